"""A training loop of your own, in PyTorch and transformers, with two functions of Pellucid.

    python examples/own_loop.py MODEL    # a folder or a Hub id, with a chat template

`group_advantages` compares each answer with the others of its group. `policy_loss` is the loss whose gradient makes the
better ones more likely. Their arguments choose among the published variants, as the settings of a recipe do:
`group_advantages(rewards, "rloo")`, `policy_loss(..., objective="cispo")`. Model, prompts, sampling, optimizer and
everything else belong to this file.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from pellucid.algorithm import group_advantages, policy_loss

SUMS = [(f"What is {a} + {b}? Answer with the number only.", a + b) for a in range(10) for b in range(10)]


@dataclass
class Rollout:
    """P prompts with G answers each: B = P * G rows. Prompts are padded on the left, answers on the right."""

    ids: Tensor
    """[B, L + T]: prompts of up to L tokens, answers of up to T."""
    attention: Tensor
    """[B, L + T]: 0 at padding."""
    mask: Tensor
    """[B, T]: 1 for the tokens of an answer, up to and including its EOS."""


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: list[str],
    group_size: int,
    max_new_tokens: int,
) -> Rollout:
    """Sample `group_size` answers to each question."""
    chats = [[{"role": "user", "content": question}] for question in questions for _ in range(group_size)]
    prompts = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    # The loss uses the whole distribution, so sampling must too. `generate` takes what is not named here from the
    # checkpoint, and many checkpoints name a temperature or a penalty.
    ids = model.generate(
        **prompts,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        repetition_penalty=1.0,
        max_new_tokens=max_new_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    answers = ids[:, prompts["input_ids"].shape[1] :]
    ends = (answers == tokenizer.eos_token_id).long()
    mask = ends.cumsum(-1) - ends == 0
    return Rollout(ids, torch.cat([prompts["attention_mask"], mask.long()], -1), mask)


def compute_logprobs(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    """Return the log-probability [B, T] of each answer token, with gradients."""
    length = rollout.mask.shape[1]
    positions = (rollout.attention.cumsum(-1) - 1).clamp(min=0)
    logits = model(rollout.ids, attention_mask=rollout.attention, position_ids=positions, use_cache=False).logits
    log_probs = logits[:, -length - 1 : -1].log_softmax(-1)  # a token is predicted at the position before it
    return log_probs.gather(-1, rollout.ids[:, -length:, None])[..., 0]


def grade(answer: str, expected: int) -> float:
    numbers = re.findall(r"\d+", answer)
    return float(bool(numbers) and int(numbers[-1]) == expected)


def update(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, rollout: Rollout, rewards: Tensor, epochs: int = 1
) -> None:
    """Take one optimizer step per epoch on rewards [P, G]. After the first, the answers are off-policy."""
    advantages = group_advantages(rewards)
    with torch.no_grad():
        old_logprobs = compute_logprobs(model, rollout)
    for _ in range(epochs):
        logprobs = compute_logprobs(model, rollout)
        policy_loss(logprobs, advantages, rollout.mask, old_logprobs=old_logprobs).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def main(name: str, steps: int = 20, prompts: int = 4, group_size: int = 8, max_new_tokens: int = 12) -> list[float]:
    """Train a model to add. Return the mean reward of each step."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model.eval()  # no dropout: with it, the ratio of a policy to itself would not be 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    means = []
    for step in range(1, steps + 1):
        sums = [SUMS[i] for i in torch.randint(len(SUMS), (prompts,)).tolist()]
        rollout = generate(model, tokenizer, [question for question, _ in sums], group_size, max_new_tokens)
        texts = tokenizer.batch_decode(rollout.ids[:, -rollout.mask.shape[1] :], skip_special_tokens=True)
        expected = [result for _, result in sums for _ in range(group_size)]
        rewards = torch.tensor([grade(*pair) for pair in zip(texts, expected, strict=True)]).view(prompts, group_size)
        update(model, optimizer, rollout, rewards)
        means.append(float(rewards.mean()))
        print(f"step {step:2}  reward {means[-1]:.3f}", flush=True)
    return means


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/own_loop.py MODEL    (a folder or a Hub id, with a chat template)")
    main(sys.argv[1])
