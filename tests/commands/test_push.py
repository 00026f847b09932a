"""The Hub's requests, answered by a stand-in: what arrives there, what the card says, and what is refused in a line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

import hub
from conftest import records, tiny_recipe
from pellucid.policy.packaged import PACKAGED_MODELS
from pellucid.share import push_to_hub
from pellucid.types import UserError
from runs import train

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")  # its own way to send LFS


@pytest.fixture(scope="module")
def trained(tmp_path_factory, model_dir):
    """A finished run of a tiny model, and its recipe, in a folder of their own."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = tiny_recipe(folder / "tiny.toml", model_dir)
    enough = ["--evaluate.n", "12"]  # for intervals
    assert train(recipe, "--run", folder / "run", "--algorithm.steps", "2", "--log.no-tensorboard", *enough) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, model_dir):
    """A finished run of an adapter on that model."""
    folder = tmp_path_factory.mktemp("adapted")
    recipe = tiny_recipe(folder / "tiny.toml", model_dir)
    few = ["--algorithm.steps", "1", "--evaluate.every", "0", "--log.no-tensorboard"]
    assert train(recipe, "--run", folder / "run", "--policy.lora", "2", *few) == 0
    return folder / "run"


@pytest.fixture
def online(monkeypatch):
    """The stand-in, to which huggingface_hub now speaks, logged in."""
    with hub.serving() as standin:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", standin.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # it takes plain LFS
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", hub.TOKEN)
        yield standin


def card_of(standin, repo_id="me/tiny"):
    return ModelCard(standin.files[f"{repo_id}/README.md"].decode())


def recipe_in(card):
    return card.text.partition("```toml\n")[2].partition("```")[0]


# ---------------------------------------------------------------- what arrives


@pytest.mark.slow
def test_every_file_of_the_model_arrives_as_it_is_in_one_commit(trained, online, capsys):
    assert push_to_hub(trained, "me/tiny") == 0
    sent = {f"me/tiny/{path.name}": path.read_bytes() for path in (trained / "model").iterdir()}
    readme = online.files.pop("me/tiny/README.md")
    assert online.files == sent and readme
    assert any(name.endswith("model.safetensors") for name in sent) and online.stored
    assert [commit["summary"] for commit in online.commits] == ["Model trained by Pellucid, with its card"]
    assert online.private == {"me/tiny": False}
    assert f"{online.url}/me/tiny" in capsys.readouterr().out


@pytest.mark.slow
def test_an_adapter_has_a_folder_of_its_own_and_names_its_base_as_the_card_does(adapted, model_dir, online):
    push_to_hub(adapted, "me/tiny")
    sent = json.loads(online.files["me/tiny/adapter/adapter_config.json"])
    kept = json.loads((adapted / "adapter" / "adapter_config.json").read_text())
    assert kept["base_model_name_or_path"] == str(model_dir)
    assert sent == {**kept, "base_model_name_or_path": model_dir.name}
    weights = adapted / "adapter" / "adapter_model.safetensors"
    assert online.files["me/tiny/adapter/adapter_model.safetensors"] == weights.read_bytes()
    assert f"\n{model_dir.name}, trained" in card_of(online).text


@pytest.mark.parametrize(
    ("base", "told"), [*((name, model.hub_id) for name, model in PACKAGED_MODELS.items()), ("me/base", "me/base")]
)
def test_the_base_of_an_adapter_has_its_id_on_the_hub(base, told, adapted, online, tmp_path):
    run_dir = shutil.copytree(adapted, tmp_path / "run")
    settings = run_dir / "adapter" / "adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"base_model_name_or_path": base}))
    push_to_hub(run_dir, "me/tiny")
    assert json.loads(online.files["me/tiny/adapter/adapter_config.json"])["base_model_name_or_path"] == told


def test_a_card_of_peft_is_neither_kept_nor_uploaded(adapted, online, tmp_path):
    run_dir = shutil.copytree(adapted, tmp_path / "run")
    assert not list(run_dir.rglob("README.md"))
    (run_dir / "adapter" / "README.md").write_text("of a run of an earlier version")
    push_to_hub(run_dir, "me/tiny")
    assert "me/tiny/adapter/README.md" not in online.files


def test_a_second_push_leaves_nothing_of_the_model_before(trained, adapted, online):
    """What is no part of a model stays, and so does what is of this one, though it be unchanged."""
    push_to_hub(adapted, "me/tiny")
    shards = {f"me/tiny/model-0000{i}-of-00002.safetensors": b"old" for i in (1, 2)}
    index, mine = {"me/tiny/model.safetensors.index.json": b"{}"}, {"me/tiny/LICENSE": b"MIT", "me/tiny/model.png": b""}
    online.files |= shards | index | mine
    push_to_hub(trained, "me/tiny")
    assert online.files.keys() == {
        "me/tiny/README.md",
        *mine,
        *(f"me/tiny/{path.name}" for path in (trained / "model").iterdir()),
    }
    assert len(online.commits) == 2
    before = set(online.files)
    push_to_hub(adapted, "me/tiny")
    push_to_hub(adapted, "me/tiny")
    assert online.files.keys() == before | {f"me/tiny/adapter/{path.name}" for path in (adapted / "adapter").iterdir()}


def test_private_is_private_and_what_is_there_already_is_added_to(trained, online):
    push_to_hub(trained, "me/tiny", private=True)
    assert online.private == {"me/tiny": True}
    push_to_hub(trained, "me/tiny")
    assert len(online.commits) == 2 and online.private == {"me/tiny": True}


def test_nothing_private_goes_into_a_public_repository(trained, online):
    push_to_hub(trained, "me/tiny")
    before = dict(online.files)
    with pytest.raises(UserError, match="already exists and is public"):
        push_to_hub(trained, "me/tiny", private=True)
    assert len(online.commits) == 1 and online.files == before


def test_a_dry_run_asks_nobody_and_shows_the_card(trained, online, capsys):
    push_to_hub(trained, "me/tiny", dry_run=True)
    shown = capsys.readouterr().out
    assert not online.requests
    push_to_hub(trained, "me/tiny")
    assert online.files["me/tiny/README.md"].decode() in shown and "model.safetensors" in shown


# ---------------------------------------------------------------- the card


def test_the_numbers_of_the_card_are_those_of_the_evaluations(trained, online):
    push_to_hub(trained, "me/tiny")
    card = card_of(online)
    first, *_, last = records(trained / "evals.jsonl")
    measured = {result.metric_name: result for result in card.data.eval_results}
    assert measured["greedy accuracy"].metric_value == last["greedy"]["value"]
    assert measured["mean@2"].metric_value == last["mean@k"]["value"]
    assert measured["mean@2"].metric_args["low"] == last["mean@k"]["low"]
    assert {result.dataset_split for result in measured.values()} == {"test"}
    [row] = [line for line in card.text.splitlines() if line.startswith("| mean@2 |")]
    for evaluation in (first, last):
        value, low, high = (evaluation["mean@k"][name] for name in ("value", "low", "high"))
        assert f"{value:.3f} [{low:.2f}, {high:.2f}]" in row


def test_the_card_says_what_the_hub_sorts_by(trained, online):
    push_to_hub(trained, "me/tiny")
    data = card_of(online).data
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    assert {"grpo", "pellucid", "reinforcement-learning"} <= set(data.tags)
    assert data.base_model is None  # a folder of this machine has no id there


def test_the_card_says_which_versions_and_files_it_was(trained, online):
    push_to_hub(trained, "me/tiny")
    text, known = card_of(online).text, json.loads((trained / "config.json").read_text())
    for name, version in known["versions"].items():
        assert f"| {name} | `{version}` |" in text
    [digest] = known["digests"].values()
    assert f"| `task.name` | `digits_task.py:Digits` | `{digest}` |" in text
    assert known["git"] in text and "2 steps of 4 prompts x 4 completions" in text and "seed 0" in text


@pytest.mark.parametrize("run", ["trained", "adapted"])
def test_no_folder_of_this_machine_is_told(run, model_dir, online, request):
    run_dir = request.getfixturevalue(run)
    push_to_hub(run_dir, "me/tiny")
    texts = {name: content.decode() for name, content in online.files.items() if not name.endswith(".safetensors")}
    assert {"README.md", "config.json"} <= {Path(name).name for name in texts}
    for place in (str(run_dir.parent), str(model_dir.parent), str(Path(hub.__file__).parent)):
        assert not [name for name, text in texts.items() if place in text]
    assert str(Path(hub.__file__).parent) in (run_dir / "config.json").read_text()


# ---------------------------------------------------------------- what is refused, in a line


@pytest.mark.parametrize("name", ["tiny", "me/tiny/model", "me/ti ny", "me/tiny.git", "/tiny"])
def test_a_name_that_no_repository_can_have(name, trained, online):
    with pytest.raises(UserError, match=f'^push to "{name}": '):
        push_to_hub(trained, name)
    assert not online.requests


def test_what_is_no_run_and_the_one_that_was_meant(trained, online):
    with pytest.raises(UserError, match=r'rnu is not a run folder: .*did you mean ".*run"\?'):
        push_to_hub(trained.parent / "rnu", "me/tiny")
    assert not online.requests


@pytest.mark.parametrize("lacks", ["model", "evaluation"])
def test_a_run_that_is_not_finished(lacks, trained, online, tmp_path):
    run_dir = shutil.copytree(trained, tmp_path / "run")
    if lacks == "model":
        shutil.rmtree(run_dir / "model")
    else:
        (run_dir / "evals.jsonl").write_text((run_dir / "evals.jsonl").read_text().splitlines(keepends=True)[0])
    with pytest.raises(UserError, match=f"finish it with pellucid train --resume {run_dir}"):
        push_to_hub(run_dir, "me/tiny")
    assert not online.requests


def test_nobody_is_logged_in(trained, online, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"hf auth login, or set HF_TOKEN"):
        push_to_hub(trained, "me/tiny")
    assert not online.requests


def test_a_token_that_the_hub_does_not_know(trained, online, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_of_yesterday")
    with pytest.raises(UserError, match=r"answers 401: .*; hf auth login") as refused:
        push_to_hub(trained, "me/tiny")
    assert "hf_of_yesterday" not in str(refused.value)


def test_the_namespace_of_somebody_else(trained, online):
    with pytest.raises(UserError, match=r"answers 403: .*rights to create a model under you.*your own"):
        push_to_hub(trained, "you/tiny")
    assert not online.files


@pytest.mark.parametrize(
    ("path", "status"), [("/lfs/", 400), ("/api/models/me/tiny/commit", 500), ("/api/models/me/tiny/preupload", 413)]
)
def test_the_hub_fails_half_way(path, status, trained, online):
    online.fails[path] = status
    with pytest.raises(UserError, match=r"^push to me/tiny: .*as the test asks for") as refused:
        push_to_hub(trained, "me/tiny")
    assert "\n" not in str(refused.value) and not online.files
    online.fails.clear()
    assert push_to_hub(trained, "me/tiny") == 0


def test_the_hub_cannot_be_reached(trained, online, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"the Hugging Face Hub cannot be reached: .*refused"):
        push_to_hub(trained, "me/tiny")


def test_the_network_is_forbidden(trained, online, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"cannot be reached: .*unset .*HF_HUB_OFFLINE"):
        push_to_hub(trained, "me/tiny")
