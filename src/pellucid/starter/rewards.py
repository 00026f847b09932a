"""The reward: a number that says how good an answer is. Training makes answers with higher numbers more likely."""

import re


def right_and_short(completions, answer, **columns):
    # Gets lists: the model's answers, each a list of chat messages, and every column of data.jsonl by its name.
    # Returns a number for each answer, the higher the better; None where it has nothing to say.
    return [score(messages[-1]["content"], gold) for messages, gold in zip(completions, answer, strict=True)]


def score(text, gold):
    """1 if the last number is the right one, minus 0.05 for every other word; else 0."""
    numbers = re.findall(r"\d+", text)
    return 1 - 0.05 * (len(text.split()) - 1) if numbers[-1:] == [gold] else 0.0
