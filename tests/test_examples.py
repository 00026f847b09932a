"""Test that the examples run and compute the same as the package."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from conftest import OneProcessRuntime, character_tokenizer, mostly_slow, tiny_llama
from pellucid.algorithm import grpo
from pellucid.algorithm.batch import collate, collect_grades
from pellucid.algorithm.objectives import ObjectiveInputs
from pellucid.algorithm.settings import AdamWConfig, GRPOConfig
from pellucid.distributed.runtime import Runtime
from pellucid.policy.policy import Policy
from pellucid.types import Completion, Group, Prompt, Reward, Sampling


def example(name):
    spec = importlib.util.spec_from_file_location(name, f"examples/{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------- transparent_grpo.py

transparent = example("transparent_grpo")


class Digits:
    """A problem graded by the share of digits, some of which a tiny random model produces."""

    prompt = "2+3="

    def reward(self, text):
        return sum(c.isdigit() for c in text) / max(1, len(text))


@dataclass(frozen=True)
class Replay:
    """A sampler that returns the rollouts of the example, and a task that grades them."""

    rollouts: list
    lengths: list
    group_size: int
    seed: int = 0
    split: str = "train"

    def sync(self, policy, version):
        pass

    def sample(self, step, n):
        return [Prompt(f"{step}/{i}", Digits.prompt) for i in range(n)]

    def generate(self, prompts, sampling):
        rollout, group_size = self.rollouts[int(sampling.seed.split("/")[1])], sampling.n
        width = rollout.mask.shape[1]
        rows = []
        for ids, attention, mask in zip(rollout.ids, rollout.attention, rollout.mask, strict=True):
            tokens = tuple(ids[-width:][mask.bool()].tolist())
            prompt = tuple(ids[:-width][attention[:-width].bool()].tolist())
            text = character_tokenizer().decode(list(tokens), skip_special_tokens=True)
            rows.append((prompt, Completion(tokens, (0.0,) * len(tokens), text, True)))
        return [
            Group(p, rows[i * group_size][0], tuple(c for _, c in rows[i * group_size : (i + 1) * group_size]))
            for i, p in enumerate(prompts)
        ]

    def reward(self, prompt, completion):
        return Reward(Digits().reward(completion.text))


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_transparent_grpo_takes_the_steps_of_the_package(kl, monkeypatch):
    """With the same weights and rollouts, three steps with three epochs give the same parameters."""
    config = transparent.Config(
        steps=3, prompts=2, group_size=4, max_new_tokens=8, lr=1e-2, beta=0.1, kl=kl, temperature=0.9, seed=1
    )
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.padding_side = "left"
    models = []
    for _ in range(4):
        torch.manual_seed(0)
        models.append(tiny_llama().eval())
    theirs, their_reference, ours, our_reference = models

    rollouts, drawn = [], transparent.generate
    monkeypatch.setattr(transparent, "generate", lambda *a: rollouts.append(drawn(*a)) or rollouts[-1])
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=config.lr, weight_decay=0.0)
    accelerator = Accelerator(cpu=True)
    steps = list(
        transparent.train(theirs, their_reference, tokenizer, optimizer, accelerator, lambda random: Digits(), config)
    )
    assert len({r.mask.sum().item() for r in rollouts}) > 1
    assert len(set(rollouts[0].mask.sum(1).tolist())) > 1, "responses must be of different lengths"

    cfg = GRPOConfig(
        steps=3, prompts_per_step=2, group_size=4, epochs=3, kl=kl, kl_coef=0.1, kl_in="reward", aggregate="token"
    )
    policy = Policy(ours, tokenizer, temperature=0.9)
    reference = Policy(our_reference.requires_grad_(False), tokenizer, temperature=0.9)
    replay = Replay(rollouts, [], 4)
    runtime = Runtime(policy, AdamWConfig(lr=1e-2), total_updates=9)
    results = list(grpo.train(replay, replay, policy, runtime, cfg, reference))

    for (_, _, reward, _, moved), result in zip(steps, results, strict=True):
        assert reward == pytest.approx(
            sum(r.value for g in result.groups for r in g.rewards) / sum(len(g.rewards) for g in result.groups)
        )
        assert moved >= 0 or kl == "k1"
    torch.manual_seed(0)
    before = dict(tiny_llama().named_parameters())
    for name, p in theirs.named_parameters():
        torch.testing.assert_close(dict(ours.named_parameters())[name], p, rtol=0, atol=2e-4)
        assert (p - before[name]).abs().max() > 5e-3


def test_transparent_grpo_is_short_and_imports_only_common_libraries():
    source = Path("examples/transparent_grpo.py").read_text()
    assert len(source.splitlines()) < 400
    imports = {line.split()[1].split(".")[0] for line in source.splitlines() if line.startswith(("import ", "from "))}
    libraries = imports - set(sys.stdlib_module_names)
    assert libraries <= {"torch", "transformers", "accelerate", "numpy"}


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("", 0.0),
        ("x = 2", 0.05),
        ("x=2 and x=-2", 0.1),
        ("x = 20, x = -21", 0.0),
        ("2a + 3 = -3", 0.15),
        ("so a = -3.", 0.3),
        ("a = -39, b = 30", 0.0),
        ("-7 = -4 - b, b = 3", 0.3),
        ("\\boxed{0}", 0.3),
        ("\\boxed{0} no, \\boxed{ 99 }", 0.0),
        ("the answer is 10", 0.0),
        ("x=2, x=-2, 2a+3=-3, a=-3, -7=-4-b, b=3, \\boxed{0}", 1.0),
        ("x=2, x=-2, 2a+3=-3, a=-3, -7=-4-b, b=3, \\boxed{99}", 0.7),
    ],
)
def test_toy_environment_grades_whole_statements(text, reward):
    assert transparent.THREE_PIECES.reward(text) == pytest.approx(reward)


# ---------------------------------------------------------------- own_loop.py

own_loop = example("own_loop")


def test_own_loop_computes_the_gradients_of_the_package(monkeypatch):
    """The example has its own model, sampling and log-probs, and our advantages and loss."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.padding_side = "left"
    torch.manual_seed(0)
    theirs, ours = tiny_llama().eval(), tiny_llama().eval()
    ours.load_state_dict(theirs.state_dict())
    rollout = own_loop.generate(theirs, tokenizer, ["1+2=", "12+34="], 4, max_new_tokens=40)
    rewards = torch.tensor([[0.0, 1.0, 0.5, 0.0], [1.0, 1.0, 0.0, 0.2]])
    assert len(set(rollout.mask.sum(1).tolist())) > 1, "answers must be of different lengths"
    gradients = {}
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.0)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: None)
    monkeypatch.setattr(
        optimizer, "step", lambda: gradients.update({name: p.grad.clone() for name, p in theirs.named_parameters()})
    )
    own_loop.update(theirs, optimizer, rollout, rewards)

    policy = Policy(ours, tokenizer)
    [groups] = [Replay([rollout], [], 4).generate([Prompt(str(i), "") for i in range(2)], Sampling(4, seed="0/0"))]
    graded = [
        replace(group, rewards=tuple(Reward(float(r)) for r in row)) for group, row in zip(groups, rewards, strict=True)
    ]
    cfg = GRPOConfig(prompts_per_step=2, group_size=4)
    runtime = OneProcessRuntime(policy)
    batch = collate(graded)
    advantages, _ = grpo.compute_advantages(collect_grades(graded), batch, policy, runtime, cfg)
    grpo.update_policy(
        policy, grpo.attach_advantages(batch, collect_grades(graded), advantages, runtime, cfg), runtime, cfg
    )
    for name, gradient in runtime.gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5)
    assert max(float(g.abs().max()) for g in gradients.values()) > 1e-2


def test_own_loop_ignores_the_generation_config_of_a_checkpoint():
    """At the checkpoint's temperature, all answers of a group would be equal."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.padding_side = "left"
    torch.manual_seed(0)
    model = tiny_llama().eval()
    model.generation_config.update(do_sample=True, temperature=1e-3, repetition_penalty=1.3)
    rollout = own_loop.generate(model, tokenizer, ["1+2="], 8, max_new_tokens=6)
    assert len(rollout.ids.unique(dim=0)) > 1


def test_own_loop_runs(tmp_path, capsys):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    tiny_llama(positions=512).save_pretrained(tmp_path)
    assert len(own_loop.main(str(tmp_path), steps=2, prompts=2, group_size=4, max_new_tokens=6)) == 2
    assert capsys.readouterr().out.count("reward") == 2


# ---------------------------------------------------------------- sorting_from_scratch.py

sorting = example("sorting_from_scratch")


def options(*arguments):
    return sorting.parse_options([str(argument) for argument in arguments])


@pytest.mark.parametrize(("loss", "epochs"), mostly_slow([("naive", 40), ("unclipped", 40), ("clipped", 100)], every=3))
@pytest.mark.parametrize("deltas", ["centered", "normalized", "max"])
def test_every_valid_combination_learns_to_sort(deltas, loss, epochs):
    """The clipped loss, with a clip of 0.01, learns slowest."""
    _, steps = sorting.train(options("--epochs", epochs), deltas, loss)
    assert sorting.average_reward(steps[:3]) < 0.4
    assert sorting.average_reward(steps) > 0.8


@pytest.mark.slow
def test_inverted_ratio_unlearns():
    _, steps = sorting.train(options("--epochs", 20), "centered", "inverted")
    assert sorting.average_reward(steps) < 0.5 * sorting.average_reward(steps[:3])


def test_inverted_clipped_loss_stops_tokens_that_became_less_likely():
    """Log-probs of -1 and -1.05 that were -1 before have inverted ratios of 1 and 1.05, and the clip limits 1.05 to
    1.01.
    """
    logprobs = torch.tensor([[-1.0, -1.05]], dtype=torch.float64, requires_grad=True)
    ones = torch.ones(1, 2, dtype=torch.float64)
    tokens = ObjectiveInputs(logprobs, -ones, ones, ones.bool())
    value = sorting.compute_inverted_clipped(tokens, GRPOConfig(clip_low=0.01, clip_high=0.01))
    assert value.tolist() == [pytest.approx([1.0, 1.01])]
    assert torch.autograd.grad(value.sum(), logprobs)[0].tolist() == [[-1.0, 0.0]]


def test_kl_penalty_keeps_the_sorter_near_its_reference():
    free, held = (options("--epochs", 5, "--lr", 0.01, "--kl", kl, "--reference", 10**6) for kl in (0.0, 10.0))
    moved = [sorting.train(setting, "centered", "unclipped")[0] for setting in (free, held)]
    torch.manual_seed(5)
    start = sorting.Sorter(10, 3, 0.3)
    distances = [
        sum(
            float((p - q).detach().square().sum())
            for p, q in zip(m.module.parameters(), start.parameters(), strict=True)
        )
        for m in moved
    ]
    assert distances[1] < 0.5 * distances[0]


@pytest.mark.parametrize(
    ("grading", "answer", "reward"),
    [
        ("position", (0, 1, 2), 1),
        ("position", (2, 1, 0), 1 / 3),
        ("distance", (0, 1, 4), 1 - 2 / 4 / 3),
        ("inclusion", (0, 1, 2), 1),
        ("inclusion", (2, 1, 0), 3 / 5),
        ("inclusion", (0, 0, 0), 3 / 5),
    ],
)
def test_sorting_rewards_by_hand(grading, answer, reward):
    assert sorting.REWARDS[grading]((1, 0, 2), answer) == pytest.approx(reward)


def test_curves_are_drawn(tmp_path):
    _, steps = sorting.train(options("--epochs", 2), "centered", "clipped")
    sorting.draw_curves(steps, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_sorting_policy_embeds_answers_by_their_numbers():
    """The Policy of the example is complete, so it supports similarity-weighted rewards."""
    policy = sorting.SorterPolicy(sorting.Sorter(4, 3, 1.0))
    numbers = policy.module.embedding
    embedded = policy.embed(SimpleNamespace(response_ids=torch.tensor([[0, 1, 1], [2, 2, 2]])), -1)
    torch.testing.assert_close(embedded, torch.stack([(numbers[0] + 2 * numbers[1]) / 3, numbers[2]]))
    with pytest.raises(ValueError, match="layer 0 only"):
        policy.embed(SimpleNamespace(response_ids=torch.tensor([[0]])), 1)
