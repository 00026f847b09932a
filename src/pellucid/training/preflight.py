"""Checks settings and data before step 1, and shows what the run will do.

`run_preflight_checks` runs before the model is loaded, and checks all prompts of a data set against the tokenizer.
Then follow the plan, one prompt with its completion and reward, and the predicted share of zero-variance groups.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil, nan
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import rich
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from pellucid.algorithm.metrics import find_inert_settings
from pellucid.algorithm.settings import GRPOConfig
from pellucid.config import Config, PolicyConfig, SamplerConfig
from pellucid.distributed.process_group import broadcast_decision
from pellucid.models.decoder import get_context_length
from pellucid.policy import load
from pellucid.policy.chat_template import (
    RENDER_ERRORS,
    PromptText,
    encode_prefix,
    encode_prompt_texts,
    encode_question,
    find_token_fault,
    format_template_error,
    render_question,
)
from pellucid.policy.load import check_lora_targets, count_weights, has_custom_code
from pellucid.policy.policy import Policy
from pellucid.reporting import loggers
from pellucid.reporting.charts import format_count
from pellucid.reporting.console import find_first_error, format_error_line, format_failed_terms
from pellucid.reporting.conversations import count_turns, cut_middle, describe_tool_use, get_tool_events
from pellucid.reporting.eval_metrics import MIN_INTERVAL_PROMPTS, TOO_FEW_PROMPTS
from pellucid.reporting.loggers import compute_failed_shares, have_all_failed, predict_zero_variance_share
from pellucid.reporting.run_files import BEST_MODEL_DIR
from pellucid.rewards.functions import check_signature, list_argument_names
from pellucid.rewards.grading import collect_grader_notices, get_grading_task
from pellucid.rewards.terms import get_reward_terms, is_function_term
from pellucid.rollout import vllm, vllm_client
from pellucid.rollout.sglang import SERVER_CLIENTS
from pellucid.sandbox.values import InvalidResultError
from pellucid.tasks.dataset import (
    Dataset,
    ScanKey,
    SourceScan,
    format_bad_rows,
    list_bad_rows,
    list_scan_keys,
    load_split_prompts,
    mark_bad_rows,
    scan_source,
)
from pellucid.tasks.prefixed import Prefixed
from pellucid.tasks.wrappers import get_innermost_task, list_task_layers
from pellucid.training import memory
from pellucid.training.build import check_settings, make_template
from pellucid.training.evaluate import estimate_if_enough, estimate_share, sample_held_out_prompts
from pellucid.training.run_dir import is_first_process
from pellucid.types import (
    Completion,
    DataError,
    Group,
    NotBegunError,
    Prompt,
    Reward,
    Task,
    UserError,
    rewards_are_verdicts,
    with_split,
)
from pellucid.utils import hardware
from pellucid.utils.plugins import import_extra
from pellucid.utils.text import escape_controls, format_option, print_notes

_CUT_OFF_WARNING_SHARE = 0.1
"""The share of cut-off samples from which a warning is printed."""
MAX_GIVEN_CHARACTERS = 4000
"""The most characters that are shown of a span of given tokens."""
_MARK_STYLE = "bold cyan"
_FAILED_WARNING_SHARE = 0.1
"""The share of failed rewards from which the advice is to mend them."""
_MIN_GPU_ROWS = 16
"""Below this many rows in a forward pass a GPU waits for the kernels of an update
(docs/contributing/performance.md)."""
_OTHER_ARITHMETIC_NOTE = (
    'log-probs of sampler.name = "{}" differ slightly from those of the update: algorithm.correction = "{}"'
)


class PreflightResult(NamedTuple):
    """The result of `run_preflight_checks`."""

    cfg: Config
    """The settings, with the numbers that algorithm.micro_batch = "auto" and algorithm.data_epochs chose."""
    prompt_tokens: int
    """The length of the longest of the first prompts."""


def run_preflight_checks(cfg: Config, run_dir: Path) -> PreflightResult:
    """Check what would otherwise fail after minutes or at the end: settings, extras, data, memory, disk space.

    Raise DataError for bad rows that are not to be skipped, and UserError for anything else that would end the run.
    """
    print_disclosures(cfg, cfg.policy.access.format_warning(cfg.policy.model))
    check_settings(cfg)
    cfg = _choose_steps(cfg) if cfg.algorithm.data_epochs else cfg
    if cfg.log.tensorboard:
        import_extra("tensorboard", "tensorboard", "log.tensorboard")
    if cfg.log.wandb != "off":
        loggers.check_wandb(cfg.log.wandb)
    if cfg.policy.lora:
        import_extra("peft", "lora", "policy.lora")
    if cfg.policy.load_in_4bit:
        load.check_bitsandbytes_installed()
    if cfg.sampler.urls:
        vllm_client.check_servers(cfg.sampler.urls, cfg.sampler.timeout, SERVER_CLIENTS[cfg.sampler.name])
    elif cfg.sampler.name == "vllm":
        vllm.check_vllm_installed()
    try:
        model, tokenizer = memory.describe_model(cfg.policy), load_run_tokenizer(cfg.policy)
    except UserError:  # loading the model raises an error that says more
        model = tokenizer = None
    if model and tokenizer:
        _check_model_config(cfg, model.config.get_text_config())
        _check_configured_prompts(cfg, model.config.get_text_config(), tokenizer)
    prompts = with_split(cfg.task, "train").sample(0, cfg.algorithm.prompts_per_step)
    check_reward_signatures(cfg, prompts)
    if cfg.evaluate.every:  # raises a UserError if nothing is held out
        sample_held_out_prompts(with_split(cfg.task, "test"), cfg.evaluate.n)
    disk = memory.plan_disk(cfg, model, run_dir) if model else None
    if disk and disk.needed_gb > disk.free_gb:
        checkpoints = format_count(disk.max_checkpoints, "checkpoint")
        best, leave_out = (", the best model", ", set checkpoint.keep_best = false") if disk.best_model_gb else ("", "")
        raise UserError(
            f"{run_dir} needs {disk.needed_gb:.1f} GB for the model{best} and {checkpoints}, and {disk.free_gb:.1f} GB"
            f" are free: make room, lower checkpoint.keep_last{leave_out}, or choose another folder with"
            f" {format_option('run')}",
            page="reference/run-folder",
        )
    if not model or not tokenizer:
        return PreflightResult(cfg, memory.ASSUMED_PROMPT_TOKENS)
    model = model._replace(prompt_tokens=measure_prompt_tokens(cfg, tokenizer, prompts))
    chosen = _choose_micro_batch(cfg, model) if cfg.algorithm.micro_batch == "auto" else cfg
    return PreflightResult(chosen, model.prompt_tokens)


def _choose_steps(cfg: Config) -> Config:
    """Set algorithm.steps by algorithm.data_epochs, and that to 0. Raise UserError if the task has no rows."""
    layers = list_task_layers(with_split(cfg.task, "train"))
    rows = next((n for layer in layers if (n := getattr(layer, "question_count", None)) is not None), None)
    if rows is None:
        raise UserError(
            "algorithm.data_epochs counts passes over the rows of a data set, and this task makes up its questions: set"
            " algorithm.steps, and leave algorithm.data_epochs out"
        )
    steps = ceil(cfg.algorithm.data_epochs * rows / cfg.algorithm.prompts_per_step - 1e-9)
    return memory.change_settings(cfg, {"algorithm.steps": steps, "algorithm.data_epochs": 0.0})


def _choose_micro_batch(cfg: Config, model: memory.ModelFacts) -> Config:
    """Choose algorithm.micro_batch by the memory of the first process. Raise UserError if not even one row fits."""
    device = hardware.pick_device(cfg.policy.device)
    available = broadcast_decision(lambda: repr(hardware.get_available_memory_gb(device)), device, cfg.runtime.timeout)
    rows = memory.choose_micro_batch(model, cfg, float(available), int(os.environ.get("WORLD_SIZE", "1")))
    return memory.change_settings(cfg, {"algorithm.micro_batch": rows})


def measure_prompt_tokens(cfg: Config, tokenizer: PreTrainedTokenizerBase, first: Sequence[Prompt] = ()) -> int:
    """Return the length of the longest prompt with its prefix, among the first prompts of the task.

    A user-defined task is only asked for the prompts of the first step, if they are not given: it may rely on one call
    per step. The environment of a conversation may write more than its prompt: its length is at least the assumed one.
    """
    task, n = with_split(cfg.task, "train"), cfg.algorithm.prompts_per_step
    innermost = get_innermost_task(task)
    if type(innermost).__module__.startswith("pellucid."):
        first = [prompt for step in range(-(-_PROBE_PROMPT_COUNT // n)) for prompt in task.sample(step, n)]
    lengths = []
    for prompt in first or task.sample(0, n):
        with suppress(UserError, *RENDER_ERRORS):  # a bad row, which other checks refuse or leave out
            lengths.append(len(encode_question(tokenizer, prompt)) + len(encode_prefix(tokenizer, prompt)))
    is_known = bool(lengths) and not hasattr(innermost, "environment_spec")
    return max([1 if is_known else memory.ASSUMED_PROMPT_TOKENS, *lengths])


def load_run_tokenizer(cfg: PolicyConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the policy, with the chat template of the settings. Raise UserError if it is not found."""
    tokenizer = load.load_tokenizer(cfg.model, cfg.access)
    make_template(cfg).apply_to_tokenizer(tokenizer)
    return tokenizer


def describe_planned_model(cfg: Config) -> memory.ModelFacts:
    """Return the facts of the model and of the prompts without loading weights.

    Raise UserError if the model is not found. Prompts whose data are not found have the assumed length.
    """
    model = memory.describe_model(cfg.policy)
    with suppress(UserError):
        return model._replace(prompt_tokens=measure_prompt_tokens(cfg, load_run_tokenizer(cfg.policy)))
    return model


def print_disclosures(cfg: Config, access_warning: str) -> None:
    """Print notices before code of the model runs, graders are loaded and data is sent to servers."""
    servers = [vllm_client.format_servers_notice(cfg.sampler.urls)] if cfg.sampler.urls else []
    if is_first_process():
        print_notes(access_warning, *collect_grader_notices(cfg.task), *servers)


def check_reward_signatures(cfg: Config, prompts: Sequence[Prompt]) -> None:
    """Raise UserError for a reward function that does not accept the arguments it will get."""
    environments = ["environments"] if hasattr(get_innermost_task(cfg.task), "environment_spec") else []
    for term in get_reward_terms(get_grading_task(cfg.task)):
        if is_function_term(term.name):
            try:
                check_signature(term.name, [*list_argument_names(prompts), *environments])
            except InvalidResultError as error:
                raise UserError(f"reward {error}") from error


def _check_model_config(cfg: Config, text: PreTrainedConfig) -> None:
    """Raise UserError if the configuration of the text model does not fit the settings."""
    if cfg.sampler.max_tokens >= get_context_length(text):
        raise UserError(
            f"sampler.max_tokens = {cfg.sampler.max_tokens} leaves no room for a prompt: {cfg.policy.model} has a"
            f" context of {get_context_length(text)} tokens"
        )
    layer, layers = cfg.algorithm.similarity_layer, getattr(text, "num_hidden_layers", None)
    if cfg.algorithm.similarity != "none" and layers is not None and not -layers <= layer + 1 <= layers + 1:
        raise UserError(f"algorithm.similarity_layer = {layer}: this model has layers 0, the embedding, to {layers}")
    if cfg.policy.lora_targets:
        check_lora_targets(memory.build_meta_model(cfg.policy.model, cfg.policy.access)[1], cfg.policy.lora_targets)


def show_plan(
    cfg: Config, model: memory.ModelFacts, fallback: str, world_size: int, run_dir: Path, run_time: str = ""
) -> None:
    """Print the numbers that follow from the settings, and an estimate of the time of the run, if it is given.

    `fallback` is the reason why transformers is used and not our decoder; empty if our decoder is used.
    """
    a, device = cfg.algorithm, hardware.pick_device(cfg.policy.device)
    completions, disk = a.prompts_per_step * a.group_size, memory.plan_disk(cfg, model, run_dir)
    rows = {
        "model": f"{cfg.policy.model}: {model.parameter_count / 1e6:.1f} M parameters,"
        f" {model.trained_count / 1e6:.1f} M trained",
        "computes": f"in {cfg.policy.dtype} on {device}, {world_size} process{'es' if world_size > 1 else ''}, by"
        + (f" transformers ({fallback})" if fallback else " our decoder"),
        **_describe_data(cfg),
        "a step": f"{a.prompts_per_step} prompts x {a.group_size} completions = {completions}, up to"
        f" {cfg.sampler.max_tokens} tokens each, {format_count(a.inner_steps, 'optimizer step')}",
        "the run": f"{a.steps} steps = {a.steps * completions} completions"
        + (f", or {a.minutes:g} minutes" if a.minutes else "")
        + f", seed {a.seed}",
        "memory": _describe_memory(cfg, model, world_size),
        **{name: f"{gb:.1f} GB of it" for name, gb in memory.estimate_reward_models(cfg).items()},
        "disk": f"up to {disk.peak_gb:.1f} GB of {disk.free_gb:.0f} GB free"
        + (f", {disk.best_model_gb:.1f} GB of it for {BEST_MODEL_DIR}/" if disk.best_model_gb else ""),
        **({"time": run_time} if run_time else {}),
    }
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(f"[dim]{name}", escape(escape_controls(value)))
    rich.print(table)
    slow_note = hardware.describe_slow_dtype(cfg.policy.dtype, device)
    correction_note = _OTHER_ARITHMETIC_NOTE.format(cfg.sampler.name, a.correction) if cfg.sampler.uses_engine else ""
    print_notes(slow_note, correction_note, *find_inert_settings(a))


def _describe_memory(cfg: Config, model: memory.ModelFacts, world_size: int) -> str:
    """Return how much memory the run will need, with advice if that is more than it may plan with."""
    unknown = memory.explain_unknown_memory(model.config)
    expected = memory.estimate_peak(model, cfg, world_size)
    available = hardware.get_available_memory_gb(hardware.pick_device(cfg.policy.device))
    rows, minibatch = memory.count_backward_rows(cfg, world_size), memory.count_minibatch_rows(cfg, world_size)
    of_minibatch = f" of the {minibatch}" if rows < minibatch else ""
    text = f"{'at least' if unknown else 'about'} {expected:.1f} GB expected with {format_count(rows, 'row')}"
    text += f"{of_minibatch} in a forward pass"
    if unknown:
        text += f", activations unknown ({unknown})"
    has_room = memory.fits(expected, available)
    if not has_room:
        text += (
            f", more than {memory.format_limit(available)}: pellucid doctor --plan says what would fit, and"
            f" {format_option('algorithm.micro_batch', 'auto')} chooses a micro-batch for this memory"
        )
    note = memory.describe_checkpointing(model, cfg, world_size)
    if _MIN_GPU_ROWS > rows < minibatch and hardware.pick_device(cfg.policy.device).type == "cuda":
        return f"{text}; fewer than {_MIN_GPU_ROWS} rows cost time on a GPU{f': {note}' if note else ''}"
    return f"{text}; {note}" if note and (not has_room or cfg.policy.gradient_checkpointing) else text


def _describe_data(cfg: Config) -> dict[str, str]:
    """Return how many rows train and how many are held out; empty for a task that generates its questions."""
    counts: dict[str, int | None] = {}
    for split in ("train", "test"):
        with suppress(UserError):  # nothing is held out
            counts[split] = getattr(with_split(get_innermost_task(cfg.task), split), "question_count", None)
    train, test = counts.get("train"), counts.get("test")
    if train is None:
        return {}
    if not test:
        return {"data": f"{format_count(train, 'row')} to train on, none held out"}
    evaluations = (
        f"an evaluation asks {min(test, cfg.evaluate.n or test):,} of these" if cfg.evaluate.every else "not evaluated"
    )
    return {"data": f"{format_count(train, 'row')} to train on, {test:,} held out ({evaluations})"}


def show_first_completion(policy: Policy, group: Group) -> None:
    """Print the first completion of a group, special tokens included. Bars mark where sampled tokens begin and end."""
    completion, reward = group.completions[0], group.rewards[0]
    text, was_sampled = _format_tokens(policy, group.prompt_ids, is_given=True), False
    for ids, is_given in _split_spans(completion):
        text.append("" if is_given and not was_sampled else "|", _MARK_STYLE).append_text(
            _format_tokens(policy, ids, is_given)
        )
        was_sampled = not is_given
    rich.print(Text("\n"), text, sep="")
    grade = f"not graded: {format_error_line(reward)}" if reward.failed else f"reward {reward.value:g}"
    grade += f", gold answer {escape_controls(group.prompt.answer)}" if group.prompt.answer else ""
    given_count = len(completion.token_ids) - completion.length
    lengths = f"{completion.length} sampled" + (f", {given_count} given" if given_count else "")
    if completion.messages:
        lengths += f" in {', '.join(describe_tool_use(count_turns(completion), get_tool_events(completion)))}"
    rich.print(f"[dim]{len(group.prompt_ids)} prompt tokens | {escape(lengths)}; {escape(grade)}\n")


def _format_tokens(policy: Policy, ids: Sequence[int], is_given: bool) -> Text:
    """Return the text of these tokens for the screen. Given tokens are dim, without the middle of a long span."""
    text = escape_controls(policy.decode(ids, special=True))
    begin, left_out, end = cut_middle(text, MAX_GIVEN_CHARACTERS if is_given else len(text))
    between = f"[{format_count(left_out, 'character')} left out]" if left_out else ""
    style = "dim" if is_given else ""
    return Text.assemble((begin, style), (between, _MARK_STYLE), (end, style))


def _split_spans(completion: Completion) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Yield the tokens of each span of a completion, and whether they were given rather than sampled."""
    position = 0
    for start, end in completion.given_spans:
        if start > position:
            yield completion.token_ids[position:start], False
        yield completion.token_ids[start:end], True
        position = end
    if rest := completion.token_ids[position:]:
        yield rest, False


def refuse_useless_rewards(groups: Sequence[Group], is_probe: bool = False) -> None:
    """Raise NotBegunError if every reward failed or, unless `is_probe`, if every reward is None."""
    rewards = [reward for group in groups for reward in group.rewards]
    if have_all_failed(groups) and (error := find_first_error(groups)):
        raise NotBegunError(
            f"every reward of the first {len(rewards)} samples failed, the first with {error}", page="how-to/rewards"
        )
    if rewards and not is_probe and not any(reward.applies for reward in rewards):
        raise NotBegunError(
            f"every reward of the first {format_count(len(rewards), 'sample')} is None: no reward applies to these"
            " rows, and nothing can be learned from them; return a number, or name a reward for them in task.rewards",
            page="how-to/rewards",
        )


def show_signal(groups: Sequence[Group], cfg: Config, eos_ids: Collection[int]) -> None:
    """Print the predicted share of zero-variance groups, advice if it is large, and warnings about cut-off samples.

    The graded groups have at least algorithm.group_size samples each.
    """
    graded = [reward for group in groups for reward in group.rewards if not reward.failed]
    if not graded:
        print("! no sample could be graded: no reward applies to any of these prompts", flush=True)
        return
    n = f"{format_count(len(graded), 'sample')} of {format_count(len(groups), 'prompt')}"
    if rewards_are_verdicts(graded):
        outcome = f"{fmean(reward.is_correct for reward in graded):.0%} of {n} are right"
    else:
        outcome = f"The mean reward of {n} is {fmean(reward.value for reward in graded):.3f}"
    share, prediction = _estimate_zero_variance_share(groups, cfg.algorithm)
    advice = _describe_failures(groups) or _give_advice(share, graded, cfg.task, len(groups) < MIN_INTERVAL_PROMPTS)
    print(f"{outcome}; {prediction}", advice)
    completions = [completion for group in groups for completion in group.completions]
    print_notes(*find_cut_off_warnings(completions, cfg.sampler, eos_ids))


def _estimate_zero_variance_share(groups: Sequence[Group], cfg: GRPOConfig) -> tuple[float, str]:
    """Return the predicted share of groups with equal rewards, and a clause that states it."""
    rewards = [[nan if reward.failed else float(reward.value) for reward in group.rewards] for group in groups]
    shares = [predict_zero_variance_share([values], cfg.group_size, cfg.min_reward_range) for values in rewards]
    dead = estimate_if_enough(estimate_share, shares)
    interval = f"95% interval {dead.low:.0%} to {dead.high:.0%}" if dead.has_interval else TOO_FEW_PROMPTS
    return dead.value, f"judging by them, {dead.value:.0%} of groups of {cfg.group_size} will be dead ({interval})."


def _describe_failures(groups: Sequence[Group]) -> str:
    """Return advice to fix the rewards if _FAILED_WARNING_SHARE of them failed; else an empty string."""
    rewards = [reward for group in groups for reward in group.rewards if reward.applies]
    share = fmean(reward.failed for reward in rewards) if rewards else 0.0
    if share < _FAILED_WARNING_SHARE:
        return ""
    terms = format_failed_terms(compute_failed_shares(rewards))
    in_brackets = f" ({terms})" if terms else ""
    return f"{share:.0%} of rewards failed{in_brackets}, the first with {find_first_error(groups)}: fix them first."


def _give_advice(zero_variance_share: float, graded: Sequence[Reward], task: Task, few: bool) -> str:
    """Return advice if many groups will have zero variance. `few`: too few prompts for a general statement."""
    if zero_variance_share < 0.5:
        return "" if few else "That is enough contrast to learn from."
    too_easy = fmean(reward.is_correct for reward in graded) >= 0.5
    other_prompts = "harder prompts" if too_easy else "easier prompts or clearer instructions"
    changes = [
        "a larger algorithm.group_size",
        "algorithm.max_rounds to draw dead groups anew",
        other_prompts if rewards_are_verdicts(graded) else "a reward that grades more finely",
    ]
    is_prefixed = any(isinstance(layer, Prefixed) for layer in list_task_layers(task))
    if hasattr(get_innermost_task(task), "working") and not is_prefixed and not too_easy:
        changes.append('prefixes, the beginnings of right answers: [task] name = "prefixed" around this task')
    subject = "These prompts" if few else "Most sampling"
    return f"{subject} will teach little: use {', '.join(changes[:-1])}, or {changes[-1]}."


def find_cut_off_warnings(
    completions: Sequence[Completion], cfg: SamplerConfig, eos_ids: Collection[int]
) -> Iterator[str]:
    """Yield warnings if _CUT_OFF_WARNING_SHARE of the samples were cut off, or have a turn that was cut off.

    A conversation that ended with the last of sampler.turns is not cut off.
    """
    n, turn_limit, limit = len(completions), cfg.turn_tokens, cfg.max_tokens
    cut_turns = [_find_cut_turns(completion, turn_limit, eos_ids) for completion in completions]
    with_cut_turn = sum(any(turns) for turns in cut_turns)
    cut_off = sum(not c.finished and not (turns and turns[-1]) for c, turns in zip(completions, cut_turns, strict=True))
    if with_cut_turn and with_cut_turn >= _CUT_OFF_WARNING_SHARE * n:
        yield (
            f"{with_cut_turn / n:.0%} of {format_count(n, 'sample')} have a turn that was cut off at"
            f" sampler.turn_tokens = {turn_limit}: raise it, or ask for shorter turns"
        )
    if cut_off >= _CUT_OFF_WARNING_SHARE * n:
        has_conversations = any(completion.messages for completion in completions)
        scope = ", which counts all tokens after the question, whatever their role" if has_conversations else ""
        yield (
            f"{cut_off / n:.0%} of {format_count(n, 'sample')} were cut off at sampler.max_tokens = {limit}{scope}:"
            " raise it, or ask for shorter answers, if what is cut off is the answer"
        )


def _find_cut_turns(completion: Completion, max_tokens: int, eos_ids: Collection[int]) -> list[bool]:
    """Return whether each turn of a conversation was cut off at `max_tokens`; empty if turns have no limit."""
    if not max_tokens or not completion.messages:
        return []
    turns = [ids for ids, is_given in _split_spans(completion) if not is_given]
    return [len(ids) == max_tokens and ids[-1] not in eos_ids for ids in turns]


def describe_loaded_model(policy: Policy, prompt_tokens: int = memory.ASSUMED_PROMPT_TOKENS) -> memory.ModelFacts:
    """Return the facts of a loaded model, whose longest prompt has so many tokens."""
    sizes = [(count_weights(p), p) for p in policy.model.parameters()]
    return memory.ModelFacts(
        policy.model.config,
        parameter_count=sum(n for n, _ in sizes),
        trained_count=sum(n for n, p in sizes if p.requires_grad),
        quantized_count=sum(n for n, p in sizes if load.is_quantized(p)),
        has_own_code=has_custom_code(policy.model),
        prompt_tokens=prompt_tokens,
    )


# ---------------------------------------------------------------- bad rows
# All prompts of a data set are tokenized before the model is loaded, to find those that the policy cannot read.


_TOKENIZE_BATCH_SIZE = 1024
"""The number of prompts that are tokenized at once, in parallel by a fast tokenizer."""
_PROBE_PROMPT_COUNT = 256
"""The number of prompts that are checked if a task generates them."""


class _PromptLimits(NamedTuple):
    """The limits that each prompt must be within."""

    max_prompt_tokens: int
    """The length of the context minus that of the longest completion."""
    max_completion_tokens: int
    vocabulary_size: int


def _check_configured_prompts(cfg: Config, text: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check the prompts of both splits against the tokenizer and the configuration of the text model."""
    splits = ("train", "test") if cfg.evaluate.every else ("train",)
    check_prompts(cfg, tokenizer, get_context_length(text), text.vocab_size, splits)


def check_prompts(
    cfg: Config, tokenizer: PreTrainedTokenizerBase, context_length: int, vocabulary_size: int, splits: Sequence[str]
) -> None:
    """Tokenize all prompts of a data set, or some of a task that generates them, and mark or refuse bad ones.

    Raise DataError for bad rows of these splits that are not to be skipped.
    """
    limits = _PromptLimits(context_length - cfg.sampler.max_tokens, cfg.sampler.max_tokens, vocabulary_size)
    task = get_innermost_task(cfg.task)
    # The prompt of a conversation is only known when its environment has started.
    if limits.max_prompt_tokens < 1 or hasattr(task, "environment_spec"):
        return
    if hasattr(task, "as_dataset"):
        _check_dataset_prompts(task.as_dataset(), tokenizer, limits, splits)
    else:
        _check_probe_prompts(cfg, tokenizer, limits, splits)


def _check_dataset_prompts(
    task: Dataset, tokenizer: PreTrainedTokenizerBase, limits: _PromptLimits, splits: Sequence[str]
) -> None:
    """Mark the bad rows of a data set. Raise DataError if they are not to be skipped, or no other rows remain."""
    bad_rows = {key: _find_bad_rows(scan_source(key), tokenizer, limits) for key in list_scan_keys(task)}
    for key, bad in bad_rows.items():
        mark_bad_rows(key, bad if task.skip_bad_rows or len(splits) > 1 else _filter_by_split(task, key, bad, splits))
    if not task.skip_bad_rows and (bad := list_bad_rows(task)):
        raise DataError(
            f"{format_bad_rows(bad)}; fix {'it' if len(bad) == 1 else 'them'}, or set task.skip_bad_rows = true",
            page="how-to/data",
        )
    for split in splits:
        load_split_prompts(replace(task, split=split))
    if (bad := list_bad_rows(task)) and is_first_process():
        count = sum(len(scan_source(key).prompts) for key in bad_rows)
        print(f"! task.skip_bad_rows leaves out {len(bad)} of {count} rows: {format_bad_rows(bad)}", flush=True)


def _filter_by_split(task: Dataset, key: ScanKey, bad: Mapping[int, str], splits: Sequence[str]) -> dict[int, str]:
    """Return the bad rows of a source that are in one of these splits."""
    prompts_by_split = [load_split_prompts(replace(task, split=split)) for split in splits]
    rows = scan_source(key).prompts.rows
    indices = {index for prompts in prompts_by_split if prompts.rows is rows for index in prompts.indices}
    return {index: reason for index, reason in bad.items() if index in indices}


def _check_probe_prompts(
    cfg: Config, tokenizer: PreTrainedTokenizerBase, limits: _PromptLimits, splits: Sequence[str]
) -> None:
    """Raise DataError for a bad prompt among the first ones of a task that generates its questions.

    A user-defined task is only asked for those of the first step: it may rely on one call per step.
    """
    train, n = get_innermost_task(with_split(cfg.task, "train")), cfg.algorithm.prompts_per_step
    steps = -(-_PROBE_PROMPT_COUNT // n) if type(train).__module__.startswith("pellucid.") else 1
    prompts = [prompt for step in range(steps) for prompt in train.sample(step, n)] if "train" in splits else []
    if "test" in splits and cfg.evaluate.every:
        prompts += sample_held_out_prompts(get_innermost_task(with_split(cfg.task, "test")), cfg.evaluate.n)
    for i, fault in _find_prompt_faults(dict(enumerate(prompts)), tokenizer, limits).items():
        question = " ".join(prompts[i].question.split())[:60]
        raise DataError(f'{cfg.task_name}: prompt {prompts[i].id}, "{question}": {fault}')


def _find_bad_rows(scanned: SourceScan, tokenizer: PreTrainedTokenizerBase, limits: _PromptLimits) -> dict[int, str]:
    """Return the faults of bad rows of a source by their indices."""
    indices = [index for index, fingerprint in enumerate(scanned.fingerprints) if fingerprint]
    bad: dict[int, str] = {}
    for start in range(0, len(indices), _TOKENIZE_BATCH_SIZE):
        batch = {index: scanned.prompts[index] for index in indices[start : start + _TOKENIZE_BATCH_SIZE]}
        bad |= _find_prompt_faults(batch, tokenizer, limits)
    return bad


def _find_prompt_faults(
    prompts: Mapping[int, Prompt], tokenizer: PreTrainedTokenizerBase, limits: _PromptLimits
) -> dict[int, str]:
    """Return the faults of bad prompts by their indices."""
    faults: dict[int, str] = {}
    texts: dict[int, PromptText] = {}
    for i, prompt in prompts.items():
        try:
            texts[i] = render_question(tokenizer, prompt)
        except UserError as error:
            faults[i] = str(error)
        except RENDER_ERRORS as error:
            faults[i] = format_template_error(error)
    for i, ids in zip(texts, encode_prompt_texts(tokenizer, list(texts.values())), strict=True):
        if fault := find_token_fault(ids, limits.vocabulary_size):
            faults[i] = fault
        elif len(ids) > limits.max_prompt_tokens:
            most = f"more than {limits.max_prompt_tokens}, which leave room for"
            faults[i] = f"its prompt has {len(ids)} tokens, {most} sampler.max_tokens = {limits.max_completion_tokens}"
    return dict(sorted(faults.items()))
