#!/usr/bin/env bash
#SBATCH --job-name=dipaco-roles
#SBATCH --ntasks=3
#SBATCH --cpus-per-task=4
#SBATCH --signal=TERM@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=dipaco-roles-%j.log
# The roles of a run of islands that need no accelerator, beside workers.sh, which has the same options:
#   sbatch launch/slurm/roles.sh --config=configs/tiny.py --workdir=s3://BUCKET/runs/one
set -euo pipefail
export JAX_PLATFORMS=cpu
# shellcheck disable=SC2016 # each task's shell knows its number
exec bash launch/slurm/step.sh bash -c 'roles=(outer evaluator monitor); role=${roles[SLURM_PROCID]}; status=0
  trap : INT TERM  # the role hears them, too
  python -m dipaco_jax.main --role="$role" --name="$role-$SLURM_JOB_ID" "$@" || status=$?
  case $status in
    0 | 143) ;;  # at a preemption each hears of it
    130) status=0 ;;  # another has failed: its status is that of the job
    *) scancel --signal=INT "$SLURM_JOB_ID.$SLURM_STEP_ID" ;;  # no role goes on without the others
  esac
  exit "$status"' roles "$@"
