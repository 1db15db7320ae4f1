#!/bin/bash
# Two nodes of 4 GPUs, a rank for each: sbatch examples/slurm.sh
#SBATCH --job-name=kos
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --time=00:10:00
set -euo pipefail

# srun tells each rank its number; they find each other at the first node, and prove that they know the secret.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
KOS_SECRET=$(openssl rand -hex 32)
export MASTER_ADDR MASTER_PORT KOS_SECRET
export KOS_RECORDER_DIR=${KOS_RECORDER_DIR:-dumps-$SLURM_JOB_ID} # the last calls of each rank, if one fails

srun --kill-on-bad-exit=1 "${PYTHON:-python}" "${1:-examples/all_reduce.py}"
