"""A run in this process, from settings to report; the command `main` and `dipaco_jax.train` share it."""

import contextlib
import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

from dipaco_jax.buckets import disks
from dipaco_jax.command_line import bucket_run, command
from dipaco_jax.config import settings as settings_lib
from dipaco_jax.core import errors
from dipaco_jax.core.errors import InputError
from dipaco_jax.pipeline import inputs, plan, preflight, reuse, run as run_lib, stage_records, stages
from dipaco_jax.processes import display, processes, stopping, time_use
from dipaco_jax.reports import live_report, run_report
from dipaco_jax.storage import files, lock
from dipaco_jax.storage.remedies import ISLANDS_MARK
from dipaco_jax.telemetry import metrics_log, metrics_server, performance, profiling, sinks, time_account
from dipaco_jax.training import compilation_cache, training_loop


class Call(NamedTuple):
  """What the user has asked for beside the settings."""

  workdir: str  # a folder, or the URL of a bucket
  command: str  # or call, for command.txt
  reuse: str | os.PathLike | None = None
  scratch: str | os.PathLike | None = None  # with a bucket; see `bucket_run.scratch_parent`
  # To look at the run with; nothing that it makes depends on it.
  profile: profiling.Steps | None = None
  watched: metrics_server.MetricsServer | None = None


def train(call: Call, settings: settings_lib.Settings, signals: stopping.Signals) -> dict[str, Any]:
  """Checks everything that can be checked, then runs the stages that are not done; returns what report.json holds.

  Other processes of a job than the first get {}.

  Raises InputError; Unavailable if the disk is full, gone or read-only, or the bucket is away; Diverged;
  KeyboardInterrupt when it was stopped.
  """
  check_no_islands(call.workdir)
  if settings.data.own_text:
    raise InputError('config.data.own_text=True is for islands: give each process a --role, as docs/owners.md says')
  check_settings(settings)
  with display.doing('looking for devices'):
    command.check_devices()
  if '://' not in call.workdir:
    with command.full_disk_told(f'--workdir={call.workdir}'):
      return _train(pathlib.Path(call.workdir), call, settings, signals)
  parent = bucket_run.scratch_parent(call.scratch)
  with command.full_disk_told(f'--scratch={parent}'), bucket_run.opened(call.workdir, parent, settings) as disk:
    return _train(bucket_run.folder_here(call.workdir, call.scratch), call, settings, signals, disk)


def check_settings(settings: settings_lib.Settings):
  """Raises InputError for what runs in one process cannot do."""
  fix = 'add --role, or run `python -m dipaco_jax.local`, or leave it out'
  if settings.train.phase_s:
    problem = 'is for islands, whose workers end a phase at different steps'
    raise InputError(f'config.train.phase_s={settings.train.phase_s} {problem}: {fix}')
  if settings.outer.quorum < 1:
    problem = 'is for islands, whose paths are done at different times'
    raise InputError(f'config.outer.quorum={settings.outer.quorum} {problem}: {fix}')
  if settings.outer.floor:
    raise InputError(f'config.outer.floor={settings.outer.floor} is for islands, whose evaluator judges paths: {fix}')


def check_no_islands(workdir: str):
  """Raises InputError if islands have a run in a folder; of a bucket, the mirror does so."""
  if '://' not in workdir and (pathlib.Path(workdir) / ISLANDS_MARK).exists():
    raise InputError(
      f'--workdir={workdir} is a run of islands: add its --role, or run `python -m dipaco_jax.local`, or name another '
      'folder for a run of one job'
    )


def _train(
  workdir: pathlib.Path,
  call: Call,
  settings: settings_lib.Settings,
  signals: stopping.Signals,
  disk: disks.Disk = disks.SHARED,
) -> dict[str, Any]:
  with contextlib.ExitStack() as stack:
    first = processes.is_first()
    display.STDERR.silent |= not first
    preflight.check_text(workdir, settings)
    with display.doing('looking at the model'):
      preflight.check_model(settings)
    place = call.workdir.rstrip('/') if disk.mirror else os.path.realpath(workdir)
    metric_sinks = sinks.make(settings, pathlib.Path(place).name) if first else []
    stack.enter_context(preflight.kept(workdir))
    if first:
      stack.enter_context(lock.hold(workdir))
      preflight.settle_config(workdir, settings, call.command)
      inputs.check_inputs(workdir, settings)
      preflight.check_costs(workdir, settings)
      account = stack.enter_context(time_account.kept(workdir, signals))
    disk.follow('config', with_checkpoints=True)  # some may have been removed with an earlier config
    compilation_cache.keep()
    page = stack.enter_context(contextlib.closing(live_report.LiveReport(workdir)))
    with sinks.fed(metric_sinks, lambda: sinks.follow(workdir), sinks.in_workdir(workdir)):
      _run_stages(workdir, settings, signals, page.write_if_due, call, disk)
    page.close()
    report = _finish(workdir, account) if first else {}
    processes.barrier('finished')  # the others' end waits for the first's no longer than some minutes
    return report


def _run_stages(
  workdir: pathlib.Path,
  settings: settings_lib.Settings,
  signals: stopping.Signals,
  evaluated: Callable[[], None],
  call: Call,
  disk: disks.Disk,
):
  """Runs the stages that are not done; `evaluated` is called after each evaluation."""
  events = 'tensorboard' in settings.metrics.sinks
  with (
    metrics_log.Metrics(workdir, processes.is_first(), evaluated, events) as metrics,
    performance.watch_compilations() as compilations,
    contextlib.closing(profiling.Profiler(workdir, call.profile)) as profiler,
  ):

    def stop() -> bool:
      if disk.mirror:
        disk.mirror.check()
      return signals.requested()

    run = run_lib.Run(workdir, settings, metrics, compilations, stop, signals.graceful, disk=disk, profiler=profiler)
    if call.watched and (clock := time_use.present()):
      call.watched.read = functools.partial(run_lib.read_metrics, run, clock)
    preflight.note_environment(run)
    if call.reuse and processes.is_first():
      reuse.take_stages(run, pathlib.Path(call.reuse))
    disk.follow('reuse')
    disk.publish()
    display.STDERR.note(plan.describe(settings, stage_records.read_stages(workdir)))
    try:
      stages.run_all(run)
    except training_loop.Stopped:
      processes.barrier('stopped')  # the first process takes the coordinator with it
      raise
    except InputError as e:
      if processes.is_first():
        stage_records.write_refusal(workdir, str(e))
      raise


def _finish(workdir: pathlib.Path, account: time_account.Account) -> dict[str, Any]:
  """Writes the report. Raises Diverged if the perplexity is not finite."""
  with display.doing('writing the report'):
    report = run_report.write(workdir, account.note_for_report)
    files.tidy(workdir)
  if report['perplexity'] is None:
    raise errors.Diverged(errors.NO_PERPLEXITY)
  return report
