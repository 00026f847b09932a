"""Rewards: how an answer becomes a number.

`terms.py` names the terms of a reward, from exact match to the user's own function; `answers.py` and `math.py` read the
answers that they compare, `functions.py` calls functions as TRL does, `judge.py` asks another model, and
`reward_model.py` runs one. `grading.py` is a task that computes all rewards of a step at once. `pool.py` manages the
worker processes, which run `worker.py`. `parts.py` defines the result of one term for one completion. Nothing here
depends on the source of prompts, and only `reward_model.py` needs torch, so that worker processes start fast.
"""
