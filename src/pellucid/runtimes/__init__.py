"""Runtimes: how many processes there are, how their gradients meet, and how an optimizer step is taken.

accelerate.py is one process, or as many as `torchrun` started (processes.py); fsdp2.py shards what they hold, shards.py
takes that to disk and back; optimizer.py keeps AdamW on the CPU. Other rooms call the `Runtime` protocol of
algorithm/grpo.py and do not ask how many processes there are; only a checkpoint says which of them writes what.
"""
