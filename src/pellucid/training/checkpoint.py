"""Checkpoints: safetensors and JSON with their checksums, whole or not there at all."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pellucid.algorithm.batch import Batch
from pellucid.machine import disk
from pellucid.reporting.run_folder import checkpoints, step_of
from pellucid.runtimes import shards
from pellucid.sections import CheckpointConfig
from pellucid.types import UserError

State = Mapping[str, Mapping[str, Tensor]]
REPLAY = "replay."
SUMS = "SHA256SUMS"
"""The file of checksums in each checkpoint, one line for each file, as `sha256sum -c SHA256SUMS` reads it."""


class DamagedError(UserError):
    """A checkpoint is no longer what was saved."""


class Processes(Protocol):
    """Those that save together what lies in all of them."""

    @property
    def is_main(self) -> bool: ...
    def gather(self, items: Sequence[Any]) -> list[Any]: ...


class Alone:
    """One process."""

    is_main = True

    def gather(self, items: Sequence[Any]) -> list[Any]:
        return list(items)


ALONE = Alone()


def save(
    run_dir: Path, step: int, tensors: State, facts: Mapping[str, Any], keep_last: int, processes: Processes = ALONE
) -> Path:
    """Write `checkpoints/step-NNNNNN` beside its final name, then rename it; drop all but the last `keep_last`.

    `tensors` becomes a safetensors file per name, or where they are sharded a folder with a file of each process;
    `facts` state.json. On disk at return. UserError, in all processes, where the disk is full.
    """
    folder = run_dir / "checkpoints" / f"step-{step:06d}"
    partial = folder.with_suffix(".partial")
    parts = {name: state for name, state in tensors.items() if shards.sharded(state)}
    rest = {name: state for name, state in tensors.items() if name not in parts}
    facts = {"step": step, "checksums": True, **facts, **({"sharded": sorted(parts)} if parts else {})}
    sums: dict[str, str] = {}

    def begin() -> None:
        clear_rests(run_dir)
        partial.mkdir(parents=True)

    def end() -> None:
        _write(partial, rest, facts, sums)
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one: the run was resumed from one before it
        partial.rename(folder)
        disk.sync(folder.parent)
        disk.sync(run_dir)
        for old in checkpoints(run_dir)[:-keep_last]:
            _drop(old)

    def own() -> None:
        for name, state in parts.items():
            sums.update({f"{name}/{path.name}": _to_disk(path) for path in shards.write(partial / name, state)})
            disk.sync(partial / name)

    try:
        together(begin if processes.is_main else None, processes)
        together(own, processes)
        sums = dict(processes.gather(list(sums.items())))
        together(end if processes.is_main else None, processes)
    except OSError as error:
        if processes.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"step {step} could not be saved in {folder.parent} ({error}); earlier checkpoints are whole"
        ) from error
    return folder


def together(action: Callable[[], None] | None, processes: Processes) -> None:
    """Act in each process that has something to do. OSError or UserError in all where one of them raises it."""
    try:
        if action:
            action()
        failed = []
    except (OSError, SafetensorError) as error:
        failed = [OSError(str(error))]
    except UserError as error:
        failed = [error]
    if failures := processes.gather(failed):
        raise failures[0]


def _write(folder: Path, tensors: State, facts: Mapping[str, Any], sums: Mapping[str, str]) -> None:
    """Write the files; each is synced and its checksum taken while the next one is being written. `sums` are those of
    files that are there already.
    """
    with ThreadPoolExecutor() as pool:
        taken = {}
        for name, state in tensors.items():
            path = folder / f"{name}.safetensors"
            # safetensors refuses tensors that share memory, and reads what it is given as it lies there.
            save_file({key: value.detach().cpu().contiguous() for key, value in state.items()}, path)
            taken[path.name] = _taken(pool, path)
        path = folder / "state.json"
        path.write_text(json.dumps(facts))
        taken[path.name] = _taken(pool, path)
        all_sums = {**sums, **{name: of_file.result() for name, of_file in taken.items()}}
    (folder / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in all_sums.items()))
    _to_disk(folder / SUMS)
    disk.sync(folder)


def _taken(pool: ThreadPoolExecutor, path: Path) -> Future[str]:
    """Sync a file and take its checksum in a thread; at once in a process at its end, which begins no threads."""
    try:
        return pool.submit(_to_disk, path)
    except RuntimeError:
        done: Future[str] = Future()
        done.set_result(_to_disk(path))
        return done


def _to_disk(path: Path) -> str:
    """Sync a file, as power may fail between the rename and the write-back. Return its checksum."""
    disk.sync(path)
    return disk.digest(path)


def _drop(folder: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that what a kill leaves of it is not taken for one."""
    shutil.rmtree(folder.rename(folder.with_suffix(".partial")))


def tidy(run_dir: Path, settings: CheckpointConfig) -> None:
    """Remove what is not to be kept of a run that is finished, its model saved. Without checkpoints on purpose, one
    that a request to stop has left would lead back to the middle of the run.
    """
    keep = settings.keep_finished if settings.every else "none"
    for old in checkpoints(run_dir)[: {"newest": -1, "all": -settings.keep_last, "none": None}[keep]]:
        _drop(old)


def clear_rests(run_dir: Path) -> None:
    """Remove the rest of checkpoints that were being written or dropped when the process was killed."""
    for rest in (run_dir / "checkpoints").glob("*.partial"):
        shutil.rmtree(rest)


def newest(
    run_dir: Path, processes: Processes = ALONE
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any], list[str]]:
    """The newest whole checkpoint, as `load` has it, and lines that name those that are broken, or without checksums.

    The main process looks for it. UserError, in all, where none is whole.
    """
    loaded, found = None, []
    if processes.is_main:
        folder, notes, loaded = _newest(run_dir)
        found = [(folder, notes)]
    [(folder, notes)] = processes.gather(found)
    if folder is None:
        raise UserError(notes[0])
    return *(loaded or load(folder, is_verified=True)), notes


def _newest(run_dir: Path) -> tuple[Path | None, list[str], tuple[dict[str, dict[str, Tensor]], dict[str, Any]] | None]:
    """The folder of the newest whole checkpoint, notes, and what is in it; without a folder the note says why."""
    broken: list[str] = []
    for folder in reversed(checkpoints(run_dir)):
        try:
            loaded = load(folder)
        except DamagedError as error:
            broken.append(str(error))
            continue
        old = [] if (folder / SUMS).exists() else [f"{folder} has no checksums, as of older versions: taken as it is"]
        return folder, [*(f"{line}: {folder.name} is taken" for line in broken), *old], loaded
    what = "; ".join(broken) or str(run_dir)
    return None, [f"{what}: no checkpoint is whole: bring one back from a copy, or start again elsewhere"], None


def load(folder: Path, is_verified: bool = False) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """What `save` was given, but for what is sharded: tensors and facts, the step among them.

    DamagedError, in one line, where a file is. checked: the checksums are known to be right.
    """
    try:
        facts = json.loads((folder / "state.json").read_text())
        if not isinstance(facts, dict) or facts.get("step") != step_of(folder):
            raise ValueError("state.json is not that of this step")
        if (facts.pop("checksums", False) or (folder / SUMS).exists()) and not is_verified:
            check_sums(folder)
        tensors = {path.stem: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
        there = {*tensors, *facts.get("sharded", ())}
        if missing := [name for name in named(facts) if name not in there]:
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
    there = {str(path.relative_to(folder)) for path in (folder / "state.json", *folder.rglob("*.safetensors"))}
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


def pack_replay(buffers: Sequence[Experiences]) -> tuple[dict[str, dict[str, Tensor]], list[list[dict[str, Any]]]]:
    """The rollouts that each process may train on again, as the tensors and the facts of a checkpoint."""
    tensors = {f"{REPLAY}{r}.{i}": b.get_tensors() for r, kept in enumerate(buffers) for i, (_, b) in enumerate(kept)}
    return tensors, [[{"step": step, **of_prompts(b)} for step, b in kept] for kept in buffers]


def of_prompts(batch: Batch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in ("prompt_ids", "demonstrations")}


def unpack_replay(tensors: State, facts: Sequence[Sequence[Mapping[str, Any]]], rank: int) -> list[tuple[int, Batch]]:
    """The rollouts of one process."""
    return [(fact["step"], unpack_batch(fact, tensors[f"{REPLAY}{rank}.{i}"])) for i, fact in enumerate(facts[rank])]


def unpack_batch(fact: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Batch:
    """A batch of the replay."""
    prompt_ids, demonstrations = (tuple(map(tuple, fact[name])) for name in ("prompt_ids", "demonstrations"))
    return Batch(prompt_ids=prompt_ids, demonstrations=demonstrations, **tensors)


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
