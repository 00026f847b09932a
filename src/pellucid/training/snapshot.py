"""A run into a checkpoint, and back."""

from __future__ import annotations

from pathlib import Path

from pellucid.config import Config
from pellucid.policy.policy import Policy
from pellucid.reporting import loggers
from pellucid.training import checkpoint
from pellucid.training.compose import Components
from pellucid.types import UserError, stateful_task

OPTIMIZER = "optimizer."


def save(run_dir: Path, cfg: Config, parts: Components) -> None:
    runtime, state, reference = parts.runtime, parts.state, parts.reference
    generators = runtime.gather([checkpoint.random_state()])
    replay, replay_facts = checkpoint.pack_replay(runtime.gather([state.experiences]))
    # A file for each moment: safetensors holds a whole file in memory while it writes.
    moments = {f"{OPTIMIZER}{moment}": tensors for moment, tensors in runtime.optimizer_state().items()}
    moving = (
        {"reference": reference.weights()} if cfg.algorithm.reference_every and isinstance(reference, Policy) else {}
    )
    tensors = {"policy": parts.policy.masters(), **moments, **moving, **replay}
    if not runtime.main:  # only here: what lies in several processes is gathered by all of them
        return
    facts = {"updates": runtime.updates, "seconds": parts.seconds, "random": generators, "replay": replay_facts}
    facts |= {"micro_batch": runtime.micro_batch} if runtime.micro_batch else {}
    facts |= {"scaler": runtime.scaler.state_dict()} if runtime.scaler.is_enabled() else {}
    facts |= {"kl_coef": state.kl_coef} if cfg.algorithm.kl_target else {}
    watching = stateful_task(parts.task)
    facts |= {"task": watching.state()} if watching else {}
    loggers.sync(run_dir)  # a checkpoint counts when what led to it is on disk
    checkpoint.save(run_dir, state.step, tensors, facts, cfg.checkpoint.keep_last)


def restore(run_dir: Path, parts: Components) -> list[str]:
    """Restore the newest whole checkpoint and cut the logs to it. Return lines that say what is damaged."""
    tensors, facts, notes = checkpoint.newest(run_dir)
    runtime, state = parts.runtime, parts.state
    if len(facts["random"]) != runtime.world:
        raise UserError(f"{run_dir} was trained by {len(facts['random'])} processes: resume it with as many")
    if "reference" in tensors and isinstance(parts.reference, Policy):
        parts.reference.follow(tensors["reference"], decay=0.0)
    moments = {name.removeprefix(OPTIMIZER): value for name, value in tensors.items() if name.startswith(OPTIMIZER)}
    parts.policy.load_trainable({**tensors["policy"], **moments.pop("master", {})})  # where versions up to 0.1 had them
    runtime.load_optimizer_state(moments, facts["updates"])
    if "scaler" in facts:
        runtime.scaler.load_state_dict(facts["scaler"])
    if rows := facts.get("micro_batch", 0):
        runtime.micro_batch = rows
        notes = [*notes, f"memory ran out before: {rows} rows in a forward pass at most"]
    checkpoint.restore_random_state(facts["random"][runtime.rank])
    parts.seconds = facts["seconds"]
    state.step, state.kl_coef = facts["step"], facts.get("kl_coef", state.kl_coef)
    if watching := stateful_task(parts.task):
        watching.load_state(facts["task"])
    kept = checkpoint.unpack_replay(tensors, facts["replay"], runtime.rank)
    state.experiences = [(step, batch.to(parts.policy.device)) for step, batch in kept]
    if not runtime.main:
        return []
    checkpoint.clear_rests(run_dir)
    return [*notes, *loggers.truncate(run_dir, state.step)]
