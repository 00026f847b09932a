"""`pellucid doctor`: what this machine has, what training would need, and where the time of a step goes.

command.py is the report, memory.py plans memory before anything is loaded, profile.py measures a step against what the
machine can do. The room knows settings and models, and trains nothing.
"""
