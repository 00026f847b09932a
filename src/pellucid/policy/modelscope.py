"""Models of ModelScope, modelscope:OWNER/NAME: found where its package keeps them, else downloaded by it. What is there
needs neither the package nor a network.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from pellucid.machine.extras import extra
from pellucid.types import UserError

PREFIX = "modelscope:"
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data")
"""Files that neither a configuration nor a tokenizer needs."""


def locate(name: str, weights: bool = True, revision: str = "") -> Path:
    """The model's folder; without weights, one that has its configuration at least. Empty is the default branch.

    UserError for what is no such name, cannot be downloaded, or needs the package to be.
    """
    repository = name.removeprefix(PREFIX)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repository):
        raise UserError(f"policy.model = {name!r}: a model of ModelScope is called {PREFIX}OWNER/NAME")
    ready = is_whole if weights else is_described
    found = next(filter(ready, places(repository, revision)), None)
    return found or downloaded(name, repository, weights, revision)


def root() -> Path:
    return Path(os.environ.get("MODELSCOPE_CACHE") or Path.home() / ".cache" / "modelscope").expanduser()


def places(repository: str, revision: str = "") -> Iterator[Path]:
    """Where the package has kept a model, in the order in which it looks for it itself (modelscope 1.40).

    Up to 1.37 a folder had no dots in its name, up to 1.21 none was in `models`, and without MODELSCOPE_CACHE all were
    in `hub`. Since then there is a folder a revision, of which one is taken without asking if it is the only one.
    A revision that is asked for can only be there.
    """
    owner, _, name = repository.partition("/")
    if revision:
        yield root() / "models" / f"{owner}--{name}" / "snapshots" / revision
        return
    plain = name.replace(".", "___")
    yield root() / "models" / owner / plain
    yield root() / "hub" / "models" / owner / plain
    revisions = root() / "models" / f"{owner}--{name}" / "snapshots"
    yield from (revisions / "master", revisions / "main")
    yield from alone if len(alone := list(revisions.glob("*"))) == 1 else ()
    yield root() / owner / plain
    yield root() / "hub" / owner / plain


def is_described(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def is_whole(folder: Path) -> bool:
    """A download that was cut short is not."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return is_described(folder) and any((*folder.glob("*.safetensors"), *folder.glob("*.bin")))
    shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return is_described(folder) and all((folder / shard).is_file() for shard in shards)


def downloaded(name: str, repository: str, weights: bool, revision: str) -> Path:
    of = f", revision {revision!r}," if revision else ""
    what = f"policy.model = {name!r}{of} is not in {root()}: downloading it"
    package = extra("modelscope.hub.snapshot_download", "modelscope", what)
    errors = vars(extra("modelscope.hub.errors", "modelscope", what)).values()
    own = [error for error in errors if isinstance(error, type) and issubclass(error, Exception)]
    try:
        ignored = None if weights else list(WEIGHTS)
        return Path(package.snapshot_download(repository, revision=revision or None, ignore_patterns=ignored))
    except (OSError, ValueError, *own) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"policy.model = {name!r}{of} cannot be downloaded ({reason}): mend the name or the connection, or put the"
            f" model into {next(places(repository, revision))}"
        ) from error
