"""A run: settings in, a run folder out.

compose.py builds the objects of a Config; run.py walks them through the steps; preflight.py looks before the first one,
and chronicle.py writes down how it begins and ends; claim.py, changes.py, checkpoint.py and snapshot.py see to it that
a run can be stopped, killed, changed and resumed; evaluate.py and exam.py ask held-out questions. This room may know
all others but those of the commands around it: serve, study and prefixes.
"""
