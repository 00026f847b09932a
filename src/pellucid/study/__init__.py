"""`pellucid study` and `pellucid compare`: variants of one recipe over several seeds, run and compared.

plan.py lists the runs of a study; runner.py makes them, each in a process of its own. runs.py reads them, bootstrap.py
resamples them, and compare.py and comparison_page.py show what may be concluded. Nothing here imports torch.
"""
