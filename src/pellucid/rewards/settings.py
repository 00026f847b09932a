"""The settings of rewards: `[reward]`, and the tables of a judge and of a reward model in `[[task.rewards]]`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import regex

from pellucid.utils.endpoint import SettingNames, find_address_mistake
from pellucid.utils.text import find_placeholders

ENDPOINT_NAMES = SettingNames("base_url", "model", "key")
MAX_TIMEOUT_SECONDS = 1e6
"""The longest time limit in seconds, eleven days: clocks of processes take no more."""
_VARIABLE_NAME = re.compile("[A-Z_][A-Z0-9_]*")
_NON_COLUMN_SIGN = re.compile("[\"':\n]")


@dataclass(frozen=True)
class RewardConfig:
    """`[reward]`: the processes that compute rewards, their limits, and after how many failures a run stops."""

    timeout: float = 10.0
    """Seconds that one completion's reward may take. One that takes longer has failed, and its process is ended."""
    step_timeout: float = 120.0
    """Seconds that a function may take which is asked about all completions of a step at once."""
    workers: int = 1
    """Processes that grade completions side by side. Rewards do not depend on it."""
    memory_gb: float = 8.0
    """Memory that each of them may ask for, on Linux; 0 is no limit. A judge of 3 B parameters in bf16 takes 6."""
    patience: int = 3
    """Steps in a row, each with all of its rewards failed, after which the run is saved and stops; 0 never stops it."""
    secrets: tuple[str, ...] = ()
    """Environment variables that rewards may read although they are called *_KEY, *_TOKEN, *_SECRET or *_PASSWORD."""

    def __post_init__(self) -> None:
        for name in ("timeout", "step_timeout"):
            if not 0 < getattr(self, name) <= MAX_TIMEOUT_SECONDS:
                seconds = f"a positive number of seconds, at most {MAX_TIMEOUT_SECONDS:.0f}"
                raise ValueError(f"{name} = {getattr(self, name)} must be {seconds}")
        if self.workers < 1:
            raise ValueError(f"workers = {self.workers} must be at least 1")
        if not 0 <= self.memory_gb < math.inf or self.patience < 0:
            raise ValueError("memory_gb and patience must not be negative")


@dataclass(frozen=True)
class JudgeSettings:
    """`[task.rewards.judge]`: the endpoint that judges, what it is asked, and how its answer is read.

    Example: JudgeSettings("http://127.0.0.1:8100/v1", "judge", rubric="Rate it from 0 to 10. Write the number alone.")
    """

    base_url: str = ""
    """An OpenAI-compatible endpoint, such as http://127.0.0.1:8100/v1."""
    model: str = ""
    """The name by which the endpoint knows the model that judges."""
    rubric: str = ""
    """What makes an answer good, and in what form the judge shall say it: {rubric} in the template."""
    template: str = "Question:\n{prompt}\n\nAnswer:\n{completion}\n\n{rubric}"
    """The message to the judge, with {prompt}, {completion}, {answer} (the gold answer), {rubric}, and {column} for any
    column of the row; {{...}} is {...}. A conversation is put in as text, each message behind its role."""
    system: str = ""
    """The system message to the judge, if any, with the same placeholders."""
    range: tuple[float, float] = (0.0, 10.0)
    """The lowest and the highest grade, which become the rewards 0 and 1; another number is no grade."""
    pattern: str = ""
    """A regular expression whose first group is the grade; its last match counts. Empty: the whole answer is."""
    words: dict[str, float] = field(default_factory=dict, hash=False)
    """Where the grade is a word: the reward of each, such as { yes = 1.0, no = 0.0 }. The range is not looked at."""
    json_field: str = ""
    """Where the judge answers with a JSON object: the field of it that is the grade, a number."""
    body: dict[str, Any] = field(default_factory=dict, hash=False)
    """Further fields of the request as the endpoint has them, such as response_format or seed. Fields of ours, such as
    temperature, which is 0, are replaced; with max_completion_tokens, max_tokens is not sent."""
    max_tokens: int = 512
    """The longest answer of the judge, in tokens."""
    concurrency: int = 16
    """How many requests are under way at once."""
    timeout: float = 60.0
    """Seconds that one request may take."""
    retries: int = 6
    """How often a request that failed is made again: after 429, 5xx, a time-out or a dropped connection."""
    step_timeout: float = 300.0
    """Seconds that judging the completions of a step may take, waits included; what has no grade by then has failed.
    Less than runtime.timeout, since other processes wait for this one."""
    key: str = "OPENAI_API_KEY"
    """The name of the environment variable that holds the key; on the loopback none is needed."""
    cache: bool = True
    """Keep the answers in the run folder, so that nothing is asked twice."""

    def __post_init__(self) -> None:
        if mistake := next(find_judge_mistakes(self), ""):
            raise ValueError(mistake)


def find_judge_mistakes(judge: JudgeSettings) -> Iterator[str]:
    """Yield what is wrong with the settings of a judge, in one line each; no line holds a key."""
    if mistake := find_address_mistake(judge.base_url, ENDPOINT_NAMES):
        yield mistake
    if not judge.model:
        yield 'model = "" must name the model that judges, as the endpoint knows it'
    if not _VARIABLE_NAME.fullmatch(judge.key):  # what stands there may be the key itself, and is not told
        yield "key must name an environment variable, in capitals, such as OPENAI_API_KEY: the key itself stays there"
    yield from find_template_mistakes(judge)
    yield from find_parsing_mistakes(judge)
    yield from find_body_mistakes(judge)
    for name, least in {"max_tokens": 1, "concurrency": 1, "retries": 0}.items():
        if getattr(judge, name) < least:
            yield f"{name} = {getattr(judge, name)} must be at least {least}"
    for name in ("timeout", "step_timeout"):
        if not 0 < getattr(judge, name) < math.inf:
            yield f"{name} = {getattr(judge, name)} must be a positive number of seconds"


def find_body_mistakes(judge: JudgeSettings) -> Iterator[str]:
    if ours := [name for name in ("model", "messages", "stream") if name in judge.body]:
        yield f"body has {ours[0]}, which is not its to say: leave it out"
    try:
        json.dumps(judge.body)
    except TypeError as error:
        yield f"body must be what JSON can say: {error}"


def find_template_mistakes(judge: JudgeSettings) -> Iterator[str]:
    shown = find_placeholders(judge.template) | find_placeholders(judge.system)
    for name in sorted(shown):
        if _NON_COLUMN_SIGN.search(name):
            yield f"template has {{{name}}}, which is no placeholder: write {{{{...}}}} where braces are meant"
    if "completion" not in find_placeholders(judge.template):
        yield "template must have {completion}, which the judge is to grade"
    if bool(judge.rubric) != ("rubric" in shown):
        yield f'rubric = "{judge.rubric}": give one where the template has {{rubric}}, and nowhere else'


def find_parsing_mistakes(judge: JudgeSettings) -> Iterator[str]:
    low, high = judge.range
    if not -math.inf < low < high < math.inf:
        yield f"range = [{low:g}, {high:g}] must be two numbers, the lowest grade and the highest"
    if judge.json_field and (judge.pattern or judge.words):
        yield "json_field and pattern or words are two ways to read an answer: leave out one"
    if not all(map(math.isfinite, judge.words.values())):
        yield "words must have finite numbers, the rewards"
    try:
        groups = regex.compile(judge.pattern).groups if judge.pattern else 1
    except regex.error as error:
        yield f'pattern = "{judge.pattern}" is no regular expression: {error}'
    else:
        if not groups:
            yield f'pattern = "{judge.pattern}" needs a group around the grade: "Grade: ([0-9]+)"'


@dataclass(frozen=True)
class RewardModelSettings:
    """`[task.rewards.reward_model]`: how a reward model is run."""

    device: str = "auto"
    """The device that it runs on: auto, cpu, cuda, cuda:1. auto is that of the policy, where that is auto."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The dtype of its weights and of computing. auto is that in which it was saved, as in transformers."""
    batch: int = 16
    """Sequences that it reads at once. Where they do not fit into memory, half of them and then the others."""
    max_tokens: int = 0
    """The longest sequence in tokens, with its prompt; 0 is the longest that the model can read. A longer one has no
    reward, which counts as failed: without its beginning or its end it is not what was answered."""
    label: int = 0
    """The column of its logits that is the reward, where it has several labels. 0 is what TRL takes."""
    revision: str = ""
    """Branch, tag or commit of a model of the Hub; empty is its default branch."""
    trust_remote_code: bool = False
    """Run the Python code that lies in the model's own folder, as you, with all that you may do: read it before."""

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch = {self.batch} must be at least 1")
        for name in ("max_tokens", "label"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} must not be negative")

    def get_trust_notice(self, source: str) -> str:
        """Return the line that must be shown before this model is read; empty where it runs nothing."""
        return f"reward_model.trust_remote_code: Python code of {source} runs as you" if self.trust_remote_code else ""
