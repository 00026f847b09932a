"""The machine: its devices and memory, its disks and locks, its terminals and signals.

Each file stands alone and says what the rest of the package may rely on: hardware.py on devices and dtypes, disk.py on
what is durable, locks.py on being alone, interrupts.py and streams.py on being stopped or not heard, harmless.py on
text of others in a terminal, extras.py on libraries that may be missing, plugins.py on files and objects of the user's
own, nearby.py on files that may have been meant, docstrings.py on what source files say of themselves. The room knows
nothing of the others.
"""
