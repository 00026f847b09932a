"""Metrics of the graded groups of a step: pure functions, no torch.

`reward/*` and `*/correct` speak of the completions that got a grade: a reward that failed has no value to average, and
is counted in `reward/failed` instead, or in `reward/no_term` where no term is meant for the prompt. Where rewards are
a matter of degree (`state_correctness`), there is no `*/correct`, no `*_right` and no `*_wrong`: groups with equal
rewards are counted in `groups/dead_equal`. `failed/NAME` is the share of completions for which that term failed,
`logged/NAME` the mean of what rewards logged by that name. Lengths are in sampled tokens, the end-of-sequence token
included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb, isfinite, nan
from statistics import fmean, pstdev

from pellucid.reporting.conversations import turns_of
from pellucid.types import Completion, Group, Reward, alike, equal_rewards, state_correctness


def describe(groups: Sequence[Group], min_reward_range: float = 0.0) -> dict[str, float]:
    """The metrics of a step's groups, each with its rewards. Shares are in [0, 1]; the mean of no grades is NaN.

    A group is dead, and teaches nothing, when the rewards in it are equal: see `alike`.
    """
    pairs = [pair for group in groups for pair in zip(group.completions, group.rewards, strict=True)]
    graded = [(completion, reward) for completion, reward in pairs if not reward.failed]
    values = [reward.value for _, reward in graded]
    unmeant = sum(not reward.applies for _, reward in pairs)
    return {
        **logged_means([reward for _, reward in pairs]),
        **prefix_lengths(groups),
        **part_means([reward for _, reward in pairs if not (reward.failed and reward.applies)]),
        "reward/mean": fmean(values) if values else nan,
        "reward/std": pstdev(values) if values else nan,
        "reward/failed": float(sum(reward.failed and reward.applies for _, reward in pairs)),
        **({"reward/no_term": float(unmeant)} if unmeant else {}),
        **failed_shares([reward for _, reward in pairs]),
        **dead_shares(groups, min_reward_range),
        **correctness(graded),
        "completion/finished": fmean(completion.finished for completion, _ in pairs),
        "completion/length_mean": mean_length([completion for completion, _ in pairs]),
        **turns_and_calls([completion for completion, _ in pairs]),
        "tokens": float(sum(each.length for completion, _ in pairs for each in (completion, *completion.branches))),
    }


def dead_shares(groups: Sequence[Group], min_reward_range: float) -> dict[str, float]:
    """The share of groups with equal rewards: of all right and all wrong answers, or of answers graded by degree."""
    dead = [rewards for group in groups if (rewards := equal_rewards(group, min_reward_range))]
    if not state_correctness(reward for group in groups for reward in group.rewards):
        return {"groups/dead_equal": len(dead) / len(groups)}
    all_right = sum(all(reward.is_correct for reward in rewards) for rewards in dead)
    return {
        "groups/dead_all_right": all_right / len(groups),
        "groups/dead_all_wrong": (len(dead) - all_right) / len(groups),
    }


def correctness(graded: Sequence[tuple[Completion, Reward]]) -> dict[str, float]:
    """The share of right answers, and the lengths of right and wrong ones; empty where rewards are degrees."""
    judged = [(completion, reward) for completion, reward in graded if reward.is_judged]
    if not state_correctness(reward for _, reward in judged):
        return {}
    share = fmean(reward.is_correct for _, reward in judged) if judged else nan
    return {"completion/correct": share, **lengths_by_grade(judged)}


def turns_and_calls(completions: Sequence[Completion]) -> dict[str, float]:
    """Of conversations the turns of the policy, the calls of tools, and how many of these came to nothing, and why."""
    held = [completion for completion in completions if completion.messages]
    if not held:
        return {}
    events = [completion.outcome.events for completion in held if completion.outcome]
    total = sum((Counter(each) for each in events), Counter())
    calls = total.pop("calls", 0)
    faults = {f"tools/{kind}": count / calls for kind, count in total.items() if calls}
    return {"turns/mean": fmean(map(turns_of, held))} | ({"tools/calls": calls / len(held)} if calls else {}) | faults


def all_failed(groups: Sequence[Group]) -> bool:
    """Whether no completion has a reward: each one failed, or is None since no term is meant for the prompt."""
    rewards = [reward for group in groups for reward in group.rewards]
    return bool(rewards) and all(reward.failed for reward in rewards)


def prefix_lengths(groups: Sequence[Group]) -> dict[str, float]:
    """The mean length of the prefixes that were given, in tokens; later messages of a conversation are no prefix."""
    first = [
        c.given_spans[0] for group in groups if group.demonstration for c in group.completions[:1] if c.given_spans
    ]
    lengths = [end for start, end in first if start == 0]
    return {"prefix/length_mean": fmean(lengths)} if lengths else {}


def part_means(rewards: Sequence[Reward]) -> dict[str, float]:
    """The mean of each term, over the rewards in which it is finite; NaN where there is none."""
    names = {name: None for reward in rewards for name in reward.parts}
    known = {name: [x for reward in rewards if isfinite(x := reward.parts.get(name, nan))] for name in names}
    return {f"reward/{name}": fmean(values) if values else nan for name, values in known.items()}


def failed_shares(rewards: Sequence[Reward]) -> dict[str, float]:
    """The share of completions for which each term failed, of the terms that did."""
    names = Counter(name for reward in rewards for name in reward.failures)
    return {f"failed/{name}": count / len(rewards) for name, count in names.items()}


def logged_means(rewards: Sequence[Reward]) -> dict[str, float]:
    """The mean of each number that rewards logged, over the completions that have one."""
    names = {name: None for reward in rewards for name in reward.logged}
    known = {name: [reward.logged[name] for reward in rewards if name in reward.logged] for name in names}
    return {f"logged/{name}": fmean(values) for name, values in known.items()}


def mean_length(completions: Sequence[Completion]) -> float:
    return fmean(completion.length for completion in completions)


def lengths_by_grade(judged: Sequence[tuple[Completion, Reward]]) -> dict[str, float]:
    right = [completion for completion, reward in judged if reward.is_correct]
    wrong = [completion for completion, reward in judged if not reward.is_correct]
    lengths = {"completion/length_right": right, "completion/length_wrong": wrong}
    return {name: mean_length(completions) for name, completions in lengths.items() if completions}


def predicted_dead_share(rewards: Sequence[Sequence[float]], group_size: int, min_reward_range: float = 0.0) -> float:
    """The share of groups of `group_size` that would be dead, from n >= `group_size` rewards of each prompt.

    Averages the chance that G of a prompt's n samples, drawn without replacement, were rewarded alike: for the sample
    that is the lowest of the G, the others are among those above that are like it. With two values that is
    sum of C(n_v, G) / C(n, G), unbiased for p^G + (1 - p)^G. NaN, a reward that failed, is like any other.
    Plugging in p = n_v / n would exaggerate: 8 samples of a prompt with p = 0.1 are all wrong 43% of the time, and
    p = 0 calls it dead at every G.

    Raises ValueError where n < group_size: p^G cannot be estimated without bias from fewer than G samples.
    """
    samples = min(map(len, rewards))
    if samples < group_size:
        raise ValueError(
            f"{samples} samples a prompt cannot predict groups of {group_size}: draw at least {group_size}"
        )
    return fmean(_dead_chance(values, group_size, min_reward_range) for values in rewards)


def _dead_chance(values: Sequence[float], group_size: int, min_reward_range: float) -> float:
    ascending = sorted(value for value in values if isfinite(value))
    failed = len(values) - len(ascending)
    above = [sum(alike(low, high, min_reward_range) for high in ascending[i + 1 :]) for i, low in enumerate(ascending)]
    dead = comb(failed, group_size) + sum(comb(n + failed, group_size - 1) for n in above)
    return dead / comb(len(values), group_size)
