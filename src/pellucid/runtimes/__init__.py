"""Runtimes: how many processes there are, how their gradients meet, and how an optimizer step is taken.

accelerate.py is one process, or as many as `torchrun` started; optimizer.py keeps AdamW on the CPU. No other room knows
that there may be several processes: they call the `Runtime` protocol of algorithm/grpo.py.
"""
