"""Runtimes: how many processes there are, how their gradients meet, and how an optimizer step is taken.

runtime.py is one process, or as many as `torchrun` started (processes.py). Its engine holds what is trained and takes
the steps: plain.py by torch's optimizer, on whole parameters or on parts that fsdp2.py makes of them, deepspeed.py
with ZeRO. shards.py takes parts to disk and back; optimizer.py keeps AdamW on the CPU. Other rooms call the `Runtime`
protocol of algorithm/grpo.py and do not ask how many processes there are; only a checkpoint says which writes what.
"""
