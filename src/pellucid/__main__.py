from pellucid.cli import main

main()
