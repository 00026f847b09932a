"""Tests of the microscope's record against transformers and autograd, on the weights before and after each step."""

from __future__ import annotations

import json
import math
from collections import namedtuple
from dataclasses import replace

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import OneProcessRuntime, make_policy, mostly_slow
from pellucid.algorithm import grpo
from pellucid.algorithm.batch import Batch, append_demonstrations, collate, collect_grades, concat_batches
from pellucid.algorithm.grpo import Scores, compute_loss
from pellucid.algorithm.settings import GRPOConfig
from pellucid.config import Config, LogConfig
from pellucid.distributed.runtime import Runtime
from pellucid.reporting import token_files
from pellucid.training import run
from pellucid.training.token_recorder import UpdateWatcher, record_steps
from pellucid.types import Completion, Group, Prompt, Reward
from runs import in_two_processes, train, weights

F64, CPU = torch.float64, torch.device("cpu")
RECORD = ("--log.tokens", 2)


def table(run_dir, step):
    return pd.DataFrame(token_files.read_tokens(run_dir, step).to_pylist())


def sequences(frame):
    """Return (prompt ids, rows) of every completion and branch."""
    prompts = {group: rows.token.tolist() for group, rows in frame[frame.kind == "prompt"].groupby("group")}
    said = frame[frame.kind != "prompt"].groupby(["group", "completion", "branch"], sort=True)
    return [(prompts[key[0]], rows.reset_index(drop=True)) for key, rows in said]


def logits_of(model, prompt, ids):
    """Return the logits [T, V] of the response by transformers, in float64."""
    return model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]


def close(found, expected, atol=2e-5):
    torch.testing.assert_close(torch.tensor(list(found), dtype=F64), expected.to(F64), rtol=1e-4, atol=atol)


# ---------------------------------------------------------------- runs that keep the weights of each optimizer step


@pytest.fixture(scope="module")
def watched_run(tmp_path_factory, model_dir):
    """Return a function that trains two steps of two epochs each.

    It returns (folder, weights before the first and after each optimizer step).
    """
    made = {}

    def make(recipe, *settings):
        key = tuple(map(str, settings))
        if key not in made:
            kept, step = [], Runtime.step

            def keeping(self):
                kept.append(copied(self.policy)) if not kept else None
                found = step(self)
                kept.append(copied(self.policy))
                return found

            folder = tmp_path_factory.mktemp("watched") / "run"
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(Runtime, "step", keeping)
                assert train(recipe, "--run", folder, *TWO_STEPS, *RECORD, *settings) == 0
            made[key] = folder, kept
        return made[key]

    return make


TWO_STEPS = (
    *("--algorithm.steps", 2, "--algorithm.epochs", 2, "--algorithm.minibatches", 1, "--evaluate.every", 0),
    *("--algorithm.kl_coef", 0, "--optimizer.warmup", 0, "--optimizer.schedule", "constant"),
)
VARIANTS = {
    "ppo_clip": (),
    "dual_clip": ("--algorithm.dual_clip", 1.5),
    "gspo": ("--algorithm.objective", "gspo"),
    "dcpo": ("--algorithm.objective", "dcpo"),
    "cispo": ("--algorithm.objective", "cispo"),
    "sapo": ("--algorithm.objective", "sapo"),
    "gmpo": ("--algorithm.objective", "gmpo"),
    "importance_weighted": ("--algorithm.objective", "importance_weighted"),
    "penalties": (
        *("--algorithm.entropy_coef", 0.1, "--algorithm.kl_coef", 0.2, "--algorithm.kl", "k3"),
        *("--algorithm.kl_in", "loss"),
    ),
    "entropy_share": ("--algorithm.entropy_share", 0.4),
    "temperature": ("--sampler.temperature", 0.7),
}
KEYS = {f"--algorithm.{name}": name for name in GRPOConfig.__dataclass_fields__}


def copied(policy):
    return {name: p.detach().clone() for name, p in policy.model.state_dict().items()}


def model_with(model_dir, state):
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=F64)
    model.load_state_dict({name: x.to(F64) for name, x in state.items()})
    return model


def algorithm_of(settings):
    named = {KEYS[key]: value for key, value in zip(settings[::2], settings[1::2], strict=True) if key in KEYS}
    return GRPOConfig(**{"max_length": 10, "epochs": 2, **named})


def temperature_of(settings):
    return dict(zip(settings[::2], settings[1::2], strict=True)).get("--sampler.temperature", 1.0)


def step_of(kept, number):
    """Return the weights at the start of a step, before its last optimizer step, and after it."""
    return kept[2 * number - 2], kept[2 * number - 1], kept[2 * number]


@pytest.mark.parametrize("variant", mostly_slow(VARIANTS, every=4))
def test_recorded_loss_quantities_match_autograd_on_plain_logits(recipe, model_dir, watched_run, variant):
    """Ratio, push, gradient and rule match the loss on log-probs by transformers and log_softmax."""
    settings = VARIANTS[variant]
    cfg, temperature = algorithm_of(settings), temperature_of(settings)
    run_dir, kept = watched_run(recipe, *settings)
    frame = table(run_dir, 2)
    start, middle, _ = (model_with(model_dir, state) for state in step_of(kept, 2))
    reference = model_with(model_dir, kept[0])
    rules = set()
    for prompt, rows in sequences(frame):
        if rows.logprob_before.isna().any():  # an average reward, so the row is not in the update
            assert rows.rule.eq("no_advantage").all()
            assert rows.advantage.eq(0).all()
            continue
        ids = torch.tensor(rows.token)
        with torch.no_grad():
            old, ref = (
                (logits_of(m, prompt, ids) / temperature).log_softmax(-1).gather(-1, ids[:, None]).T
                for m in (start, reference)
            )
            logits = logits_of(middle, prompt, ids)
        logits.requires_grad_()
        every = (logits / temperature).log_softmax(-1)
        logprobs = every.gather(-1, ids[:, None]).T
        entropy = -(every.exp() * every).sum(-1)[None]
        batch = batch_of(prompt, rows, old, ref)
        plain = GRPOConfig(**{**vars(cfg), "kl_coef": 0.0, "entropy_coef": 0.0})
        [of_policy] = torch.autograd.grad(
            compute_loss(Scores(logprobs, entropy), batch, plain)[0], logprobs, retain_graph=True
        )
        loss, metrics = compute_loss(Scores(logprobs, entropy), batch, cfg)
        of_logprobs, of_logits = torch.autograd.grad(loss, (logprobs, logits))
        close(rows.logprob_before, logprobs[0].detach())
        close(rows.logprob_start, old[0])
        close(rows.entropy_before, entropy[0].detach())
        close(rows.ratio, metrics["ratio/mean"], atol=1e-4)
        close(rows.push, -of_logprobs[0], atol=1e-6)
        close(rows.gradient, of_logits.norm(dim=-1), atol=1e-6)
        share = rows.gradient / max(rows.gradient.sum(), 1e-30)
        close(share, of_logits.norm(dim=-1) / of_logits.norm(dim=-1).sum().clamp(min=1e-30), atol=1e-4)
        assert (rows.rule != "").tolist() == (of_policy[0] == 0).tolist()
        if cfg.kl_coef:
            close(rows.ref_logprob, ref[0])
        rules |= set(rows.rule)
    expected = {
        "ppo_clip": {"clip_low", "clip_high"},
        "dual_clip": {"dual_clip"},
        "gspo": {"clip_low", "clip_high"},
        "dcpo": {"clip_low", "clip_high"},
        "gmpo": {"clip_low", "clip_high"},
        "entropy_share": {"entropy_share"},
    }
    assert expected.get(variant, {""}) <= rules
    assert "other" not in rules


def batch_of(prompt, rows, old, ref):
    """Return a batch of one row, from the columns of the file."""
    mask = torch.ones(1, len(rows), dtype=torch.bool)
    acts = torch.tensor([(rows.rule != "entropy_share").tolist()])

    def column(name):
        return torch.tensor([rows[name].tolist()], dtype=F64)

    return Batch(
        prompt_ids=(tuple(prompt),),
        demonstrations=((),),
        prompt_indices=torch.zeros(1, dtype=torch.long),
        response_ids=torch.tensor([rows.token.tolist()]),
        response_mask=mask,
        action_mask=mask,
        finished=torch.tensor([bool(rows.finished[0])]),
        sampler_logprobs=column("sampler_logprob"),
        old_logprobs=old,
        ref_logprobs=ref,
        loss_mask=acts,
        advantages=column("advantage"),
        token_weights=column("weight"),
    )


def test_clipped_tokens_are_beyond_the_bound_that_their_advantage_selects(recipe, model_dir, watched_run):
    """Checks PPO's definition with ratios by transformers."""
    run_dir, kept = watched_run(recipe)
    start, middle, _ = (model_with(model_dir, state) for state in step_of(kept, 2))
    found = []
    for prompt, rows in sequences(table(run_dir, 2)):
        ids = torch.tensor(rows.token)
        with torch.no_grad():
            before, old = (
                logits_of(m, prompt, ids).log_softmax(-1).gather(-1, ids[:, None])[:, 0] for m in (middle, start)
            )
        for ratio, row in zip((before - old).exp().tolist(), rows.itertuples(), strict=True):
            rule = ("clip_low" if ratio < 0.8 else "") if row.advantage < 0 else ("clip_high" if ratio > 1.2 else "")
            assert row.rule == rule
            bound = {"clip_low": 0.8, "clip_high": 1.2}.get(rule)
            assert math.isnan(row.bound) if bound is None else row.bound == pytest.approx(bound)
            found.append(rule)
    assert {"", "clip_low", "clip_high"} <= set(found)


@pytest.mark.parametrize("variant", ["ppo_clip", "temperature"])
def test_values_before_and_after_the_update_match_transformers(recipe, model_dir, watched_run, variant):
    run_dir, kept = watched_run(recipe, *VARIANTS[variant])
    temperature = temperature_of(VARIANTS[variant])
    _, middle, after = (model_with(model_dir, state) for state in step_of(kept, 2))
    for prompt, rows in sequences(table(run_dir, 2)):
        ids = torch.tensor(rows.token)
        for when, model in (("before", middle), ("after", after)):
            with torch.no_grad():
                every = (logits_of(model, prompt, ids) / temperature).log_softmax(-1)
            close(rows[f"logprob_{when}"], every.gather(-1, ids[:, None])[:, 0])
            close(rows[f"entropy_{when}"], -(every.exp() * every).sum(-1))
            likeliest = every.topk(5)
            assert rows[f"top_{when}"].tolist() == likeliest.indices.tolist()
            close(rows[f"top_{when}_logprob"].explode(), likeliest.values.flatten())


def test_tokens_are_recorded_at_configured_steps_also_after_a_resume(recipe, tmp_path):
    settings = ("--evaluate.every", 0, "--log.tokens", 1, "--log.token_steps", 2)
    assert train(recipe, "--run", tmp_path / "run", *settings) == 0
    assert token_files.list_recorded_steps(tmp_path / "run") == [1, 2, 4, 6]
    assert train("--resume", tmp_path / "run", "--algorithm.steps", 8) == 0
    assert token_files.list_recorded_steps(tmp_path / "run") == [1, 2, 4, 6, 8]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_token_file_states_its_dtype(recipe, tmp_path, dtype):
    settings = ("--evaluate.every", 0, "--algorithm.steps", 1, "--policy.dtype", dtype)
    assert train(recipe, "--run", tmp_path / "run", *settings, "--log.tokens", 1) == 0
    about = json.loads(token_files.read_tokens(tmp_path / "run", 1).schema.metadata[token_files.METADATA_KEY])
    assert about["dtype"] == dtype


# ---------------------------------------------------------------- recording does not affect the run


def own_objective(tmp_path):
    path = tmp_path / "noisy.py"
    path.write_text(
        "import torch\n\ndef noisy(tokens, cfg):\n"
        "    drawn = torch.rand_like(tokens.logprobs)\n"
        "    return tokens.advantages * drawn * (tokens.logprobs - tokens.old_logprobs).exp()\n"
    )
    return f"{path}:noisy"


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["ppo_clip", "own"])
def test_recording_changes_no_bit_of_the_weights(recipe, tmp_path, objective):
    """This includes objectives that draw random numbers."""
    settings = ["--algorithm.objective", own_objective(tmp_path) if objective == "own" else objective]
    for name, more in (("off", ()), ("on", RECORD)):
        assert train(recipe, "--run", tmp_path / name, *settings, *more) == 0
    for name, x in weights(tmp_path / "off").items():
        assert torch.equal(weights(tmp_path / "on")[name], x), name
    assert not (tmp_path / "off" / "tokens").exists()


@pytest.mark.slow
@pytest.mark.parametrize("dies_in_update", [1, 5])
def test_killed_and_resumed_run_has_the_token_files_of_a_whole_one(
    recipe, tmp_path, monkeypatch, undisturbed, dies_in_update
):
    whole, killed = undisturbed(recipe, *RECORD), tmp_path / "killed"
    update, calls = run.grpo.update_policy, []

    def dying(*arguments):
        calls.append(1)
        found = update(*arguments)
        if len(calls) == dies_in_update:
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patched:
        patched.setattr(run.grpo, "update_policy", dying)
        assert train(recipe, "--run", killed, *RECORD) == 130
    token_files.write_tokens(
        killed, 900, {"step": [900], "token": [1]}, {}
    )  # of a step that the resumed run has not taken
    assert train("--resume", killed) == 0
    assert token_files.list_recorded_steps(killed) == token_files.list_recorded_steps(whole) == [1, 2, 3, 4, 5, 6]
    for step in range(1, 7):
        assert token_files.read_tokens(killed, step).equals(token_files.read_tokens(whole, step), check_metadata=True)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_two_processes_write_the_same_records_as_one(recipe, tmp_path, engine):
    """One process has two of the three groups. If they share parameters, both must run as many forward passes."""
    settings = ("--algorithm.steps", 1, "--evaluate.every", 0, "--checkpoint.every", 0, "--log.tokens", 3)
    assert train(recipe, "--run", tmp_path / "one", *settings) == 0
    words = ("--run", tmp_path / "two", *settings, "--runtime.engine", engine)
    in_two_processes("-m", "pellucid", "train", recipe, *words)
    one, two = table(tmp_path / "one", 1), table(tmp_path / "two", 1)
    assert set(one.group) == {0, 1, 2}
    for name in one:
        pd.testing.assert_series_equal(one[name].explode(), two[name].explode(), rtol=2e-3, atol=2e-4)


@pytest.mark.slow
def test_recording_does_not_wait_for_a_process_without_records(recipe, tmp_path):
    """Transformers modules have buffers, which data parallelism synchronizes before a forward pass."""
    settings = ("--algorithm.steps", 2, "--evaluate.every", 0, "--checkpoint.every", 0, "--log.tokens", 1)
    words = ("--run", tmp_path / "two", *settings, "--policy.engine", "transformers", "--runtime.timeout", 20)
    in_two_processes("-m", "pellucid", "train", recipe, *words)
    assert token_files.list_recorded_steps(tmp_path / "two") == [1, 2]


# ---------------------------------------------------------------- groups made by hand


def graded(*rewards):
    return tuple(Reward(value, {"right": value}, value > 0.5) for value in rewards)


def completion(*ids, given=(), branches=(), finished=True):
    inside = {t for start, end in given for t in range(start, end)}
    logprobs = tuple(0.0 if t in inside else -1.5 for t in range(len(ids)))
    return Completion(tuple(ids), logprobs, "", finished, given_spans=given, branches=branches, version=3)


LIVE = Group(
    Prompt("live", "?"),
    (1, 2, 3),
    (
        completion(4, 5, 6, 7, given=((1, 3),)),
        completion(
            8,
            9,
            branches=(
                completion(10, 11, 12, given=((0, 1),)),
                completion(
                    13,
                ),
            ),
        ),
        completion(14, 15, 16),
    ),
    graded(1.0, 0.0, 0.0),
)
DEAD = Group(Prompt("dead", "?"), (2, 2), (completion(4), completion(5, 6), completion(7)), graded(1.0, 1.0, 1.0))
FAILED = Group(
    Prompt("failed", "?"),
    (3,),
    (completion(4, branches=(completion(9),)), completion(5, 6), completion(7, 8, finished=False)),
    (Reward(math.nan, error="ValueError: \ud83d"), *graded(1.0, 0.0)),
)

Parts = namedtuple("Parts", "policy runtime state")


def written(tmp_path, groups, most, lr=0.3, **algorithm):
    """Return the table of one step on these groups, and the policy after it."""
    policy, cfg = (
        make_policy(),
        GRPOConfig(steps=1, prompts_per_step=len(groups), group_size=3, max_length=4, **algorithm),
    )
    runtime, state = OneProcessRuntime(policy, lr), grpo.TrainingState(kl_coef=cfg.kl_coef)
    runtime.max_micro_batch_rows = 0
    runtime.rank, runtime.is_main, runtime.engine = 0, True, namedtuple("Engine", "is_lockstep")(False)

    def step():
        batch = grpo.collate(groups)
        batch = grpo.add_old_and_reference_logprobs(batch, policy, None, runtime, cfg)
        advantages, _ = grpo.compute_advantages(collect_grades(groups), batch, policy, runtime, cfg)
        grpo.update_policy(
            policy, grpo.attach_advantages(batch, collect_grades(groups), advantages, runtime, cfg), runtime, cfg
        )
        state.step = 1
        yield grpo.StepResult(1, {}, grpo.store_group_advantages(groups, advantages))

    config = Config(algorithm=cfg, log=LogConfig(tokens=most))
    [result] = record_steps(step(), config, tmp_path, Parts(policy, runtime, state))
    assert result.metrics["time/record"] > 0
    assert policy.scorer.score_hook is None
    return table(tmp_path, 1), policy


def test_branches_and_given_tokens_are_separate_and_scored_in_context(tmp_path):
    frame, policy = written(tmp_path, [FAILED, LIVE], 2)
    of_live = frame[(frame.group == 1) & (frame.kind != "prompt")]
    shape = of_live.groupby(["completion", "branch"]).token.apply(list).to_dict()
    assert shape == {(0, 0): [4, 5, 6, 7], (1, 0): [8, 9], (1, 1): [10, 11, 12], (1, 2): [13], (2, 0): [14, 15, 16]}
    assert of_live[of_live.completion == 0].kind.tolist() == ["sampled", "given", "given", "sampled"]
    model = policy.model.to(F64)
    for prompt, rows in sequences(frame):
        ids = torch.tensor(rows.token)
        with torch.no_grad():
            every = logits_of(model, prompt, ids).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
        sampled = (rows.kind == "sampled").to_numpy()
        close(rows.logprob_after[sampled], every[torch.tensor(sampled.tolist())])
        given = rows[~sampled]
        assert given.rule.eq("given").all()
        numbers = ["sampler_logprob", "logprob_before", "logprob_after", "ratio", "push", "advantage"]
        assert given[numbers].isna().all(axis=None)
        taught = rows[sampled & (rows.rule != "no_advantage").to_numpy()]
        assert taught[numbers].notna().all(axis=None)


def test_group_without_signal_has_a_reason_and_is_recorded_last(tmp_path):
    """Its rows are not in the update and have no values from it, but they have values after it."""
    frame, _ = written(tmp_path, [DEAD, FAILED, LIVE], 2)
    assert set(frame.prompt_id) == {"failed", "live"}
    frame, _ = written(tmp_path, [DEAD, FAILED, LIVE], 3)
    dead = frame[(frame.prompt_id == "dead") & (frame.kind == "sampled")]
    assert dead.rule.eq("zero_variance").all()
    assert dead[["logprob_start", "logprob_before", "ratio", "push", "weight", "gradient"]].isna().all(axis=None)
    assert dead.logprob_after.notna().all()
    assert dead.advantage.eq(0).all()


@pytest.mark.parametrize("scored", [{}, {"entropy_coef": 0.1}])
def test_group_of_failed_rewards_is_not_recorded_as_zero_variance(tmp_path, scored):
    lost = replace(DEAD, prompt=Prompt("lost", "?"), rewards=(Reward(math.nan, error="no"),) * 3)
    frame, _ = written(tmp_path, [lost, DEAD, LIVE], 3, **scored)
    rules = frame[frame.kind == "sampled"].groupby("prompt_id").rule.unique()
    assert (rules["lost"].tolist(), rules["dead"].tolist()) == (["all_failed"], ["zero_variance"])


def test_group_without_signal_has_update_values_under_entropy_coef(tmp_path):
    frame, _ = written(tmp_path, [DEAD, LIVE], 2, entropy_coef=0.1)
    dead = frame[(frame.prompt_id == "dead") & (frame.kind == "sampled")]
    assert dead.rule.eq("zero_variance").all()
    assert dead[["logprob_before", "ratio", "weight"]].notna().all(axis=None)


def test_rules_name_average_rewards_and_the_overlong_filter(tmp_path):
    even = Group(LIVE.prompt, LIVE.prompt_ids, LIVE.completions, graded(1.0, 0.5, 0.0))
    frame, _ = written(tmp_path, [even, FAILED], 2, overlong_filter=True)
    sampled = frame[frame.kind == "sampled"].set_index(["group", "completion"]).rule
    assert sampled[(0, 1)].eq("no_advantage").all()
    assert sampled[(0, 0)].eq("").all()
    assert sampled[(1, 2)].eq("overlong_filter").all()


def test_response_excluded_by_the_correction_has_that_rule(tmp_path):
    """Its importance weight, the product over all its tokens, exceeds the cap."""
    unlikely = replace(LIVE.completions[2], logprobs=(-9.0,) * 3)
    group = replace(LIVE, completions=(*LIVE.completions[:2], unlikely))
    frame, _ = written(tmp_path, [group], 1, correction="sequence", correction_cap=1.5)
    found = set()
    for _, rows in frame[frame.kind == "sampled"].groupby(["completion", "branch"]):
        weight = math.exp((rows.logprob_start - rows.sampler_logprob).sum())
        out = weight > 1.5
        assert rows.rule.eq("correction" if out else "").all()
        assert rows.importance.tolist() == pytest.approx([0.0 if out else weight] * len(rows), rel=1e-5)
        found.add(out)
    assert found == {True, False}


def test_token_rows_carry_the_reward_and_error_of_their_answer(tmp_path):
    frame, _ = written(tmp_path, [FAILED], 1)
    failed = frame[frame.completion == 0]
    assert failed.reward.isna().all()
    assert failed.correct.isna().all()
    assert failed.error.eq("ValueError: ?").all(), "what cannot be encoded ends no run"
    right = frame[frame.completion == 1].iloc[0]
    assert (right.reward, right.correct, right.finished, right.version) == (1.0, True, True, 3)
    assert json.loads(right.parts) == {"right": 1.0}
    prompt = frame[frame.completion == -1]
    assert prompt.kind.eq("prompt").all()
    assert prompt[["reward", "rule", "advantage"]].isna().all(axis=None)


def test_recorded_rows_are_those_of_the_last_optimizer_step(tmp_path):
    """All rows of a group are recorded, even if micro-batches split it."""
    frame, _ = written(tmp_path, [LIVE, FAILED], 1, epochs=3, micro_batch=2)
    sampled = frame[frame.kind == "sampled"]
    assert set(sampled.prompt_id) == {"live"}
    assert sampled.logprob_before.notna().all()
    assert not sampled.ratio.between(0.99999, 1.00001).any(), "the weights have moved since the rollouts"


def test_replayed_and_demonstration_rows_are_not_recorded():
    fresh = collate([LIVE, FAILED])
    assert fresh.step_row_indices.tolist() == list(range(9))
    joined = concat_batches([fresh, fresh.mark_as_replayed()])
    given = replace(joined, demonstrations=((7, 7), (), (), ()), token_weights=joined.sampler_logprobs)
    shown = append_demonstrations(given, torch.tensor([0, 1]))
    assert shown.step_row_indices.tolist() == [*range(9), *[-1] * 9, -1]
    advantages = torch.ones_like(shown.sampler_logprobs)
    watched = UpdateWatcher(GRPOConfig, 2).select_rows(replace(shown, advantages=advantages))
    assert watched.tolist() == [True] * 9 + [False] * 10
    old = replace(fresh, step_row_indices=None)  # checkpoints of older versions have no indices
    assert concat_batches([fresh, old.mark_as_replayed()]).step_row_indices.tolist() == [*range(9), *[-1] * 9]


@pytest.mark.slow
def test_row_outside_the_update_has_no_values_of_the_previous_step(recipe, tmp_path):
    """Step 1 has a signal and step 2 has none. The update then keeps only the first row, as it needs one."""
    path = tmp_path / "fading.py"
    path.write_text(
        "from dataclasses import dataclass\nfrom pellucid.types import Prompt, Reward\n\n\n"
        "@dataclass(frozen=True)\nclass Fading:\n    seed: int = 0\n    split: str = 'train'\n\n"
        "    def sample(self, step, n):\n        return [Prompt(f'{step % 2}/{i}', 'ab') for i in range(n)]\n\n"
        "    def reward(self, prompt, completion):\n"
        "        return Reward(float(prompt.id[0] == '0') * len(set(completion.text)))\n"
    )
    settings = ("--algorithm.steps", 2, "--algorithm.kl_coef", 0, "--evaluate.every", 0, "--log.tokens", 1)
    lines = recipe.read_text().splitlines()
    recipe.write_text("\n".join(f'name = "{path}:Fading"' if "digits_task" in line else line for line in lines))
    assert train(recipe, "--run", tmp_path / "run", *settings) == 0
    before = [table(tmp_path / "run", step).query("completion > 0").logprob_before for step in (1, 2)]
    assert before[0].notna().any()
    assert before[1].isna().all()
