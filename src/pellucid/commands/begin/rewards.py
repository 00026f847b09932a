"""The reward: a number that says how good an answer is. Training makes answers of higher numbers likelier."""


def right_and_short(completions, answer, **columns):
    # Gets lists: the model's answers, each a list of chat messages, and every column of data.jsonl by its name.
    # Returns a number for each answer, the higher the better; None where it has nothing to say.
    return [score(messages[0]["content"], gold) for messages, gold in zip(completions, answer, strict=True)]


def score(text, gold):
    """1 for the right word alone, 1/6 where it stands among five others, 0 where it is missing."""
    words = [word.strip('.,:;!?*"') for word in text.split()]
    return 1 / len(words) if gold in words else 0.0
