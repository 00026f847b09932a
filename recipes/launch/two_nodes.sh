#!/usr/bin/env bash
# Two machines. Start the same line on each, with its own NODE; HEAD is the name or address of node 0:
#   HEAD=host0 NODE=0 recipes/launch/two_nodes.sh recipes/gsm8k.toml --run /shared/runs/gsm8k
#   HEAD=host0 NODE=1 recipes/launch/two_nodes.sh recipes/gsm8k.toml --run /shared/runs/gsm8k
# Both must see the run folder, the model and the data at the same path. Parameters are sharded within a machine and
# replicated across (hybrid sharding), so that only gradients go over the network. SHARDS=0 shards across both: less
# memory, more traffic, as ENGINE=deepspeed does. NODES takes more machines, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name their network.
set -euo pipefail
: "${HEAD:?say HEAD=, the name or address of node 0}" "${NODE:?say NODE=, the number of this machine, from 0}"
processes="${PROCESSES:-8}" engine="${ENGINE:-fsdp2}" sharding=()
[[ $engine == fsdp2 ]] && sharding=(--runtime.shards "${SHARDS:-$processes}")
exec torchrun --nnodes "${NODES:-2}" --node-rank "$NODE" --nproc-per-node "$processes" \
    --master-addr "$HEAD" --master-port "${PORT:-29500}" \
    -m -- pellucid train "$@" --runtime.engine "$engine" "${sharding[@]}"
