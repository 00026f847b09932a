"""`pellucid.train`: the command, from a notebook or a program of the user's own.

Keywords become the settings of a recipe (settings.py, objects.py, data.py); a Run (run.py) goes through the steps of
training/run.py, as the command does. What is given as an object stays in this process, under a name that begins with
"here:". This room lies above all others but the command line's, and imports torch when the first step is taken.
"""
