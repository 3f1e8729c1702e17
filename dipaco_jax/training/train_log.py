"""The log of a training loop: rows of metrics, the progress line, and seconds and tokens for the report."""

import logging
import math
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from dipaco_jax.algorithm import averaging_gap, screening
from dipaco_jax.core.errors import Diverged
from dipaco_jax.processes import display, time_use
from dipaco_jax.storage import module_store
from dipaco_jax.telemetry import metrics_log
from dipaco_jax.training import mesh
from dipaco_jax.training.job import Dispatch, Job
from dipaco_jax.training.train_state import Record


def warn_not_finite(name: str, path: int, step: int, finite_K: np.ndarray, skipped: float):
  """Warns of the first of a path's steps up to `step` that was not finite."""
  which = step - len(finite_K) + 1 + int(np.argmin(finite_K))
  done = 'it is skipped' if skipped else 'it is applied, because of config.inner.max_skipped'
  logging.warning('%s, step %d: loss or gradient of path %d is not finite: %s', name, which, path, done)


class Steps(NamedTuple):
  """Figures of some steps of some paths."""

  sums: dict[str, np.ndarray]  # of loss and norm over the steps that were finite, [P]
  means: dict[str, np.ndarray]  # the same; NaN where none was
  learning_rate: float
  finite: np.ndarray  # bool [k, P]
  skipped: np.ndarray  # how many steps, [P]


def of_steps(metrics: dict[str, np.ndarray]) -> Steps:
  """Returns figures of a dispatch from `inner.METRICS`, [k, P] each."""
  values = {name: x.astype(np.float64) for name, x in metrics.items()}
  rates, skipped = values.pop('learning_rate')[-1], values.pop('skipped').sum(0)
  finite = np.isfinite(values['loss']) & np.isfinite(values['grad_norm'])
  count, sums = finite.sum(0), {name: np.where(finite, x, 0).sum(0) for name, x in values.items()}
  means = {name: np.where(count, x / np.maximum(count, 1), np.nan) for name, x in sums.items()}
  return Steps(sums, means, float(rates[0]), finite, skipped)


class Journal:
  """The log of one stage. Metrics are read one dispatch late, so that the device never waits."""

  def __init__(self, job: Job, rows: metrics_log.Metrics, record: Record):
    self._job = job
    self._name = job.name
    self._rows = rows
    self._record = record
    updates = job.updates(job.schedule.phases, 0, 0)
    self._progress = display.Progress(job.name, updates, 'updates', later=job.later_work * updates)
    self._pending: tuple[Dispatch, dict[str, Any]] | None = None
    self._timed = False  # the first dispatch compiles
    self._told_gap = False
    self._not_finite = [0] * len(record.loss_sum)  # steps in a row up to the last, by path
    self._inner_s = time_use.read().get(
      time_use.INNER, 0.0
    )  # of this process, up to the last dispatch that was written
    self.lap()

  def lap(self):
    """Restarts the clock, because the time before was not an inner step."""
    self._clock = time.monotonic()

  def dispatched(self, dispatch: Dispatch, metrics: dict[str, jax.Array]):
    """Notes a dispatch whose `inner.METRICS`, [k, m_a, ...], are still being computed, and writes the one before it."""
    # Made readable now: after the next dispatch, it would wait for that one.
    metrics = {name: mesh.readable(x) for name, x in metrics.items()}
    self.catch_up()
    self._pending = dispatch, metrics

  def catch_up(self):
    """Waits for the last dispatch, and writes it."""
    if self._pending:
      self._write(*self._pending)
    self._pending = None

  def is_busy(self) -> bool:
    """Returns whether the devices are still at the last dispatch; waits for nothing."""
    return self._pending is not None and not mesh.is_ready(self._pending[1]['loss'])

  def _count_inner(self, trained: list[int]):
    """Adds what inner steps took since the last dispatch that was written to the paths of this one, in equal parts."""
    now = time_use.read().get(time_use.INNER, 0.0)
    for path in trained:
      self._record.path_s[path] += (now - self._inner_s) / len(trained)
    self._inner_s = now

  def _write(self, dispatch: Dispatch, metrics: dict[str, jax.Array]):
    """Writes a row for a dispatch; losses and norms are means over the steps that were finite."""
    job, phase = self._job, dispatch.phase
    paths = job.trained(phase, job.programs.placement.turns()[dispatch.turn])
    at, trained = [i for i, path in enumerate(paths) if path >= 0], [path for path in paths if path >= 0]
    sums, means, learning_rate, finite, skipped = of_steps(
      {name: mesh.fetch(x).reshape(x.shape[0], -1)[:, at] for name, x in metrics.items()}
    )
    self._count_inner(trained)
    after = dispatch.step + len(finite)
    updates, step = job.updates(phase, dispatch.turn, after, dispatch.piece), job.schedule.global_step(phase, after)
    rate = self._count(len(finite), finite.size * job.data.batch_size * job.programs.model.config.seq_len)
    for path, loss, number in zip(trained, sums['loss'].tolist(), finite.sum(0).tolist(), strict=True):
      self._record.loss_sum[path] += loss
      self._record.loss_steps[path] += number
    values = {'step': step, 'phase': phase, 'paths': trained, 'paths_in_phase': int((job.weights(phase) > 0).sum())}
    values |= {**means, 'learning_rate': learning_rate, 'tokens_per_s': rate}
    self._rows.write('step', self._name, updates, **values, **({'skipped': skipped} if skipped.any() else {}))
    self._note_not_finite(step, trained, finite, skipped)
    grid = job.programs.layout.grid
    shown: dict[str, Any] = {display.whose_loss(trained, grid.num_paths, grid.path_name): float(means['loss'].mean())}
    shown |= {'phase': phase + 1} if grid.num_paths > 1 else {}
    shown |= {'tokens_per_s': rate} if rate else {}
    self._progress.update(updates, **shown)

  def _note_not_finite(self, step: int, trained: list[int], finite_KP: np.ndarray, skipped_P: np.ndarray):
    """Warns of paths whose steps were not finite; raises Diverged if the only path skipped too many in a row."""
    record, most = self._record, self._job.programs.settings.inner.max_skipped
    for path, finite_K, skipped in zip(trained, finite_KP.T, skipped_P, strict=True):
      if not finite_K.all() and not self._not_finite[path]:
        warn_not_finite(self._name, path, step, finite_K, skipped)
      record.skipped[path] += int(skipped)
      in_a_row = int(np.argmax(finite_K[::-1])) if finite_K.any() else self._not_finite[path] + len(finite_K)
      self._not_finite[path] = in_a_row
    if len(self._not_finite) == 1 and self._not_finite[0] > most:
      raise Diverged(
        f'{self._name} diverged by step {step}: loss or gradient was not finite in {self._not_finite[0]} steps in a row'
      )

  def all_are_skipping(self) -> bool:
    """Returns whether the latest step was finite for no path."""
    return all(self._not_finite)

  def log_excluded(self, phase: int, path: int, why: str):
    """Logs that a path takes no part in an outer step, and why."""
    message = screening.exclusion_message(self._job.programs.layout.grid, path, why)
    step = self._job.schedule.global_step(phase + 1, 0)
    logging.warning('%s, phase %d, step %d: %s', self._name, phase + 1, step, message)

  def _count(self, steps: int, tokens: int) -> float | None:
    """Adds to the record; returns tokens/s since the last call, None for the first."""
    now, record = time.monotonic(), self._record
    seconds, self._clock = now - self._clock, now
    record.tokens += tokens
    self._rows.tokens = record.tokens
    record.phase_s += seconds
    if not self._timed:
      self._timed = True
      return None
    record.inner_s += seconds
    record.timed_steps += steps
    record.timed_tokens += tokens
    return tokens / seconds

  def _write_after_phases(self, kind: str, **values):
    """Writes a row for the phases that are complete."""
    phase, schedule = self._record.phase, self._job.schedule
    updates, step = self._job.updates(phase, 0, 0), schedule.global_step(phase, 0)
    self._rows.write(kind, self._name, updates, phase=phase, step=step, **values)

  def write_phase(self, outer_s: float, statistics: dict, holdout: list[float | None], excluded: dict[int, str]):
    """Writes a row for a phase and its outer step; the sums of its steps' losses start again. Warns of a gap once."""
    record = self._record
    failed: dict[str, Any] = {'excluded': excluded} if excluded else {}
    failed |= {'skipped_by_path': record.skipped} if any(record.skipped) else {}
    means = [s / n if n else None for s, n in zip(record.loss_sum, record.loss_steps, strict=True)]
    gap = averaging_gap.mean_gap(averaging_gap.gaps(record.own_loss, holdout))
    if gap is not None and gap > averaging_gap.LARGE and not self._told_gap:
      self._told_gap = True
      logging.warning('%s, phase %d: %s', self._name, record.phase, averaging_gap.describe(gap))
    self._compare_with_guessing([mean for mean in means if mean is not None])
    record.outer_s += outer_s
    name = module_store.module_name
    norms = {l: {name(at): norm for at, norm in np.ndenumerate(x)} for l, x in statistics['norm'].items()}
    cosine = {level: float(np.nanmean(x)) for level, x in statistics['cosine'].items() if not np.isnan(x).all()}
    self._write_after_phases(
      'phase', inner_s=record.phase_s, outer_s=outer_s, loss_by_path=means, holdout_loss_by_path=holdout,
      holdout_loss_before_by_path=record.own_loss, averaging_gap=gap, best_version_by_path=record.best_version,
      outer_gradient_norm=norms, cosine=cosine, **failed,
    )  # fmt: skip
    record.loss_sum = [0.0] * len(means)
    record.loss_steps = [0] * len(means)
    record.phase_s = 0.0
    record.skipped, record.own_loss = [0] * len(means), [None] * len(means)

  def _compare_with_guessing(self, means: list[float]):
    """Warns where paths do worse than one that knows nothing: its loss is the logarithm of the vocabulary's size."""
    guess, mean = math.log(self._job.programs.model.vocab_size), float(np.mean(means)) if means else 0.0
    if mean > guess + 1:
      problem = f'the mean loss is {mean:.2f} nats, and guessing costs {guess:.2f}: the model gets worse, not better'
      logging.warning('%s, phase %d: %s; a lower learning rate may help', self._name, self._record.phase, problem)

  def write_evaluation(self, figures: dict[str, Any]):
    """Writes a row for a validation."""
    self._write_after_phases('evaluation', **figures)

  def close(self):
    self._progress.close()
