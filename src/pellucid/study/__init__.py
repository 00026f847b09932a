"""`pellucid study` and `pellucid compare`: variants of one recipe over several seeds, run and compared.

plan.py says which runs there are and cells.py in what state; runner.py makes them, each in a process of its own.
runs.py reads them, paired.py resamples them, and compare.py and page.py show what may be concluded. The room knows
settings, run folders and charts; it knows no model, and starts without torch.
"""
