"""Rewards that know no answer: what training gains by these, it does not owe to right and wrong."""

import hashlib


def reward_chance(prompts, completions, **_columns):
    """1 for three answers of ten, whatever they say; the same answer to a question always has the same reward."""
    pairs = zip(prompts, completions, strict=True)
    digests = [hashlib.sha256(f"{prompt}\n{messages[-1]['content']}".encode()).digest() for prompt, messages in pairs]
    return [float(int.from_bytes(digest[:4]) < 0.3 * 2**32) for digest in digests]


def reward_box(completions, **_columns):
    """1 for an answer with a box that is not empty, whatever it holds."""
    texts = [messages[-1]["content"] for messages in completions]
    return [float("\\boxed{" in text and "\\boxed{}" not in text) for text in texts]
