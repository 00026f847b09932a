#!/usr/bin/env bash
# All GPUs of one machine, a process each: recipes/launch/eight_gpus.sh recipes/gsm8k.toml [--section.setting value ...]
# Every parameter, gradient and moment is sharded among them. ENGINE=ddp is for a model that fits on each of them;
# PROCESSES=2 takes fewer.
set -euo pipefail
exec torchrun --standalone --nproc-per-node "${PROCESSES:-8}" -m -- pellucid train "$@" --runtime.engine "${ENGINE:-fsdp2}"
