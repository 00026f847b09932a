"""Training in one or more processes: how gradients are combined, and how an optimizer step is taken.

`Runtime` is one process, or as many as `torchrun` started. Its engine holds the trained parameters: `TorchEngine` for
ddp and fsdp2, `ZeroEngine` for DeepSpeed. Other folders use the protocol `Runtime` of algorithm/protocols.py.
"""
