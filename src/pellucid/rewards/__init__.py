"""Rewards: how an answer becomes a number.

`terms.py` names the terms of a reward, from exact match to a function of the user's own; `answers.py` and `math.py`
read the answers that they compare, `functions.py` calls functions as TRL does, `judge.py` asks another model, and
`reward_model.py` runs one. `grading.py` is a task whose rewards are computed all at once for a step: `pool.py` has them
computed in worker processes, which run `worker.py`. `parts.py` is what a term says of one completion. Nothing here
knows where prompts come from, and nothing but `reward_model.py` needs torch, so that the processes start fast.
"""
