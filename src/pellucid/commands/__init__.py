"""The commands of `pellucid`: a dataclass each, whose fields are the options and whose call does the work.

line.py reads the words of a command line, and shown.py gives its help the settings. Most of what a command does is in
the room that its name says. Here is what stands around a run: starter.py writes the files that a newcomer begins with,
which lie in begin/; rehearsal.py says what a run would be; push.py brings a trained model to the Hugging Face Hub, with
the recipe that rerun.py makes of its run; listing.py says what there is. The room may know all others but `cli`; it
checks what it can before torch is imported.
"""
