#!/bin/bash
# Two nodes of 4 GPUs, one rank per GPU: sbatch examples/slurm.sh [PROGRAM | -m MODULE] [arguments], for example
# sbatch examples/slurm.sh -m kos.train --preset 1b. Before the time limit, or if the job is preempted, the trainer
# saves. The job is then requeued and resumes. Options of sbatch go before the script: sbatch --nodes=1 ….
#SBATCH --job-name=kos
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

# srun tells each rank its number; they find each other at the first node, and prove that they know the secret.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
KOS_SECRET=$(openssl rand -hex 32)
export MASTER_ADDR MASTER_PORT KOS_SECRET
export KOS_RECORDER_DIR=${KOS_RECORDER_DIR:-dumps-$SLURM_JOB_ID} # the last calls of each rank, if one fails
if [ -x .venv/bin/python ]; then PATH=$PWD/.venv/bin:$PATH; fi

[ $# -gt 0 ] || set -- examples/all_reduce.py
out=
if [ "$1 ${2-}" = "-m kos.train" ]; then
    more=(--resume auto) previous=
    for each in "${@:3}"; do
        case $each in --out=* | --config=*) previous=${each%%=*} each=${each#*=} ;; esac
        case $previous in
        --out) out=$each ;;
        --config) if [ -d "$(dirname "$each")/checkpoints" ]; then out=${out:-$(dirname "$each")}; fi ;; # of a run
        esac
        previous=$each
    done
    if [ -z "$out" ]; then out=runs/slurm-$SLURM_JOB_ID; more+=(--out "$out"); fi # the same after a requeue
    set -- -m kos.train "${more[@]}" "${@:3}"
fi

# srun does not inherit --cpus-per-task from sbatch.
srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "${PYTHON:-python}" "$@"

# The signal comes 120 to 180 seconds before the end. A run that has steps left goes on in the next job.
if [ -n "$out" ] && (($(date +%s) > ${SLURM_JOB_END_TIME:-9999999999} - 180)); then
    steps=$(sed -n 's/^ *"steps": *\([0-9]*\).*/\1/p' "$out/config.json" | tail -1)
    last=$(find "$out/checkpoints" -name 'step-*' | sed 's/.*step-//' | sort -n | tail -1)
    if ((${last:-0} < ${steps:-0})); then scontrol requeue "$SLURM_JOB_ID"; fi
fi
