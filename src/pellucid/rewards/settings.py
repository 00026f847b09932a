"""The settings of rewards: `[reward]`, and the tables of a judge and a reward model in `[[task.rewards]]`."""

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
_MAX_TIMEOUT_SECONDS = 1e6
"""The longest time limit in seconds, eleven days: process timers accept no more."""
_VARIABLE_NAME = re.compile("[A-Z_][A-Z0-9_]*")
_NON_COLUMN_SIGN = re.compile("[\"':\n]")


@dataclass(frozen=True)
class RewardConfig:
    """`[reward]`: the processes that compute rewards, their limits, and after how many failures a run stops."""

    timeout: float = 10.0
    """The time limit for the reward of one completion, in seconds. A reward that exceeds it fails, and its process is
    ended."""
    step_timeout: float = 120.0
    """The time limit, in seconds, of a function that grades all completions of a step in one call."""
    workers: int = 1
    """Processes that grade completions side by side. The rewards do not depend on their number."""
    memory_gb: float = 8.0
    """Memory that each process may use, on Linux; 0 is no limit. A judge of 3 B parameters in bf16 takes 6."""
    patience: int = 3
    """Steps in a row, each with all of its rewards failed, after which the run is saved and stops; 0 never stops it."""
    secrets: tuple[str, ...] = ()
    """Environment variables that rewards may read although they are called *_KEY, *_TOKEN, *_SECRET or *_PASSWORD."""

    def __post_init__(self) -> None:
        for name in ("timeout", "step_timeout"):
            if not 0 < getattr(self, name) <= _MAX_TIMEOUT_SECONDS:
                seconds = f"a positive number of seconds, at most {_MAX_TIMEOUT_SECONDS:.0f}"
                raise ValueError(f"{name} = {getattr(self, name)} must be {seconds}")
        if self.workers < 1:
            raise ValueError(f"workers = {self.workers} must be at least 1")
        if not 0 <= self.memory_gb < math.inf or self.patience < 0:
            raise ValueError("memory_gb and patience must not be negative")


@dataclass(frozen=True)
class JudgeSettings:
    """`[task.rewards.judge]`: the endpoint that judges, the request, and how the answer is read.

    Example: JudgeSettings("http://127.0.0.1:8100/v1", "judge", rubric="Rate it from 0 to 10. Write the number alone.")
    """

    base_url: str = ""
    """An OpenAI-compatible endpoint, such as http://127.0.0.1:8100/v1."""
    model: str = ""
    """The name by which the endpoint knows the model that judges."""
    rubric: str = ""
    """The properties of a good answer, and the form of the judge's answer: {rubric} in the template."""
    template: str = "Question:\n{prompt}\n\nAnswer:\n{completion}\n\n{rubric}"
    """The message to the judge, with {prompt}, {completion}, {answer} (the gold answer), {rubric}, and {column} for any
    column of the row; {{...}} is {...}. A conversation is inserted as text, each message after its role."""
    system: str = ""
    """The system message to the judge, if any, with the same placeholders."""
    range: tuple[float, float] = (0.0, 10.0)
    """The lowest and the highest grade, which become the rewards 0 and 1; another number is no grade."""
    pattern: str = ""
    """A regular expression whose first group, in its last match, is the grade. Empty: the whole answer is the grade."""
    words: dict[str, float] = field(default_factory=dict, hash=False)
    """The reward of each word, such as { yes = 1.0, no = 0.0 }, if grades are words; `range` is then not used."""
    json_field: str = ""
    """If the judge answers with a JSON object: the name of the field that is the grade, a number."""
    body: dict[str, Any] = field(default_factory=dict, hash=False)
    """Further fields of the request, such as response_format or seed. They override the default fields, such as
    temperature = 0; with max_completion_tokens, max_tokens is not sent."""
    max_tokens: int = 512
    """The longest answer of the judge, in tokens."""
    concurrency: int = 16
    """How many requests are sent at once."""
    timeout: float = 60.0
    """Seconds that one request may take."""
    retries: int = 6
    """How often a request that failed is repeated: after 429, 5xx, a timeout or a dropped connection."""
    step_timeout: float = 300.0
    """The time limit, in seconds, for judging the completions of a step, including all waits; completions without a
    grade by then fail. It must be less than runtime.timeout, since other processes wait for this one."""
    key: str = "OPENAI_API_KEY"
    """The name of the environment variable that holds the key. A judge on a loopback address needs no key."""
    cache: bool = True
    """Store the answers in the run folder, so that nothing is asked twice."""

    def __post_init__(self) -> None:
        if mistake := next(_find_judge_mistakes(self), ""):
            raise ValueError(mistake)


def _find_judge_mistakes(judge: JudgeSettings) -> Iterator[str]:
    """Yield the mistakes in the settings of a judge, one line each; no line contains a key."""
    if mistake := find_address_mistake(judge.base_url, ENDPOINT_NAMES):
        yield mistake
    if not judge.model:
        yield 'model = "" must name the model that judges, as the endpoint knows it'
    if not _VARIABLE_NAME.fullmatch(judge.key):  # the value may be the key itself, so it is not shown
        yield "key must name an environment variable, in capitals, such as OPENAI_API_KEY: the key itself stays there"
    yield from _find_template_mistakes(judge)
    yield from _find_parsing_mistakes(judge)
    if ours := [name for name in ("model", "messages", "stream") if name in judge.body]:
        yield f"body must not set {ours[0]}: leave it out"
    try:
        json.dumps(judge.body)
    except TypeError as error:
        yield f"body must be serializable as JSON: {error}"
    for name, least in {"max_tokens": 1, "concurrency": 1, "retries": 0}.items():
        if getattr(judge, name) < least:
            yield f"{name} = {getattr(judge, name)} must be at least {least}"
    for name in ("timeout", "step_timeout"):
        if not 0 < getattr(judge, name) < math.inf:
            yield f"{name} = {getattr(judge, name)} must be a positive number of seconds"


def _find_template_mistakes(judge: JudgeSettings) -> Iterator[str]:
    shown = find_placeholders(judge.template) | find_placeholders(judge.system)
    for name in sorted(shown):
        if _NON_COLUMN_SIGN.search(name):
            yield f"template has {{{name}}}, which is no placeholder: write {{{{...}}}} where braces are meant"
    if "completion" not in find_placeholders(judge.template):
        yield "template must have {completion}, which the judge is to grade"
    if bool(judge.rubric) != ("rubric" in shown):
        yield f'rubric = "{judge.rubric}": set it if, and only if, the template has {{rubric}}'


def _find_parsing_mistakes(judge: JudgeSettings) -> Iterator[str]:
    low, high = judge.range
    if not -math.inf < low < high < math.inf:
        yield f"range = [{low:g}, {high:g}] must be two numbers, the lowest grade and the highest"
    if judge.json_field and (judge.pattern or judge.words):
        yield "json_field excludes pattern and words, which read the answer in another way: leave out one"
    if not all(map(math.isfinite, judge.words.values())):
        yield "words must map to finite numbers, the rewards"
    try:
        if judge.pattern and not regex.compile(judge.pattern).groups:
            yield f'pattern = "{judge.pattern}" needs a group around the grade: "Grade: ([0-9]+)"'
    except regex.error as error:
        yield f'pattern = "{judge.pattern}" is not a valid regular expression: {error}'


@dataclass(frozen=True)
class RewardModelSettings:
    """`[task.rewards.reward_model]`: how a reward model is run."""

    device: str = "auto"
    """The device that it runs on: auto, cpu, cuda, cuda:1. auto is chosen as for the policy."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The dtype of its weights and of the computation. auto is the dtype in which it was saved, as in transformers."""
    batch: int = 16
    """Sequences that it reads at once. If they do not fit into memory, it reads one half and then the other."""
    max_tokens: int = 0
    """The maximum length of a sequence with its prompt, in tokens; 0 is the maximum of the model. The reward of a
    longer sequence fails: it is not truncated, since that would grade another answer."""
    label: int = 0
    """The column of its logits that is the reward, if it has several labels. TRL takes 0."""
    revision: str = ""
    """Branch, tag or commit of a model of the Hub; empty is its default branch."""
    trust_remote_code: bool = False
    """Run the Python code in the model's own folder, with your permissions: read the code first."""

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch = {self.batch} must be at least 1")
        for name in ("max_tokens", "label"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} must not be negative")

    def get_trust_notice(self, source: str) -> str:
        """Return the line that must be shown before this model is loaded; empty if it runs no code."""
        return (
            f"reward_model.trust_remote_code: Python code of {source} runs with your permissions"
            if self.trust_remote_code
            else ""
        )
