"""What the policy said, as HTML for the page of a run: the best and the worst answers, conversations turn by turn."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from math import exp, inf
from pathlib import Path

from pellucid.reporting.charts import counted, shown
from pellucid.reporting.conversations import counts, is_fault, speaker, words
from pellucid.reporting.run_folder import Record, end_rollouts

MOST_CHARACTERS = 2000
MOST_TOKENS = 400
MOST_MESSAGES = 40
PICKS = 2


def said_in(rollouts: Path, by_length: bool = False) -> str:
    """The best and the worst of the first and the last step of a rollouts.jsonl, or of each third by length."""
    steps = [rows for rows in end_rollouts(rollouts) if rows]
    of = "each third of a step's completions by length" if by_length else "a step"
    held = any(row.get("messages") for rows in steps for row in rows)
    drawn = " What was given to it is a thin line. Beside what it said stands a solid bar." if held else ""
    note = (
        f'<p class="soft">The best and the worst of {of}. Each cell of a strip is a token: the stronger '
        f"its colour, the less likely the policy was to say it.{drawn}</p>"
    )
    said = "\n".join(f"<h3>Step {rows[0]['step']:,}</h3>\n{cards(rows, by_length)}" for rows in steps)
    return f"{note}\n{said}" if said else ""


def cards(rollouts: Sequence[Record], by_length: bool = False) -> str:
    """The best and the worst completions, no two alike; a failed reward is the worst there is."""
    distinct = list({identity(rollout): rollout for rollout in rollouts}.values())
    if by_length:
        picked = [pick for third in length_thirds(distinct) for pick in extremes(third, 1)]
    else:
        picked = extremes(distinct, PICKS)
    articles = "\n".join(card(rank, rollout) for rank, rollout in picked)
    return f'<div class="cards">\n{articles}\n</div>'


def identity(rollout: Record) -> tuple[str, str, str]:
    """What two that are alike have in common: all that was said, not the last turn alone."""
    return rollout["prompt"], rollout["completion"], json.dumps(rollout.get("messages"))


def extremes(rollouts: Sequence[Record], count: int) -> list[tuple[str, Record]]:
    ranked = sorted(rollouts, key=lambda rollout: -inf if rollout["reward"] is None else rollout["reward"])
    worst, best = ranked[:-count][:count], ranked[-count:][::-1]
    return [*(("best", rollout) for rollout in best), *(("worst", rollout) for rollout in worst)]


def length_thirds(rollouts: Sequence[Record]) -> list[Sequence[Record]]:
    """The short, the middling and the long; fewer where there are fewer than three."""
    ordered, n = sorted(rollouts, key=lambda rollout: len(rollout["tokens"])), len(rollouts)
    thirds = [ordered[i * n // 3 : (i + 1) * n // 3] for i in range(3)]
    return [third for third in thirds if third]


def card(rank: str, rollout: Record) -> str:
    error = f'<p class="warn">{clipped(rollout["error"])}</p>' if rollout.get("error") else ""
    answer = f'<pre dir="auto" tabindex="0">{begun(rollout)}{clipped(rollout["completion"])}</pre>'
    return (
        f'<article class="{rank}"><p><b>{rank}</b>, {", ".join(figures(rollout))}</p>{error}\n'
        f'<pre class="prompt" dir="auto" tabindex="0">{clipped(rollout["prompt"])}</pre>\n'
        f"{talk(rollout) if rollout.get('messages') else answer}"
        f"{extras(rollout.get('extra', {}))}{strip(rollout['logprobs'], rollout.get('given', ()))}</article>"
    )


def figures(rollout: Record) -> Iterator[str]:
    """How it was graded, how long it is, and how it ended."""
    reward, advantage, own = rollout["reward"], rollout["advantage"], rollout.get("environment_reward")
    yield "reward failed" if reward is None else f"reward {reward:.3f}"
    if own is not None and own != reward:
        yield f"{own:.3f} from the environment"
    yield "no advantage" if advantage is None else f"advantage {advantage:+.2f}"
    if rollout.get("messages"):
        yield from map(shown, counts(rollout["turns"], rollout.get("events", {})))
        given = sum(end - start for start, end in rollout.get("given", ()))
        yield f"{counted(len(rollout['tokens']) - given, 'token')} sampled and {given:,} given"
    else:
        yield counted(len(rollout["tokens"]), "token")
    yield "finished" if rollout["finished"] else "cut off"


def talk(rollout: Record) -> str:
    """A conversation message by message, earlier sequences first where its history was rewritten."""
    *earlier, last = [*rollout.get("branches", ()), rollout]
    items = [item("prefix", "given", "given", f"<i>{clipped(rollout['prefix'])}</i>")] if rollout.get("prefix") else []
    for branch in earlier:
        items += [*messages(branch["messages"]), '<li class="cut"><p>the history was rewritten</p></li>']
    return '<ol class="talk">\n' + "\n".join([*items, *messages(last["messages"])]) + "\n</ol>"


def messages(said: Sequence[Record]) -> list[str]:
    """The messages of a sequence; of very many those in the middle are left out."""
    left_out = len(said) - MOST_MESSAGES
    if left_out <= 0:
        return [of_message(message) for message in said]
    half = MOST_MESSAGES // 2
    note = f'<li class="cut"><p>{counted(left_out, "more message")} in rollouts.jsonl</p></li>'
    return [*map(of_message, said[:half]), note, *map(of_message, said[-half:])]


def of_message(message: Record) -> str:
    by_policy = message.get("role") == "assistant"
    fault = ', <b class="warn">the call came to nothing</b>' if is_fault(message) else ""
    kind = "sampled" if by_policy else "given"
    return item(shown(speaker(message)), kind, f"{kind}{fault}", clipped(words(message)))


def item(who: str, kind: str, about: str, text: str) -> str:
    return f'<li class="{kind}"><p><b>{who}</b>, {about}</p><pre dir="auto" tabindex="0">{text}</pre></li>'


def extras(columns: Record) -> str:
    """What rewards logged beside the completion."""
    rows = (f"<b>{clipped(name)}</b> {clipped(str(value))}" for name, value in columns.items())
    return "".join(f"\n<p>{row}</p>" for row in rows)


def begun(rollout: Record) -> str:
    """The prefix that was given to the policy, set apart from the completion."""
    return f"<i>{clipped(rollout['prefix'])}</i>" if rollout.get("prefix") else ""


def clipped(text: str) -> str:
    rest = len(text) - MOST_CHARACTERS
    return shown(text[:MOST_CHARACTERS]) + (f"\n[{rest:,} more characters in rollouts.jsonl]" if rest > 0 else "")


def strip(logprobs: Sequence[float | None], given: Sequence[Sequence[int]] = ()) -> str:
    """The tokens of a completion as cells, those that were given as a thin line.

    Without the tokenizer the chances of tokens can be shown, their text cannot.
    """
    chances = [0.0 if logprob is None else exp(logprob) for logprob in logprobs[:MOST_TOKENS]]
    told = {i for start, end in given for i in range(start, min(end, len(chances)))}
    sampled = [p for i, p in enumerate(chances) if i not in told]
    if not sampled:
        return ""
    cells = "".join(told_cell(i) if i in told else sampled_cell(i, p) for i, p in enumerate(chances))
    about = f"the chances of {counted(len(sampled), 'token')}, the lowest {min(sampled):.1%}"
    return (
        f'\n<svg class="strip" role="img" aria-label="{about}" viewBox="0 0 {len(chances)} 1" '
        f'preserveAspectRatio="none" style="max-width:{len(chances)}rem">{cells}</svg>'
    )


def sampled_cell(i: int, p: float) -> str:
    return f'<rect x="{i}" width="1" height="1" fill-opacity="{1 - p:.2f}"><title>token {i + 1}: {p:.1%}</title></rect>'


def told_cell(i: int) -> str:
    return f'<rect class="given" x="{i}" y="0.4" width="1" height="0.2"><title>token {i + 1}: given</title></rect>'
