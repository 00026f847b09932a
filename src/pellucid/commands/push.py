"""`pellucid push`: the model of a finished run on the Hugging Face Hub, with a card that says how it came about."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage] - that of the HTTP library which this version has
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import validate_repo_id

from pellucid.commands.rerun import recipe_of
from pellucid.machine.harmless import harmless
from pellucid.machine.plugins import did_you_mean, names_beside
from pellucid.reporting import run_folder
from pellucid.reporting.card import ON_THE_HUB, card
from pellucid.reporting.shareable import short
from pellucid.types import UserError

ADAPTER_SETTINGS = "adapter/adapter_config.json"
OF_A_MODEL = re.compile(r"adapter/.*|model[^/]*\.safetensors[^/]*")
"""What `from_pretrained` would take for a part of the model beside it."""
LOG_IN = "hf auth login, or set HF_TOKEN to a token with write access"


def push(run_dir: Path, repo_id: str, private: bool = False, dry_run: bool = False) -> int:
    """Upload the model of a run in one commit, and make the repository where it is missing. Print where it is.

    private: the repository is private, or nothing is uploaded. dry_run: print the card and the files instead.
    UserError for a run without a model, and where the Hub cannot be reached or refuses.
    """
    check(run_dir, repo_id)
    files = files_of(run_dir)
    readme = card(run_dir, repo_id, recipe_of(run_dir))
    size = f"{len(files) + 1} files, {sum(path.stat().st_size for path in files.values()) / 1e6:.1f} MB"
    if dry_run:
        print(harmless(f"{readme}\nwould upload README.md, {', '.join(files)}: {size}"))
        return 0
    if get_token() is None:
        raise UserError(f"push needs to be logged in at the Hugging Face Hub: {LOG_IN}")
    print(f"uploads {size}", flush=True)
    with explained(repo_id):
        upload(repo_id, {"README.md": readme.encode(), **files, **adapter_settings(files)}, private)
    return 0


def check(run_dir: Path, repo_id: str) -> None:
    """Raise UserError for a name that no repository can have, and for what is no finished run."""
    if repo_id.count("/") != 1:
        raise UserError(f'push to "{repo_id}": the name of a repository is USER/NAME, or ORGANIZATION/NAME')
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f'push to "{repo_id}": {error}') from error
    if not run_folder.run_of(str(run_dir)):
        near = did_you_mean(run_dir.name, names_beside(run_dir))
        raise UserError(f"{run_dir} is no run folder (config.json and metrics.jsonl){near}")
    run_folder.model_of(run_dir)
    if not run_folder.finished(run_dir):
        raise UserError(f"{run_dir} has not come to its end: finish it with pellucid train --resume {run_dir}")


def files_of(run_dir: Path) -> dict[str, Path]:
    """The files by their names in the repository: the model's at its top, an adapter's in `adapter/`."""
    tops = {"": run_dir / "model", "adapter/": run_dir / "adapter"}
    found = {
        f"{top}{path.relative_to(folder).as_posix()}": path
        for top, folder in tops.items()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    return {name: path for name, path in found.items() if path.name != "README.md"}


def adapter_settings(files: dict[str, Path]) -> dict[str, bytes]:
    """The configuration of an adapter, if there is one, with its base named as in the card, without its folder here."""
    if not (path := files.get(ADAPTER_SETTINGS)):
        return {}
    settings = json.loads(path.read_text(encoding="utf-8"))
    base = settings["base_model_name_or_path"]
    settings["base_model_name_or_path"] = ON_THE_HUB.get(base) or short(base, is_file=True)
    return {ADAPTER_SETTINGS: json.dumps(settings, indent=2).encode()}


def upload(repo_id: str, files: dict[str, Path | bytes], private: bool) -> None:
    """Commit these files, and that weights and adapters of a model before are gone."""
    api = HfApi(library_name="pellucid")
    api.create_repo(repo_id, private=private or None, exist_ok=True)  # None: public, or as an organization has it
    if private and not api.model_info(repo_id).private:
        raise UserError(f"{repo_id} is there already, and public: name another, or make it private in its settings")
    there = [name for name in api.list_repo_files(repo_id) if OF_A_MODEL.fullmatch(name) and name not in files]
    operations = [
        *(CommitOperationAdd(name, content) for name, content in files.items()),
        *(CommitOperationDelete(name, is_folder=False) for name in there),
    ]
    made = api.create_commit(repo_id, operations, commit_message="Model trained by Pellucid, with its card")
    print(harmless(f"{made.repo_url} at {made.oid[:12]}"))


@contextmanager
def explained(repo_id: str) -> Iterator[None]:
    """UserError for what the Hub, or the way to it, raises in here."""
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise UserError(f"push to {repo_id}: HF_HUB_OFFLINE is set, which forbids the network: unset it") from error
    except HfHubHTTPError as error:
        raise UserError(f"push to {repo_id}: {refusal(error)}") from error
    except (HTTPError, ConnectionError) as error:
        raise UserError(f"push to {repo_id}: the Hugging Face Hub cannot be reached: {one_line(error)}") from error
    except (RuntimeError, ValueError, OSError) as error:  # of one file, of hf_xet, or an answer that makes no sense
        why = f" ({one_line(error.__cause__)})" if error.__cause__ else ""
        raise UserError(f"push to {repo_id}: {one_line(error)}{why}; nothing was committed: try again") from error


def refusal(error: HfHubHTTPError) -> str:
    """What the Hub answered, and the mend."""
    status, said = error.response.status_code, one_line(error.server_message or error)
    if status == 401:
        return f"the Hugging Face Hub does not know this token: {LOG_IN}"
    if status == 403:
        return f"the Hugging Face Hub refuses it to this token ({said}): give your own user name, or {LOG_IN}"
    return f"the Hugging Face Hub answers {status}: {said}"


def one_line(error: object) -> str:
    return " ".join(str(error).split())
