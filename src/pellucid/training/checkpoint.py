"""Checkpoints: safetensors and JSON with their checksums, whole or not there at all."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pellucid.algorithm.batch import Batch
from pellucid.machine import disk
from pellucid.reporting.run_folder import checkpoints, step_of
from pellucid.types import UserError

State = Mapping[str, Mapping[str, Tensor]]
REPLAY = "replay."
SUMS = "SHA256SUMS"
"""The file of checksums in each checkpoint, one line for each file, as `sha256sum -c SHA256SUMS` reads it."""


class DamagedError(UserError):
    """A checkpoint is no longer what was saved."""


def save(run_dir: Path, step: int, tensors: State, facts: Mapping[str, Any], keep_last: int) -> Path:
    """Writes `checkpoints/step-NNNNNN` beside its final name, then renames it; drops all but the last `keep_last`.

    `tensors` becomes a safetensors file per name, `facts` state.json. On disk at return. UserError where it is full.
    """
    folder = run_dir / "checkpoints" / f"step-{step:06d}"
    partial = folder.with_suffix(".partial")
    clear_rests(run_dir)
    try:
        partial.mkdir(parents=True)
        _write(partial, tensors, {"step": step, "checksums": True, **facts})
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"step {step} could not be saved in {folder.parent} ({error}); earlier checkpoints are whole"
        ) from error
    shutil.rmtree(folder, ignore_errors=True)  # a damaged one: the run was resumed from one before it
    partial.rename(folder)
    disk.sync(folder.parent)
    disk.sync(run_dir)
    for old in checkpoints(run_dir)[:-keep_last]:
        _drop(old)
    return folder


def _write(folder: Path, tensors: State, facts: Mapping[str, Any]) -> None:
    """Write the files; each is synced and its checksum taken while the next one is being written."""
    with ThreadPoolExecutor() as pool:
        sums = {}
        for name, state in tensors.items():
            path = folder / f"{name}.safetensors"
            # safetensors refuses tensors that share memory, and reads what it is given as it lies there.
            save_file({key: value.detach().cpu().contiguous() for key, value in state.items()}, path)
            sums[path.name] = pool.submit(_to_disk, path)
        path = folder / "state.json"
        path.write_text(json.dumps(facts))
        sums[path.name] = pool.submit(_to_disk, path)
        listing = "".join(f"{of_file.result()}  {name}\n" for name, of_file in sums.items())
    (folder / SUMS).write_text(listing)
    _to_disk(folder / SUMS)
    disk.sync(folder)


def _to_disk(path: Path) -> str:
    """Sync a file, as power may fail between the rename and the write-back. Return its checksum."""
    disk.sync(path)
    return disk.digest(path)


def _drop(folder: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that what a kill leaves of it is not taken for one."""
    shutil.rmtree(folder.rename(folder.with_suffix(".partial")))


def clear_rests(run_dir: Path) -> None:
    """Remove the rest of checkpoints that were being written or dropped when the process was killed."""
    for rest in (run_dir / "checkpoints").glob("*.partial"):
        shutil.rmtree(rest)


def newest(run_dir: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any], list[str]]:
    """The newest whole checkpoint, as `load` has it, and lines that name those that are broken, or without checksums.

    UserError where none is whole.
    """
    broken: list[str] = []
    for folder in reversed(checkpoints(run_dir)):
        try:
            tensors, facts = load(folder)
        except DamagedError as error:
            broken.append(str(error))
            continue
        old = [] if (folder / SUMS).exists() else [f"{folder} has no checksums, as of older versions: taken as it is"]
        return tensors, facts, [*(f"{line}: {folder.name} is taken" for line in broken), *old]
    raise UserError(
        f"{'; '.join(broken) or run_dir}: no checkpoint is whole: bring one back from a copy, or start again elsewhere"
    )


def load(folder: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """What `save` was given: tensors and facts, the step among them. DamagedError, in one line, where a file is."""
    try:
        facts = json.loads((folder / "state.json").read_text())
        if not isinstance(facts, dict) or facts.get("step") != step_of(folder):
            raise ValueError("state.json is not that of this step")
        if facts.pop("checksums", False) or (folder / SUMS).exists():
            check_sums(folder)
        tensors = {path.stem: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
        if missing := [name for name in named(facts) if name not in tensors]:
            raise ValueError(f"{missing[0]}.safetensors is missing")
    except (OSError, ValueError, SafetensorError) as error:
        raise DamagedError(f"{folder} is damaged ({error})") from error
    return tensors, facts


def check_sums(folder: Path) -> None:
    """Raise ValueError where a file has changed, is missing, or is not of the checkpoint."""
    *lines, end = (folder / SUMS).read_text().split("\n")
    if end:
        raise ValueError(f"{SUMS} is cut off")
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    there = {path.name for path in (folder / "state.json", *folder.glob("*.safetensors"))}
    if odd := sorted(there ^ sums.keys()):
        raise ValueError(f"{odd[0]} is {'not listed in ' + SUMS if odd[0] in there else 'missing'}")
    for name, digest in sums.items():
        if disk.digest(folder / name) != digest:
            raise ValueError(f"{name} is not what {SUMS} says")


def named(facts: Mapping[str, Any]) -> list[str]:
    """The names of the tensor files that a checkpoint must have, by its facts."""
    replayed = facts.get("replay", [])
    return ["policy", *(f"{REPLAY}{r}.{i}" for r, kept in enumerate(replayed) for i in range(len(kept)))]


Experiences = Sequence[tuple[int, Batch]]


def pack_replay(of_ranks: Sequence[Experiences]) -> tuple[dict[str, dict[str, Tensor]], list[list[dict[str, Any]]]]:
    """The rollouts that each process may train on again, as the tensors and the facts of a checkpoint."""
    tensors = {f"{REPLAY}{r}.{i}": b.tensors() for r, kept in enumerate(of_ranks) for i, (_, b) in enumerate(kept)}
    return tensors, [[{"step": step, **of_prompts(b)} for step, b in kept] for kept in of_ranks]


def of_prompts(batch: Batch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in ("prompt_ids", "demonstrations")}


def unpack_replay(tensors: State, facts: Sequence[Sequence[Mapping[str, Any]]], rank: int) -> list[tuple[int, Batch]]:
    """The rollouts of one process."""
    return [(fact["step"], unpacked(fact, tensors[f"{REPLAY}{rank}.{i}"])) for i, fact in enumerate(facts[rank])]


def unpacked(fact: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Batch:
    """A batch of the replay. Older ones know no given tokens (a prefix belonged to the prompt) and one advantage a
    response; they call `acts` gate or entropy_mask.
    """
    named = {"acts" if name in ("gate", "entropy_mask") else name: x for name, x in tensors.items()}
    batch = Batch(
        prompt_ids=tuple(map(tuple, fact["prompt_ids"])),
        demonstrations=tuple(map(tuple, fact.get("demonstrations") or [()] * len(fact["prompt_ids"]))),
        **{"sampled": named["mask"], **named},
    )
    return replace(batch, advantages=batch.along_responses(x)) if (x := named["advantages"]).dim() == 1 else batch


def random_state() -> dict[str, Any]:
    """The state of every generator that a task may draw from, as JSON. Samplers are seeded by step and have none."""
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
