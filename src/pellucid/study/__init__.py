"""`pellucid study` and `pellucid compare`: variants of one recipe over several seeds, run and compared.

plan.py and cells.py say which runs there are, runner.py makes them, each in a process of its own; runs.py reads them,
paired.py resamples them, compare.py and page.py show what may be concluded. The room knows settings, run folders and
charts; it starts without torch.
"""
