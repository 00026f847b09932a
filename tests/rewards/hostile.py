"""Run hostile texts through every grader: no text may raise an error, be slow, or be credited wrongly.

python tests/rewards/hostile.py 10000         # number of texts; prints counts, and the slowest text of every grader
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from random import Random

from pellucid.rewards.functions import build_trainer_state
from pellucid.rewards.terms import RewardTerm, compute_term_parts
from pellucid.tasks.arithmetic import Arithmetic
from pellucid.tasks.continuity import Continuity
from pellucid.tasks.countdown import Countdown
from pellucid.tasks.expected import Expected
from pellucid.tasks.gsm8k import Gsm8k
from pellucid.tasks.sorting import Sorting
from pellucid.types import Completion, Progress, Prompt

SLOW = 0.1
"""CPU time in seconds above which a text counts as slow. Most completions are far shorter than these texts."""
LONGEST = 20_000
GOLD = "7919"
"""The gold answer of every grader that compares numbers. No scrap has a 7, so scraps cannot form it."""

SCRAPS = (
    *"0123456890 \n\t.,;:!?'\"()[]{}<>|+-*/=^_%$#&~\\`",
    *(
        "<answer>",
        "</answer>",
        "<think>",
        "</think>",
        "<answer",
        "\\boxed{",
        "\\boxed",
        "\\fbox{",
        "}",
        "\\}",
        "{",
        "\\{",
    ),
    *(
        "\\frac{",
        "\\frac12",
        "\\sqrt{",
        "\\left(",
        "\\right)",
        "\\text{",
        "\\begin{align}",
        "\\end{align}",
        "&=",
        "\\\\",
    ),
    *(
        "\\sum_{i=1}^{999999}",
        "\\int",
        "\\binom{99999}{500}",
        "9^{9^{9^9}}",
        "9^9^9",
        "999999!!!",
        "2^{99999}",
        "1e9999",
    ),
    *(
        "1,111",
        "1 111",
        "1/2",
        "1 1/2",
        "1/0",
        "0.0",
        "1_0",
        "0x1F",
        "1E5",
        "--5",
        "5%",
        "5^\\circ",
        "5 m^2",
        "\\$5",
        "- 5",
    ),
    *(
        "a = ",
        "b = ",
        "x = ",
        "a + b = ",
        "f(x)",
        "ax + 3",
        "\u00bd",
        "\u221a2",
        "\u00b2",
        "\u221e",
        "\u03c0",
        "\uff15",
    ),
    *("\uff0d5", "\uff0c", "\u0665", "\u0300\u0316", "\u0f73", "\ud83d", "\udc00", "\0", "\u202e", "\u200f", "\u00a0"),
    *(
        "\u2028",
        "\U0001f600",
        "\u115f",
        "not ",
        " or ",
        " and ",
        "the answer is ",
        "\u7b54\u6848\u662f",
        "dollars",
        "yes",
    ),
    *(
        "True",
        "None",
        "lambda: 5",
        "__import__('os')",
        "%s",
        "{0}",
        "$$",
        "\\(",
        "\\)",
        "\\[",
        "\\]",
        "**",
        "- ",
        "1. ",
    ),
)
WARM = ("7919", "$\\frac{x}{2}$", "\\boxed{\\sqrt{2} + 3}", "<answer>1, 2, 3</answer>", "\\boxed{\\{f(x) = 2\\}}")
WRONG = ("\\boxed{5}", "<answer>5</answer>", "\\boxed{\\frac{5}{2}}", "<answer>\\boxed{5}</answer>")


def texts(n: int, seed: int = 0) -> Iterator[str]:
    """Yield n texts of five shapes. A text that contains the gold answer ends with another answer in a box."""
    for i in range(n):
        rng = Random(f"hostile/{seed}/{i}")
        length = int(10 ** rng.uniform(0.5, 4.3))
        few = rng.sample(SCRAPS, rng.randint(1, 4))
        once = "".join(few)
        noise = "".join(rng.choices(SCRAPS, k=min(length, 400)))
        shape = i % 5
        if shape == 0:
            yield noise[:LONGEST]
        elif shape == 1:
            yield (once * length)[:length]
        elif shape == 2:
            yield once * rng.randint(1, 12) + rng.choice(WRONG)
        elif shape == 3:
            yield noise + GOLD + "".join(rng.choices(SCRAPS, k=20)) + "\\boxed{5}"
        else:
            box = "\\boxed{" + once * rng.randint(1, 30) + "}" * rng.randint(0, 3)
            yield (few[0] * length)[: max(0, length - len(box))] + box


def completion(text: str) -> Completion:
    return Completion((1, 2), (-0.5, -0.5), text, True)


def of_task(task: object, prompt: Prompt) -> Callable[[str], bool]:
    return lambda text: task.reward(prompt, completion(text)).is_correct


def of_term(name: str, gold: str) -> Callable[[str], bool]:
    return lambda text: (
        compute_term_parts(
            RewardTerm(name), [(Prompt("p", "?", gold), completion(text))], build_trainer_state(Progress(), None)
        )[0].value
        == 1.0
    )


def graders() -> dict[str, Callable[[str], bool]]:
    """Return graders that say whether a text is credited. Literal ones credit any mention and are only timed."""
    # No scrap equals the sum of these pieces, and no scrap states them.
    pieces = {"right": 3, "left": -2, "p": 1, "m": 4000, "q": 4000, "k": 2}
    number = Prompt("p", "?", GOLD)
    continuity = Prompt("p", "?", "", {"pieces": pieces})
    ask = {
        "exact": of_term("exact", GOLD),
        "numeric": of_term("numeric", GOLD),
        "math, a number": of_term("math", GOLD),
        "math, a formula": of_term("math", "\\frac{7x^2}{\\sqrt{7}}"),
        "math, a word": of_term("math", "seventy"),
        "arithmetic": of_task(Arithmetic(), number),
        "countdown": of_task(Countdown(), Prompt("p", "?", "190", {"numbers": [17, 7, 71]})),
        "continuity": of_task(Continuity(), continuity),
        "gsm8k strict": of_task(Gsm8k(), number),
        "expected whole": of_task(Expected(), Prompt("p", "?", "77")),
        "sorting": of_task(Sorting(), Prompt("p", "?", "", {"numbers": [7, 17, 77]})),
    }
    literal = {
        "gsm8k literal": of_task(Gsm8k(grading="literal"), number),
        "expected literal": of_task(Expected(matching="literal"), Prompt("p", "?", "77")),
        "continuity literal": of_task(Continuity(grading="literal"), continuity),
    }
    return ask | {name: lambda text, speed=speed: speed(text) and False for name, speed in literal.items()}


def main(n: int) -> None:
    every = list(texts(n))
    failures = 0
    for credits in graders().values():
        for text in WARM:  # the first formulas import sympy and build the grammar of its parser
            credits(text)
    gc.freeze()  # the garbage collector does not scan texts and grammar while a grader is timed
    for name, credits in graders().items():
        slowest, slow, credited, raised = (0.0, ""), 0, [], []
        for text in every:
            start = time.process_time()
            try:
                if credits(text):
                    credited.append(text)
            except Exception as error:  # noqa: BLE001  (whatever it is, it is what is looked for)
                raised.append((error, text))
            seconds = time.process_time() - start
            slow += seconds > SLOW
            slowest = max(slowest, (seconds, text))
        failures += len(credited) + len(raised)
        print(
            f"{name:20} {n} texts: {len(raised)} raise, {len(credited)} credited, {slow} above {SLOW * 1000:.0f} ms;",
            end=" ",
        )
        print(f"slowest {1000 * slowest[0]:.1f} ms, {len(slowest[1])} characters: {slowest[1][:60]!r}")
        for what in (*raised[:3], *credited[:3]):
            print(f"    {str(what)[:300]!r}")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
