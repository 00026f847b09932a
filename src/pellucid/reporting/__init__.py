"""What a run writes down, and how people see it.

loggers.py writes the run folder and run_folder.py reads it back; metrics.py turns graded groups into numbers;
console.py, notebook.py and boards.py show them while a run goes on, report.py with curves.py and charts.py when it is
over, and card.py to strangers, who see what shareable.py leaves. The room knows records and files: no torch, no model.
"""
