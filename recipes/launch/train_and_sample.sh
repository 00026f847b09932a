#!/usr/bin/env bash
# One machine whose first GPUs train while its last GPUs sample with vLLM:
#   PROCESSES=4 SERVERS=4 recipes/launch/train_and_sample.sh recipes/gsm8k.toml [--section.setting value ...]
# CACHE_GB is the memory of each server for keys and values. The servers end with the run.
set -euo pipefail
processes="${PROCESSES:-4}" servers="${SERVERS:-4}" port="${PORT:-8001}"
export PELLUCID_SAMPLER_TOKEN="${PELLUCID_SAMPLER_TOKEN:-$RANDOM$RANDOM$RANDOM$RANDOM}"
folder="$(dirname "$0")"
FIRST="$processes" SERVERS="$servers" PORT="$port" "$folder/servers.sh" --cache-gb "${CACHE_GB:-40}" &
group=$!
trap 'kill "$group" 2> /dev/null || true; wait' EXIT
urls=()
for ((i = 0; i < servers; i++)); do
    urls+=("http://127.0.0.1:$((port + i))")
    until (: < "/dev/tcp/127.0.0.1/$((port + i))") 2> /dev/null; do
        kill -0 "$group" # ends this script if the servers have ended
        sleep 1
    done
done
PROCESSES="$processes" "$folder/eight_gpus.sh" "$@" --sampler.name vllm --sampler.urls "${urls[@]}"
