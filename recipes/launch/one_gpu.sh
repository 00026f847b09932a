#!/usr/bin/env bash
# One GPU, or none: recipes/launch/one_gpu.sh recipes/gsm8k.toml [--section.setting value ...]
set -euo pipefail
exec pellucid train "$@"
