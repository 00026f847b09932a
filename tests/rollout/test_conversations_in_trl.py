"""Conversations compared with TRL's own trainer, which gets the same environment and the same turns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import trl
from datasets import Dataset

from conftest import byte_tokenizer, tiny_llama_of
from pellucid.algorithm.batch import collate
from pellucid.environments.pool import InProcessEnvironments
from pellucid.environments.spec import EnvironmentSpec
from pellucid.policy.policy import Policy
from pellucid.rollout.conversations import ConversationBatch
from pellucid.types import Prompt, Sampling
from worlds import Counter, multiply

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
SAID = [
    ['<tool_call>\n{"name": "count", "arguments": {"by": 3}}\n</tool_call>', "It is 3."],
    [
        '<tool_call>\n{"name": "count", "arguments": {"by": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "multiply", "arguments": {"a": 12, "b": 3}}\n</tool_call>',
        'Again.\n<tool_call>\n{"name": "count", "arguments": {"by": 5}}\n</tool_call>',
        "Done: 36",
    ],
    ["I count nothing."],
    ['<tool_call>\n{"name": "what", "arguments": {"to": 1}}\n</tool_call>', "Oh."],
]
"""The policy's turns in four completions of one prompt."""


def tokenizer_of(template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    return tokenizer


def model_for(tokenizer):
    torch.manual_seed(0)
    return tiny_llama_of(tokenizer)


def ids_of(tokenizer, text):
    return [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]


ROW = {"prompt": [{"role": "user", "content": "Count."}], "start": 2}


def in_trl(tokenizer, folder, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    settings = trl.GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=2000,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=None,
    )
    trainer = trl.GRPOTrainer(
        model_for(tokenizer),
        reward_funcs=[],
        args=settings,
        train_dataset=Dataset.from_list([ROW]),
        processing_class=tokenizer,
        tools=[multiply],
        environment_factory=Counter,
    )
    turns = [[ids_of(tokenizer, text) for text in texts] for texts in SAID]
    speaking = [list(range(4))]

    def generate(prompt_ids, *_, **__):
        """Return the next turn of each row that has one left, in the same order."""
        rows = speaking[0]
        said = [turns[row].pop(0) for row in rows]
        speaking[0] = [row for row in rows if turns[row]]
        assert len(prompt_ids) == len(said)
        return said, None

    monkeypatch.setattr(trainer, "_generate_single_turn", generate)
    kept = {}
    inner = trainer._calculate_rewards
    monkeypatch.setattr(trainer, "_calculate_rewards", lambda *a: kept.setdefault("rewards", inner(*a)))
    outputs = trainer._generate_and_score_completions([dict(ROW) for _ in range(4)])
    return outputs, kept["rewards"]


def with_us(tokenizer):
    policy = Policy(model_for(tokenizer), tokenizer)
    prompt = Prompt("p", tuple(ROW["prompt"]), columns=ROW)
    world = InProcessEnvironments(EnvironmentSpec("worlds:Counter", ("worlds:multiply",)))
    talks = ConversationBatch(policy, 0, world, [prompt], Sampling(4, max_tokens=2000, turns=9))
    while not talks.is_done:
        talks.start(4)
        talks.poll_replies(0.0)
        speaking, talks.extend_queue = (
            [row for rows in talks.take_prefill_groups(4) for row in rows] + talks.extend_queue,
            [],
        )
        for row in speaking:
            for token in ids_of(tokenizer, SAID[row.number][row.turn_count]):
                talks.add_token(row, token, -1.0, None)
            talks.finish_turn(row)
    return collate(talks.collect_groups()), talks.collect_groups()[0]


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3"])
def test_ids_masks_and_rewards_equal_those_of_trl(template, tmp_path, monkeypatch):
    theirs, rewards = in_trl(tokenizer_of(template), tmp_path, monkeypatch)
    ours, group = with_us(tokenizer_of(template))
    for row in range(4):
        mask = theirs["completion_mask"][row].bool()
        assert theirs["prompt_ids"][row][theirs["prompt_mask"][row].bool()].tolist() == list(ours.prompt_ids[0])
        assert theirs["completion_ids"][row][mask].tolist() == ours.response_ids[row][ours.response_mask[row]].tolist()
        assert theirs["tool_mask"][row][mask].bool().tolist() == ours.action_mask[row][ours.response_mask[row]].tolist()
    assert [c.outcome.reward for c in group.completions] == pytest.approx(rewards[:, 0].tolist())
    assert [c.outcome.reward for c in group.completions] == pytest.approx([0.5, 0.8, 0.2, 0.2])
