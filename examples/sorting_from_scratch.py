"""GRPO on a model of a few hundred numbers that learns to sort three numbers, through the very loop that trains LLMs.

    python examples/sorting_from_scratch.py                                  the table of all combinations
    python examples/sorting_from_scratch.py --deltas top --loss clipped      one of them, step by step, and its curves

The model gives every place of the answer a distribution of its own, all from one vector that is made of the prompt.
`Places` and `Draws` are all that `algorithm.grpo.train` asks of a policy and of a sampler: nothing is inherited.
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
DELTAS = {"raw": "raw", "centered": "centered", "normalised": "grpo", "max": "top"}
"""What multiplies the gradient, by the name of `algorithm.advantage`."""
LOSSES = {
    "naive": "reinforce",
    "unclipped": "importance_weighted",
    "clipped": "ppo_clip",
    "inverted": f"{__file__}:inverted",
    "inverted, clipped": f"{__file__}:inverted_clipped",
}
"""... by the name of `algorithm.objective`; the last two are functions of this file."""


# ---------------------------------------------------------------- the model


class Sorter(nn.Module):
    """E embeds numbers; A_l, one matrix for each place of the prompt, add up to one vector; B_t, one for each place of
    the answer, make a distribution of it, read through E again.

    spread: of E at the start. With 1, as described, the first distributions are nearly certain, and what is never
    sampled is never learned: no combination sorts (--spread 1).
    """

    def __init__(self, size: int, places: int, spread: float) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(VOCAB, size) * spread)
        self.encode = nn.Parameter(torch.randn(places, size, size) / size**0.5)
        self.decode = nn.Parameter(torch.randn(places, size, size) / size**0.5)

    def forward(self, prompts: Tensor) -> Tensor:
        """[P, L] numbers -> [P, T, V] log-probabilities of each number at each place."""
        read = torch.einsum("pld,lde->pe", self.embedding[prompts], self.encode)
        places = torch.einsum("pd,tde->pte", read, self.decode)
        return (places @ self.embedding.T).log_softmax(-1)


class Places:
    """A policy: it scores rollouts."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def distributions(self, batch: Batch) -> Tensor:
        """[B, T, V]"""
        return self.module(torch.tensor(batch.prompt_ids))[batch.prompt_indices]

    def score(self, batch: Batch) -> Scores:
        log_probs = self.distributions(batch)
        chosen = log_probs.gather(-1, batch.response_ids[..., None])[..., 0]
        return Scores(chosen, -(log_probs.exp() * log_probs).sum(-1))

    def embed(self, batch: Batch, layer: int) -> Tensor:
        """The numbers of an answer, as they are embedded: there is one layer."""
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


class Draws:
    """A sampler: it draws every place by itself."""

    def sync(self, policy: Places, version: int) -> None:
        self.policy, self.version = policy, version

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        numbers = [prompt.columns["numbers"] for prompt in prompts]
        log_probs = self.policy.module(torch.tensor(numbers))  # [P, T, V]
        generator = torch.Generator().manual_seed(hash_of(sampling.seed))
        drawn = [torch.multinomial(p.exp(), sampling.n, replacement=True, generator=generator).T for p in log_probs]
        return [
            Group(prompt, ids, tuple(completion(row, log_probs[i], self.version) for row in drawn[i].tolist()))
            for i, (prompt, ids) in enumerate(zip(prompts, numbers, strict=True))
        ]


def completion(tokens: list[int], log_probs: Tensor, version: int) -> Completion:
    logprobs = log_probs.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    return Completion(tuple(tokens), tuple(logprobs.tolist()), " ".join(map(str, tokens)), True, version=version)


def hash_of(seed: str) -> int:
    return int.from_bytes(seed.encode()) % 2**63


# ---------------------------------------------------------------- the task


def by_position(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Places that hold the right number, of all."""
    return fmean(x == y for x, y in zip(sorted(prompt), answer, strict=True))


def by_distance(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """1 less how far each number is from the right one, as a share of the vocabulary."""
    return 1 - fmean(abs(x - y) / (VOCAB - 1) for x, y in zip(sorted(prompt), answer, strict=True))


def by_inclusion(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Numbers of the prompt that are in the answer, and neighbours in the answer that ascend: points of all points."""
    included = sum(x in answer for x in prompt)
    ascending = sum(x <= y for x, y in pairwise(answer))
    return (included + ascending) / (2 * len(prompt) - 1)


REWARDS = {"position": by_position, "distance": by_distance, "inclusion": by_inclusion}


@dataclass(frozen=True)
class SortThree:
    """The three prompts, at every step."""

    grading: str
    seed: int = 0
    split: str = "train"

    def sample(self, step: int, n: int) -> list[Prompt]:
        rows = [PROMPTS[i % len(PROMPTS)] for i in range(n)]
        return [Prompt(f"{step}/{i}", " ".join(map(str, row)), columns={"numbers": row}) for i, row in enumerate(rows)]

    def reward(self, prompt: Prompt, completion: Completion) -> Reward:
        return Reward(REWARDS[self.grading](prompt.columns["numbers"], completion.token_ids))


# ---------------------------------------------------------------- a ratio upside down


def inverted(tokens: ObjectiveInputs, _cfg: GRPOConfig) -> Tensor:
    """What `log_probs / old_log_probs`, taken for the ratio, maximises. Both are negative, so as the probability of an
    answer rises this falls: it unlearns what was rewarded.
    """
    return tokens.advantages * quotient(tokens)


def inverted_clipped(tokens: ObjectiveInputs, cfg: GRPOConfig) -> Tensor:
    """The same quotient, clipped as the ratio is."""
    clipped = quotient(tokens).clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    return torch.minimum(tokens.advantages * quotient(tokens), tokens.advantages * clipped)


def quotient(tokens: ObjectiveInputs) -> Tensor:
    return tokens.logprobs / tokens.old_logprobs.clamp(max=-1e-6)


# ---------------------------------------------------------------- training


def settings(options: argparse.Namespace, deltas: str, loss: str) -> GRPOConfig:
    """`naive` has no ratio, so it takes fresh answers for each of its inner steps."""
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


def train(options: argparse.Namespace, deltas: str, loss: str) -> tuple[Places, list[grpo.StepResult]]:
    torch.manual_seed(options.seed)
    policy, cfg = (
        Places(Sorter(options.size, len(PROMPTS[0]), options.spread)),
        settings(options, deltas, loss),
    )
    reference = Places(copy.deepcopy(policy.module).requires_grad_(False)) if options.kl else None
    optimizer = AdamWConfig(lr=options.lr, max_grad_norm=0.0)
    runtime = Runtime(policy, optimizer, total_updates=cfg.steps * cfg.inner_steps)
    return policy, list(grpo.train(SortThree(options.reward), Draws(), policy, runtime, cfg, reference))


@torch.no_grad()
def greedy(policy: Places, grading: str) -> list[float]:
    """The reward of the likeliest answer to each prompt."""
    answers = policy.module(torch.tensor(PROMPTS)).argmax(-1).tolist()
    return [REWARDS[grading](prompt, answer) for prompt, answer in zip(PROMPTS, answers, strict=True)]


def sampled(steps: Sequence[grpo.StepResult]) -> float:
    """The mean reward of the last tenth of the steps."""
    last = steps[-max(1, len(steps) // 10) :]
    return fmean(reward.value for step in last for group in step.groups for reward in group.rewards)


# ---------------------------------------------------------------- what is shown


def table(options: argparse.Namespace) -> None:
    losses = list(LOSSES)
    print(f"Reward by {options.reward} of answers drawn at the end | of the likeliest answers; 1 is sorted.\n")
    print(f"{'deltas':12}" + "".join(f"{loss:>18}" for loss in losses))
    for deltas in DELTAS:
        cells = []
        for loss in losses:
            policy, steps = train(options, deltas, loss)
            cells.append(f"{sampled(steps):.2f} | {fmean(greedy(policy, options.reward)):.2f}")
        print(f"{deltas:12}" + "".join(f"{cell:>18}" for cell in cells), flush=True)


def one(options: argparse.Namespace) -> None:
    print("four answers of the first group, each with (reward, delta, log-prob)")
    policy, steps = train(options, options.deltas, options.loss)
    for step in steps[:: max(1, len(steps) // 20)]:
        group = step.groups[0]
        shown = ", ".join(
            f"{c.text} ({r.value:.2f}, {a:+.2f}, {sum(c.logprobs):+.2f})"
            for c, r, a in zip(group.completions[:4], group.rewards, group.advantages, strict=False)
        )
        print(f"step {step.step:4d}  loss {step.metrics['loss']:+.4f}  reward {sampled([step]):.2f}   {shown}")
    print(f"\nlikeliest answers: {policy.module(torch.tensor(PROMPTS)).argmax(-1).tolist()}")
    if options.picture:
        draw(steps, options.picture)
        print(f"curves: {options.picture}")


def draw(steps: Sequence[grpo.StepResult], path: Path) -> None:
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an extra, for the picture alone
    except ImportError as error:
        raise SystemExit("--picture needs matplotlib: pip install 'pellucid[plots]'") from error
    mpl.use("agg")
    from matplotlib import pyplot  # noqa: PLC0415 - behind the choice of a backend

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3), layout="constrained")
    left.plot([s.metrics["loss"] for s in steps])
    left.set(title="Loss (0 by construction at the first inner step)", xlabel="step")
    right.plot([sampled([s]) for s in steps])
    right.set(title="Mean reward", xlabel="step", ylim=(0, 1.02))
    figure.savefig(path, dpi=120)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deltas", choices=DELTAS)
    parser.add_argument("--loss", choices=list(LOSSES))
    parser.add_argument("--reward", choices=REWARDS, default="position")
    parser.add_argument(
        "--epochs", type=int, default=100, help="times that answers are drawn; `naive` draws anew for each inner step"
    )
    parser.add_argument("--inner", type=int, default=10, help="optimizer steps on the same answers")
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
        help="of the embedding at the start; 1 in the description, where nothing is learned",
    )
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--picture", type=Path, help="a PNG of the loss and the reward")
    options = parser.parse_args(arguments)
    if bool(options.deltas) != bool(options.loss):
        parser.error("--deltas and --loss go together; without both, the table of all is made")
    return options


def main() -> None:
    options = parsed()
    one(options) if options.deltas else table(options)


if __name__ == "__main__":
    main()
