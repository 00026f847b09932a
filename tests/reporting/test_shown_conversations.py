"""Tests of conversations in rollouts.jsonl, on the console and in the HTML report."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import rich.console

from pages import ALLOWED, HOSTILE, Page
from pellucid.reporting.charts import draw_tool_charts
from pellucid.reporting.console import MAX_MESSAGE_CHARACTERS, ConsoleLogger, PlainLogger, make_verdict_table
from pellucid.reporting.conversations import (
    MAX_TOOL_NAME_CHARACTERS,
    format_fault_shares,
    format_message,
    format_tool_call,
    get_speaker,
    is_failed_call,
)
from pellucid.reporting.loggers import JsonlLogger, compute_group_metrics
from pellucid.reporting.report import MAX_MESSAGES, render_token_strip, write_report
from pellucid.types import Completion, ConversationOutcome, Group, Prompt, Reward
from pellucid.utils.text import BIDI_CODES, CONTROL_CODES

CALL = {"id": "call_0", "type": "function", "function": {"name": "multiply", "arguments": {"a": 3, "unit": "<m>"}}}
TALK = (
    {"role": "assistant", "content": "let me see", "tool_calls": [CALL]},
    {"role": "tool", "name": "multiply", "content": "{'error': 'no b'}"},
    {"role": "tool", "name": "unknown", "content": "{'error': 'The call cannot be read: no name'}"},
    {"role": "assistant", "content": "it is 12"},
    {"role": "user", "content": "Higher."},
    {"role": "assistant", "content": "13"},
)
EVENTS = {"unreadable": 1, "arguments": 1, "calls": 2}


def completion(messages=TALK, events=EVENTS, branches=()):
    outcome = ConversationOutcome(reward=0.25, events=events)
    tokens, logprobs = (1, 2, 3, 4, 5), (-0.5, 0.0, 0.0, -0.5, -0.5)
    return Completion(
        tokens, logprobs, "13", True, given_spans=((1, 3),), messages=messages, outcome=outcome, branches=branches
    )


def group(*completions, reward=1.0):
    prompt = Prompt("p", ({"role": "user", "content": "What is 3 * 4?"},), "12")
    n = len(completions)
    return Group(prompt, (9,), completions, (Reward(reward),) * n, (0.0,) * n)


def logged(folder, *groups, step=1):
    log = JsonlLogger(folder)
    log.log(step, compute_group_metrics(groups), groups)
    log.close()
    (folder / "config.json").write_text("{}")
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]


def page_of(folder):
    html = write_report(folder).read_text(encoding="utf-8")
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ElementTree.fromstring(svg)
    return html, Page(html)


def drawn(shown):
    paper = rich.console.Console(file=io.StringIO(), width=100)
    paper.print(shown)
    return paper.file.getvalue()


# ---------------------------------------------------------------- rollouts.jsonl


def test_rollout_record_holds_the_messages_and_the_outcome(tmp_path):
    (row,) = logged(tmp_path, group(completion()))
    assert row["messages"] == [dict(message) for message in TALK]
    assert (row["turns"], row["events"], row["environment_reward"]) == (3, EVENTS, 0.25)
    assert (row["completion"], row["given"]) == ("13", [[1, 3]])
    assert "branches" not in row


def test_branches_are_logged_with_tokens_and_count_as_turns(tmp_path):
    earlier = Completion((7, 8), (-1.0, 0.0), "5", True, given_spans=((1, 2),), messages=TALK[3:5])
    (row,) = logged(tmp_path, group(completion(branches=(earlier,))))
    assert row["branches"] == [
        {"messages": [dict(m) for m in TALK[3:5]], "tokens": [7, 8], "given": [[1, 2]], "logprobs": [-1.0, 0.0]}
    ]
    assert row["turns"] == 4
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["turns/mean"] == 4


def test_environment_error_is_logged(tmp_path):
    (row,) = logged(tmp_path, group(replace(completion(), outcome=ConversationOutcome(error="reset: no room"))))
    assert row["environment_error"] == "reset: no room"
    assert "events" not in row
    assert "environment_reward" not in row


# ---------------------------------------------------------------- formatting


def test_tool_calls_are_formatted_like_python_calls():
    assert format_tool_call(CALL) == 'multiply(a=3, unit="<m>")'
    assert format_tool_call({"function": {"name": "now", "arguments": {}}}) == "now()"
    assert format_message(TALK[0]) == 'let me see\ncalls multiply(a=3, unit="<m>")'
    assert (
        format_message({"role": "assistant", "content": " \n", "tool_calls": [CALL]})
        == 'calls multiply(a=3, unit="<m>")'
    )


def test_long_tool_names_are_shortened():
    """The policy can invent the name of a tool that does not exist."""
    assert get_speaker({"role": "tool", "name": "multiply", "content": ""}) == "tool multiply"
    assert get_speaker({"role": "tool", "name": "x" * 5000, "content": ""}) == f"tool {'x' * MAX_TOOL_NAME_CHARACTERS}…"
    assert get_speaker({"role": "tool", "content": ""}) == "tool"


def test_only_errors_from_tools_count_as_failed_calls():
    error = "{'error': 'no b'}"
    assert is_failed_call({"role": "tool", "name": "multiply", "content": error})
    assert not is_failed_call({"role": "tool", "name": "multiply", "content": f"it said {error}"})
    assert not is_failed_call({"role": "user", "content": error})


def test_most_frequent_faults_are_named():
    shares = {"tools/calls": 2.0, "tools/unknown": 0.02, "tools/raised": 0.03, "tools/timeout": 0.5, "turns/mean": 1.0}
    assert format_fault_shares(shares) == "50% timeout, 3% raised, 2% other"
    assert format_fault_shares({"tools/calls": 2.0, "tools/unknown": 0.12}) == "12% unknown"
    assert format_fault_shares({"tools/calls": 2.0}) == ""


# ---------------------------------------------------------------- the console


def test_plain_line_shows_turns_and_tool_faults(capsys):
    PlainLogger(3).log(
        1, {"completion/finished": 1.0, "turns/mean": 2.4, "tools/calls": 1.1, "tools/unreadable": 0.12}, []
    )
    assert capsys.readouterr().out == "step 1/3  fin 1.00  turns 2.4  tools 1.1 (12% unreadable)\n"
    PlainLogger(3).log(1, {"turns/mean": 2.4, "tools/calls": 1.1}, [])
    assert capsys.readouterr().out == "step 1/3  turns 2.4  tools 1.1\n"
    PlainLogger(3).log(1, {"completion/finished": 1.0}, [])
    assert capsys.readouterr().out == "step 1/3  fin 1.00\n"


def test_live_display_shows_turns_and_tool_faults():
    log = ConsoleLogger(3, screen=rich.console.Console(file=io.StringIO(), force_terminal=True))
    log.log(1, {"turns/mean": 2.4, "tools/calls": 1.1, "tools/unreadable": 0.12}, [])
    picture = drawn(log.render())
    log.log(2, {"reward/mean": 0.5}, [])
    log.close()
    assert re.search(r"turns +2\.4 +per conversation", picture)
    assert re.search(r"tools +1\.1 +calls per conversation, 12% unreadable", picture)
    assert "turns" not in drawn(log.render())


def test_verdict_table_shows_a_conversation_turn_by_turn():
    lines = [" ".join(line.split()) for line in drawn(make_verdict_table(group(completion()))).splitlines()]
    assert lines[:9] == [
        "question What is 3 * 4?",
        "policy let me see",
        'calls multiply(a=3, unit="<m>")',
        "tool multiply {'error': 'no b'}",
        "tool unknown {'error': 'The call cannot be read: no name'}",
        "policy it is 12",
        "environment Higher.",
        "policy 13",
        "verdict right, reward 1.00; 3 turns, 2 tool calls (1 unreadable, 1 arguments)",
    ]


def test_long_observation_loses_its_middle_on_the_console():
    heard = {"role": "tool", "name": "shout", "content": "begin" + "a" * 20_000 + "end"}
    shown = drawn(make_verdict_table(group(completion((TALK[0], heard, TALK[-1])))))
    assert f"[{20_008 - MAX_MESSAGE_CHARACTERS:,} characters left out]" in shown
    unwrapped = re.sub(r"\s", "", shown)
    assert "beginaaa" in unwrapped
    assert "aaaend" in unwrapped
    assert len(shown) < 2 * MAX_MESSAGE_CHARACTERS


HARD = f"{HOSTILE}\u061c🦜 [red]rich[/red] {'x' * 5000}"


def hostile_talk():
    call = {"function": {"name": HARD, "arguments": {HARD: HARD}}}
    said = {"role": "assistant", "content": HARD, "tool_calls": [call]}
    return (
        said,
        {"role": "tool", "name": f"\x1b]0;<b>{HARD}", "content": f"{{'error': {HARD}"},
        {"role": "user", "content": HARD},
        said,
    )


def test_hostile_observations_are_escaped_on_the_console():
    shown = drawn(make_verdict_table(group(completion(hostile_talk(), {"calls": 1, HOSTILE: 1}))))
    assert not {*map(chr, (*CONTROL_CODES, *BIDI_CODES))} & set(shown)
    unwrapped = re.sub(r"\s", "", shown)
    assert "🦜[red]rich[/red]xxx" in unwrapped
    assert "\\x1b[31m" in unwrapped


# ---------------------------------------------------------------- the HTML report


def test_report_shows_each_message_with_its_speaker(tmp_path):
    logged(tmp_path, group(completion()))
    html, page = page_of(tmp_path)
    items = re.findall(r'<li class="(\w+)"><p>(.*?)</p><pre[^>]*>(.*?)</pre></li>', html, re.DOTALL)
    assert [(kind, re.sub("<.*?>", "", about)) for kind, about, _ in items] == [
        ("sampled", "policy, sampled"),
        ("given", "tool multiply, given, the call failed"),
        ("given", "tool unknown, given, the call failed"),
        ("sampled", "policy, sampled"),
        ("given", "environment, given"),
        ("sampled", "policy, sampled"),
    ]
    assert items[0][2] == "let me see\ncalls multiply(a=3, unit=&quot;&lt;m&gt;&quot;)"
    assert items[-1][2] == "13"
    figures = "reward 1.000, 0.250 from the environment, advantage +0.00, 3 turns, 2 tool calls"
    assert f"best, {figures} (1 unreadable, 1 arguments), 3 tokens sampled and 2 given, finished" in page


def test_single_answer_is_shown_without_a_message_list(tmp_path):
    logged(tmp_path, group(Completion((1, 2), (-0.5, -0.5), "12", True)))
    html, page = page_of(tmp_path)
    assert "<ol" not in html
    assert "best, reward 1.000, advantage +0.00, 2 tokens, finished" in page
    assert "given to it" not in page


def test_conversations_with_the_same_last_turn_are_both_shown(tmp_path):
    logged(tmp_path, group(completion(), completion(TALK[3:]), completion()))
    assert page_of(tmp_path)[0].count("<article") == 2


def test_a_rewritten_history_is_shown_before_the_new_one(tmp_path):
    earlier = Completion((7,), (-1.0,), "5", True, messages=({"role": "assistant", "content": "before"},))
    logged(tmp_path, group(completion(branches=(earlier,))))
    html, _ = page_of(tmp_path)
    assert html.index("before</pre>") < html.index("the history was rewritten") < html.index("let me see")


def test_middle_of_a_long_conversation_is_left_out(tmp_path):
    long = tuple({"role": "assistant", "content": f"turn {i}."} for i in range(100))
    logged(tmp_path, group(completion(long)))
    html, page = page_of(tmp_path)
    assert f"{100 - MAX_MESSAGES} more messages in rollouts.jsonl" in page
    shown = [int(i) for i in re.findall(r"turn (\d+)\.", html)]
    assert shown == [*range(MAX_MESSAGES // 2), *range(100 - MAX_MESSAGES // 2, 100)]


def test_hostile_observations_are_escaped_in_the_report(tmp_path):
    logged(tmp_path, group(completion(hostile_talk(), {"calls": 1, HOSTILE: 1})))
    html, page = page_of(tmp_path)
    assert page.tags <= ALLOWED
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "🦜 [red]rich[/red] xxx" in page
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u061c\u202a-\u202e\u2066-\u2069]", html)
    assert len(html) < 80_000


def test_given_tokens_are_drawn_thin_without_a_probability():
    cells = ElementTree.fromstring(render_token_strip([0.0, 0.0, -0.6931471805599453, None], [[1, 2]]))
    assert [(cell.get("class"), cell.get("height")) for cell in cells.iter("rect")] == [
        (None, "1"), ("given", "0.2"), (None, "1"), (None, "1"),
    ]  # fmt: skip
    assert [tip.text for tip in cells.iter("title")][1:3] == ["token 2: given", "token 3: 50.0%"]
    assert cells.get("aria-label") == "the chances of 3 tokens, the lowest 0.0%"
    assert render_token_strip([0.0], [[0, 1]]) == ""


def test_tool_charts_handle_steps_without_calls_or_faults():
    rows = [
        {"step": 1, "turns/mean": 1.0},
        {"step": 2, "turns/mean": 2.0, "tools/calls": 1.0, "tools/raised": 0.5},
        {"step": 3, "turns/mean": 2.0, "tools/calls": 2.0},
    ]
    turns, calls, faults = (
        [tip.text for tip in ElementTree.fromstring(svg).iter("title")] for svg in draw_tool_charts(rows)
    )
    assert turns == ["turns, step 1: 1", "turns, step 2: 2", "turns, step 3: 2"]
    assert calls == ["calls, step 1: 0", "calls, step 2: 1", "calls, step 3: 2"]
    assert faults == ["raised, step 2: 0.5", "raised, step 3: 0"]
    assert draw_tool_charts([{"step": 1, "reward/mean": 1.0}]) == ["", "", ""]
    assert draw_tool_charts(rows[:1])[1:] == ["", ""]


@pytest.mark.parametrize("kind", ["turns/mean", "tools/calls"])
def test_report_has_the_conversation_charts(tmp_path, kind):
    logged(tmp_path, group(completion()))
    titles = {"turns/mean": ["Turns"], "tools/calls": ["Tool calls", "Failed calls"]}
    drawn_titles = re.findall(r'class="title"[^>]*>([^<]*)<', page_of(tmp_path)[0])
    assert set(titles[kind]) <= set(drawn_titles)
