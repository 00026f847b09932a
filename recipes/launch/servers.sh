#!/usr/bin/env bash
# A sampler server for each GPU of this machine: recipes/launch/servers.sh [--host 0.0.0.0 --cache-gb 40 ...]
# SERVERS=2 FIRST=6 starts two, on GPUs 6 and 7. PORT is the port of the first (8001). If one ends, all end.
set -euo pipefail
trap 'kill $(jobs -p) 2> /dev/null || true; wait' EXIT
trap 'exit 143' TERM
first="${FIRST:-0}" port="${PORT:-8001}"
for ((i = 0; i < ${SERVERS:-8}; i++)); do
    CUDA_VISIBLE_DEVICES=$((first + i)) pellucid sampler --port $((port + i)) "$@" &
done
wait -n
