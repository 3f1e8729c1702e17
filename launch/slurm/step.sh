#!/usr/bin/env bash
# Runs a command as a step of the job, and queues the job again where that was stopped: job.sh, workers.sh and roles.sh.
set -euo pipefail
job=$SLURM_JOB_ID
# The job id of an array's last task is the array's own.
[[ ! ${SLURM_ARRAY_TASK_ID-} ]] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
trap : TERM  # scancel sends it to the step, too, which this shell waits for
status=0
# All processes save at the same time: one that is ready sooner does not end the others.
srun --kill-on-bad-exit=0 --cpus-per-task="$SLURM_CPUS_PER_TASK" "$@" || status=$?
if [[ $(squeue --noheader --format=%T --jobs="$job") == RUNNING ]]; then  # else Slurm itself has ended or requeued it
  case $status in
    143) scontrol requeue "$job" ;;  # the time limit, or a preemption
    75) scontrol requeuehold "$job" ;;  # the disk is full, or the registry away: `scontrol release` when that is mended
  esac
fi
exit "$status"
