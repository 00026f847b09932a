"""Reward functions for the tests: examples of TRL, and other functions that its trainer accepts.

The functions up to `async_reward_func` follow the examples of TRL's documentation ("Using a custom reward function")
and of trl.rewards.
"""
# ruff: noqa: B007, B905

import asyncio
import functools
import os
import re
import sys
import time

from pellucid.rewards.terms import grade_numeric


def longer_reward(completion_ids, **kwargs):
    """Reward function that assigns higher scores to longer completions (in terms of token count)."""
    return [float(len(ids)) for ids in completion_ids]


def unique_chars(completions, **kwargs):
    """Reward function that rewards completions with more unique characters."""
    return [float(len(set(c))) for c in completions]


def format_reward_func(completions, **kwargs):
    """Reward function that checks if the completion has a specific format."""
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]


def boxed_reward(completions, ground_truth, **kwargs):
    # Regular expression to capture content inside \boxed{}
    matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    # Reward 1 if the content is the same as the ground truth, 0 otherwise
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]


def think_format_reward(completions: list[list[dict[str, str]]], **kwargs) -> list[float]:
    pattern = r"^<think>(?!.*<think>)(.*?)</think>.*$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content, re.DOTALL | re.MULTILINE) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]


def math_reward_func(prompts, completions, task, **kwargs):
    rewards = []
    for prompt, completion, t in zip(prompts, completions, task):
        if t == "math":
            rewards.append(1.0 if "4" in completion else -1.0)
        else:
            # Return None for non-math tasks
            rewards.append(None)
    return rewards


async def async_reward_func(prompts, completions, **kwargs):
    # Simulate an I/O-bound call (e.g., HTTP request, database lookup)
    await asyncio.sleep(0.01)
    # Simple toy reward: 1.0 if the completion is non-empty, else 0.0
    return [1.0 if completion else 0.0 for completion in completions]


def ranked(prompts, completions, **kwargs):
    """Rank siblings by length: the longest answer to a question gets 1, the shortest 0."""
    siblings = {prompt: sorted({len(c) for p, c in zip(prompts, completions) if p == prompt}) for prompt in prompts}
    return [
        siblings[prompt].index(len(completion)) / max(1, len(siblings[prompt]) - 1)
        for prompt, completion in zip(prompts, completions)
    ]


def unlike_the_others(completions, **kwargs):
    """Return 1 / (the number of times that the completion occurs in the step)."""
    return [1.0 / completions.count(completion) for completion in completions]


async def slow_judge(completions, **kwargs):
    await asyncio.sleep(1.0)
    return [float(len(completion)) for completion in completions]


async def another_slow_judge(completions, **kwargs):
    await asyncio.sleep(1.0)
    return [-float(len(completion)) for completion in completions]


class Judge:
    """An asynchronous callable object that is bound to the event loop of its first call, as HTTP clients are."""

    def __init__(self):
        self.loop = None

    async def __call__(self, completions, **kwargs):
        self.loop = self.loop or asyncio.get_running_loop()
        await asyncio.sleep(0)
        return [0.5 if self.loop is asyncio.get_running_loop() else 0.0] * len(completions)


judge = Judge()
partly = functools.partial(judge, verbose=True)


def growing(completions, trainer_state, **kwargs):
    """Return the length, scaled by the share of training that is done."""
    share = trainer_state.global_step / trainer_state.max_steps
    return [share * len(completion) for completion in completions]


def state_seen(completions, trainer_state, log_extra, **kwargs):
    names = ("global_step", "max_steps", "epoch", "num_train_epochs", "log_history", "is_world_process_zero")
    log_extra("state", [{name: getattr(trainer_state, name) for name in names} for _ in completions])
    return [0.0] * len(completions)


def logging_reward(completions, log_extra, log_metric, **kwargs):
    log_extra("letters", [len(completion) for completion in completions])
    log_metric("longest", max(map(len, completions)))
    log_metric("longest", 0.0)
    return [0.5 for _ in completions]


def columns_seen(completions, **kwargs):
    """Log the name and the value of every keyword argument."""
    known = {name: value for name, value in kwargs.items() if isinstance(value, list)}
    kwargs["log_extra"]("seen", [{name: values[i] for name, values in known.items()} for i in range(len(completions))])
    kwargs["log_extra"]("keywords", [sorted(kwargs) for _ in completions])
    return [0.0] * len(completions)


def numbers_of_any_kind(completions, **kwargs):
    return iter([True, 2, 0.5, None][: len(completions)])


def fragile(completions, **kwargs):
    return [1 / len(completion) for completion in completions]


async def fragile_judge(completions, **kwargs):
    await asyncio.sleep(0)
    return [1 / len(completion) for completion in completions]


def one_too_many(completions, **kwargs):
    return [0.0] * (len(completions) + 1)


def one_is_no_number(completions, **kwargs):
    return [float("nan"), "a lot", *(0.0 for _ in completions[2:])]


def no_list(completions, **kwargs):
    return 1.0


def takes_less(completions):
    return [0.0] * len(completions)


def deep_extra(completions, log_extra, **_):
    deep, objects = [], {}
    for _ in range(900):
        deep, objects = [deep], {"a": objects}
    log_extra("lists", [deep] * len(completions))
    log_extra("objects", [objects] * len(completions))
    log_extra("plain", [[1, [2, {"a": 3}]]] * len(completions))
    return [1.0] * len(completions)


def wrong_extra(completions, log_extra, **kwargs):
    log_extra("short", [1])
    return [0.0] * len(completions)


def hangs(completions, **kwargs):
    time.sleep(1000)


async def hangs_together(completions, **kwargs):
    await asyncio.sleep(1000)


def ends_its_process(completions, **kwargs):
    os._exit(3)


def calls_what_is_ours(completions, **kwargs):
    return [grade_numeric(None, "7") for _ in completions]


async def blocks_the_loop(completions, **kwargs):
    await asyncio.sleep(0.3)
    time.sleep(1000)


async def cancels_itself(completions, **kwargs):
    raise asyncio.CancelledError


async def exits_in_a_task(completions, **kwargs):
    async def inner():
        sys.exit(1)

    await asyncio.gather(inner())


def slow_and_fragile(completions, **kwargs):
    time.sleep(0.6)
    return [1 / len(completion) for completion in completions]


def exact_length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def forks(completions, **kwargs):
    os.fork()
    return [float(len(completion)) for completion in completions]


def waits_for_a_fork(completions, **kwargs):
    child = os.fork()
    if not child:
        sys.exit(7)
    return [float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))] * len(completions)


async def waits_for_a_fork_that_returns(completions, **kwargs):
    child = os.fork()
    return [float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) if child else 1.0] * len(completions)


def hangs_alone(completions, **kwargs):
    if len(completions) > 1:
        raise ValueError("one at a time")
    if not completions[0]:
        time.sleep(60)
    return [float(len(completions[0]))]


def of_text(function):
    @functools.wraps(function)
    def wrapper(completions, **kwargs):
        return [function(completion) for completion in completions]

    return wrapper


@of_text
def decorated(text):
    return float("a" in text)


def logs_in_pieces(completions, log_extra, log_metric, **kwargs):
    for completion in completions:
        log_extra("piece", [completion[:1]])
    log_metric("shared", 1.0)
    return [0.0] * len(completions)


def tensors_of_one(completions, log_metric, **kwargs):
    import torch  # noqa: PLC0415 - the other functions do without

    log_metric("shared", 3.0)
    return [torch.tensor([float(len(completion))]) for completion in completions]


def logs_infinity(completions, log_metric, **kwargs):
    log_metric("huge", float("inf"))
    return [0.0] * len(completions)


not_a_function = 3
