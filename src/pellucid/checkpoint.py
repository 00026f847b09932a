"""Checkpoints: safetensors and JSON, whole or not there at all."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pellucid.batch import Batch
from pellucid.types import UserError

State = Mapping[str, Mapping[str, Tensor]]
REPLAY = "replay."


def save(run_dir: Path, step: int, tensors: State, facts: Mapping[str, Any], keep_last: int) -> Path:
    """Writes `checkpoints/step-NNNNNN` beside its final name, then renames it; drops all but the last `keep_last`.

    `tensors` becomes a safetensors file per name, `facts` state.json. UserError where the disk is full.
    """
    folder = run_dir / "checkpoints" / f"step-{step:06d}"
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        for name, state in tensors.items():
            # safetensors refuses tensors that share memory, and reads what it is given as it lies there.
            save_file(
                {key: value.detach().cpu().contiguous() for key, value in state.items()},
                partial / f"{name}.safetensors",
            )
        (partial / "state.json").write_text(json.dumps({"step": step, **facts}))
        _to_disk(partial)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"step {step} could not be saved in {folder.parent} ({error}); earlier checkpoints are whole"
        ) from error
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    for old in found(run_dir)[: -max(1, keep_last)]:
        shutil.rmtree(old)
    return folder


def _to_disk(folder: Path) -> None:
    """Power may fail between the rename and the write-back: the files go first."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def found(run_dir: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(p for p in (run_dir / "checkpoints").glob("step-*") if p.suffix != ".partial")


def load(folder: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """What `save` was given: tensors and facts, the step among them. UserError where a file is damaged."""
    try:
        facts = json.loads((folder / "state.json").read_text())
        return {path.stem: load_file(path) for path in sorted(folder.glob("*.safetensors"))}, facts
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(
            f"{folder} is damaged ({error}): delete it, and --resume goes on from the one before"
        ) from error


Experiences = Sequence[tuple[int, Batch]]


def pack_replay(of_ranks: Sequence[Experiences]) -> tuple[dict[str, dict[str, Tensor]], list[list[dict[str, Any]]]]:
    """The rollouts that each process may train on again, as the tensors and the facts of a checkpoint."""
    tensors = {f"{REPLAY}{r}.{i}": b.tensors() for r, kept in enumerate(of_ranks) for i, (_, b) in enumerate(kept)}
    return tensors, [[{"step": step, **of_prompts(b)} for step, b in kept] for kept in of_ranks]


def of_prompts(batch: Batch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in ("prompt_ids", "prefix_lengths", "prefix_ends")}


def unpack_replay(tensors: State, facts: Sequence[Sequence[Mapping[str, Any]]], rank: int) -> list[tuple[int, Batch]]:
    """Those of one process."""
    return [(fact["step"], unpacked(fact, tensors[f"{REPLAY}{rank}.{i}"])) for i, fact in enumerate(facts[rank])]


def unpacked(fact: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Batch:
    return Batch(
        prompt_ids=tuple(map(tuple, fact["prompt_ids"])),
        prefix_lengths=tuple(fact.get("prefix_lengths") or [0] * len(fact["prompt_ids"])),
        prefix_ends=tuple(fact.get("prefix_ends") or [None] * len(fact["prompt_ids"])),
        **tensors,
    )


def random_state() -> dict[str, Any]:
    """Every generator that a task may draw from, as JSON. Samplers are seeded by step and have none."""
    algorithm, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [algorithm, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
        "cuda": [state.tolist() for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([torch.tensor(s, dtype=torch.uint8) for s in state["cuda"]])
