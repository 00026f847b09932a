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
from pydantic import ConfigDict, TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pellucid.algorithm.batch import Batch
from pellucid.config import CheckpointConfig, Config
from pellucid.distributed import sharded_checkpoint
from pellucid.models.linear import gather_full_tensor
from pellucid.policy import lora
from pellucid.policy.policy import CPU, Policy
from pellucid.reporting import loggers, token_files
from pellucid.reporting.run_files import get_checkpoint_step, list_checkpoints
from pellucid.training.build import Components
from pellucid.types import Group, UserError, as_stateful_task
from pellucid.utils import files

TensorStates = Mapping[str, Mapping[str, Tensor]]
REPLAY_PREFIX = "replay."
CHECKSUMS_FILE = "SHA256SUMS"
"""The file of checksums in each checkpoint, one line for each file, as `sha256sum -c SHA256SUMS` reads it."""


class DamagedCheckpointError(UserError):
    """A checkpoint is no longer what was saved."""


class ProcessGroup(Protocol):
    """Those that save together what lies in all of them."""

    @property
    def is_main(self) -> bool: ...
    def gather(self, items: Sequence[Any]) -> list[Any]: ...


class SingleProcess:
    """One process."""

    is_main = True

    def gather(self, items: Sequence[Any]) -> list[Any]:
        return list(items)


SINGLE_PROCESS = SingleProcess()


def write_checkpoint(
    run_dir: Path,
    step: int,
    tensors: TensorStates,
    facts: Mapping[str, Any],
    keep_last: int,
    processes: ProcessGroup = SINGLE_PROCESS,
) -> Path:
    """Write `checkpoints/step-NNNNNN` beside its final name, then rename it; drop all but the last `keep_last`.

    `tensors` becomes a safetensors file per name, or where they are sharded a folder with a file of each process;
    `facts` state.json. On disk at return. UserError, in all processes, where the disk is full.
    """
    folder = run_dir / "checkpoints" / f"step-{step:06d}"
    partial = folder.with_suffix(".partial")
    parts = {name: state for name, state in tensors.items() if sharded_checkpoint.has_sharded_tensors(state)}
    rest = {name: state for name, state in tensors.items() if name not in parts}
    facts = {"step": step, "checksums": True, **facts, **({"sharded": sorted(parts)} if parts else {})}
    sums: dict[str, str] = {}

    def begin() -> None:
        remove_partial_checkpoints(run_dir)
        partial.mkdir(parents=True)

    def end() -> None:
        _write_files(partial, rest, facts, sums)
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one: the run was resumed from one before it
        partial.rename(folder)
        files.sync_path(folder.parent)
        files.sync_path(run_dir)
        for old in list_checkpoints(run_dir)[:-keep_last]:
            _remove_checkpoint(old)

    def own() -> None:
        for name, state in parts.items():
            sums.update(
                {
                    f"{name}/{path.name}": _sync_and_digest(path)
                    for path in sharded_checkpoint.save_shards(partial / name, state)
                }
            )
            files.sync_path(partial / name)

    try:
        run_collectively(begin if processes.is_main else None, processes)
        run_collectively(own, processes)
        sums = dict(processes.gather(list(sums.items())))
        run_collectively(end if processes.is_main else None, processes)
    except OSError as error:
        if processes.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"step {step} could not be saved in {folder.parent} ({error}); earlier checkpoints are whole"
        ) from error
    return folder


def run_collectively(action: Callable[[], None] | None, processes: ProcessGroup) -> None:
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


def _write_files(folder: Path, tensors: TensorStates, facts: Mapping[str, Any], sums: Mapping[str, str]) -> None:
    """Write the files; each is synced and its checksum taken while the next one is being written. `sums` are those of
    files that are there already.
    """
    with ThreadPoolExecutor() as pool:
        taken = {}
        for name, state in tensors.items():
            path = folder / f"{name}.safetensors"
            # safetensors refuses tensors that share memory, and reads what it is given as it lies there.
            save_file({key: value.detach().cpu().contiguous() for key, value in state.items()}, path)
            taken[path.name] = _submit_checksum(pool, path)
        path = folder / "state.json"
        path.write_text(json.dumps(facts))
        taken[path.name] = _submit_checksum(pool, path)
        all_sums = {**sums, **{name: of_file.result() for name, of_file in taken.items()}}
    (folder / CHECKSUMS_FILE).write_text("".join(f"{digest}  {name}\n" for name, digest in all_sums.items()))
    _sync_and_digest(folder / CHECKSUMS_FILE)
    files.sync_path(folder)


def _submit_checksum(pool: ThreadPoolExecutor, path: Path) -> Future[str]:
    """Sync a file and take its checksum in a thread; at once in a process at its end, which begins no threads."""
    try:
        return pool.submit(_sync_and_digest, path)
    except RuntimeError:
        done: Future[str] = Future()
        done.set_result(_sync_and_digest(path))
        return done


def _sync_and_digest(path: Path) -> str:
    """Sync a file, as power may fail between the rename and the write-back. Return its checksum."""
    files.sync_path(path)
    return files.compute_file_digest(path)


def _remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that what a kill leaves of it is not taken for one."""
    shutil.rmtree(folder.rename(folder.with_suffix(".partial")))


def remove_old_checkpoints(run_dir: Path, settings: CheckpointConfig) -> None:
    """Remove what is not to be kept of a run that is finished, its model saved. Without checkpoints on purpose, one
    that a request to stop has left would lead back to the middle of the run.
    """
    keep = settings.keep_finished if settings.every else "none"
    for old in list_checkpoints(run_dir)[: {"newest": -1, "all": -settings.keep_last, "none": None}[keep]]:
        _remove_checkpoint(old)


def remove_partial_checkpoints(run_dir: Path) -> None:
    """Remove the rest of checkpoints that were being written or dropped when the process was killed."""
    for rest in (run_dir / "checkpoints").glob("*.partial"):
        shutil.rmtree(rest)


def load_newest_checkpoint(
    run_dir: Path, processes: ProcessGroup = SINGLE_PROCESS
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any], list[str]]:
    """The newest whole checkpoint, as `load` has it, and lines that name those that are broken, or without checksums.

    The main process looks for it. UserError, in all, where none is whole.
    """
    loaded, found = None, []
    if processes.is_main:
        folder, notes, loaded = _find_newest_checkpoint(run_dir)
        found = [(folder, notes)]
    [(folder, notes)] = processes.gather(found)
    if folder is None:
        raise UserError(notes[0])
    return *(loaded or load_checkpoint(folder, is_verified=True)), notes


def _find_newest_checkpoint(
    run_dir: Path,
) -> tuple[Path | None, list[str], tuple[dict[str, dict[str, Tensor]], dict[str, Any]] | None]:
    """The folder of the newest whole checkpoint, notes, and what is in it; without a folder the note says why."""
    broken: list[str] = []
    for folder in reversed(list_checkpoints(run_dir)):
        try:
            loaded = load_checkpoint(folder)
        except DamagedCheckpointError as error:
            broken.append(str(error))
            continue
        old = (
            []
            if (folder / CHECKSUMS_FILE).exists()
            else [f"{folder} has no checksums, as of older versions: taken as it is"]
        )
        return folder, [*(f"{line}: {folder.name} is taken" for line in broken), *old], loaded
    what = "; ".join(broken) or str(run_dir)
    return None, [f"{what}: no checkpoint is whole: bring one back from a copy, or start again elsewhere"], None


def load_checkpoint(folder: Path, is_verified: bool = False) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """What `save` was given, but for what is sharded: tensors and facts, the step among them.

    DamagedError, in one line, where a file is. checked: the checksums are known to be right.
    """
    try:
        facts = json.loads((folder / "state.json").read_text())
        if not isinstance(facts, dict) or facts.get("step") != get_checkpoint_step(folder):
            raise ValueError("state.json is not that of this step")
        if (facts.pop("checksums", False) or (folder / CHECKSUMS_FILE).exists()) and not is_verified:
            verify_checksums(folder)
        tensors = {path.stem: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
        there = {*tensors, *facts.get("sharded", ())}
        if missing := [name for name in list_tensor_files(facts) if name not in there]:
            raise ValueError(f"{missing[0]}.safetensors is missing")
    except (OSError, ValueError, SafetensorError) as error:
        raise DamagedCheckpointError(f"{folder} is damaged ({error})") from error
    return tensors, facts


def verify_checksums(folder: Path) -> None:
    """Raise ValueError where a file has changed, is missing, or is not of the checkpoint."""
    *lines, end = (folder / CHECKSUMS_FILE).read_text().split("\n")
    if end:
        raise ValueError(f"{CHECKSUMS_FILE} is cut off")
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    there = {str(path.relative_to(folder)) for path in (folder / "state.json", *folder.rglob("*.safetensors"))}
    if odd := sorted(there ^ sums.keys()):
        raise ValueError(f"{odd[0]} is {'not listed in ' + CHECKSUMS_FILE if odd[0] in there else 'missing'}")
    for name, digest in sums.items():
        if files.compute_file_digest(folder / name) != digest:
            raise ValueError(f"{name} is not what {CHECKSUMS_FILE} says")


def list_tensor_files(facts: Mapping[str, Any]) -> list[str]:
    """The names of the tensor files that a checkpoint must have, by its facts."""
    replayed = facts.get("replay", [])
    return ["policy", *(f"{REPLAY_PREFIX}{r}.{i}" for r, kept in enumerate(replayed) for i in range(len(kept)))]


ReplayBuffer = Sequence[tuple[int, Batch]]


def pack_replay(buffers: Sequence[ReplayBuffer]) -> tuple[dict[str, dict[str, Tensor]], list[list[dict[str, Any]]]]:
    """The rollouts that each process may train on again, as the tensors and the facts of a checkpoint."""
    tensors = {
        f"{REPLAY_PREFIX}{r}.{i}": b.get_tensors() for r, kept in enumerate(buffers) for i, (_, b) in enumerate(kept)
    }
    return tensors, [[{"step": step, **collect_prompt_fields(b)} for step, b in kept] for kept in buffers]


def collect_prompt_fields(batch: Batch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in ("prompt_ids", "demonstrations")}


def unpack_replay(
    tensors: TensorStates, facts: Sequence[Sequence[Mapping[str, Any]]], rank: int
) -> list[tuple[int, Batch]]:
    """The rollouts of one process."""
    return [
        (fact["step"], unpack_batch(fact, tensors[f"{REPLAY_PREFIX}{rank}.{i}"])) for i, fact in enumerate(facts[rank])
    ]


def unpack_batch(fact: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Batch:
    """A batch of the replay."""
    prompt_ids, demonstrations = (tuple(map(tuple, fact[name])) for name in ("prompt_ids", "demonstrations"))
    return Batch(prompt_ids=prompt_ids, demonstrations=demonstrations, **tensors)


def get_random_state() -> dict[str, Any]:
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


# ---------------------------------------------------------------- snapshot
# A run into a checkpoint, and back.


OPTIMIZER_PREFIX = "optimizer."
AHEAD_GROUPS_TYPE = TypeAdapter(
    tuple[Sequence[Group], dict[str, float]],
    config=ConfigDict(ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="constants"),
)
"""The groups and metrics that were drawn ahead for the step after a checkpoint. A reward that failed is NaN, which must
stay a float: pydantic writes null by default, and a null is no reward when the checkpoint is loaded."""


def save_checkpoint(run_dir: Path, cfg: Config, parts: Components) -> None:
    runtime, state, reference = parts.runtime, parts.state, parts.reference
    generators = runtime.gather([get_random_state()])
    replay, replay_facts = pack_replay(runtime.gather([state.replay_buffer]))
    # A file for each moment: safetensors holds a whole file in memory while it writes.
    moments = {f"{OPTIMIZER_PREFIX}{moment}": tensors for moment, tensors in runtime.engine.moments().items()}
    moving = (
        {"reference": reference.weights()} if cfg.algorithm.reference_every and isinstance(reference, Policy) else {}
    )
    tensors = {"policy": runtime.engine.masters(), **moments, **moving, **replay}
    processes = runtime if any(map(sharded_checkpoint.has_sharded_tensors, tensors.values())) else SINGLE_PROCESS
    if processes is not runtime and not runtime.is_main:
        return
    facts = {"updates": runtime.updates, "seconds": parts.elapsed_seconds, "random": generators, "replay": replay_facts}
    facts |= {"micro_batch": runtime.max_micro_batch_rows} if runtime.max_micro_batch_rows else {}
    facts |= runtime.engine.state()
    facts |= {"kl_coef": state.kl_coef} if cfg.algorithm.kl_target else {}
    watching = as_stateful_task(parts.task)
    facts |= {"task": watching.state()} if watching else {}
    facts |= {"ahead": AHEAD_GROUPS_TYPE.dump_python(state.next_rollouts, mode="json")} if state.next_rollouts else {}
    loggers.sync_logs(run_dir)  # a checkpoint counts when what led to it is on disk
    token_files.sync_tokens(run_dir, after=max(map(get_checkpoint_step, list_checkpoints(run_dir)), default=0))
    write_checkpoint(run_dir, state.step, tensors, facts, cfg.checkpoint.keep_last, processes)


def restore_run(run_dir: Path, parts: Components) -> list[str]:
    """Restore the newest whole checkpoint and cut the logs to it. Return lines that say what is damaged."""
    runtime, state = parts.runtime, parts.state
    tensors, facts, notes = load_newest_checkpoint(run_dir, runtime)
    folder = run_dir / "checkpoints" / f"step-{facts['step']:06d}"
    apart = facts.get("sharded", [])

    def saved(name: str, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state as this run has it, however many processes kept it then and now."""
        if name in apart:
            return sharded_checkpoint.load_shards(folder / name, like)
        return {key: sharded_checkpoint.take_local_shard(x, like.get(key, x)) for key, x in tensors[name].items()}

    if "reference" in (*tensors, *apart) and isinstance(parts.reference, Policy):
        parts.reference.update_weights(saved("reference", parts.reference.weights()), decay=0.0)
    masters = runtime.engine.masters()
    moments = {
        name.removeprefix(OPTIMIZER_PREFIX): saved(name, {} if name.endswith(".step") else masters)
        for name in (*tensors, *apart)
        if name.startswith(OPTIMIZER_PREFIX)
    }
    # Versions up to 0.1 had masters among the moments.
    runtime.engine.load_masters({**saved("policy", masters), **moments.pop("master", {})})
    runtime.engine.load_moments(moments)
    runtime.engine.load_state(facts)
    runtime.updates = facts["updates"]
    if rows := facts.get("micro_batch", 0):
        runtime.max_micro_batch_rows = rows
        notes = [*notes, f"memory ran out before: {rows} rows in a forward pass at most"]
    then = len(facts["random"])
    if then != runtime.world_size:
        if any(facts["replay"]):
            raise UserError(f"{run_dir} has a replay buffer in each of {then} processes: resume it with as many")
        notes = [
            *notes,
            f"saved by {then} processes, resumed by {runtime.world_size}: the same weights, rounded otherwise",
        ]
    restore_random_state(facts["random"][runtime.rank % then])
    parts.elapsed_seconds = facts["seconds"]
    state.step, state.kl_coef = facts["step"], facts.get("kl_coef", state.kl_coef)
    if watching := as_stateful_task(parts.task):
        watching.load_state(facts["task"])
    state.next_rollouts = AHEAD_GROUPS_TYPE.validate_python(facts["ahead"]) if "ahead" in facts else None
    rank, replay = runtime.rank, facts["replay"]
    state.replay_buffer = unpack_replay(tensors, replay, rank) if any(replay) else []
    if not runtime.is_main:
        return []
    remove_partial_checkpoints(run_dir)
    token_files.delete_tokens(run_dir, state.step)
    return [*notes, *loggers.truncate_logs(run_dir, state.step)]


def save_model(run_dir: Path, cfg: Config, parts: Components) -> None:
    """Save the model durably. UserError where that fails: the checkpoint is whole, and `--resume` saves again."""
    learner, runtime, dtype = parts.policy, parts.runtime, getattr(torch, cfg.policy.save_dtype)
    processes = runtime if runtime.engine.is_lockstep else SINGLE_PROCESS
    if processes is not runtime and not runtime.is_main:
        return
    folder, partial, adapter = run_dir / "model", run_dir / "model.partial", run_dir / "adapter.partial"
    parted, trained = runtime.engine.is_lockstep and not learner.adapter, {}
    if learner.adapter:
        trained = {name: gather_full_tensor(p.detach()) for name, p in runtime.engine.masters().items()}
        learner.gather()

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)

    def own() -> None:
        sharded_checkpoint.save_consolidated_model(
            partial, {name: x.to(dtype) for name, x in runtime.engine.weights().items()}
        )

    def end() -> None:
        merged = learner.build_merged_model(trained, CPU) if learner.adapter else None
        learner.save_config(partial, dtype) if parted else learner.save(partial, merged, dtype)
        if learner.adapter:
            shutil.rmtree(adapter, ignore_errors=True)
            lora.save_adapter(learner.adapter, trained, adapter)
            finalize_folder(adapter)
        finalize_folder(partial)  # last: with it the run is finished

    try:
        run_collectively(begin if processes.is_main else None, processes)
        run_collectively(own if parted else None, processes)
        run_collectively(end if processes.is_main else None, processes)
    except (OSError, UserError) as error:
        if processes.is_main:
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(adapter, ignore_errors=True)
        saved = list_checkpoints(run_dir)[-1:]
        is_saved = bool(saved) and get_checkpoint_step(saved[0]) == parts.state.step
        first = "make room" if isinstance(error, OSError) else "mend that"
        mend = f"the checkpoint is whole: {first}, then --resume {run_dir}"
        lost = f"checkpoint.every = 0 has left no checkpoint of it: {first}, then train it again"
        raise UserError(f"{folder} could not be saved ({error}); {mend if is_saved else lost}") from error


def finalize_folder(partial: Path) -> None:
    """Rename a folder that is written to its end to its own name, durably; what was there goes."""
    folder = partial.with_suffix("")
    files.sync_tree(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    files.sync_path(folder.parent)
