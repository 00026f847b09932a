"""The student: a local model that is asked for prefixes with the same messages as a teacher."""

from __future__ import annotations

from pellucid.config import Config
from pellucid.machine import hardware
from pellucid.machine.harmless import harmless
from pellucid.policy import policy
from pellucid.protocols import Sampler
from pellucid.samplers.choice import choose


def load(cfg: Config, name: str) -> Sampler:
    hardware.keep_freed_memory()
    device = hardware.pick_device(cfg.policy.device)
    dtype = hardware.pick_dtype(cfg.policy.dtype, device)
    access = cfg.policy.get_access(name)
    if note := access.format_warning(name):
        print(harmless(f"! {note}"), flush=True)
    frozen = policy.load_frozen(name, device, dtype, cfg.sampler.temperature, cfg.policy.engine, access=access)
    sampler, note = choose("native", cfg.sampler.rows, frozen)
    if note:
        print(harmless(f"! {note}"), flush=True)
    sampler.sync(frozen, 0)
    return sampler
