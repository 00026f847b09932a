"""What a run logs, and how people see it.

loggers.py writes the files of a run and run_files.py reads them; token_files.py is the format of tokens/. console.py
shows a run while it goes on, report.py and charts.py show a finished one. No module imports a model; torch is imported
only for TensorBoard.
"""
