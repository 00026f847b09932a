"""Commands that stand around a run: its beginning, its publication, and the names that a recipe may use.

starter.py writes the files that a newcomer begins with, which lie in begin/; push.py brings a trained model to the
Hugging Face Hub, with the recipe that rerun.py makes of its run; listing.py says what there is. The room may know all
others but the command line; it starts without torch.
"""
