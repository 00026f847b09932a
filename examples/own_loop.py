"""A training loop of one's own, in PyTorch and transformers, that takes two functions from Pellucid.

    python examples/own_loop.py MODEL    # a folder or a Hub id, with a chat template

`group_advantages` says how much better each answer is than its siblings, `policy_loss` is the loss whose gradient makes
the better ones likelier. Which of the published variants that is, their settings say, as in a recipe:
`group_advantages(rewards, "rloo")`, `policy_loss(..., objective="cispo")`. Model, prompts, sampling, optimizer and
everything else are this file's.
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
    """P prompts with G answers each: B = P * G rows, whose prompts are padded on the left."""

    ids: Tensor
    """[B, L + T]: prompts of up to L tokens, answers of up to T."""
    attention: Tensor
    """[B, L + T]: 0 at padding."""
    mask: Tensor
    """[B, T]: the tokens of the answers, up to and with the first that ends them."""


@torch.no_grad()
def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: list[str], group_size: int, most: int
) -> Rollout:
    chats = [[{"role": "user", "content": question}] for question in questions for _ in range(group_size)]
    prompts = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    # From the whole distribution: the loss knows no other.
    ids = model.generate(
        **prompts, do_sample=True, top_k=0, top_p=1.0, max_new_tokens=most, pad_token_id=tokenizer.pad_token_id
    )
    answers = ids[:, prompts["input_ids"].shape[1] :]
    ended = (answers == tokenizer.eos_token_id).cumsum(-1)
    mask = (ended - (answers == tokenizer.eos_token_id).long()) == 0
    return Rollout(ids, torch.cat([prompts["attention_mask"], mask.long()], -1), mask)


def logprobs_of(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    """[B, T]: log pi of each token of the answers, with gradient."""
    width = rollout.mask.shape[1]
    places = (rollout.attention.cumsum(-1) - 1).clamp(min=0)
    logits = model(rollout.ids, attention_mask=rollout.attention, position_ids=places, use_cache=False).logits
    chances = logits[:, -width - 1 : -1].log_softmax(-1)
    return chances.gather(-1, rollout.ids[:, -width:, None])[..., 0]


def reward(answer: str, right: int) -> float:
    numbers = re.findall(r"\d+", answer)
    return float(bool(numbers) and int(numbers[-1]) == right)


def step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, rollout: Rollout, rewards: Tensor, epochs: int = 1
) -> None:
    """Take an optimizer step an epoch on rewards [P, G]. From the second on, the answers are of an older policy."""
    advantages = group_advantages(rewards)
    with torch.no_grad():
        old = logprobs_of(model, rollout)
    for _ in range(epochs):
        policy_loss(logprobs_of(model, rollout), advantages, rollout.mask, old_logprobs=old).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def main(name: str, steps: int = 20, prompts: int = 4, group_size: int = 8, most: int = 12) -> list[float]:
    """Teach a model to add. Return the mean reward of each step."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    model.eval()  # no dropout: with it, the ratio of a policy to itself would not be 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    means = []
    for number in range(steps):
        chosen = [SUMS[i] for i in torch.randint(len(SUMS), (prompts,)).tolist()]
        rollout = generate(model, tokenizer, [question for question, _ in chosen], group_size, most)
        texts = tokenizer.batch_decode(rollout.ids[:, -rollout.mask.shape[1] :], skip_special_tokens=True)
        right = [result for _, result in chosen for _ in range(group_size)]
        rewards = torch.tensor([reward(*pair) for pair in zip(texts, right, strict=True)]).view(prompts, group_size)
        step(model, optimizer, rollout, rewards)
        means.append(float(rewards.mean()))
        print(f"step {number + 1:2}  reward {means[-1]:.3f}", flush=True)
    return means


if __name__ == "__main__":
    main(sys.argv[1])
