"""Rewards: how an answer becomes a number.

terms.py names the terms of a reward, from exact match to a function of the user's own; answers.py, formulas.py and
latex.py read what they compare. sandbox.py computes rewards in processes that may hang or die, worker.py is such a
process, guarded.py computes those that have no file in this one. judge.py has completions graded by a language model:
rubric.py says what it is asked and how its answer is read, asking.py asks, judgements.py keeps what it said. Nothing
here knows where prompts come from. Nothing here but model.py needs torch, so that reward processes start fast.
"""
