"""What a person sees before step 1: the derived numbers, one real exchange, and whether there is anything to learn."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any

import rich
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pellucid.algorithm.diagnostics import known_inert
from pellucid.config import Config
from pellucid.doctor import memory
from pellucid.machine import hardware
from pellucid.machine.extras import extra
from pellucid.machine.harmless import harmless
from pellucid.models.family import longest
from pellucid.policy import quantized
from pellucid.policy.model import check_targets, has_own_code
from pellucid.policy.policy import Policy
from pellucid.policy.quantized import numbers
from pellucid.protocols import with_split
from pellucid.reporting import boards
from pellucid.reporting.charts import counted
from pellucid.reporting.console import failing, first_error, first_line
from pellucid.reporting.conversations import counts, events_of, turns_of, without_middle
from pellucid.reporting.measures import FEWEST, TOO_FEW
from pellucid.reporting.metrics import all_failed, failed_shares, predicted_dead_share
from pellucid.rewards.functions import arguments_for, check_signature
from pellucid.rewards.graded import grading
from pellucid.rewards.graders import notes_on
from pellucid.rewards.plain import NoRewardError
from pellucid.rewards.terms import is_function, terms_of
from pellucid.samplers import remote, vllm_engine
from pellucid.tasks.prefixed import Prefixed
from pellucid.tasks.wrappers import innermost, layers
from pellucid.training import bad_rows, room
from pellucid.training.claim import first_process
from pellucid.training.evaluate import estimate, held_out, if_enough
from pellucid.types import Completion, Group, NotBegunError, Prompt, Reward, UserError, state_correctness

MANY_CUT_OFF = 0.1
"""From which share of the samples on a line says that they were cut off."""
MOST_GIVEN = 4000
"""How many characters are shown at a time of what was not sampled."""
MARK = "bold cyan"
MANY_FAILED = 0.1
"""From which share of the rewards on the advice is to mend them."""
OTHER_ARITHMETIC = '{} computes in another arithmetic than the update, which algorithm.correction = "{}" answers'


def check(cfg: Config, run_dir: Path) -> None:
    """Check what would otherwise fail after minutes or at the end: extras, data, disk space. Raise UserError."""
    for note in filter(None, (cfg.policy.access.format_warning(cfg.policy.model), *notes_on_others(cfg))):
        if first_process():
            print(harmless(f"! {note}"), flush=True)
    if cfg.log.tensorboard:
        extra("torch.utils.tensorboard", "tensorboard", "log.tensorboard")
    if cfg.log.wandb != "off":
        boards.check_wandb(cfg.log.wandb)
    if cfg.policy.lora:
        extra("peft", "lora", "policy.lora")
    if cfg.policy.load_in_4bit:
        quantized.check_library()
    if cfg.sampler.urls:
        remote.reach(cfg.sampler.urls, cfg.sampler.timeout)
    elif cfg.sampler.name == "vllm":
        vllm_engine.check_library()
    model = described(cfg)
    if model:
        check_model(cfg, model)
        bad_rows.check_settings(cfg, model.config)
    prompts = with_split(cfg.task, "train").sample(0, cfg.algorithm.prompts_per_step)
    check_rewards(cfg, prompts)
    if cfg.evaluate.every:
        held_out(with_split(cfg.task, "test"), cfg.evaluate.n)
    if model:
        check_room(cfg, model, run_dir)


def described(cfg: Config) -> memory.Model | None:
    """Return the facts of the model of a run; None where it cannot be found, of which loading it says more."""
    try:
        return memory.of_policy(cfg.policy)
    except UserError:
        return None


def notes_on_others(cfg: Config) -> list[str]:
    """Return the lines that must be shown before graders are loaded and before anything is sent to anybody."""
    return [*notes_on(cfg.task), *([remote.note(cfg.sampler.urls)] if cfg.sampler.urls else [])]


def check_rewards(cfg: Config, prompts: Sequence[Prompt]) -> None:
    """Raise UserError for a reward function that does not take what it will be given."""
    environments = ["environments"] if hasattr(innermost(cfg.task), "environment_spec") else []
    for term in terms_of(grading(cfg.task)):
        if is_function(term.name):
            try:
                check_signature(term.name, [*arguments_for(prompts), *environments])
            except NoRewardError as error:
                raise UserError(f"reward {error}") from error


def check_model(cfg: Config, model: memory.Model) -> None:
    """Raise UserError where the configuration of the model shows that it cannot do what the settings ask."""
    text = model.config.get_text_config()
    if cfg.sampler.max_tokens >= longest(text):
        raise UserError(
            f"sampler.max_tokens = {cfg.sampler.max_tokens} leaves no room for a prompt: {cfg.policy.model} has a"
            f" context of {longest(text)} tokens"
        )
    if cfg.algorithm.similarity != "none":
        check_layer(cfg.algorithm.similarity_layer, text)
    if cfg.policy.lora_targets:
        check_targets(memory.without_weights(cfg.policy.model, cfg.policy.access)[1], cfg.policy.lora_targets)


def check_layer(layer: int, text: Any) -> None:
    """Raise UserError for a layer that a model of this configuration does not have."""
    layers = getattr(text, "num_hidden_layers", None)
    if layers is not None and not -layers <= layer + 1 <= layers + 1:
        raise UserError(f"algorithm.similarity_layer = {layer}: this model has 0, the embedding, to {layers}")


def check_room(cfg: Config, model: memory.Model, run_dir: Path) -> None:
    """Raise UserError where the disk has no room for the model and its checkpoints, one more than are kept."""
    needs = room.of_run(cfg, model, run_dir)
    if needs.needed_gb > needs.free_gb:
        checkpoints = counted(needs.max_checkpoints, "checkpoint")
        raise UserError(
            f"{run_dir} needs {needs.needed_gb:.1f} GB for the model and {checkpoints}, and {needs.free_gb:.1f} GB are free:"
            " make room, lower checkpoint.keep_last, or choose another folder with --run"
        )


def show_numbers(cfg: Config, policy: Policy, world_size: int, run_dir: Path) -> None:
    show_plan(cfg, count(policy), policy.find_fallback_reason(), world_size, run_dir)


def show_plan(cfg: Config, model: memory.Model, fallback: str, world_size: int, run_dir: Path) -> None:
    """Print the numbers that follow from the settings. `fallback` is why our decoder does not compute, or empty."""
    a, device = cfg.algorithm, hardware.pick_device(cfg.policy.device)
    completions = a.prompts_per_step * a.group_size
    reason = memory.unlike(model.config)
    expected, here = memory.peak(model, cfg, world_size), hardware.device_gb(device)
    note = memory.on_checkpointing(model, cfg, world_size)
    table = Table.grid(padding=(0, 2))
    for name, value in {
        "model": f"{cfg.policy.model}: {model.parameter_count / 1e6:.1f} M parameters, {model.trained_count / 1e6:.1f} M trained",
        "computes": f"in {cfg.policy.dtype} on {device}, {world_size} process{'es' if world_size > 1 else ''}, by"
        + (f" transformers ({fallback})" if fallback else " our decoder"),
        **rows_of(cfg),
        "a step": f"{a.prompts_per_step} prompts x {a.group_size} completions = {completions}, up to"
        f" {cfg.sampler.max_tokens} tokens each, {a.inner_steps} optimizer step{'s' if a.inner_steps > 1 else ''}",
        "the run": f"{a.steps} steps = {a.steps * completions} completions"
        + (f", or {a.minutes:g} minutes" if a.minutes else "")
        + f", seed {a.seed}",
        "memory": ("at least" if reason else "about")
        + f" {expected:.1f} GB expected"
        + (f", activations unknown ({reason})" if reason else "")
        + (f" of {here:.0f} GB: pellucid doctor --plan says what would fit" if expected > here else "")
        + (f"; {note}" if note and (expected > here or cfg.policy.gradient_checkpointing) else ""),
        **{name: f"{gb:.1f} GB of it" for name, gb in memory.reward_models(cfg).items()},
        "disk": room.of_run(cfg, model, run_dir).describe(cfg.checkpoint.every > 0),
    }.items():
        table.add_row(f"[dim]{name}", escape(harmless(value)))
    rich.print(table)
    slow = {"float32": hardware.without_bf16, "float16": hardware.slower_in_float16}.get(cfg.policy.dtype)
    other = cfg.sampler.inexact_setting
    corrected = OTHER_ARITHMETIC.format(other, a.correction) if other else ""
    for line in filter(None, (slow(device) if slow else "", corrected, *known_inert(a))):
        print(harmless(f"! {line}"), flush=True)


def rows_of(cfg: Config) -> dict[str, str]:
    """How many rows train and how many are held out; empty for a task that makes its questions."""
    train, test = (rows_in(cfg, split) for split in ("train", "test"))
    if train is None:
        return {}
    if not test:
        return {"data": f"{counted(train, 'row')} to train on, none held out"}
    evaluations = f"an evaluation asks {min(test, cfg.evaluate.n):,} of these" if cfg.evaluate.every else "not asked"
    return {"data": f"{counted(train, 'row')} to train on, {test:,} held out ({evaluations})"}


def rows_in(cfg: Config, split: str) -> int | None:
    """The number of rows of a split; None where the task does not know it."""
    try:
        return getattr(with_split(innermost(cfg.task), split), "question_count", None)
    except UserError:  # nothing is held out
        return None


def show_exchange(policy: Policy, group: Group) -> None:
    """Print the exact strings, special tokens included; a bar stands where sampling began, and where it gave way."""
    completion, reward = group.completions[0], group.rewards[0]
    shown, after_sampled = exact(policy, group.prompt_ids, is_given=True), False
    for ids, given in stretches(completion):
        shown.append("" if given and not after_sampled else "|", MARK).append_text(exact(policy, ids, given))
        after_sampled = not given
    rich.print(Text("\n"), shown, sep="")
    graded = f"not graded: {first_line(reward)}" if reward.failed else f"reward {reward.value:g}"
    verdict = graded + (f", gold answer {harmless(group.prompt.answer)}" if group.prompt.answer else "")
    given = len(completion.token_ids) - completion.length
    lengths = f"{completion.length} sampled" + (f", {given} given" if given else "")
    held = f" in {', '.join(counts(turns_of(completion), events_of(completion)))}" if completion.messages else ""
    rich.print(f"[dim]{len(group.prompt_ids)} prompt tokens | {lengths}{escape(held)}; {escape(verdict)}\n")


def exact(policy: Policy, ids: Sequence[int], is_given: bool) -> Text:
    """The string of these tokens for the screen; of what was given dim, and without the middle of a very long one."""
    text = harmless(policy.decode(ids, special=True))
    begin, left_out, end = without_middle(text, MOST_GIVEN if is_given else len(text))
    between = f"[{counted(left_out, 'character')} left out]" if left_out else ""
    style = "dim" if is_given else ""
    return Text.assemble((begin, style), (between, MARK), (end, style))


def stretches(completion: Completion) -> Iterator[tuple[tuple[int, ...], bool]]:
    """The tokens of a completion, stretch by stretch, and whether each was given and not sampled."""
    at = 0
    for start, end in completion.given_spans:
        if start > at:
            yield completion.token_ids[at:start], False
        yield completion.token_ids[start:end], True
        at = end
    if rest := completion.token_ids[at:]:
        yield rest, False


def refuse_failing(groups: Sequence[Group]) -> None:
    """Raise NotBegunError where every reward of the first look failed: there is nothing to learn from."""
    if all_failed(groups) and first_error(groups):
        n = sum(len(group.rewards) for group in groups)
        raise NotBegunError(f"every reward of the first {n} samples failed, the first with {first_error(groups)}")


def refuse_none(groups: Sequence[Group]) -> None:
    """Raise NotBegunError where every reward of the first look is None: there is nothing to learn from."""
    rewards = [reward for group in groups for reward in group.rewards]
    if rewards and not any(reward.applies for reward in rewards):
        raise NotBegunError(
            f"every reward of the first {counted(len(rewards), 'sample')} is None: no reward applies to these rows, and"
            " nothing can be learned from them; return a number, or name a reward for them in task.rewards"
        )


def show_signal(groups: Sequence[Group], cfg: Config, eos_ids: Collection[int]) -> None:
    """Print how many groups will be dead, from at least as many samples of each prompt, and how much is cut off.

    ends: the end-of-sequence tokens.
    """
    graded = [reward for group in groups for reward in group.rewards if not reward.failed]
    if not graded:
        print("! no sample could be graded: no reward is meant for any of their prompts", flush=True)
        return
    dead, found = expected_dead(groups, cfg)
    failures = unreliable(groups)
    few = len(groups) < FEWEST
    print(f"{outcome(graded, len(groups))}; {found}", failures or advice(dead, graded, can_begin(cfg), few))
    for warning in cut_off([completion for group in groups for completion in group.completions], cfg, eos_ids):
        print(harmless(f"! {warning}"), flush=True)


def expected_dead(groups: Sequence[Group], cfg: Config) -> tuple[float, str]:
    """The share of groups that will have equal rewards, and a sentence on it, to follow the number of prompts."""
    size, least = cfg.algorithm.group_size, cfg.algorithm.min_reward_range
    rewards = [[nan if reward.failed else float(reward.value) for reward in group.rewards] for group in groups]
    dead = if_enough(estimate, [predicted_dead_share([of_prompt], size, least) for of_prompt in rewards])
    interval = f"95% interval {dead.low:.0%} to {dead.high:.0%}" if dead.has_interval else TOO_FEW
    return dead.value, f"judging by them, {dead.value:.0%} of groups of {size} will be dead ({interval})."


def unreliable(groups: Sequence[Group]) -> str:
    """What to do where more than a few rewards failed: nothing that is said of the others would help."""
    rewards = [reward for group in groups for reward in group.rewards if reward.applies]
    share = fmean(reward.failed for reward in rewards) if rewards else 0.0
    if share < MANY_FAILED:
        return ""
    terms = failing(failed_shares(rewards))
    whose = f" ({terms})" if terms else ""
    return f"{share:.0%} of rewards failed{whose}, the first with {first_error(groups)}: mend them first."


def outcome(graded: Sequence[Reward], prompts: int) -> str:
    """How the samples did, and how many they are."""
    n = f"{counted(len(graded), 'sample')} of {counted(prompts, 'prompt')}"
    if state_correctness(graded):
        return f"{fmean(reward.is_correct for reward in graded):.0%} of {n} are right"
    return f"The mean reward of {n} is {fmean(reward.value for reward in graded):.3f}"


def advice(zero_variance_share: float, graded: Sequence[Reward], has_workings: bool = False, few: bool = False) -> str:
    """What to do where many groups will be dead: all alike, they have no gradient.

    can_begin: the task can begin the answers, and does not do so yet. few: too few prompts were asked to promise
    anything.
    """
    if zero_variance_share < 0.5:
        return "" if few else "That is enough contrast to learn from."
    too_easy = fmean(reward.is_correct for reward in graded) >= 0.5
    judged = "harder prompts" if too_easy else "easier prompts or a better-prompted start"
    ways = [
        "a larger algorithm.group_size",
        "algorithm.max_rounds to draw dead groups anew",
        judged if state_correctness(graded) else "a reward that grades more finely",
    ]
    if has_workings and not too_easy:
        ways.append('prefixes, the beginnings of right answers: [task] name = "prefixed" around this task')
    return (
        f"{'These prompts' if few else 'Most sampling'} will teach little: use {', '.join(ways[:-1])}, or {ways[-1]}."
    )


def can_begin(cfg: Config) -> bool:
    """Whether the task writes workings that could be prefixes, and nothing gives them yet."""
    given = any(isinstance(layer, Prefixed) for layer in layers(cfg.task))
    return not given and hasattr(innermost(cfg.task), "working")


def cut_off(completions: Sequence[Completion], cfg: Config, eos_ids: Collection[int]) -> Iterator[str]:
    """Lines on the samples, and on the turns of conversations, that did not come to an end: for more than a few.

    A conversation that ended with the last of sampler.turns is not cut off.
    """
    n, most, longest = len(completions), cfg.sampler.turn_tokens, cfg.sampler.max_tokens
    of_turns = [cut_turns(completion, most, eos_ids) for completion in completions]
    turns = sum(any(cut) for cut in of_turns)
    cut = sum(not c.finished and not (at and at[-1]) for c, at in zip(completions, of_turns, strict=True))
    if turns and turns >= MANY_CUT_OFF * n:
        yield (
            f"{turns / n:.0%} of {counted(n, 'sample')} have a turn that was cut off at sampler.turn_tokens = {most}:"
            " raise it, or ask for shorter turns"
        )
    if cut >= MANY_CUT_OFF * n:
        held = any(completion.messages for completion in completions)
        all_in_it = ", which is for all that follows the question, whoever says it" if held else ""
        yield (
            f"{cut / n:.0%} of {counted(n, 'sample')} were cut off at sampler.max_tokens = {longest}{all_in_it}: raise"
            " it, or ask for shorter answers, if what is cut off is the answer"
        )


def cut_turns(completion: Completion, max_tokens: int, eos_ids: Collection[int]) -> list[bool]:
    """Whether each turn of a conversation was cut off at so many tokens; empty where a turn may have any number."""
    turns = (
        [ids for ids, is_given in stretches(completion) if not is_given] if max_tokens and completion.messages else []
    )
    return [len(ids) == max_tokens and ids[-1] not in eos_ids for ids in turns]


def count(policy: Policy) -> memory.Model:
    """The facts of a model as it is loaded."""
    sizes = [(numbers(p), p) for p in policy.model.parameters()]
    return memory.Model(
        policy.model.config,
        parameter_count=sum(n for n, _ in sizes),
        trained_count=sum(n for n, p in sizes if p.requires_grad),
        quantized_count=sum(n for n, p in sizes if quantized.is_quantized(p)),
        has_own_code=has_own_code(policy.model),
    )
