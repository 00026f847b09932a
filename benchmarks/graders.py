"""The verdicts of the reward `math` beside those of graders that others use.

python benchmarks/graders.py                      # the table of pairs, forms of GSM8K's answers, and real completions
python benchmarks/graders.py --disagreements      # also every pair and completion on which two graders disagree
python benchmarks/graders.py --time               # CPU milliseconds of a verdict on the table

Run this file with the `src` of another commit first in PYTHONPATH to compare commits. The completions are greedy
answers of Qwen2.5-Coder-0.5B-Instruct (4-bit, Apache-2.0) to questions of GSM8K's test file (MIT), up to 400 tokens.

The other graders: math-verify as it comes, with `parse` and `verify` on the whole text; the normalizer of Minerva
(Lewkowycz et al. 2022, appendix D.1), which removes units and formatting and compares strings; and GSM8K's strict
match, which compares the number behind `####`. The last two are written here from their descriptions. A grader gets the
answers of the table in the form that it expects, whatever the form of the pair.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "rewards"))

import math_verify  # noqa: E402
from math_pairs import LIMIT, Row, rows  # noqa: E402

from pellucid.rewards import math  # noqa: E402
from pellucid.rewards.terms import grade_math  # noqa: E402
from pellucid.tasks.gsm8k import grade_literally  # noqa: E402

COMPLETIONS = Path(__file__).with_name("graders_completions.jsonl")
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "test.jsonl"
logging.getLogger("math_verify").setLevel(logging.ERROR)

UNITS = [
    "square",
    "ways",
    "integers",
    "dollars",
    "mph",
    "inches",
    "ft",
    "hours",
    "km",
    "units",
    "points",
    "feet",
    "minutes",
    "digits",
    "cents",
    "degrees",
    "cm",
    "gm",
    "pounds",
    "meters",
    "meals",
    "edges",
    "students",
    "tickets",
    "multiples",
]
"""The words that Minerva's normalizer removes."""


def minerva_form(answer: str) -> str:
    """Return an answer as Minerva's normalizer leaves it: without units, formatting, and commas in whole numbers."""
    text = answer.rsplit("=", maxsplit=1)[-1]
    for old, new in ((" an ", " "), ("a ", ""), (r"\$", ""), ("$", ""), ("mbox", "text"), (r"\ ", ""), (r"\!", "")):
        text = text.replace(old, new)
    text = re.sub(r"\\text\{\s*(?:and|or)\s*\}", ",", text)
    for unit in sorted(UNITS, key=len, reverse=True):
        text = re.sub(rf"(?:\\text\{{\s*{unit}\s*\}}|\b{unit}\b)(?:\^\{{?\d\}}?)?", "", text)
    for sign in (r"^\circ", r"^{\circ}", r"\%", "%", r"\ldots", r"\text{s}", r"\text{.}", r"\text{}"):
        text = text.replace(sign, "")
    text = re.sub(r"\\(?:text|textbf|overline|boxed)\{(.*?)\}", r"\1", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac\s*([^{\s])\s*([^{\s])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt\s*([^{\[\s])", r"\\sqrt{\1}", text)
    text = re.sub(r"\s+", "", text).rstrip(".")
    return text.replace(",", "") if text.replace(",", "").isdigit() else text


def last_box(text: str) -> str | None:
    """Return what the last box of a text holds."""
    start = text.rfind(r"\boxed{")
    depth = 0
    for place in range(start, len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0 and text[place] == "}":
            return text[start + len(r"\boxed{") : place]
    return None


def minerva(text: str, gold: str) -> bool:
    answer = last_box(text)
    return answer is not None and minerva_form(answer) == minerva_form(gold)


def strict_match(text: str, gold: str) -> bool:
    """Whether the number behind the first `####` is the gold answer, without commas, dollars and a final full stop."""
    found = re.search(r"#### (\-?[0-9.,]+)", text)

    def bare(number: str) -> str:
        return re.sub(r"\.$", "", re.sub(r"[,$]", "", number)).lower()

    return found is not None and bare(found[1]) == bare(gold)


def verified(text: str, gold: str) -> bool:
    """Return the verdict of math-verify as it comes."""
    return bool(math_verify.verify(math_verify.parse(f"${gold}$"), math_verify.parse(text)))


def ours(text: str, gold: str) -> bool:
    return grade_math(text, gold) == 1.0


GRADERS: dict[str, Callable[[str, str], bool]] = {
    "pellucid": ours,
    "math-verify": verified,
    "minerva": minerva,
    "gsm8k strict": strict_match,
}


def text_for(grader: str, row: Row) -> str:
    """Return the completion of a pair in the form that a grader expects."""
    if grader == "pellucid" or row.answer == row.completion:
        return row.completion
    return f"#### {row.answer}" if grader == "gsm8k strict" else rf"So it is $\boxed{{{row.answer}}}$."


def limited(jobs: Sequence[tuple[Callable[[str, str], bool], str, str]]) -> Iterator[bool | None]:
    """Yield verdicts, computed in a process of its own; None where one takes longer than LIMIT seconds."""
    pool = multiprocessing.Pool(1)
    for grade, text, gold in jobs:
        try:
            yield pool.apply_async(grade, (text, gold)).get(LIMIT)
        except multiprocessing.TimeoutError:
            pool.terminate()
            pool = multiprocessing.Pool(1)
            yield None
    pool.terminate()


# ---------------------------------------------------------------- the table of pairs


def compare_on_pairs(every: bool) -> None:
    table = rows()
    verdicts = {
        name: list(limited([(grade, text_for(name, row), row.gold) for row in table]))
        for name, grade in GRADERS.items()
    }
    print(
        f"Pairs of the table judged rightly, of {sum(row.equal for row in table)} equal and the other different ones:\n"
    )
    print("| grader | equal | different |\n|---|---|---|")
    for name, given in verdicts.items():
        right = Counter(row.equal for row, verdict in zip(table, given, strict=True) if verdict == row.equal)
        print(f"| {name} | {right[True]} | {right[False]} |")
    print("\nPairs of each kind on which a grader disagrees with pellucid:\n")
    print("| kind | math-verify | minerva | gsm8k strict |\n|---|---|---|---|")
    for kind in dict.fromkeys(row.kind for row in table):
        places = [i for i, row in enumerate(table) if row.kind == kind]
        counts = [sum(verdicts[name][i] != verdicts["pellucid"][i] for i in places) for name in list(GRADERS)[1:]]
        print(f"| {kind} ({len(places)}) | {' | '.join(map(str, counts))} |")
    for i, row in enumerate(table) if every else ():
        said = {name: given[i] for name, given in verdicts.items()}
        if len(set(said.values())) > 1:
            print(f"{row.kind}: {row.gold!r} {'=' if row.equal else '!='} {row.answer!r}: {said}")


# ---------------------------------------------------------------- GSM8K's answers in other forms


def asks_for_percentage(question: str) -> bool:
    last = re.split(r"(?<=[.!])\s+", question.strip())[-1]
    return (
        re.search(r"what (?:\S+ )*percent|percentage (?:more|of|chance|are)|as a percentage", last, re.IGNORECASE)
        is not None
    )


def asks_for_degrees(question: str) -> bool:
    return "degrees" in re.split(r"(?<=[.!])\s+", question.strip())[-1]


def asks_for_money(question: str) -> bool:
    return re.search(r"\$|dollar|cost|money|pay|earn", question) is not None


def any_question(_: str) -> bool:
    return True


def grouped(gold: str, comma: str) -> str:
    return f"{int(gold):,}".replace(",", comma) if re.fullmatch(r"-?\d+", gold) else gold


WAYS: dict[str, tuple[Callable[[str], bool], Callable[[str], str]]] = {
    r"thousands as 10,\!000": (any_question, lambda gold: r"\boxed{" + grouped(gold, r",\!") + "}"),
    "a % sign that the gold answer lacks": (asks_for_percentage, lambda gold: rf"\boxed{{{gold}\%}}"),
    "a degree sign that it lacks": (asks_for_degrees, lambda gold: rf"\boxed{{{gold}^\circ}}"),
    "dollars": (asks_for_money, lambda gold: rf"\boxed{{\${gold}}}"),
    r"\mathbf{7}": (any_question, lambda gold: rf"\boxed{{\mathbf{{{gold}}}}}"),
    r"\textbf{7}": (any_question, lambda gold: rf"\boxed{{\textbf{{{gold}}}}}"),
    r"\text{7}": (any_question, lambda gold: rf"\boxed{{\text{{{gold}}}}}"),
    r"\approx 7": (any_question, lambda gold: rf"\boxed{{\approx {gold}}}"),
    r"2*7 for 14": (lambda _: True, lambda gold: rf"\boxed{{2*{gold}/2}}"),
    r"\fbox{7}": (any_question, lambda gold: rf"So it is \fbox{{{gold}}}."),
    r"\boxed 7": (any_question, lambda gold: rf"So it is $\boxed {gold}$."),
    "**Final Answer: 7**": (any_question, lambda gold: f"**Final Answer: {gold}**"),
    "__7__": (any_question, lambda gold: f"The answer is __{gold}__."),
    "<b>7</b>": (any_question, lambda gold: f"The answer is <b>{gold}</b>."),
    "a decimal point, 7.00": (any_question, lambda gold: rf"\boxed{{{gold}.00}}"),
    "#### 7": (any_question, lambda gold: f"So it is {gold}.\n#### {gold}"),
}
"""Ways to write an answer, with the questions to which a model may write it so."""


def compare_on_forms(data: Path) -> None:
    questions = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    golds = [(each["question"], each["answer"].rpartition("#### ")[2].strip()) for each in questions]
    print(f"\nQuestions of {data.name} whose right answer is refused when it is written like this:\n")
    print(f"| written as | questions | {' | '.join(GRADERS)} |\n|---|---|{'---|' * len(GRADERS)}")
    for way, (asked, write) in WAYS.items():
        pairs = [(write(gold.replace(",", "")), gold) for question, gold in golds if asked(question)]
        if "thousands" in way:
            pairs = [pair for pair in pairs if r"\!" in pair[0]]
        each = {pair: {name: grade(*pair) for name, grade in GRADERS.items()} for pair in dict.fromkeys(pairs)}
        refused = {name: sum(not each[pair][name] for pair in pairs) for name in GRADERS}
        print(f"| {way} | {len(pairs)} | {' | '.join(str(refused[name]) for name in GRADERS)} |")
    unended = {
        name: sum(grade(rf"<think>Is it \boxed{{{gold}}}? Hmm", gold) for _, gold in golds)
        for name, grade in GRADERS.items()
    }
    print(f"\nCredited in a thought that never ends, of {len(golds)}: {unended}")
    literal = sum(grade_literally(f"<answer>{gold}</answer>", gold.replace(",", "")) < 1 for _, gold in golds)
    print(f"Refused by the literal grading of the task gsm8k as the data has them: {literal} of {len(golds)}.")


# ---------------------------------------------------------------- real completions


def compare_on_completions(every: bool) -> None:
    said = [json.loads(line) for line in COMPLETIONS.read_text(encoding="utf-8").splitlines()]
    verdicts = [{name: grade(each["answer"], each["gold"]) for name, grade in GRADERS.items()} for each in said]
    print(f"\nReal completions judged right, of {len(said)}, and on which a grader disagrees with pellucid:\n")
    print("| grader | right | it alone | pellucid alone |\n|---|---|---|---|")
    for name in GRADERS:
        right = sum(each[name] for each in verdicts)
        alone = sum(each[name] and not each["pellucid"] for each in verdicts)
        print(f"| {name} | {right} | {alone} | {sum(each['pellucid'] and not each[name] for each in verdicts)} |")
    for each, verdict in zip(said, verdicts, strict=True) if every else ():
        if len({verdict[name] for name in list(GRADERS)[:3]}) > 1:
            print(f"gold {each['gold']!r}, {verdict}: ...{each['answer'][-160:]!r}")


# ---------------------------------------------------------------- time


def measure_time(turns: int = 2) -> None:
    """Print median and maximum CPU time of a verdict: the fastest of several turns, each with empty caches."""
    table = rows()
    for row in table:
        grade_math(row.completion, row.gold)
    best = [float("inf")] * len(table)
    for _ in range(turns):
        for i, row in enumerate(table):
            for cache in (math.parse_formula, math.normalize_formula):
                cache.cache_clear()
            start = time.process_time()
            grade_math(row.completion, row.gold)
            best[i] = min(best[i], time.process_time() - start)
    slowest = max(range(len(table)), key=best.__getitem__)
    print(
        f"{len(table)} pairs: median {1e3 * statistics.median(best):.2f} ms, maximum {1e3 * best[slowest]:.0f} ms, ",
        end="",
    )
    print(
        f"mean {1e3 * statistics.fmean(best):.1f} ms; the slowest is {table[slowest].gold!r}, {table[slowest].answer!r}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--disagreements", action="store_true", help="print every pair and completion that graders disagree on"
    )
    parser.add_argument("--time", action="store_true", help="measure the time of a verdict, and nothing else")
    parser.add_argument("--gsm8k", type=Path, default=GSM8K, help="GSM8K's test.jsonl")
    options = parser.parse_args()
    if options.time:
        measure_time()
        return
    compare_on_pairs(options.disagreements)
    if options.gsm8k.is_file():
        compare_on_forms(options.gsm8k)
    if COMPLETIONS.is_file():
        compare_on_completions(options.disagreements)


if __name__ == "__main__":
    main()
