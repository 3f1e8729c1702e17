#!/usr/bin/env bash
#SBATCH --job-name=dipaco
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=dipaco-%j.log
# A whole run, `main` in one process on each node. In the clone, in the environment that it is installed in:
#   sbatch --nodes=4 --gpus-per-node=8 launch/slurm/job.sh --config=configs/tiny.py --workdir=/shared/runs/one
# Options before job.sh replace those above. All nodes see the workdir. 300 s before the time limit, or at a preemption,
# the run saves its state and stops, and the job is queued again: step.sh.
set -euo pipefail
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=$(scontrol show node "${nodes%%$'\n'*}" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
port=$((61440 + SLURM_JOB_ID % 4096))  # above those that Linux gives to clients
# shellcheck disable=SC2016 # each task's shell knows its number
exec bash launch/slurm/step.sh bash -c 'exec python -m dipaco_jax.main --distributed --coordinator="$0" \
  --num_processes="$SLURM_NTASKS" --process_id="$SLURM_PROCID" "$@"' "$first:$port" "$@"
