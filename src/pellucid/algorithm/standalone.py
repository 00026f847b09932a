"""Advantages and loss for your own training loop: Pellucid's functions on tensors, with settings as keywords.

Every setting is a key of `[algorithm]`. A setting of another stage of the step, or a tensor of the wrong shape, raises
UserError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from pellucid.algorithm.advantages import Grades, compute_advantages_from_grades
from pellucid.algorithm.batch import Batch, fill_with_sibling_mean
from pellucid.algorithm.grpo import compute_loss
from pellucid.algorithm.objectives import AGGREGATES
from pellucid.algorithm.protocols import Scores
from pellucid.algorithm.settings import GRPOConfig
from pellucid.types import UserError
from pellucid.utils.plugins import IN_PROCESS_PREFIX, did_you_mean, provide_objects

_ADVANTAGE_SETTINGS = (
    *("advantage", "advantage_difficulty", "min_reward_range"),
    *("length_buckets", "length_min_cell", "length_shrinkage"),
)
_LOSS_SETTINGS = (
    *("objective", "clip_low", "clip_high", "clip_cap", "dual_clip", "soft_temperature"),
    *("aggregate", "constant_length", "max_length"),
    *("kl", "kl_coef", "entropy_coef", "correction", "correction_cap"),
)
_LOSS_KL_ESTIMATORS = ("k2", "k3", "k3_weighted")
"""Estimators with the gradient of a KL in the loss. The gradient of k1 is 0 in expectation; exact needs logits."""


def group_advantages(
    rewards: Any,
    advantage: str | Callable[..., Tensor] = "grpo",
    *,
    lengths: Any = None,
    correct: Any = None,
    parts: Any = None,
    weights: Any = None,
    **settings: Any,
) -> Tensor:
    """Compute how much better each completion is than its siblings, [P, G] float64 on the device of `rewards`.

    Args:
        rewards: [P, G] the rewards of G completions of each of P prompts, as a tensor, an array or lists. NaN marks a
            missing one, which counts as the mean of its siblings.
        advantage: A name of ADVANTAGES, "file.py:function", or a function of Grades and GRPOConfig.
        lengths: [P, G] in tokens, for advantages that compare completions of similar length.
        correct: [P, G] whether the answer is right, for "lead". None means rewards of at least 1.
        parts: [P, G, K] the terms of the reward, for "gdpo".
        weights: [K] the weights of those terms. None means 1.
        **settings: Keys of `[algorithm]` that belong to the advantage.

    Example: group_advantages([[0.0, 1.0, 1.0, 0.0]], "rloo")
    """
    settings, functions = _name_functions({"advantage": advantage, **settings})
    cfg = make_grpo_config(settings, _ADVANTAGE_SETTINGS, "group_advantages")
    values = fill_with_sibling_mean(convert_to_float64("rewards", rewards, 2)).nan_to_num(0.0)
    if cfg.advantage.startswith("length_grouped") and lengths is None:
        raise UserError(f'advantage = "{cfg.advantage}" compares completions of similar length: give lengths=')
    if cfg.advantage == "gdpo" and parts is None:
        raise UserError('advantage = "gdpo" compares the terms of a reward: give parts=')
    terms = values[..., None]
    if parts is not None:
        terms = fill_with_sibling_mean(convert_to_float64("parts", parts, 3)).nan_to_num(0.0)
    is_correct = (values >= 1).double()
    if correct is not None:
        is_correct = fill_with_sibling_mean(convert_to_float64("correct", correct, 2))
    term_weights = (
        torch.ones(terms.shape[-1]).double() if weights is None else convert_to_float64("weights", weights, 1)
    )
    grades = Grades(
        rewards=values,
        correct=is_correct,
        lengths=torch.ones_like(values) if lengths is None else convert_to_float64("lengths", lengths, 2),
        parts=terms,
        weights=term_weights.expand(len(values), -1),
    )
    device = rewards.device if isinstance(rewards, Tensor) else values.device
    with provide_objects(functions):
        return compute_advantages_from_grades(grades, values, cfg).to(device)


def policy_loss(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    old_logprobs: Tensor | None = None,
    sampler_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    rows: int | Tensor | None = None,
    tokens: int | Tensor | None = None,
    **settings: Any,
) -> Tensor:
    """Compute the scalar loss of some completions. Its `backward()` gives the gradient of a GRPO step.

    Padding is ignored in all tensors.

    Args:
        logprobs: [B, T] of each response token under the policy, in nats, with gradient.
        advantages: [B], [P, G] with B = P * G in the same order, or [B, T].
        mask: [B, T] the tokens that the policy sampled.
        old_logprobs: [B, T] under the policy that sampled. None means that the policy has not changed since sampling,
            as in the first optimizer step.
        sampler_logprobs: [B, T] as the sampler computed them, for `correction`.
        ref_logprobs: [B, T] under the reference, for `kl_coef` with kl = "k2", "k3" or "k3_weighted".
        entropy: [B, T] in nats, with gradient, for `entropy_coef`.
        rows: The number of responses in the optimizer step, if this call has only some of them, as in gradient
            accumulation. The losses of the calls then add up to that of the step. None means the number in `mask`.
        tokens: The number of response tokens in the optimizer step. None means the number in `mask`.
        **settings: Keys of `[algorithm]` that belong to the loss. An objective may also be a function.

    Example: policy_loss(logprobs, group_advantages(rewards), mask, objective="gspo", aggregate="sequence").backward()
    """
    settings, functions = _name_functions(settings)
    cfg = make_grpo_config(settings, _LOSS_SETTINGS, "policy_loss")
    _check_required_tensors(
        settings, {"ref_logprobs": ref_logprobs, "entropy": entropy, "sampler_logprobs": sampler_logprobs}
    )

    mask = mask.bool()

    def clear_padding(x: Tensor) -> Tensor:
        """Set padding to 0: an infinity there would make the gradients and means of its row NaN."""
        return x.masked_fill(~mask, 0.0)

    logprobs = clear_padding(logprobs)
    row_count = mask.any(-1).sum() if rows is None else torch.as_tensor(rows, device=mask.device)
    token_count = mask.sum() if tokens is None else torch.as_tensor(tokens, device=mask.device)
    no_ids = torch.zeros(mask.shape, dtype=torch.long, device=mask.device)  # no model reads them
    batch = Batch(
        prompt_ids=((0,),),
        demonstrations=((),),
        prompt_indices=no_ids[:, 0],
        response_ids=no_ids,
        response_mask=mask,
        action_mask=mask,
        finished=mask.any(-1),
        sampler_logprobs=logprobs.detach() if sampler_logprobs is None else clear_padding(sampler_logprobs),
        old_logprobs=None if old_logprobs is None else clear_padding(old_logprobs),
        ref_logprobs=None if ref_logprobs is None else clear_padding(ref_logprobs),
        advantages=clear_padding(_broadcast_advantages(advantages, mask).to(logprobs)),
        token_weights=AGGREGATES[cfg.aggregate](mask, row_count.clamp(min=1), token_count.clamp(min=1), cfg),
    )
    scores = Scores(logprobs, torch.zeros_like(logprobs) if entropy is None else clear_padding(entropy))
    with provide_objects(functions):
        return compute_loss(scores, batch, cfg)[0]


def _name_functions(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Callable[..., Any]]]:
    """Return the settings with generated names in place of functions, and a dict from those names to the functions."""
    names = {key: f"{IN_PROCESS_PREFIX}{key}" for key, value in settings.items() if callable(value)}
    return {**settings, **names}, {name: settings[key] for key, name in names.items()}


def make_grpo_config(settings: Mapping[str, Any], names: Sequence[str], function: str) -> GRPOConfig:
    """Return a GRPOConfig. Raises UserError for a setting that is not in `names` or that contradicts another."""
    for name in settings:
        if name not in names:
            hint = did_you_mean(name, names) or f"; its settings are {', '.join(names)}"
            raise UserError(f"{function} has no setting {name}{hint}")
        _check_setting_type(name, settings[name])
    try:
        return GRPOConfig(kl_in="loss", **settings)
    except ValueError as error:
        raise UserError(str(error)) from error


def _check_setting_type(name: str, value: Any) -> None:
    """Raise UserError for a value that is not of the type of its setting."""
    kind = get_type_hints(GRPOConfig)[name]
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    if choices and value not in choices:
        raise UserError(f"{name} = {value!r} is unknown; there are {', '.join(choices)}")
    is_pair = isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(each, Real) for each in value)
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    fits, description = {
        int: (is_number and isinstance(value, Integral), "a whole number"),
        float: (is_number, "a number"),
        tuple[float, float]: (is_pair, "two numbers"),
    }.get(kind, (isinstance(value, str), "a name or a function"))
    if not fits:
        raise UserError(f"{name} = {value!r} must be {description}")


def _check_required_tensors(settings: Mapping[str, Any], given: Mapping[str, Tensor | None]) -> None:
    needed = {"kl_coef": "ref_logprobs", "entropy_coef": "entropy"}
    needed |= {"correction": "sampler_logprobs"} if settings.get("correction", "none") != "none" else {}
    for setting, name in needed.items():
        if settings.get(setting) and given[name] is None:
            raise UserError(f"{setting} = {settings[setting]} needs {name}=")
    if settings.get("kl_coef") and settings.get("kl") not in _LOSS_KL_ESTIMATORS:
        raise UserError(f"kl_coef in a loss needs kl=, one of {', '.join(_LOSS_KL_ESTIMATORS)}", page="explanation/kl")
    if settings.get("aggregate") == "constant" and not (settings.get("constant_length") or settings.get("max_length")):
        raise UserError('aggregate = "constant" needs constant_length=, its divisor in tokens')


def _broadcast_advantages(advantages: Tensor, mask: Tensor) -> Tensor:
    """Return advantages [B, T] from any of the shapes that policy_loss accepts."""
    if advantages.numel() == len(mask):
        return advantages.flatten()[:, None].expand(mask.shape)
    if advantages.shape == mask.shape:
        return advantages
    raise UserError(
        f"advantages of shape {list(advantages.shape)} are not one for each of {len(mask)} completions:"
        " give [B], [P, G] with P * G = B, or [B, T]"
    )


def convert_to_float64(name: str, values: Any, dimensions: int) -> Tensor:
    """Return a float64 tensor on the CPU. Raises UserError for a wrong number of dimensions, or for G = 1."""
    tensor = torch.as_tensor(values, dtype=torch.float64, device="cpu")
    form = {1: "[K]", 2: "[P, G], G completions of each of P prompts", 3: "[P, G, K]"}[dimensions]
    if tensor.dim() != dimensions or (dimensions > 1 and tensor.shape[1] < 2):
        raise UserError(f"{name} of shape {list(tensor.shape)} must be {form}, and G at least 2")
    return tensor
