#!/usr/bin/env bash
#SBATCH --job-name=dipaco-worker
#SBATCH --array=0-7
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --signal=TERM@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=dipaco-worker-%A-%a.log
# Workers of a run of islands: each task of the array is one of its own, started, preempted and queued again by itself.
#   sbatch --array=0-31 --gpus=1 launch/slurm/workers.sh --config=configs/tiny.py --workdir=s3://BUCKET/runs/one
# DIPACO_REGISTRY names the registry. roles.sh starts the other roles.
set -euo pipefail
exec bash launch/slurm/step.sh python -m dipaco_jax.main --role=worker \
  --name="worker-$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID" "$@"
