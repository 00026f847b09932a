"""Metrics, logs, the console and the report of a run. No module imports torch or a model.

loggers.py writes the files of a run and run_files.py reads them; token_files.py is the format of tokens/. console.py
shows a run while it goes on, report.py and charts.py show a finished one.
"""
