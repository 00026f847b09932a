"""Saves a run as a checkpoint, restores it, and saves its trained model.

A checkpoint is a folder `checkpoints/step-NNNNNN` of safetensors and JSON files with their checksums. It is written
under another name and then renamed, so it is either complete or absent. Processes that share parameters save together.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import ConfigDict, TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pellucid.algorithm.batch import Batch
from pellucid.algorithm.settings import LRAdaptation
from pellucid.config import CheckpointConfig, Config
from pellucid.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from pellucid.distributed.sharded_checkpoint import (
    has_sharded_tensors,
    load_shards,
    save_consolidated_model,
    save_shards,
    take_local_shard,
)
from pellucid.models.linear import gather_full_tensor
from pellucid.policy.lora import save_adapter
from pellucid.policy.policy import CPU, Policy
from pellucid.reporting.best_evaluation import BestEvaluation
from pellucid.reporting.loggers import format_json_line, sync_logs, truncate_logs
from pellucid.reporting.run_files import (
    BEST_EVALUATION_FILE,
    BEST_MODEL_DIR,
    get_checkpoint_step,
    list_checkpoints,
    read_best_model_step,
)
from pellucid.reporting.token_files import delete_tokens, sync_tokens
from pellucid.rollout.vllm import VLLMSampler
from pellucid.training.build import Components
from pellucid.types import Group, UserError, as_stateful_task
from pellucid.utils import files
from pellucid.utils.text import format_option

T = TypeVar("T")
_TensorStates = Mapping[str, Mapping[str, Tensor]]
"""Tensors by file name and by name in the file."""
_ReplayBuffer = Sequence[tuple[int, Batch]]
"""Rollouts that may be trained on again, each with the step that generated them."""
REPLAY_PREFIX = "replay."
OPTIMIZER_PREFIX = "optimizer."
CHECKSUMS_FILE = "SHA256SUMS"
"""The file of checksums in each checkpoint, one line for each file, as `sha256sum -c SHA256SUMS` reads it."""
AHEAD_GROUPS_TYPE = TypeAdapter(
    tuple[Sequence[Group], dict[str, float]],
    config=ConfigDict(ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="constants"),
)
"""The groups and metrics that were generated ahead for the step after a checkpoint. A failed reward is NaN: pydantic
would write null by default, and null is not a valid reward when the checkpoint is loaded."""


class DamagedCheckpointError(UserError):
    """A file of a checkpoint is missing or has changed since it was saved."""


def save_checkpoint(run_dir: Path, cfg: Config, parts: Components) -> None:
    """Save all that a bit-identical resume of the run needs. All processes call this together.

    Raise UserError in all of them if the checkpoint could not be written.
    """
    runtime, state, reference = parts.runtime, parts.state, parts.reference
    random_states = runtime.gather([get_random_state()])
    replay, replay_facts = pack_replay(runtime.gather([state.replay_buffer]))
    ahead = state.next_rollouts and (runtime.gather(state.next_rollouts[0]), state.next_rollouts[1])
    # Each moment has a file of its own, since safetensors holds a whole file in memory while it writes.
    moments = {f"{OPTIMIZER_PREFIX}{moment}": tensors for moment, tensors in runtime.engine.moments().items()}
    tensors = {"policy": runtime.engine.masters(), **moments, **replay}
    if cfg.algorithm.reference_every and isinstance(reference, Policy):
        tensors["reference"] = reference.weights()
    processes = runtime if any(map(has_sharded_tensors, tensors.values())) else SINGLE_PROCESS
    if processes is not runtime and not runtime.is_main:
        return
    stateful_task = as_stateful_task(parts.task)
    facts = {
        "updates": runtime.updates,
        "lr_adaptation": runtime.lr_adaptation,
        "seconds": parts.elapsed_seconds,
        "random": random_states,
        "replay": replay_facts,
        "micro_batch": runtime.max_micro_batch_rows,
        "kl_coef": state.kl_coef,
        "task": stateful_task.state() if stateful_task else None,
        "ahead": AHEAD_GROUPS_TYPE.dump_python(ahead, mode="json") if ahead else None,
        **runtime.engine.state(),
    }
    # The logs up to this step must be on disk before the checkpoint is.
    sync_logs(run_dir)
    sync_tokens(run_dir, after=max(map(get_checkpoint_step, list_checkpoints(run_dir)), default=0))
    write_checkpoint(run_dir, state.step, tensors, facts, cfg.checkpoint.keep_last, processes)


def restore_run(run_dir: Path, parts: Components) -> list[str]:
    """Restore the newest undamaged checkpoint and truncate the logs to it. All processes call this together.

    Returns:
        Notes for the user, such as which checkpoints are damaged; empty in all but the main process.

    Raises:
        UserError: All checkpoints are damaged, or the run cannot be resumed with this number of processes.
    """
    runtime, state = parts.runtime, parts.state
    tensors, facts, notes = load_newest_checkpoint(run_dir, runtime)
    sharded = facts.get("sharded", [])
    names = [*tensors, *sharded]

    def load_state(name: str, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of this process, however many processes saved them."""
        if name in sharded:
            return load_shards(get_checkpoint_dir(run_dir, facts["step"]) / name, like)
        return {key: take_local_shard(x, like.get(key, x)) for key, x in tensors[name].items()}

    if "reference" in names and isinstance(parts.reference, Policy):
        parts.reference.update_weights(load_state("reference", parts.reference.weights()), decay=0.0)
    masters = runtime.engine.masters()
    runtime.engine.load_masters(load_state("policy", masters))
    runtime.engine.load_moments(
        {
            name.removeprefix(OPTIMIZER_PREFIX): load_state(name, {} if name.endswith(".step") else masters)
            for name in names
            if name.startswith(OPTIMIZER_PREFIX)
        }
    )
    runtime.engine.load_state(facts)
    runtime.updates, runtime.lr_adaptation = facts["updates"], LRAdaptation(*facts["lr_adaptation"])
    if rows := facts.get("micro_batch"):
        runtime.max_micro_batch_rows = rows
        notes = [*notes, f"memory ran out earlier: at most {rows} rows in a forward pass"]
    saved_world_size = len(facts["random"])
    if saved_world_size != runtime.world_size:
        if any(facts["replay"]):
            raise UserError(
                f"{run_dir} has replay buffers of {saved_world_size} processes: resume it with as many processes"
            )
        resumed = f"saved by {saved_world_size} processes, resumed by {runtime.world_size}"
        notes = [*notes, f"{resumed}: same weights, different rounding"]
    restore_random_state(facts["random"][runtime.rank % saved_world_size])
    parts.elapsed_seconds = facts["seconds"]
    state.step, state.kl_coef = facts["step"], facts.get("kl_coef", state.kl_coef)
    if stateful_task := as_stateful_task(parts.task):
        stateful_task.load_state(facts["task"])
    state.next_rollouts = None
    if facts.get("ahead"):
        groups, metrics = AHEAD_GROUPS_TYPE.validate_python(facts["ahead"])
        state.next_rollouts = runtime.shard(groups), metrics
    state.replay_buffer = unpack_replay(tensors, facts["replay"], runtime.rank) if any(facts["replay"]) else []
    if not runtime.is_main:
        return []
    remove_partial_checkpoints(run_dir)
    delete_tokens(run_dir, state.step)
    return [*notes, *truncate_logs(run_dir, state.step)]


def save_model(run_dir: Path, cfg: Config, parts: Components) -> None:
    """Write the trained model to `model/`, and a LoRA adapter to `adapter/`. All processes call this together.

    Raise UserError if it could not be written. The checkpoint remains, and `--resume` saves the model again.
    """
    try:
        _write_model(run_dir / "model.partial", run_dir / "adapter.partial", cfg, parts)
    except (OSError, UserError) as error:
        checkpoints = list_checkpoints(run_dir)[-1:]
        is_saved = bool(checkpoints) and get_checkpoint_step(checkpoints[0]) == parts.state.step
        remedy = "make room" if isinstance(error, OSError) else "fix that"
        kept = f"the checkpoint is intact: {remedy}, then {format_option('resume', run_dir)}"
        lost = f"there is no checkpoint (checkpoint.every = 0): {remedy}, then train again"
        raise UserError(f"{run_dir / 'model'} could not be saved ({error}); {kept if is_saved else lost}") from error


def _write_model(
    model: Path, adapter: Path, cfg: Config, parts: Components, evaluation: BestEvaluation | None = None
) -> None:
    """Write the model, and a LoRA adapter, to folders that are then renamed. All processes call this together.

    The folder of the adapter may be in that of the model. Raise OSError or UserError in all processes if one fails.
    """
    learner, runtime, dtype = parts.policy, parts.runtime, getattr(torch, cfg.policy.save_dtype)
    processes = runtime if runtime.engine.is_lockstep else SINGLE_PROCESS
    if processes is not runtime and not runtime.is_main:
        return
    is_sharded, trained = runtime.engine.is_lockstep and not learner.adapter, {}
    if learner.adapter:
        trained = {name: gather_full_tensor(p.detach()) for name, p in runtime.engine.masters().items()}
        learner.gather()

    def save_own_part() -> None:
        if is_sharded:
            save_consolidated_model(model, {name: x.to(dtype) for name, x in runtime.engine.weights().items()})

    def finish(_: Sequence[None]) -> None:
        if is_sharded:
            learner.save_config(model, dtype)
        else:
            learner.save(model, learner.build_merged_model(trained, CPU) if learner.adapter else None, dtype)
        if learner.adapter:
            save_adapter(learner.adapter, trained, adapter)
            if adapter.parent != model:
                _finalize_folder(adapter)
        if evaluation:
            _write_evaluation(model, evaluation)
        _finalize_folder(model)  # last, since a run with `model/` counts as finished

    _save_collectively([model, *([adapter] if learner.adapter else [])], save_own_part, finish, processes)


def _finalize_folder(partial_folder: Path) -> None:
    """Rename a complete folder to its final name, durably. A folder of that name is replaced."""
    folder, replaced = partial_folder.with_suffix(""), partial_folder.with_suffix(".replaced")
    files.sync_tree(partial_folder)
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)  # removing it takes time, in which a killed run would have neither
    partial_folder.rename(folder)
    files.sync_path(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


# ---------------------------------------------------------------- the model of the best evaluation


def save_best_model(run_dir: Path, cfg: Config, parts: Components, evaluation: BestEvaluation) -> None:
    """Write the policy to `model-best/`, a LoRA adapter in its subfolder `adapter`. All processes call this together.

    Raise OSError or UserError in all of them if it could not be written. An earlier `model-best/` is then intact.
    """
    partial_folder = run_dir / f"{BEST_MODEL_DIR}.partial"
    try:
        _write_model(partial_folder, partial_folder / "adapter", cfg, parts, evaluation)
    finally:
        # Reading the weights has freed those that a sampler without its own copy reads.
        if parts.runtime.engine.is_lockstep and not isinstance(parts.sampler, VLLMSampler):
            parts.policy.reshard()
            parts.policy.gather()


def link_best_model(run_dir: Path, evaluation: BestEvaluation) -> None:
    """Make `model-best/` of `model/`, which was just saved. Weights are hard links where the disk supports them."""
    partial_folder = run_dir / f"{BEST_MODEL_DIR}.partial"
    shutil.rmtree(partial_folder, ignore_errors=True)
    shutil.copytree(run_dir / "model", partial_folder, copy_function=_link_weights)
    if (run_dir / "adapter").is_dir():
        shutil.copytree(run_dir / "adapter", partial_folder / "adapter", copy_function=_link_weights)
    _write_evaluation(partial_folder, evaluation)
    _finalize_folder(partial_folder)


def _link_weights(source: str, target: str) -> None:
    """Link a file of weights, and copy any other, which someone may edit."""
    with suppress(OSError):
        if source.endswith(".safetensors"):
            os.link(source, target)
            return
    shutil.copy2(source, target)


def _write_evaluation(folder: Path, evaluation: BestEvaluation) -> None:
    record = {"step": evaluation.step, "measure": evaluation.measure, **asdict(evaluation.estimate)}
    (folder / BEST_EVALUATION_FILE).write_text(format_json_line(record), encoding="utf-8")


def remove_later_best_model(run_dir: Path, step: int) -> None:
    """Remove a `model-best/` of a step after `step`, which a resumed run takes again, and what a killed run left."""
    if (read_best_model_step(run_dir) or 0) > step:
        shutil.rmtree(run_dir / BEST_MODEL_DIR)
    for suffix in (".partial", ".replaced"):
        shutil.rmtree(run_dir / f"{BEST_MODEL_DIR}{suffix}", ignore_errors=True)


# ---------------------------------------------------------------- work of several processes


def _save_collectively(
    partial_folders: Sequence[Path],
    save_own_part: Callable[[], Sequence[T] | None],
    finish: Callable[[Sequence[T]], None],
    processes: ProcessGroup,
) -> None:
    """Save in stages. Each starts when all processes have finished the one before.

    The main process creates empty folders, each process saves its own part, and the main process calls `finish` with
    all results. If a process fails, the folders are removed, and all processes raise its OSError or UserError.
    """

    def remove_folders() -> None:
        for folder in partial_folders:
            shutil.rmtree(folder, ignore_errors=True)

    def begin() -> None:
        remove_folders()
        for folder in partial_folders:
            folder.mkdir(parents=True)

    try:
        _run_in_all_processes(begin, processes, main_only=True)
        results = _run_in_all_processes(save_own_part, processes)
        _run_in_all_processes(lambda: finish(results), processes, main_only=True)
    except (OSError, UserError):
        if processes.is_main:
            remove_folders()
        raise


def _run_in_all_processes(
    action: Callable[[], Sequence[T] | None], processes: ProcessGroup, main_only: bool = False
) -> list[T]:
    """Run an action in all processes, or in the main one while the others wait, and return all results.

    If one fails, all processes raise its OSError or UserError, so none waits forever.
    """
    results, error = [], None
    try:
        if processes.is_main or not main_only:
            results = list(action() or ())
    except (OSError, SafetensorError) as raised:
        error = OSError(str(raised))
    except UserError as raised:
        error = raised
    outcomes = processes.gather([(results, error)])
    for _, error in outcomes:
        if error:
            raise error
    return [result for results, _ in outcomes for result in results]


# ---------------------------------------------------------------- checkpoint folders


def get_checkpoint_dir(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:06d}"


def write_checkpoint(
    run_dir: Path,
    step: int,
    tensors: _TensorStates,
    facts: Mapping[str, Any],
    keep_last: int,
    processes: ProcessGroup = SINGLE_PROCESS,
) -> Path:
    """Write and sync the checkpoint of a step, remove older ones, and return its folder.

    Args:
        run_dir: The run directory.
        step: The number of finished steps.
        tensors: Each name becomes a safetensors file, or for sharded tensors a folder with a file per process.
        facts: The content of state.json.
        keep_last: How many checkpoints to keep.
        processes: The processes that call this together. If one cannot write, all raise a UserError.
    """
    folder = get_checkpoint_dir(run_dir, step)
    partial_folder = folder.with_suffix(".partial")
    sharded = {name: state for name, state in tensors.items() if has_sharded_tensors(state)}
    unsharded = {name: state for name, state in tensors.items() if name not in sharded}
    facts = {"step": step, **facts, **({"sharded": sorted(sharded)} if sharded else {})}
    if processes.is_main:
        remove_partial_checkpoints(run_dir)

    def save_own_shards() -> list[tuple[str, str]]:
        checksums = []
        for name, state in sharded.items():
            for path in save_shards(partial_folder / name, state):
                checksums.append((f"{name}/{path.name}", _sync_and_digest(path)))
            files.sync_path(partial_folder / name)
        return checksums

    def finish(shard_checksums: Sequence[tuple[str, str]]) -> None:
        _write_files(partial_folder, unsharded, facts, dict(shard_checksums))
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one, if the run was resumed from an earlier step
        partial_folder.rename(folder)
        files.sync_path(folder.parent)
        files.sync_path(run_dir)
        for old in list_checkpoints(run_dir)[:-keep_last]:
            _remove_checkpoint(old)

    try:
        _save_collectively([partial_folder], save_own_shards, finish, processes)
    except OSError as error:
        raise UserError(
            f"step {step} could not be saved in {folder.parent} ({error}); earlier checkpoints are intact"
        ) from error
    return folder


def _write_files(folder: Path, tensors: _TensorStates, facts: Mapping[str, Any], checksums: Mapping[str, str]) -> None:
    """Write tensors, facts and the checksums of all files; `checksums` has those of files already written."""
    for name, state in tensors.items():
        # safetensors refuses tensors that share memory, and ignores strides.
        save_file({k: x.detach().cpu().contiguous() for k, x in state.items()}, folder / f"{name}.safetensors")
    (folder / "state.json").write_text(json.dumps(facts))
    paths = [*(folder / f"{name}.safetensors" for name in tensors), folder / "state.json"]
    checksums = {**checksums, **{path.name: _sync_and_digest(path) for path in paths}}
    (folder / CHECKSUMS_FILE).write_text("".join(f"{digest}  {name}\n" for name, digest in checksums.items()))
    files.sync_path(folder / CHECKSUMS_FILE)
    files.sync_path(folder)


def _sync_and_digest(path: Path) -> str:
    """Sync a file, since power may fail after the rename and before the write-back; return its checksum."""
    files.sync_path(path)
    return files.compute_file_digest(path)


def _remove_checkpoint(folder: Path) -> None:
    """Rename a checkpoint and remove it, so that a killed process leaves no incomplete checkpoint."""
    shutil.rmtree(folder.rename(folder.with_suffix(".partial")))


def remove_old_checkpoints(run_dir: Path, settings: CheckpointConfig) -> None:
    """Remove the checkpoints of a finished run that the settings do not keep.

    With checkpoint.every = 0 all are removed: one from a stop request would resume the run from its middle.
    """
    keep = settings.keep_finished if settings.every else "none"
    for old in list_checkpoints(run_dir)[: {"newest": -1, "all": -settings.keep_last, "none": None}[keep]]:
        _remove_checkpoint(old)


def remove_partial_checkpoints(run_dir: Path) -> None:
    """Remove checkpoints that a killed process was writing or removing."""
    for folder in (run_dir / "checkpoints").glob("*.partial"):
        shutil.rmtree(folder, ignore_errors=True)


def load_newest_checkpoint(
    run_dir: Path, processes: ProcessGroup = SINGLE_PROCESS
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any], list[str]]:
    """Load the newest undamaged checkpoint, which the main process finds.

    Return tensors and facts as `load_checkpoint` does, and notes that name damaged checkpoints. Raise UserError in all
    processes if all checkpoints are damaged, or if a process cannot read the checkpoint.
    """
    loaded = {}

    def find() -> list[tuple[Path, list[str]]]:
        damaged: list[str] = []
        for folder in reversed(list_checkpoints(run_dir)):
            try:
                loaded[folder] = load_checkpoint(folder)
            except DamagedCheckpointError as error:
                damaged.append(str(error))
            else:
                return [(folder, [f"{line}: {folder.name} is loaded instead" for line in damaged])]
        found = "; ".join(damaged) or str(run_dir)
        raise UserError(f"{found}: no checkpoint is intact: restore one from a copy, or start in another folder")

    def load() -> None:
        if folder not in loaded:
            loaded[folder] = load_checkpoint(folder, is_verified=True)

    [(folder, notes)] = _run_in_all_processes(find, processes, main_only=True)
    _run_in_all_processes(load, processes)
    return *loaded[folder], notes


def load_checkpoint(folder: Path, is_verified: bool = False) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Load the unsharded tensors, and the facts that `write_checkpoint` saved, including the step.

    Raise DamagedCheckpointError if a file is missing or has changed. If another process has verified the checksums,
    `is_verified` skips them.
    """
    try:
        facts = json.loads((folder / "state.json").read_text())
        if not isinstance(facts, dict) or facts.get("step") != get_checkpoint_step(folder):
            raise ValueError("state.json belongs to another step")
        verify_checksums(folder, only_names=is_verified)
        tensors = {path.stem: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
    except (OSError, ValueError, SafetensorError) as error:
        raise DamagedCheckpointError(f"{folder} is damaged ({error})") from error
    return tensors, facts


def verify_checksums(folder: Path, only_names: bool = False) -> None:
    """Raise ValueError if a file is missing, is not listed, or, unless `only_names`, has another checksum."""
    *lines, end = (folder / CHECKSUMS_FILE).read_text().split("\n")
    if end:
        raise ValueError(f"{CHECKSUMS_FILE} is cut off")
    checksums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    names = {str(path.relative_to(folder)) for path in (folder / "state.json", *folder.rglob("*.safetensors"))}
    if unmatched := sorted(names ^ checksums.keys()):
        fault = f"not listed in {CHECKSUMS_FILE}" if unmatched[0] in names else "missing"
        raise ValueError(f"{unmatched[0]} is {fault}")
    for name, digest in {}.items() if only_names else checksums.items():
        if files.compute_file_digest(folder / name) != digest:
            raise ValueError(f"{name} does not match {CHECKSUMS_FILE}")


# ---------------------------------------------------------------- replay buffers and random states


def pack_replay(buffers: Sequence[_ReplayBuffer]) -> tuple[dict[str, dict[str, Tensor]], list[list[dict[str, Any]]]]:
    """Return the replay buffers of all processes as tensors and facts of a checkpoint."""
    tensors = {
        f"{REPLAY_PREFIX}{rank}.{i}": batch.get_tensors()
        for rank, buffer in enumerate(buffers)
        for i, (_, batch) in enumerate(buffer)
    }
    facts = [
        [
            {"step": step, "prompt_ids": batch.prompt_ids, "demonstrations": batch.demonstrations}
            for step, batch in buffer
        ]
        for buffer in buffers
    ]
    return tensors, facts


def unpack_replay(
    tensors: _TensorStates, facts: Sequence[Sequence[Mapping[str, Any]]], rank: int
) -> list[tuple[int, Batch]]:
    """Return the replay buffer of one process."""
    return [
        (
            fact["step"],
            Batch(
                prompt_ids=tuple(map(tuple, fact["prompt_ids"])),
                demonstrations=tuple(map(tuple, fact["demonstrations"])),
                **tensors[f"{REPLAY_PREFIX}{rank}.{i}"],
            ),
        )
        for i, fact in enumerate(facts[rank])
    ]


def get_random_state() -> dict[str, Any]:
    """Return the state of every global random generator as JSON, for tasks that use one.

    Samplers have none: each call is seeded by its step.
    """
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
