"""Training runs, from settings to a run directory.

build.py builds the objects of a Config, run.py executes the steps, and preflight.py and memory.py check what can
be checked before the first one. run_dir.py, checkpoint.py and export.py are about the files of a run, evaluate.py about
held-out prompts, and doctor.py, dry_run.py and token_recorder.py show what a run needs and does.
"""
