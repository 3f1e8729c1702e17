"""A run in this process, from its settings to its report: what the command `main` and `dipaco_jax.train` share."""

import contextlib
import os
import pathlib
from collections.abc import Callable
from typing import Any

from dipaco_jax.command_line import command
from dipaco_jax.core import errors, settings as settings_lib
from dipaco_jax.core.errors import InputError
from dipaco_jax.pipeline import preflight, run as run_lib, stage_records, stages
from dipaco_jax.reports import live_report, run_report
from dipaco_jax.storage import files, lock
from dipaco_jax.training import (
  compilation_cache,
  display,
  metrics_log,
  performance,
  processes,
  sinks,
  stopping,
  training_loop,
)


def train(
  workdir: pathlib.Path,
  settings: settings_lib.Settings,
  signals: stopping.Signals,
  call: str,
  reuse: str | os.PathLike | None = None,
) -> dict[str, Any]:
  """Checks everything that can be checked, then runs the stages that are not done; returns what report.json holds.

  `call` is how the user has said this, for command.txt. Other processes of a job than the first get {}.

  Raises InputError; Unavailable where the disk is full or gone; Diverged; KeyboardInterrupt when it was stopped.
  """
  with command.full_disk_told(str(workdir)), contextlib.ExitStack() as stack:
    with display.doing('looking for devices'):
      command.check_devices()
    first = processes.is_first()
    display.STDERR.silent |= not first
    preflight.check_text(workdir, settings)
    with display.doing('looking at the model'):
      preflight.check_model(settings)
    made = sinks.make(settings, workdir.resolve().name) if first else []
    stack.enter_context(preflight.kept(workdir))
    if first:
      stack.enter_context(lock.hold(workdir))
      preflight.settle_config(workdir, settings, call)
    processes.barrier('config')
    compilation_cache.keep_in(workdir)
    page = stack.enter_context(contextlib.closing(live_report.LiveReport(workdir)))
    with sinks.fed(made, lambda: sinks.follow(workdir), sinks.in_workdir(workdir)):
      _run_stages(workdir, settings, signals, page.write_if_due, reuse)
    page.close()
    report = _finish(workdir) if first else {}
    processes.barrier('finished')  # the others' end waits for the first's no longer than some minutes
    return report


def _run_stages(
  workdir: pathlib.Path,
  settings: settings_lib.Settings,
  signals: stopping.Signals,
  evaluated: Callable[[], None],
  reuse: str | os.PathLike | None,
):
  """Runs the stages that are not done; `evaluated` is called after each evaluation."""
  events = 'tensorboard' in settings.metrics.sinks
  with (
    metrics_log.Metrics(workdir, processes.is_first(), evaluated, events) as metrics,
    performance.watch_compilations() as compilations,
  ):
    run = run_lib.Run(workdir, settings, metrics, compilations, signals.requested, signals.graceful)
    preflight.note_environment(run)
    if reuse and processes.is_first():
      preflight.take_stages(run, pathlib.Path(reuse))
    processes.barrier('reuse')
    try:
      stages.run_all(run)
    except training_loop.Stopped:
      processes.barrier('stopped')  # the first process takes the coordinator with it
      raise
    except InputError as e:
      if processes.is_first():
        stage_records.write_refusal(workdir, str(e))
      raise


def _finish(workdir: pathlib.Path) -> dict[str, Any]:
  """Writes the report. Raises Diverged where the perplexity is not finite."""
  with display.doing('writing the report'):
    report = run_report.write(workdir)
    files.tidy(workdir)
  if report['perplexity'] is None:
    raise errors.Diverged(errors.NO_PERPLEXITY)
  return report
