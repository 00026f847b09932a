#!/usr/bin/env bash
# Slurm: sbatch recipes/launch/slurm.sh recipes/gsm8k.toml --run /shared/runs/gsm8k
# A launcher a machine; each starts a process a GPU. Slurm sends SIGTERM five minutes before the time is over: the step
# is finished and saved, and `sbatch recipes/launch/slurm.sh --resume /shared/runs/gsm8k` goes on.
#SBATCH --job-name=pellucid
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --output=%x-%j.log
set -euo pipefail
hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")" # A pipe into head might end scontrol, and with it the job.
export HEAD="${hosts%%$'\n'*}"
export NODES="$SLURM_JOB_NUM_NODES" PROCESSES="${SLURM_GPUS_ON_NODE:-8}" PORT="$((20000 + SLURM_JOB_ID % 10000))"
srun bash -c 'NODE="$SLURM_NODEID" exec recipes/launch/two_nodes.sh "$@"' two_nodes "$@"
