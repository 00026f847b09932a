"""A run into a checkpoint, and back."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from pydantic import ConfigDict, TypeAdapter
from torch import Tensor

from pellucid.config import Config
from pellucid.machine import disk
from pellucid.models.masters import whole
from pellucid.policy import lora
from pellucid.policy.policy import CPU, Policy
from pellucid.protocols import stateful_task
from pellucid.reporting import loggers, tokens
from pellucid.reporting.run_folder import checkpoints, step_of
from pellucid.runtimes import shards
from pellucid.training import checkpoint
from pellucid.training.compose import Components
from pellucid.types import Group, UserError

OPTIMIZER = "optimizer."
AHEAD = TypeAdapter(
    tuple[Sequence[Group], dict[str, float]],
    config=ConfigDict(ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="constants"),
)
"""The groups and metrics that were drawn ahead for the step after a checkpoint. A reward that failed is NaN, which must
stay a float: pydantic writes null by default, and a null is no reward when the checkpoint is loaded."""


def save(run_dir: Path, cfg: Config, parts: Components) -> None:
    runtime, state, reference = parts.runtime, parts.state, parts.reference
    generators = runtime.gather([checkpoint.random_state()])
    replay, replay_facts = checkpoint.pack_replay(runtime.gather([state.replay_buffer]))
    # A file for each moment: safetensors holds a whole file in memory while it writes.
    moments = {f"{OPTIMIZER}{moment}": tensors for moment, tensors in runtime.engine.moments().items()}
    moving = (
        {"reference": reference.weights()} if cfg.algorithm.reference_every and isinstance(reference, Policy) else {}
    )
    tensors = {"policy": runtime.engine.masters(), **moments, **moving, **replay}
    processes = runtime if any(map(shards.sharded, tensors.values())) else checkpoint.ALONE
    if processes is not runtime and not runtime.is_main:
        return
    facts = {"updates": runtime.updates, "seconds": parts.elapsed_seconds, "random": generators, "replay": replay_facts}
    facts |= {"micro_batch": runtime.max_micro_batch_rows} if runtime.max_micro_batch_rows else {}
    facts |= runtime.engine.state()
    facts |= {"kl_coef": state.kl_coef} if cfg.algorithm.kl_target else {}
    watching = stateful_task(parts.task)
    facts |= {"task": watching.state()} if watching else {}
    facts |= {"ahead": AHEAD.dump_python(state.next_rollouts, mode="json")} if state.next_rollouts else {}
    loggers.sync(run_dir)  # a checkpoint counts when what led to it is on disk
    tokens.sync(run_dir, after=max(map(step_of, checkpoints(run_dir)), default=0))
    checkpoint.save(run_dir, state.step, tensors, facts, cfg.checkpoint.keep_last, processes)


def restore(run_dir: Path, parts: Components) -> list[str]:
    """Restore the newest whole checkpoint and cut the logs to it. Return lines that say what is damaged."""
    runtime, state = parts.runtime, parts.state
    tensors, facts, notes = checkpoint.newest(run_dir, runtime)
    folder = run_dir / "checkpoints" / f"step-{facts['step']:06d}"
    apart = facts.get("sharded", [])

    def saved(name: str, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state as this run has it, however many processes kept it then and now."""
        if name in apart:
            return shards.read(folder / name, like)
        return {key: shards.part_of(x, like.get(key, x)) for key, x in tensors[name].items()}

    if "reference" in (*tensors, *apart) and isinstance(parts.reference, Policy):
        parts.reference.update_weights(saved("reference", parts.reference.weights()), decay=0.0)
    masters = runtime.engine.masters()
    moments = {
        name.removeprefix(OPTIMIZER): saved(name, {} if name.endswith(".step") else masters)
        for name in (*tensors, *apart)
        if name.startswith(OPTIMIZER)
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
    checkpoint.restore_random_state(facts["random"][runtime.rank % then])
    parts.elapsed_seconds = facts["seconds"]
    state.step, state.kl_coef = facts["step"], facts.get("kl_coef", state.kl_coef)
    if watching := stateful_task(parts.task):
        watching.load_state(facts["task"])
    state.next_rollouts = AHEAD.validate_python(facts["ahead"]) if "ahead" in facts else None
    rank, replay = runtime.rank, facts["replay"]
    state.replay_buffer = checkpoint.unpack_replay(tensors, replay, rank) if any(replay) else []
    if not runtime.is_main:
        return []
    checkpoint.clear_rests(run_dir)
    tokens.forget(run_dir, state.step)
    return [*notes, *loggers.truncate(run_dir, state.step)]


def save_model(run_dir: Path, cfg: Config, parts: Components) -> None:
    """Save the model durably. UserError where that fails: the checkpoint is whole, and `--resume` saves again."""
    learner, runtime, dtype = parts.policy, parts.runtime, getattr(torch, cfg.policy.save_dtype)
    processes = runtime if runtime.engine.is_lockstep else checkpoint.ALONE
    if processes is not runtime and not runtime.is_main:
        return
    folder, partial, adapter = run_dir / "model", run_dir / "model.partial", run_dir / "adapter.partial"
    parted, trained = runtime.engine.is_lockstep and not learner.adapter, {}
    if learner.adapter:
        trained = {name: whole(p.detach()) for name, p in runtime.engine.masters().items()}
        learner.gather()

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)

    def own() -> None:
        shards.write_model(partial, {name: x.to(dtype) for name, x in runtime.engine.weights().items()})

    def end() -> None:
        merged = learner.build_merged_model(trained, CPU) if learner.adapter else None
        learner.save_config(partial, dtype) if parted else learner.save(partial, merged, dtype)
        if learner.adapter:
            shutil.rmtree(adapter, ignore_errors=True)
            lora.save(learner.adapter, trained, adapter)
            put_in_place(adapter)
        put_in_place(partial)  # last: with it the run is finished

    try:
        checkpoint.together(begin if processes.is_main else None, processes)
        checkpoint.together(own if parted else None, processes)
        checkpoint.together(end if processes.is_main else None, processes)
    except (OSError, UserError) as error:
        if processes.is_main:
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(adapter, ignore_errors=True)
        saved = checkpoints(run_dir)[-1:]
        is_saved = bool(saved) and step_of(saved[0]) == parts.state.step
        first = "make room" if isinstance(error, OSError) else "mend that"
        mend = f"the checkpoint is whole: {first}, then --resume {run_dir}"
        lost = f"checkpoint.every = 0 has left no checkpoint of it: {first}, then train it again"
        raise UserError(f"{folder} could not be saved ({error}); {mend if is_saved else lost}") from error


def put_in_place(partial: Path) -> None:
    """Rename a folder that is written to its end to its own name, durably; what was there goes."""
    folder = partial.with_suffix("")
    disk.sync_tree(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    disk.sync(folder.parent)
