#!/usr/bin/env bash
# Slurm: sampler servers on machines of their own, one for each GPU, as a job beside that of slurm.sh:
#   export PELLUCID_SAMPLER_TOKEN=...    # both jobs need the same secret
#   sbatch recipes/launch/slurm_servers.sh --cache-gb 40
# Its log begins with the addresses for --sampler.urls. `scancel` ends it after the run.
#SBATCH --job-name=pellucid-servers
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
set -euo pipefail
: "${PELLUCID_SAMPLER_TOKEN:?set it to a secret, and export it for both jobs}"
export SERVERS="${SLURM_GPUS_ON_NODE:-8}" PORT="${PORT:-8001}"
hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
urls=()
for host in $hosts; do
    for ((i = 0; i < SERVERS; i++)); do urls+=("http://$host:$((PORT + i))"); done
done
echo "--sampler.urls ${urls[*]}"
srun recipes/launch/servers.sh --host 0.0.0.0 --allowed-hosts "${hosts//$'\n'/,}" "$@"
