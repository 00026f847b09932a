"""Test `pellucid push` against a stand-in of the Hub: uploaded files, the model card, and refusals."""

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

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")  # huggingface_hub's LFS upload


@pytest.fixture(scope="module")
def trained(tmp_path_factory, model_dir):
    """Return the folder of a finished run of a tiny model."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = tiny_recipe(folder / "tiny.toml", model_dir)
    enough = ["--evaluate.n", "12"]  # enough for confidence intervals
    assert train(recipe, "--run", folder / "run", "--algorithm.steps", "2", "--log.no-tensorboard", *enough) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, model_dir):
    """Return the folder of a finished run that trained an adapter."""
    folder = tmp_path_factory.mktemp("adapted")
    recipe = tiny_recipe(folder / "tiny.toml", model_dir)
    few = ["--algorithm.steps", "1", "--evaluate.every", "0", "--log.no-tensorboard"]
    assert train(recipe, "--run", folder / "run", "--policy.lora", "2", *few) == 0
    return folder / "run"


@pytest.fixture
def online(monkeypatch):
    """Yield the stand-in of the Hub, with huggingface_hub logged in to it."""
    with hub.serving() as standin:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", standin.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # the stand-in takes plain LFS
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", hub.TOKEN)
        yield standin


def card_of(standin, repo_id="me/tiny"):
    return ModelCard(standin.files[f"{repo_id}/README.md"].decode())


def recipe_in(card):
    return card.text.partition("```toml\n")[2].partition("```")[0]


# ---------------------------------------------------------------- uploads


@pytest.mark.slow
def test_push_uploads_every_model_file_in_one_commit(trained, online, capsys):
    assert push_to_hub(trained, "me/tiny") == 0
    sent = {f"me/tiny/{path.name}": path.read_bytes() for path in (trained / "model").iterdir()}
    readme = online.files.pop("me/tiny/README.md")
    assert online.files == sent and readme
    assert any(name.endswith("model.safetensors") for name in sent) and online.stored
    assert [commit["summary"] for commit in online.commits] == ["Model trained by Pellucid, with its card"]
    assert online.private == {"me/tiny": False}
    assert f"{online.url}/me/tiny" in capsys.readouterr().out


@pytest.mark.slow
def test_adapter_has_its_own_folder_and_names_its_base_model(adapted, model_dir, online):
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
def test_base_model_of_an_adapter_is_a_hub_id(base, told, adapted, online, tmp_path):
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


def test_second_push_removes_files_of_the_previous_model(trained, adapted, online):
    """Files that are not part of a model stay, and so do unchanged files of the new model."""
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


def test_private_push_creates_a_private_repository_that_is_reused(trained, online):
    push_to_hub(trained, "me/tiny", private=True)
    assert online.private == {"me/tiny": True}
    push_to_hub(trained, "me/tiny")
    assert len(online.commits) == 2 and online.private == {"me/tiny": True}


def test_private_push_to_a_public_repository_is_refused(trained, online):
    push_to_hub(trained, "me/tiny")
    before = dict(online.files)
    with pytest.raises(UserError, match="already exists and is public"):
        push_to_hub(trained, "me/tiny", private=True)
    assert len(online.commits) == 1 and online.files == before


def test_dry_run_sends_no_request_and_prints_the_card(trained, online, capsys):
    push_to_hub(trained, "me/tiny", dry_run=True)
    shown = capsys.readouterr().out
    assert not online.requests
    push_to_hub(trained, "me/tiny")
    assert online.files["me/tiny/README.md"].decode() in shown and "model.safetensors" in shown


# ---------------------------------------------------------------- the card


def test_card_reports_the_numbers_of_the_evaluations(trained, online):
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


def test_card_metadata_has_library_pipeline_and_tags(trained, online):
    push_to_hub(trained, "me/tiny")
    data = card_of(online).data
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    assert {"grpo", "pellucid", "reinforcement-learning"} <= set(data.tags)
    assert data.base_model is None  # a local folder has no id on the Hub


def test_card_lists_versions_file_digests_and_settings(trained, online):
    push_to_hub(trained, "me/tiny")
    text, known = card_of(online).text, json.loads((trained / "config.json").read_text())
    for name, version in known["versions"].items():
        assert f"| {name} | `{version}` |" in text
    [digest] = known["digests"].values()
    assert f"| `task.name` | `digits_task.py:Digits` | `{digest}` |" in text
    assert known["git"] in text and "2 steps of 4 prompts x 4 completions" in text and "seed 0" in text


@pytest.mark.parametrize("run", ["trained", "adapted"])
def test_uploaded_files_name_no_local_folder(run, model_dir, online, request):
    run_dir = request.getfixturevalue(run)
    push_to_hub(run_dir, "me/tiny")
    texts = {name: content.decode() for name, content in online.files.items() if not name.endswith(".safetensors")}
    assert {"README.md", "config.json"} <= {Path(name).name for name in texts}
    for place in (str(run_dir.parent), str(model_dir.parent), str(Path(hub.__file__).parent)):
        assert not [name for name, text in texts.items() if place in text]
    assert str(Path(hub.__file__).parent) in (run_dir / "config.json").read_text()


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", ["tiny", "me/tiny/model", "me/ti ny", "me/tiny.git", "/tiny"])
def test_invalid_repository_names_are_refused(name, trained, online):
    with pytest.raises(UserError, match=f'^push to "{name}": '):
        push_to_hub(trained, name)
    assert not online.requests


def test_unknown_run_folder_suggests_a_similar_one(trained, online):
    with pytest.raises(UserError, match=r'rnu is not a run folder: .*did you mean ".*run"\?'):
        push_to_hub(trained.parent / "rnu", "me/tiny")
    assert not online.requests


@pytest.mark.parametrize("lacks", ["model", "evaluation"])
def test_unfinished_run_is_refused(lacks, trained, online, tmp_path):
    run_dir = shutil.copytree(trained, tmp_path / "run")
    if lacks == "model":
        shutil.rmtree(run_dir / "model")
    else:
        (run_dir / "evals.jsonl").write_text((run_dir / "evals.jsonl").read_text().splitlines(keepends=True)[0])
    with pytest.raises(UserError, match=f"finish it with pellucid train --resume {run_dir}"):
        push_to_hub(run_dir, "me/tiny")
    assert not online.requests


def test_push_without_a_login_is_refused(trained, online, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"hf auth login, or set HF_TOKEN"):
        push_to_hub(trained, "me/tiny")
    assert not online.requests


def test_invalid_token_is_refused_and_not_printed(trained, online, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_of_yesterday")
    with pytest.raises(UserError, match=r"answers 401: .*; hf auth login") as refused:
        push_to_hub(trained, "me/tiny")
    assert "hf_of_yesterday" not in str(refused.value)


def test_push_to_a_foreign_namespace_is_refused(trained, online):
    with pytest.raises(UserError, match=r"answers 403: .*rights to create a model under you.*your own"):
        push_to_hub(trained, "you/tiny")
    assert not online.files


@pytest.mark.parametrize(
    ("path", "status"), [("/lfs/", 400), ("/api/models/me/tiny/commit", 500), ("/api/models/me/tiny/preupload", 413)]
)
def test_failed_push_uploads_nothing_and_can_be_repeated(path, status, trained, online):
    online.fails[path] = status
    with pytest.raises(UserError, match=r"^push to me/tiny: .*as the test asks for") as refused:
        push_to_hub(trained, "me/tiny")
    assert "\n" not in str(refused.value) and not online.files
    online.fails.clear()
    assert push_to_hub(trained, "me/tiny") == 0


def test_unreachable_hub_is_an_error(trained, online, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"the Hugging Face Hub cannot be reached: .*refused"):
        push_to_hub(trained, "me/tiny")


def test_offline_mode_error_names_the_variable(trained, online, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"cannot be reached: .*unset .*HF_HUB_OFFLINE"):
        push_to_hub(trained, "me/tiny")
