"""Rewards: how an answer becomes a number.

terms.py names the terms of a reward, from exact match to a function of the user's own; answers.py, formulas.py and
latex.py read what they compare, functions.py calls functions as TRL does, judge.py asks another model, model.py a
reward model. graded.py is a task with its rewards, all those of a step at once: calls.py says what is computed and
what becomes of an error, pool.py has it computed in processes that may hang or die, process.py is the handle of one,
worker.py what runs in it. Nothing here knows where prompts come from. Nothing here but model.py needs torch, so that
these processes start fast.
"""
