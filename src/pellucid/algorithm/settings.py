"""The settings of the algorithm and of the optimizer. Contradictions raise ValueError. Torch is not imported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from pellucid.utils.plugins import did_you_mean

AdvantageName = Literal[
    "grpo",
    "grpo_sample_std",
    "centered",
    "rloo",
    "batch",
    "maxrl",
    "raw",
    "top",
    "difficulty",
    "lead",
    "dgpo",
    "length_grouped",
    "length_grouped_literal",
    "gdpo",
]
ObjectiveName = Literal[
    "ppo_clip", "importance_weighted", "reinforce", "dcpo", "gspo", "gspo_token", "cispo", "sapo", "gmpo"
]
KLEstimatorName = Literal["k1", "k2", "k3", "k3_weighted", "exact"]

_NON_NEGATIVE_SETTINGS = (
    *("data_epochs", "minutes", "max_length", "constant_length", "kl_coef", "kl_target", "reference_every"),
    *(
        "clip_low",
        "clip_high",
        "clip_difficulty",
        "clip_difficulty_low",
        "advantage_difficulty",
        "dual_clip",
        "entropy_coef",
        "prefix_coef",
    ),
    *("length_shrinkage", "min_reward_range", "overlong_cache"),
)
DUAL_CLIP_OBJECTIVES = ("ppo_clip", "dcpo", "gspo", "gspo_token")
_CLIP_DIFFICULTY_OBJECTIVES = ("ppo_clip", "dcpo")
_POSITIVE_SETTINGS = (
    *("steps", "prompts_per_step", "epochs", "minibatches", "max_rounds", "max_staleness", "length_buckets"),
)


def _check_function_name(key: str, name: str, known: Sequence[str]) -> None:
    """Raise ValueError if `name` is neither a known name nor a user-defined function."""
    if name not in known and ":" not in name:
        raise ValueError(
            f'{key} = "{name}" is unknown{did_you_mean(name, known)}; there are {", ".join(known)}, or your own as'
            ' "path/to/file.py:function"'
        )


@dataclass(frozen=True)
class GRPOConfig:
    """`[algorithm]`: a choice on each axis of grpo.py."""

    steps: int = 30
    """Generate-update cycles."""
    data_epochs: float = 0.0
    """If above 0, the passes over the rows of the data set (TRL's num_train_epochs): a run sets steps = data_epochs *
    rows / prompts_per_step, rounded up, before its first step, and records that number in place of this one. In a
    recipe it wins over steps; steps on the command line or in Python wins over a recipe."""
    minutes: float = 0.0
    """Training ends after the step in which this time is used up, not counting evaluations; 0 means no limit."""
    prompts_per_step: int = 4
    """P: prompts of each step, over all processes."""
    group_size: int = 8
    """G: completions of each prompt."""
    max_rounds: int = 1
    """Dynamic sampling: groups whose task rewards are equal are replaced by groups of other prompts, in at most this
    many rounds. A length term makes almost all rewards differ a little: set min_reward_range to ignore that."""
    max_staleness: int = 1
    """Replay: the number of steps that train on each rollout, with the old log-probs of the step that sampled it; 1 is
    on-policy."""
    epochs: int = 1
    """Passes over the rollouts of a step; more than one needs an objective with a ratio."""
    minibatches: int = 1
    """Optimizer steps in one epoch, over equal numbers of whole groups."""
    micro_batch: int | Literal["auto"] = "auto"
    """Rows in one forward pass, to limit memory; 0 means a whole minibatch. It changes the gradient by rounding alone.
    auto means the most that the memory plan allows, which a run chooses before its first step and records."""

    advantage: AdvantageName | str = "grpo"
    """How a completion compares with its siblings; or your own, "path/to/file.py:function"."""
    advantage_difficulty: float = 0.0
    """The advantages of a prompt, by whichever function, are multiplied by 1 + advantage_difficulty * (s - g), clipped
    to [0.5, 2], where s and g are the mean rewards of the step and of the prompt's group. Hard prompts then weigh
    more. advantage = "difficulty" is "grpo" with 1."""
    min_reward_range: float = 0.0
    """A group whose task rewards differ by no more than this counts as zero-variance, so that a small length term does
    not become its only signal."""
    length_buckets: int = 3
    """advantage = "length_grouped": quantile buckets of the lengths in a group."""
    length_min_cell: int = 3
    """Completions in a bucket of fewer than this are compared with the whole group."""
    length_shrinkage: float = 4.0
    """The mean and std of a bucket of n completions have the weight n / (n + length_shrinkage); those of the group have
    the rest of the weight."""

    objective: ObjectiveName | str = "ppo_clip"
    """The objective to maximize; or your own, "path/to/file.py:function"."""
    clip_low: float = 0.2
    """How far the ratio may fall below 1; see clip_high."""
    clip_high: float = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]. gmpo clips its logarithm to [-clip_low, clip_high]. dcpo
    widens the bounds for rare tokens. cispo has the upper bound only. reinforce, importance_weighted and sapo do not
    clip."""
    clip_cap: float = 10.0
    """objective = "dcpo": the highest upper bound of the ratio."""
    clip_difficulty: float = 0.0
    """objective = "ppo_clip" or "dcpo": clip_high of a prompt is multiplied by 1 + clip_difficulty * (s - g), clipped
    to [0.5, 2], where s and g are the shares of right answers in the step and in the prompt's group. The ratios of hard
    prompts may then grow further. This is not from a paper."""
    clip_difficulty_low: float = 0.0
    """The same for clip_low: the ratios of hard prompts may then fall further."""
    dual_clip: float = 0.0
    """If A < 0, the objective is at least dual_clip * A (arXiv 1912.09729): 3 is usual, 0 is off."""
    soft_temperature: tuple[float, float] = (1.0, 1.05)
    """objective = "sapo": temperatures for positive and for negative advantages."""
    aggregate: Literal["token", "sequence", "constant"] = "token"
    """How tokens add up to a loss. token: each token weighs the same. sequence: each rollout weighs the same, and its
    tokens share that weight. constant: each token weighs 1 / (rollouts * constant_length)."""
    constant_length: int = 0
    """The divisor of aggregate = "constant", in tokens; 0 means max_length."""
    max_length: int = 0
    """The response length that overlong_cache and aggregate = "constant" use, in tokens; 0 means sampler.max_tokens. It
    does not limit sampling."""

    kl: KLEstimatorName = "k1"
    """The estimator of KL(policy, reference)."""
    kl_in: Literal["reward", "raw_reward", "loss"] = "reward"
    """R is the reward, K the KL of a response, and norm the advantage function. reward: the advantage is norm(R) -
    kl_coef * (K - mean K of the siblings). raw_reward: it is norm(R - kl_coef * K). loss: kl_coef times the KL of each
    token is added to the loss."""
    kl_coef: float = 0.0
    """Weight of the KL penalty; at 0 no reference model is loaded."""
    kl_target: float = 0.0
    """If above 0, kl_coef is adapted so that the KL per token approaches this value (arXiv 1909.08593, section 2.2)."""
    reference_every: int = 0
    """Steps between updates of the reference from the policy; 0 keeps it frozen."""
    reference_decay: float = 0.0
    """Share of its old weights that the reference keeps in an update: 0 copies, 0.99 is a moving average."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    prefix_coef: float = 0.0
    """Weight of the negative log-likelihood of prefix tokens, averaged over a minibatch; task `prefixed` gives
    prefixes."""

    similarity: Literal["none", "smooth", "diversity"] = "none"
    """Reward shaping by hidden states. smooth: rewards move towards those of similar answers. diversity: rewards fall
    with the number of similar answers."""
    similarity_mix: float = 0.5
    """smooth: the share of a reward that comes from similar answers."""
    similarity_temperature: float = 0.05
    """smooth: the temperature of the softmax over cosines; at 1 it has almost no effect."""
    similarity_layer: int = -1
    """The layer whose output, averaged over the response, is compared; 0 is the embedding, -1 the last."""
    overlong_cache: int = 0
    """Rewards fall by up to 1 over the last overlong_cache tokens before max_length (DAPO); 0 is off."""
    overlong_filter: bool = False
    """Do not train on completions that did not end before the length limit."""
    entropy_share: float = 1.0
    """The share of tokens that get the objective's gradient: those with the highest entropy (arXiv 2506.01939)."""
    correction: Literal["none", "token", "sequence", "geometric"] = "none"
    """Importance weights for the sampler gap, from w = pi_old / pi_sampler. token: min(w, correction_cap). sequence:
    the product over a response, or 0 above correction_cap. geometric: 1, or 0 if the geometric mean over a response
    is outside [1 / correction_cap, correction_cap]."""
    correction_cap: float = 2.0
    """The bound of the importance weights; see correction."""

    seed: int = 0
    """The seed of the samples, and of the task unless task.seed is set."""

    def __post_init__(self) -> None:
        _check_function_name("advantage", self.advantage, get_args(AdvantageName))
        _check_function_name("objective", self.objective, get_args(ObjectiveName))
        for name in _POSITIVE_SETTINGS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        if self.group_size < 2:
            raise ValueError(
                f"group_size = {self.group_size} must be at least 2: a completion is compared with siblings"
            )
        for name in _NON_NEGATIVE_SETTINGS:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} must not be negative")
        if self.micro_batch_rows < 0:
            raise ValueError(f"micro_batch = {self.micro_batch} must not be negative")
        if self.prompts_per_step % self.minibatches:
            raise ValueError(f"minibatches = {self.minibatches} must divide prompts_per_step = {self.prompts_per_step}")
        self._check_ranges()
        self._check_combinations()

    def _check_ranges(self) -> None:
        for name in ("similarity_mix", "reference_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 0 and below 1")
        if not 0 < self.entropy_share <= 1:
            raise ValueError(f"entropy_share = {self.entropy_share} must be above 0 and at most 1")
        if not (self.similarity_temperature > 0 and min(self.soft_temperature) > 0):
            raise ValueError("similarity_temperature and soft_temperature must be positive")
        for name, limit in {"clip_cap": self.clip_cap, "correction_cap": self.correction_cap}.items():
            if not limit > 1:
                raise ValueError(f"{name} = {limit} must be above 1, where the ratio starts")
        if self.dual_clip and self.objective not in DUAL_CLIP_OBJECTIVES:
            raise ValueError(f'dual_clip has no use with objective = "{self.objective}": set 0')
        if 0 < self.dual_clip <= 1 + self.clip_high:
            raise ValueError(f"dual_clip = {self.dual_clip} must be above 1 + clip_high = {1 + self.clip_high}, or 0")

    def _check_combinations(self) -> None:
        if self.objective == "reinforce" and self.is_off_policy:
            raise ValueError(
                'objective = "reinforce" has no ratio: set epochs, minibatches and max_staleness to 1, or another'
                " objective"
            )
        for name in ("clip_difficulty", "clip_difficulty_low"):
            if getattr(self, name) and self.objective not in _CLIP_DIFFICULTY_OBJECTIVES:
                raise ValueError(
                    f'{name} has no use with objective = "{self.objective}": set "ppo_clip" or "dcpo", or {name} = 0'
                )
        if self.advantage_difficulty and self.advantage == "difficulty":
            raise ValueError(
                'advantage = "difficulty" is "grpo" with advantage_difficulty = 1: with advantage_difficulty, name'
                " another advantage"
            )
        if self.kl == "k3_weighted" and self.kl_in != "loss":
            raise ValueError('kl = "k3_weighted" is weighted by the ratio, which only the loss has: set kl_in = "loss"')
        if (self.kl_target or self.reference_every) and not self.kl_coef:
            raise ValueError("kl_target and reference_every need a reference: set kl_coef above 0")
        if self.advantage == "gdpo" and self.shapes_rewards:
            raise ValueError(
                'advantage = "gdpo" compares the terms of a reward, which similarity, overlong_cache and'
                ' kl_in = "raw_reward" do not reach: leave them out, or choose another advantage'
            )
        if self.reference_every and self.max_staleness > 1:
            raise ValueError("max_staleness > 1 keeps the log-probs of the reference: set reference_every = 0")
        if self.reference_decay and not self.reference_every:
            raise ValueError("reference_decay has no use without reference_every: set that to 1")

    @property
    def required_max_length(self) -> int:
        """max_length. Raises ValueError if it is not set."""
        if not self.max_length:
            raise ValueError("max_length must be given where overlong_cache or aggregate = constant reads it")
        return self.max_length

    @property
    def shapes_rewards(self) -> bool:
        """Whether rewards are changed before they are compared."""
        return self.similarity != "none" or self.overlong_cache > 0 or (self.kl_coef > 0 and self.kl_in == "raw_reward")

    @property
    def constant_divisor(self) -> int:
        """The divisor of aggregate = "constant", in tokens."""
        return self.constant_length or self.required_max_length

    @property
    def micro_batch_rows(self) -> int:
        """The number micro_batch; 0, a whole minibatch, until a run has chosen it."""
        return 0 if self.micro_batch == "auto" else self.micro_batch

    @property
    def inner_steps(self) -> int:
        """Optimizer steps on one set of rollouts; from the second on, the rollouts are off-policy."""
        return self.epochs * self.minibatches

    @property
    def is_off_policy(self) -> bool:
        """Whether the policy that is updated may differ from the one that sampled."""
        return self.inner_steps > 1 or self.max_staleness > 1


LR_ADAPTATION = 1.5
"""The factor by which `desired_kl` changes the learning rate after a step."""
LR_ADAPTATION_LIMIT = 100.0
"""`desired_kl` changes the learning rate by at most this factor, up or down, in all."""
UPDATE_KL_STEPS = 4
"""`desired_kl` is compared with a running mean over about this many steps."""
UPDATE_KL_LIMIT = 100.0
"""A step counts in that mean as at most this many times `desired_kl`."""


class LRAdaptation(NamedTuple):
    """How `desired_kl` has adapted the learning rate so far."""

    factor: float = 1.0
    """The factor of the learning rate."""
    mean_kl: float = 0.0
    """The running mean of how far steps move the policy at a factor of 1, in nats per token."""
    steps: int = 0
    """The steps in that mean, at most UPDATE_KL_STEPS."""


@dataclass(frozen=True)
class AdamWConfig:
    """`[optimizer]`: AdamW (arXiv 1711.05101) and the schedule of its learning rate."""

    lr: float = 2e-5
    """The peak learning rate."""
    warmup: int = 0
    """Optimizer steps over which the learning rate rises linearly to its peak."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate from the peak to the last step: constant, or falling to 0."""
    desired_kl: float = 0.0
    """How far a step should move the policy: KL(old, new) in nats per token, such as 0.001. On average over about four
    steps: while they move it more than twice as far, the learning rate is divided by 1.5; while they move it less than
    half as far, it is multiplied by 1.5. 0: the learning rate follows its schedule alone."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 leaves them as they are."""
    betas: tuple[float, float] = (0.9, 0.999)
    """The decay rates of the two moments."""
    eps: float = 1e-8
    """It is added to the root of the second moment."""
    weight_decay: float = 0.0
    """In each optimizer step the weights shrink by lr * weight_decay of themselves."""
    offload: bool = False
    """Keep fp32 master weights and moments on the CPU; the device holds weights and gradients in the compute dtype."""

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"lr = {self.lr} must be positive")
        for name in ("warmup", "max_grad_norm", "weight_decay", "desired_kl"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} must not be negative")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas = {self.betas} must be at least 0 and below 1")
        if not self.eps > 0:
            raise ValueError(f"eps = {self.eps} must be positive")
        if self.desired_kl and self.schedule != "constant":
            raise ValueError('desired_kl sets the learning rate, and a schedule would lower it: schedule = "constant"')

    def compute_lr(self, update: int, total: int) -> float:
        """Return the learning rate of optimizer step `update` of `total`, counted from 1; constant after `total`."""
        if update <= self.warmup:
            return self.lr * update / self.warmup
        remaining = max(0, total - update + 1) / max(1, total - self.warmup)  # 1 at the peak, 1 / length at the end
        cosine = 0.5 - 0.5 * math.cos(math.pi * remaining)
        return self.lr * {"constant": 1.0, "linear": remaining, "cosine": cosine}[self.schedule]

    def adapt_lr(self, adaptation: LRAdaptation, update_kl: float, update: int) -> LRAdaptation:
        """Adapt the learning rate after optimizer step `update`, counted from 1.

        The thresholds and the factor are those of KLAdaptiveLR in TorchRL and in rsl_rl, which look at the last step
        alone. But one step may move the policy a hundred times as far as the next, if few groups have rewards that
        differ. So the thresholds are compared with a running mean here. The KL of a small step is quadratic in the
        learning rate, so each step counts as if it had been taken at the present rate. During the warmup, Adam's steps
        still shrink: only the last step counts, and the rate can only fall.

        Args:
            adaptation: Where the steps before have led to.
            update_kl: KL(old, new) of the last step, in nats per token. 0 is a step without gradient, which says
                nothing about the learning rate.
            update: The number of the last optimizer step.
        """
        factor, mean_kl, steps = adaptation
        if not (self.desired_kl > 0 and update_kl > 0):
            return adaptation
        kl = min(update_kl, UPDATE_KL_LIMIT * self.desired_kl)
        is_warm = update >= self.warmup
        if is_warm:
            steps = min(steps + 1, UPDATE_KL_STEPS)
            mean_kl += (kl / factor**2 - mean_kl) / steps
            kl = mean_kl * factor**2
        if kl > 2 * self.desired_kl:
            factor = max(factor / LR_ADAPTATION, 1 / LR_ADAPTATION_LIMIT)
        elif kl < self.desired_kl / 2 and is_warm:
            factor = min(factor * LR_ADAPTATION, LR_ADAPTATION_LIMIT)
        return LRAdaptation(factor, mean_kl, steps)
