"""Run `marked.py COMMAND ...`: the command line with marks, in a process forked from one that imported it without."""

import runpy
import sys
from pathlib import Path

custom = runpy.run_path(str(Path(__file__).with_name("sitecustomize.py")))
for name in custom["STAGES"]:
    custom["marking"].mark_functions(sys.modules[name])
runpy.run_module("pellucid", run_name="__main__", alter_sys=True)
