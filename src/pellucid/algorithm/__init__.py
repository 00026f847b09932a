"""Group Relative Policy Optimization itself: the loop, and the pure functions that it is composed of.

Here live the stages of a step (grpo.py), the tensors that they work on (batch.py), and one file for each axis that a
setting chooses from: advantages, objectives, KL, shaping. The room knows torch and the records of types.py; it knows no
model, no file, no process group and no library. Whatever a step needs of those comes in through the protocols of
grpo.py and types.py.
"""
