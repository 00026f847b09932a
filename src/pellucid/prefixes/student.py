"""The student: a local model that is asked for prefixes with the same messages as a teacher."""

from __future__ import annotations

from pellucid.config import Config
from pellucid.policy import policy
from pellucid.rollout.select import choose_sampler
from pellucid.types import Sampler
from pellucid.utils import hardware
from pellucid.utils.text import escape_controls


def load_student_sampler(cfg: Config, name: str) -> Sampler:
    hardware.keep_freed_memory()
    device = hardware.pick_device(cfg.policy.device)
    dtype = hardware.pick_dtype(cfg.policy.dtype, device)
    access = cfg.policy.get_access(name)
    if note := access.format_warning(name):
        print(escape_controls(f"! {note}"), flush=True)
    frozen = policy.load_frozen_policy(name, device, dtype, cfg.sampler.temperature, cfg.policy.engine, access=access)
    sampler, note = choose_sampler("native", cfg.sampler.rows, frozen)
    if note:
        print(escape_controls(f"! {note}"), flush=True)
    sampler.sync(frozen, 0)
    return sampler
