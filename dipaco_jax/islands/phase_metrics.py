"""Measurements of one phase of a path: rows for its checkpoint, and the progress that the lease shows."""

import time
from typing import Any

import jax

from dipaco_jax.islands.lease import Lease
from dipaco_jax.telemetry import metrics_log
from dipaco_jax.training import mesh, train_log
from dipaco_jax.training.job import Job


class PhaseMetrics:
  """Metrics of one phase of a path; each dispatch's are read from the device after the next is dispatched."""

  def __init__(self, lease: Lease, job: Job, phase: int, is_warm: bool = False):
    """`is_warm`: whether this process has trained before, so that the first dispatch does not compile."""
    self.lease = lease
    self.job = job
    self.phase = phase
    self.is_warm = is_warm
    self.pending: tuple[int, dict[str, jax.Array]] | None = None
    self.rows: list[list[Any]] = []  # steps, loss, norm, learning rate, and how many steps were finite, and skipped
    self.first_done: float | None = None  # from when on steps are timed: when one that may have compiled was done
    self.last_done = time.monotonic()
    self.timed_steps = 0
    self.is_finite = True  # whether the last step was

  def dispatched(self, after: int, metrics: dict[str, jax.Array]):
    """Reads the metrics of the dispatch before, and keeps these for later; `after`: steps of the phase so far."""
    self.read_pending()
    if self.is_warm and self.first_done is None:
      self.first_done = time.monotonic()
    self.pending = after, metrics

  def read_pending(self):
    """Waits for the last dispatch and adds its row; the lease shows it to others."""
    if not self.pending:
      return
    (after, metrics), self.pending = self.pending, None
    steps = train_log.of_steps({name: mesh.fetch(x).reshape(-1, 1) for name, x in metrics.items()})
    loss, norm = (float(steps.means[name][0]) for name in ('loss', 'grad_norm'))
    counts = int(steps.finite.sum()), int(steps.skipped[0])
    self.rows.append(metrics_log.plain([after, loss, norm, steps.learning_rate, *counts]))
    self.warn_not_finite(after, steps)
    self.last_done = time.monotonic()
    self.lease.about |= {'step': after, 'of': self.job.schedule.steps_per_phase, 'loss': metrics_log.plain(loss)}
    if self.first_done is None:
      self.first_done = self.last_done
      return
    self.timed_steps += self.job.schedule.dispatch_steps
    tokens = self.timed_steps * self.job.data.batch_size * self.job.programs.model.config.seq_len
    self.lease.about['tokens_per_s'] = tokens / max(1e-9, self.last_done - self.first_done)

  def warn_not_finite(self, after: int, steps: train_log.Steps):
    """Logs the first step that is not finite, and the first one after finite steps."""
    if self.is_finite and not steps.finite.all():
      path, last = int(self.lease.task.key), self.job.schedule.global_step(self.phase, after)
      train_log.warn_not_finite(self.job.name, path, last, steps.finite[:, 0], steps.skipped[0])
    self.is_finite = bool(steps.finite[-1, 0])

  def close(self) -> dict[str, Any]:
    """Reads the last metrics; returns the entries for the path's checkpoint."""
    self.read_pending()
    seconds = self.last_done - self.first_done if self.first_done is not None else 0.0
    return {'rows': self.rows, 'timed_steps': self.timed_steps, 'timed_s': seconds}
