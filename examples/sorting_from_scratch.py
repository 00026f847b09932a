"""A model with a few hundred parameters learns to sort three numbers, in the same loop that trains language models.

    python examples/sorting_from_scratch.py                                  the table of all combinations
    python examples/sorting_from_scratch.py --deltas max --loss clipped      one combination, step by step
    python examples/sorting_from_scratch.py --deltas max --loss clipped --picture curves.png

The model computes one vector from the prompt, and from it a distribution for each position of the answer.
`SorterPolicy` and `SorterSampler` have all methods that `algorithm.grpo.train` calls; they inherit from nothing.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn

from pellucid.algorithm import grpo
from pellucid.algorithm.batch import Batch
from pellucid.algorithm.grpo import Scores
from pellucid.algorithm.objectives import ObjectiveInputs
from pellucid.algorithm.settings import AdamWConfig, GRPOConfig
from pellucid.distributed.runtime import Runtime
from pellucid.types import Completion, Group, Prompt, Reward, Sampling

PROMPTS = ((1, 0, 2), (3, 2, 4), (1, 2, 3))
VOCAB = max(map(max, PROMPTS)) + 1
DELTAS = {"raw": "raw", "centered": "centered", "normalized": "grpo", "max": "top"}
"""The factor of the gradient, and the `algorithm.advantage` that computes it."""
LOSSES = {
    "naive": "reinforce",
    "unclipped": "importance_weighted",
    "clipped": "ppo_clip",
    "inverted": f"{__file__}:compute_inverted",
    "inverted, clipped": f"{__file__}:compute_inverted_clipped",
}
"""The loss, and the `algorithm.objective` that computes it. The last two are functions of this file."""


# ---------------------------------------------------------------- the model


class Sorter(nn.Module):
    """An encoder and a decoder of one matrix per position, with a shared embedding E.

    Each position of the prompt has a matrix A_l, and the vector of the prompt is the sum of E[x_l] A_l. Each position
    of the answer has a matrix B_t, and the logits are the product of that vector, B_t and E transposed.

    Args:
        size: The width of the embedding.
        positions: The number of positions in a prompt and in an answer.
        spread: The standard deviation of the embedding at the start. With 1, as in the description, the first
            distributions are nearly certain. Answers that are never sampled are never learned, and no combination
            learns to sort (--spread 1).
    """

    def __init__(self, size: int, positions: int, spread: float) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(VOCAB, size) * spread)
        self.encode = nn.Parameter(torch.randn(positions, size, size) / size**0.5)
        self.decode = nn.Parameter(torch.randn(positions, size, size) / size**0.5)

    def forward(self, prompts: Tensor) -> Tensor:
        """Return log-probabilities [P, T, V] of each number at each position from prompts [P, L]."""
        encoded = torch.einsum("pld,lde->pe", self.embedding[prompts], self.encode)
        decoded = torch.einsum("pd,tde->pte", encoded, self.decode)
        return (decoded @ self.embedding.T).log_softmax(-1)


class SorterPolicy:
    """A policy: it scores rollouts."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def score(self, batch: Batch) -> Scores:
        log_probs = self.module(torch.tensor(batch.prompt_ids))[batch.prompt_indices]  # [B, T, V]
        chosen = log_probs.gather(-1, batch.response_ids[..., None])[..., 0]
        return Scores(chosen, -(log_probs.exp() * log_probs).sum(-1))

    def embed(self, batch: Batch, layer: int) -> Tensor:
        """Return the mean embedding of the numbers of each answer."""
        if layer not in (0, -1):
            raise ValueError(f"layer {layer}: this model has layer 0 only")
        return self.module.embedding[batch.response_ids].mean(1)

    def weights(self) -> Mapping[str, Tensor]:
        return dict(self.module.named_parameters())

    trainable = weights

    @torch.no_grad()
    def update_weights(self, weights: Mapping[str, Tensor], decay: float) -> None:
        for name, p in self.weights().items():
            p.lerp_(weights[name], 1 - decay)


class SorterSampler:
    """A sampler: it draws each position independently of the others."""

    def sync(self, policy: SorterPolicy, version: int) -> None:
        self.policy, self.version = policy, version

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        numbers = [prompt.columns["numbers"] for prompt in prompts]
        log_probs = self.policy.module(torch.tensor(numbers))  # [P, T, V]
        generator = torch.Generator().manual_seed(convert_seed(sampling.seed))
        drawn = [torch.multinomial(p.exp(), sampling.n, replacement=True, generator=generator).T for p in log_probs]
        return [
            Group(prompt, ids, tuple(make_completion(row, log_probs[i], self.version) for row in drawn[i].tolist()))
            for i, (prompt, ids) in enumerate(zip(prompts, numbers, strict=True))
        ]


def make_completion(tokens: list[int], log_probs: Tensor, version: int) -> Completion:
    logprobs = log_probs.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    return Completion(tuple(tokens), tuple(logprobs.tolist()), " ".join(map(str, tokens)), True, version=version)


def convert_seed(seed: str) -> int:
    return int.from_bytes(seed.encode()) % 2**63


# ---------------------------------------------------------------- the task


def grade_positions(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Return the share of positions that hold the right number."""
    return fmean(x == y for x, y in zip(sorted(prompt), answer, strict=True))


def grade_distances(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Return 1 minus the mean distance to the right numbers, as a share of the largest distance."""
    return 1 - fmean(abs(x - y) / (VOCAB - 1) for x, y in zip(sorted(prompt), answer, strict=True))


def grade_inclusion(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Return the share of points: one per prompt number in the answer, and one per ascending pair of neighbors."""
    included = sum(x in answer for x in prompt)
    ascending = sum(x <= y for x, y in pairwise(answer))
    return (included + ascending) / (2 * len(prompt) - 1)


REWARDS = {"position": grade_positions, "distance": grade_distances, "inclusion": grade_inclusion}


@dataclass(frozen=True)
class SortThree:
    """A task that asks the same three prompts in every step."""

    grading: str
    seed: int = 0
    split: str = "train"

    def sample(self, step: int, n: int) -> list[Prompt]:
        rows = [PROMPTS[i % len(PROMPTS)] for i in range(n)]
        return [Prompt(f"{step}/{i}", " ".join(map(str, row)), columns={"numbers": row}) for i, row in enumerate(rows)]

    def reward(self, prompt: Prompt, completion: Completion) -> Reward:
        return Reward(REWARDS[self.grading](prompt.columns["numbers"], completion.token_ids))


# ---------------------------------------------------------------- the ratio of the description


def compute_inverted(tokens: ObjectiveInputs, _cfg: GRPOConfig) -> Tensor:
    """Return the objective with `log_probs / old_log_probs` as its ratio.

    Both are negative, so this "ratio" falls as the probability of an answer rises, and training unlearns what was
    rewarded.
    """
    return tokens.advantages * divide_logprobs(tokens)


def compute_inverted_clipped(tokens: ObjectiveInputs, cfg: GRPOConfig) -> Tensor:
    """Return the same objective with the clip of PPO."""
    ratio = divide_logprobs(tokens)
    clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    return torch.minimum(tokens.advantages * ratio, tokens.advantages * clipped)


def divide_logprobs(tokens: ObjectiveInputs) -> Tensor:
    return tokens.logprobs / tokens.old_logprobs.clamp(max=-1e-6)


# ---------------------------------------------------------------- training


def make_config(options: argparse.Namespace, deltas: str, loss: str) -> GRPOConfig:
    """Return the settings of a combination. `naive` has no ratio, so it samples new answers for each update."""
    inner = 1 if loss == "naive" else options.inner
    return GRPOConfig(
        steps=options.epochs * options.inner // inner,
        prompts_per_step=len(PROMPTS),
        group_size=options.responses,
        epochs=inner,
        advantage=DELTAS[deltas],
        objective=LOSSES[loss],
        clip_low=options.clip,
        clip_high=options.clip,
        kl="k3",
        kl_in="loss",
        kl_coef=options.kl,
        reference_every=options.reference if options.kl else 0,
        seed=options.seed,
    )


def train(options: argparse.Namespace, deltas: str, loss: str) -> tuple[SorterPolicy, list[grpo.StepResult]]:
    torch.manual_seed(options.seed)
    policy = SorterPolicy(Sorter(options.size, len(PROMPTS[0]), options.spread))
    cfg = make_config(options, deltas, loss)
    reference = SorterPolicy(copy.deepcopy(policy.module).requires_grad_(False)) if options.kl else None
    optimizer = AdamWConfig(lr=options.lr, max_grad_norm=0.0)
    runtime = Runtime(policy, optimizer, total_updates=cfg.steps * cfg.inner_steps)
    return policy, list(grpo.train(SortThree(options.reward), SorterSampler(), policy, runtime, cfg, reference))


@torch.no_grad()
def grade_greedy_answers(policy: SorterPolicy, grading: str) -> list[float]:
    """Return the reward of the likeliest answer to each prompt."""
    answers = policy.module(torch.tensor(PROMPTS)).argmax(-1).tolist()
    return [REWARDS[grading](prompt, answer) for prompt, answer in zip(PROMPTS, answers, strict=True)]


def average_reward(steps: Sequence[grpo.StepResult]) -> float:
    """Return the mean reward of the answers sampled in the last tenth of the steps."""
    last = steps[-max(1, len(steps) // 10) :]
    return fmean(reward.value for step in last for group in step.groups for reward in group.rewards)


# ---------------------------------------------------------------- output


def print_table(options: argparse.Namespace) -> None:
    losses = list(LOSSES)
    print(f"Reward ({options.reward}) of the answers sampled at the end | of the likeliest answers. 1 is sorted.\n")
    print(f"{'deltas':12}" + "".join(f"{loss:>18}" for loss in losses))
    for deltas in DELTAS:
        cells = []
        for loss in losses:
            policy, steps = train(options, deltas, loss)
            cells.append(f"{average_reward(steps):.2f} | {fmean(grade_greedy_answers(policy, options.reward)):.2f}")
        print(f"{deltas:12}" + "".join(f"{cell:>18}" for cell in cells), flush=True)


def print_steps(options: argparse.Namespace) -> None:
    print("four answers of the first group, each with (reward, delta, log-prob)")
    policy, steps = train(options, options.deltas, options.loss)
    for step in steps[:: max(1, len(steps) // 20)]:
        group = step.groups[0]
        shown = ", ".join(
            f"{c.text} ({r.value:.2f}, {a:+.2f}, {sum(c.logprobs):+.2f})"
            for c, r, a in zip(group.completions[:4], group.rewards, group.advantages, strict=False)
        )
        print(f"step {step.step:4d}  loss {step.metrics['loss']:+.4f}  reward {average_reward([step]):.2f}   {shown}")
    print(f"\nlikeliest answers: {policy.module(torch.tensor(PROMPTS)).argmax(-1).tolist()}")
    if options.picture:
        draw_curves(steps, options.picture)
        print(f"curves: {options.picture}")


def draw_curves(steps: Sequence[grpo.StepResult], path: Path) -> None:
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an extra that only the picture needs
    except ImportError as error:
        raise SystemExit("--picture needs matplotlib: pip install 'pellucid[plots]'") from error
    mpl.use("agg")
    from matplotlib import pyplot  # noqa: PLC0415 - after the choice of a backend

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3), layout="constrained")
    left.plot([s.metrics["loss"] for s in steps])
    left.set(title="Loss (0 by construction at the first inner step)", xlabel="step")
    right.plot([average_reward([s]) for s in steps])
    right.set(title="Mean reward", xlabel="step", ylim=(0, 1.02))
    figure.savefig(path, dpi=120)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deltas", choices=DELTAS)
    parser.add_argument("--loss", choices=list(LOSSES))
    parser.add_argument("--reward", choices=REWARDS, default="position")
    parser.add_argument(
        "--epochs",
        type=int,
        default=100,
        help="how often answers are sampled; `naive` samples new ones for each update",
    )
    parser.add_argument("--inner", type=int, default=10, help="updates on the same answers")
    parser.add_argument("--responses", type=int, default=10, help="answers to each prompt")
    parser.add_argument("--clip", type=float, default=0.01)
    parser.add_argument("--kl", type=float, default=0.0)
    parser.add_argument("--reference", type=int, default=10, help="epochs between refreshes of the reference")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--size", type=int, default=10)
    parser.add_argument(
        "--spread",
        type=float,
        default=0.3,
        help="standard deviation of the embedding at the start; with 1, as described, nothing is learned",
    )
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--picture", type=Path, help="a PNG of the loss and the reward")
    options = parser.parse_args(arguments)
    if bool(options.deltas) != bool(options.loss):
        parser.error("give both --deltas and --loss, or neither for the table of all combinations")
    return options


def main() -> None:
    options = parse_options()
    if options.deltas:
        print_steps(options)
    else:
        print_table(options)


if __name__ == "__main__":
    main()
