"""Test reward models: batched values must equal those of transformers, one row at a time without padding."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from conftest import CHARACTERS, VOCAB, character_tokenizer, records, tiny_llama
from pellucid.config import Config, PolicyConfig, load_config
from pellucid.distributed.settings import RuntimeConfig
from pellucid.rewards.grading import collect_grader_notices
from pellucid.rewards.parts import RewardPart
from pellucid.rewards.reward_model import RewardModel, build_part, compute_weights_gb
from pellucid.rewards.settings import RewardModelSettings
from pellucid.rewards.terms import RewardTerm, label_terms
from pellucid.serve import api
from pellucid.tasks.arithmetic import Arithmetic
from pellucid.tasks.curriculum import Curriculum
from pellucid.tasks.dataset import Dataset
from pellucid.training import memory
from pellucid.types import Completion, Prompt, UserError
from runs import answered, train
from tiny_families import FAMILIES, SMALL, checkpoint

CHAT = "{% for m in messages %}{{ '=' + m['content'] + ('*' if m['role'] == 'assistant' else '+') }}{% endfor %}"
KINDS = ["llama", "qwen2", "gemma2", "gpt2", "bert", "modernbert", "roberta"]
ANSWERS = ["7", "", "abc 12 + 3 = 15?", "12345678901234567890 - 3", "7", "a" * 40, "a!", "b = 0"]
"""Two answers are equal, and one ends in an unknown token, which is also the padding token."""


def classifier(kind, folder, labels=1, template=CHAT, tokenizer=None, **settings):
    """Save a random sequence classifier with its tokenizer, and return the folder."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **{**SMALL, **FAMILIES.get(kind, {}), "num_labels": labels, **settings})
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    words = tokenizer or character_tokenizer()
    words.chat_template = template
    words.save_pretrained(folder)
    return str(folder)


def completion(text):
    return Completion((1,), (0.0,), text, True)


def plain(answers=ANSWERS, question="1 + 2?"):
    return [(Prompt("p", question), completion(answer)) for answer in answers]


def conversation(answers=ANSWERS):
    messages = ({"role": "system", "content": "abc"}, {"role": "user", "content": "1 + 2?"})
    return [(Prompt("p", messages), completion(answer)) for answer in answers]


def alone(folder, pairs):
    """Return the logits [rows, labels] of transformers, one row at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    words = AutoTokenizer.from_pretrained(folder)
    told = {"return_tensors": "pt", "return_dict": True}
    rows = []
    for prompt, answer in pairs:
        if isinstance(prompt.text, str):
            encoded = words(prompt.text + answer.text, return_tensors="pt")
        else:
            messages = [*prompt.text, {"role": "assistant", "content": answer.text}]
            encoded = words.apply_chat_template(messages, **told)
        with torch.no_grad():
            rows.append(model(**encoded).logits[0])
    return torch.stack(rows)


def graded(folder, pairs, **settings):
    return RewardModel(folder, RewardModelSettings(device="cpu", **settings)).grade(pairs)


def values(parts):
    assert [part.error for part in parts] == [""] * len(parts)
    return torch.tensor([part.value for part in parts])


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def refused(source, **settings):
    with pytest.raises(UserError) as error:
        RewardModel(str(source), RewardModelSettings(**settings))
    message = str(error.value)
    assert message.startswith(f'reward "model:{source}"')
    assert "\n" not in message
    return message


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_values_match_transformers_for_every_batch_size(kind, batch, tmp_path):
    folder = classifier(kind, tmp_path)
    for pairs in (plain(), conversation()):
        close(values(graded(folder, pairs, batch=batch)), alone(folder, pairs)[:, 0])


@pytest.mark.parametrize("pad", [None, -1, 3])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_value_is_that_of_the_last_token_for_every_padding(kind, pad, tmp_path):
    """Without pad_token_id, transformers reads one row at a time and treats no token as padding."""
    folder = classifier(kind, tmp_path, pad_token_id=None)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"pad_token_id": pad}))
    pairs = plain(["2" * n + end for n in range(4) for end in "0123!"])
    read, calls = RewardModel(folder, RewardModelSettings(device="cpu", batch=20)), []
    read._model.register_forward_hook(lambda *_: calls.append(1))
    close(values(read.grade(pairs)), alone(folder, pairs)[:, 0])
    assert len(calls) == 1, "they are read together"


def test_special_tokens_come_from_tokenizer_or_chat_template(tmp_path):
    words = character_tokenizer()
    words.backend_tokenizer.post_processor = TemplateProcessing(
        single="k $A k", special_tokens=[("k", words.convert_tokens_to_ids("k"))]
    )
    folder = classifier("bert", tmp_path, tokenizer=words)
    read = RewardModel(folder, RewardModelSettings())
    assert words("12")["input_ids"] == words("k12k", add_special_tokens=False)["input_ids"]
    close(values(read.grade(plain())), alone(folder, plain())[:, 0])
    [text, told] = ["k1 + 2?7k", "=abc+=1 + 2?+=7*"]
    without = [tuple(words(each, add_special_tokens=False)["input_ids"]) for each in (text, told)]
    assert [read._tokenize(*pairs[0]) for pairs in (plain(), conversation())] == without


def test_equal_completions_have_exactly_equal_values(tmp_path):
    """Otherwise rounding errors, divided by their standard deviation, would become advantages."""
    folder = classifier("llama", tmp_path)
    parts = graded(folder, plain(["7", *("1" * n for n in range(30)), "7"]), batch=4)
    assert parts[0].value == parts[-1].value


def test_label_defaults_to_the_first_and_can_be_chosen(tmp_path):
    folder = classifier("llama", tmp_path, labels=3)
    expected = alone(folder, plain())
    close(values(graded(folder, plain())), expected[:, 0])
    close(values(graded(folder, plain(), label=2)), expected[:, 2])


def test_dtype_defaults_to_the_saved_one_and_can_be_chosen(tmp_path):
    folder = classifier("llama", tmp_path, dtype="bfloat16")
    assert RewardModel(folder, RewardModelSettings())._model.dtype == torch.bfloat16
    wide = values(graded(folder, plain(), dtype="float32"))
    assert not torch.equal(wide, values(graded(folder, plain())))
    assert not torch.equal(wide, wide.bfloat16().float())


@pytest.mark.filterwarnings("ignore")
def test_values_match_trl(tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    folder = classifier("llama", tmp_path / "rewards")
    tiny_llama().save_pretrained(tmp_path / "policy")
    character_tokenizer().save_pretrained(tmp_path / "policy")
    trainer = trl.GRPOTrainer(
        str(tmp_path / "policy"),
        reward_funcs=folder,
        args=trl.GRPOConfig(str(tmp_path), report_to=[], use_cpu=True, bf16=False),
        train_dataset=datasets.Dataset.from_list([{"prompt": "1"}]),
    )
    for pairs in (plain(), conversation()):
        prompts = [prompt.text if isinstance(prompt.text, str) else list(prompt.text) for prompt, _ in pairs]
        answers = [
            answer.text if isinstance(prompt.text, str) else [{"role": "assistant", "content": answer.text}]
            for prompt, answer in pairs
        ]
        theirs = trainer._calculate_rewards([{"prompt": prompt} for prompt in prompts], prompts, answers, None)
        close(values(graded(folder, pairs)), theirs[:, 0])


# ---------------------------------------------------------------- errors of single completions


def test_non_finite_value_fails_only_its_completion(tmp_path):
    folder = classifier("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][character_tokenizer().convert_tokens_to_ids("k")] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    good, bad, other = graded(folder, plain(["7", "k", "12"]))
    assert (bad.value, bad.error) == (None, "its logit is nan")
    close(values([good, other]), alone(folder, plain(["7", "12"]))[:, 0])


@pytest.mark.parametrize("logit", [torch.inf, -torch.inf, torch.nan])
def test_non_finite_logit_is_an_error(logit):
    assert build_part(logit) == RewardPart(error=f"its logit is {logit}")
    assert build_part(-2.5) == RewardPart(-2.5)


class Cramped(SimpleNamespace):
    """A model that runs out of memory beyond `room` tokens and raises if a row begins with token 9."""

    def __call__(self, input_ids, attention_mask):
        self.read.append(tuple(input_ids.shape))
        if input_ids.numel() > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")
        if (input_ids[:, 0] == 9).any():
            raise ValueError("no nines")
        return self.model(input_ids=input_ids, attention_mask=attention_mask)


def test_other_rows_are_read_if_one_raises_or_runs_out_of_memory(tmp_path):
    folder = classifier("llama", tmp_path)
    read = RewardModel(folder, RewardModelSettings())
    model = read._model
    read._model = Cramped(model=model, config=model.config, device=model.device, room=30, read=[])
    texts = [*("1" * n for n in range(1, 9)), "9", "1" * 31, "2"]
    parts = read.grade([(Prompt("p", ""), completion(text)) for text in texts])
    nines, large = parts.pop(8), parts.pop(8)
    assert nines.error == "ValueError: no nines"
    assert large.error == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    fine = [(Prompt("p", ""), completion(text)) for text in [*texts[:8], "2"]]
    close(values(parts), alone(folder, fine)[:, 0])
    assert max(read._model.read) == (11, 31), "all at once at first"


def test_sequence_beyond_the_token_limit_is_an_error(tmp_path):
    folder = classifier("gpt2", tmp_path)
    fits, beyond = graded(folder, plain(["1" * 122, "1" * 123]))
    assert (fits.error, beyond.error) == ("", "129 tokens are more than the 128 that it reads")
    assert [bool(part.error) for part in graded(folder, plain(["11", "111"]), max_tokens=8)] == [False, True]


def test_empty_text_and_token_id_beyond_embedding_are_errors(tmp_path):
    folder = classifier("llama", tmp_path, tokenizer=character_tokenizer(CHARACTERS + "n"))
    pairs = [(Prompt("p", ""), completion(text)) for text in ("", "!", "7n")]
    nothing, beyond, read = graded(folder, pairs)
    assert nothing.error == "the text has no tokens"
    assert beyond.error == f"its tokenizer produced token id {VOCAB}, but its embedding has {VOCAB} entries"
    close(values([read]), alone(folder, pairs[2:])[:, 0])


def test_a_model_reads_all_turns_of_a_conversation(tmp_path):
    """The template does not know tool results, so they are user messages, as for policies."""
    folder = classifier("llama", tmp_path)
    prompt = conversation(["7"])[0][0]
    turns = [("assistant", "1"), ("user", "2?"), ("assistant", "3")]
    said = tuple({"role": role, "content": content} for role, content in turns)
    heard = ({"role": "tool", "name": "f", "content": "2?"},)
    pairs = [
        (prompt, replace(completion("3"), messages=messages))
        for messages in (said, (said[0], *heard, said[2]), said[2:])
    ]
    found = values(graded(folder, pairs))
    told = {"role": "user", "content": "<tool_response>\n2?\n</tool_response>"}
    whole = [[*prompt.text, *said], [*prompt.text, said[0], told, said[2]], [*prompt.text, said[2]]]
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    words = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        encoded = [words.apply_chat_template(each, return_tensors="pt", return_dict=True) for each in whole]
        close(found, torch.cat([model(**each).logits[0] for each in encoded]))


def test_conversation_refused_by_the_template_is_an_error(tmp_path):
    strict = "{{ raise_exception('no system here') if messages[0]['role'] == 'system' else messages[0]['content'] }}"
    folder = classifier("llama", tmp_path, template=strict)
    user = Prompt("p", ({"role": "user", "content": "1"},))
    refused, read = graded(folder, [*conversation(["7"]), (user, completion("7"))])
    assert refused.error == "TemplateError: no system here"
    assert not read.error


# ---------------------------------------------------------------- invalid models and settings


def test_a_conversation_needs_a_template(tmp_path):
    folder = classifier("llama", tmp_path, template=None)
    [read, refused] = graded(folder, [*plain(["7"]), *conversation(["7"])])
    close(values([read]), alone(folder, plain(["7"]))[:, 0])
    assert refused.error.startswith("its tokenizer has no chat template, and the prompt is a conversation: set chat =")


@pytest.mark.parametrize("kind", ["llama", "llama, without its head"])
def test_language_model_without_a_score_head_is_refused(kind, tmp_path):
    checkpoint(kind, tmp_path)
    assert "has no weights for score.weight, which LlamaForSequenceClassification needs" in refused(tmp_path)


def test_architecture_without_classifier_is_refused_before_loading(tmp_path):
    checkpoint("clip_text", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "transformers has no classifier of the architecture clip_text_model" in refused(tmp_path)


def test_settings_that_do_not_fit_the_model_are_refused(tmp_path):
    folder = classifier("llama", tmp_path, labels=2)
    assert "reward_model.label = 2: its labels are 0 LABEL_0, 1 LABEL_1" in refused(folder, label=2)
    assert "reward_model.max_tokens = 129: it reads 128 at most" in refused(folder, max_tokens=129)
    assert "reward_model.revision = 'v1' is for models of the Hub: omit it" in refused(folder, revision="v1")
    with pytest.raises(UserError, match=r'reward_model\.device = "tpu7"'):
        RewardModel(folder, RewardModelSettings(device="tpu7"))


def test_unknown_folders_and_hub_ids_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    classifier("llama", tmp_path / "rewards")
    assert f'there is no such folder; did you mean "{tmp_path}/rewards"?' in refused(tmp_path / "reward")
    (tmp_path / "empty").mkdir()
    assert "is a folder without config.json" in refused(tmp_path / "empty")
    assert "give a folder with config.json and safetensors, or a Hub id that is reachable" in refused("nobody/nothing")


def test_remote_code_and_unreadable_weights_are_refused(tmp_path):
    folder = classifier("llama", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    assert "cannot be loaded (" in refused(folder)
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    assert "read it, then set reward_model.trust_remote_code" in refused(folder)


# ---------------------------------------------------------------- recipes, runs, and memory


@pytest.mark.parametrize(("dtype", "share"), [("auto", 1.0), ("bfloat16", 0.5)])
def test_plan_counts_weights_in_the_configured_dtype(dtype, share, tmp_path):
    folder = classifier("qwen2", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    size = sum(w.numel() * 4 for w in weights.values()) / 1e9
    assert compute_weights_gb(folder, RewardModelSettings(dtype=dtype)) == pytest.approx(size * share)


def test_reward_model_settings_are_read_from_a_recipe(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"question": "1?"}\n{"question": "2?"}\n')
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        f'[task]\nname = "dataset"\ndata = "{tmp_path}/data.jsonl"\n[[task.rewards]]\nname = "model:{tmp_path}/rm"\n'
        "[task.rewards.reward_model]\nbatch = 4\n[[task.rewards]]\nname = 'model:some/rm'\n"
    )
    terms = load_config(recipe).task.rewards
    assert [term.reward_model for term in terms] == [RewardModelSettings(batch=4), None]
    assert label_terms(terms) == ["rm", "rm-2"]


@pytest.mark.slow
def test_run_resumed_from_another_folder_matches_transformers(tmp_path, model_dir, monkeypatch):
    """The reward is twice the value of the reward model, plus a term that a reward process computes."""
    classifier("llama", tmp_path / "here" / "rm")
    rows = "".join(f'{{"question": "{n} + 1?"}}\n' for n in range(20))
    (tmp_path / "here" / "data.jsonl").write_text(rows)
    recipe = tmp_path / "here" / "r.toml"
    recipe.write_text(
        f"""
        [policy]
        model = "{model_dir}"
        dtype = "float32"
        [sampler]
        max_tokens = 6
        [algorithm]
        steps = 2
        prompts_per_step = 2
        group_size = 4
        [evaluate]
        every = 0
        [checkpoint]
        every = 1
        [task]
        name = "dataset"
        data = "data.jsonl"
        chat = false
        [[task.rewards]]
        name = "model:rm"
        weight = 2.0
        reward_model = {{ batch = 3, device = "cpu" }}
        [[task.rewards]]
        name = "length"
        limit = 6
        """
    )
    monkeypatch.chdir(tmp_path / "here")
    assert train(recipe, "--run", tmp_path / "run") == 0
    monkeypatch.chdir(tmp_path)
    assert train("--resume", tmp_path / "run", "--algorithm.steps", 3) == 0
    rows = records(tmp_path / "run" / "rollouts.jsonl")
    assert [row["step"] for row in rows] == [1] * 8 + [2] * 8 + [3] * 8
    pairs = [(Prompt("p", row["prompt"]), completion(row["completion"])) for row in rows]
    found = torch.tensor([row["parts"]["rm"] for row in rows])
    close(found, alone(tmp_path / "here" / "rm", pairs)[:, 0])
    lengths = torch.tensor([row["parts"]["length"] for row in rows])
    close(torch.tensor([row["reward"] for row in rows]), 2 * found + lengths)
    assert all("reward/rm" in row for row in records(tmp_path / "run" / "metrics.jsonl"))
    assert answered("eval", tmp_path / "run", "--evaluate.n", 2, "--output", tmp_path / "answers.jsonl") == 0
    answers = records(tmp_path / "answers.jsonl")
    pairs = [(Prompt("p", row["question"]), completion(row["answer"])) for row in answers]
    close(torch.tensor([row["parts"]["rm"] for row in answers]), alone(tmp_path / "here" / "rm", pairs)[:, 0])


def test_the_service_of_a_run_grades_with_its_reward_model(tmp_path):
    folder = classifier("llama", tmp_path)
    (tmp_path / "data.jsonl").write_text('{"question": "1?"}\n{"question": "2?"}\n')
    term = RewardTerm(f"model:{folder}", weight=3.0, reward_model=RewardModelSettings(device="cpu"))
    task = api.make_graded_task(Config(task=Dataset(data=str(tmp_path / "data.jsonl"), rewards=(term,))))
    found = torch.tensor([reward.value for reward in task.reward_all(plain())])
    close(found / 3, alone(folder, plain())[:, 0])


def test_notice_names_remote_code_that_will_run():
    trusted = RewardModelSettings(trust_remote_code=True)
    task = Dataset(data="d.jsonl", rewards=(RewardTerm("exact"), RewardTerm("model:some/rm", reward_model=trusted)))
    assert collect_grader_notices(task) == [
        "reward_model.trust_remote_code: Python code of some/rm runs with your permissions"
    ]
    assert collect_grader_notices(Curriculum(task=task)) == collect_grader_notices(task)
    assert collect_grader_notices(Dataset(data="d.jsonl", rewards=(RewardTerm("model:some/rm"),))) == []
    assert collect_grader_notices(Arithmetic()) == []


def test_memory_estimate_counts_reward_models_on_the_same_device(tmp_path):
    folder = classifier("llama", tmp_path)
    size = sum(w.numel() * 4 for w in load_file(tmp_path / "model.safetensors").values()) / 1e9
    here, there = (RewardTerm(f"model:{folder}", reward_model=RewardModelSettings(device=d)) for d in ("cpu", "meta"))
    for terms, expected in (((here, there), size), ((here, here), 2 * size)):
        cfg = Config(policy=PolicyConfig(device="cpu"), task=Dataset(data="d.jsonl", rewards=terms))
        assert memory.estimate_reward_models(cfg) == {"reward model": pytest.approx(expected)}
    without = replace(cfg, task=Dataset(data="d.jsonl", rewards=(there,)))
    assert memory.estimate_reward_models(without) == {}
    model = memory.ModelFacts(tiny_llama().config, 10**9, 10**9)
    for engine in ("ddp", "fsdp2"):  # at the update, and with a sharded model
        peaks = [
            memory.estimate_peak(model, replace(each, runtime=RuntimeConfig(engine)), 64) for each in (cfg, without)
        ]
        assert peaks[0] - peaks[1] == pytest.approx(2 * size)


@pytest.mark.parametrize(
    ("term", "told"),
    [
        ({"name": "model:"}, 'reward "model:" is unknown'),
        ({"name": "exact", "reward_model": RewardModelSettings()}, 'only "model:FOLDER_OR_HUB_ID" has one'),
        ({"name": "model:rm", "pattern": "x"}, "only regex takes one, and requires it"),
    ],
)
def test_invalid_terms_raise_value_error(term, told):
    with pytest.raises(ValueError, match=told):
        RewardTerm(**term)


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"max_tokens": -1}, {"label": -1}])
def test_invalid_settings_raise_value_error(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RewardModelSettings(**wrong)
