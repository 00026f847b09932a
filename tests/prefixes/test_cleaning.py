"""Test how generated text is cleaned and cut: math stays, and points inside a sentence do not end it."""

from __future__ import annotations

import pytest

from conftest import character_tokenizer
from pellucid.prefixes.cleaning import clean_text, extract_thinking, take_first_sentences, take_first_tokens


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("  First,\n\tadd 3   and 4. ", "First, add 3 and 4."),
        ("<think>First, add.</think> <answer>7</answer>", "First, add. 7"),
        ("<THINK >First.</Think>", "First."),
        ("Thinking: First.", "First."),
        ("**Thinking:** First.", "First."),
        ("**Thinking**: First.", "First."),
        ("## My thought process:\nFirst.", "First."),
        ("Reasoning: Thought: First.", "First."),
        ("<think>\nThinking: First.", "First."),
        ("First sentence: 3 + 4.", "3 + 4."),
        ("思考：先算 3 + 4。", "先算 3 + 4。"),
        ("```\nFirst.\n```", "First."),
        ("```python\nx = 3\n```", "x = 3"),
        ("```x = 3```", "x = 3"),
        ("", ""),
        ("<think> </think>", ""),
        ("Thinking:", ""),
        ("half \ud83d a pair", "half a pair"),
        ("First. <|im_end|><|endoftext|></s>", "First."),
        ("|x| < 3 <| 4", "|x| < 3 <| 4"),
        # Text that is not a label
        ("I am thinking: is it 3?", "I am thinking: is it 3?"),
        ("The ratio 3:4 holds.", "The ratio 3:4 holds."),
        # Mathematics
        ("3 + 4 - 5 * 6 / 7 = 8% of $9 ^ 2", "3 + 4 - 5 * 6 / 7 = 8% of $9 ^ 2"),
        ("-3 < x > -4, a<b>c, x <= 2", "-3 < x > -4, a<b>c, x <= 2"),
        (r"\frac{1}{2} \times \(x_1\) = \$3.14", r"\frac{1}{2} \times \(x_1\) = \$3.14"),
        ("2**3 is 8, * 1,080.50", "2**3 is 8, * 1,080.50"),
    ],
)
def test_clean_text_removes_markup_and_keeps_math(text, cleaned):
    assert clean_text(text) == cleaned
    assert clean_text(cleaned) == cleaned


@pytest.mark.parametrize("text", ["." * 300_000 + "x", "?!" * 150_000 + "x", ". " * 150_000, "." + " " * 300_000 + "="])
def test_a_hostile_text_is_cut_in_linear_time(text):
    """In quadratic time the first texts would take many minutes."""
    assert text.startswith(take_first_sentences(text, 2))
    assert clean_text(text)


@pytest.mark.parametrize(
    ("text", "first", "two"),
    [
        ("A is 1. B is 2. C.", "A is 1.", "A is 1. B is 2."),
        ("Is it 3? No! Yes.", "Is it 3?", "Is it 3? No!"),
        ("Pi is 3.14 here. Then .5 more. End.", "Pi is 3.14 here.", "Pi is 3.14 here. Then .5 more."),
        ("It is 1,080.50. Next. End.", "It is 1,080.50.", "It is 1,080.50. Next."),
        ("Use, e.g. this, i.e. that. Next. End.", "Use, e.g. this, i.e. that.", "Use, e.g. this, i.e. that. Next."),
        (
            "Mr. Smith has (vs. Dr. No) 3. Next. End.",
            "Mr. Smith has (vs. Dr. No) 3.",
            "Mr. Smith has (vs. Dr. No) 3. Next.",
        ),
        ("1. Add 3. 2. Take 4. 3. End.", "1. Add 3.", "1. Add 3. 2. Take 4."),
        ("先算 3.5。再加4！然后？", "先算 3.5。", "先算 3.5。再加4！"),
        ("他说“好。”然后走。完。", "他说“好。”", "他说“好。”然后走。"),
        ('He said "go." Then left. End.', 'He said "go."', 'He said "go." Then left.'),
        ("5! = 120 and 3! + 1. Next. End.", "5! = 120 and 3! + 1.", "5! = 120 and 3! + 1. Next."),
        ("Hmm... Wait!? End.", "Hmm...", "Hmm... Wait!?"),
        ("no end at all", "no end at all", "no end at all"),
        ("One. half of", "One.", "One. half of"),
        ("", "", ""),
    ],
)
def test_first_sentences_end_at_sentence_boundaries(text, first, two):
    assert take_first_sentences(text, 1) == first
    assert take_first_sentences(text, 2) == two
    assert take_first_sentences(text, 100) == text


@pytest.mark.parametrize(
    ("text", "thought"),
    [
        ("<think>3 and 4.</think><answer>7</answer>", "3 and 4."),
        ("3 and 4. <answer>7", "3 and 4."),
        ("3 and 4.", "3 and 4."),
        ("<think></think>3 and 4.", "3 and 4."),
        ("<answer>3 and 4.</answer>", ""),
        ("<think>\n\n</think>\n\nFirst add 3 and 4. <answer>7</answer>", "First add 3 and 4."),
        ("<reasoning>3 and 4.</reasoning> So 7.", "3 and 4."),
        ("<Thought>3 and 4.</Thought> So 7.", "3 and 4."),
    ],
)
def test_thinking_excludes_the_answer(text, thought):
    assert clean_text(extract_thinking(text)) == thought


def test_tokens_are_counted_by_the_tokenizer():
    tokenizer = character_tokenizer()
    assert take_first_tokens("12 + 34", 2, tokenizer) == "12"
    assert take_first_tokens("12 + 34", 3, tokenizer) == "12", "no white space at the end"
    assert take_first_tokens("12 + 34", 7, tokenizer) == take_first_tokens("12 + 34", 99, tokenizer) == "12 + 34"


def test_half_a_character_is_dropped():
    class Bytes:
        def __call__(self, text, add_special_tokens):
            return {"input_ids": list(text.encode())}

        def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
            return bytes(ids).decode(errors="replace")

    assert take_first_tokens("数学", 4, Bytes()) == "数"


@pytest.mark.slow
def test_hostile_text_takes_linear_time():
    for piece in ("<think", "```a", "# ", "Thinking", "thinking: ", "e.g. ", "1. ", ". ", "!", '."', " \n"):
        take_first_sentences(clean_text(piece * 200_000), 300_000)
