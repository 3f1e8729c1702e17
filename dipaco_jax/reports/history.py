"""The history of a run: curves from the rows of metrics.jsonl, and the tasks of an islands run."""

import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from dipaco_jax.pipeline import stage
from dipaco_jax.reports import timeline_plot
from dipaco_jax.reports.plot_style import Curve
from dipaco_jax.storage import seals

POINTS = 200  # of a curve of training losses; the steps between are averaged


class History(NamedTuple):
  base: Curve  # the base model's training loss
  training: Curve  # each path's training loss, [T, P]
  holdout: Curve  # each path's loss on what its shard holds back, after each phase, [T, P]
  before: Curve  # the same just before the outer step, [T, P]
  base_norm: Curve  # of the base model's gradient, before clipping
  norm: Curve  # of each path's, [T, P]
  learning_rate: tuple[Curve, Curve]  # of the base model, and of the paths, [T, 1]
  tokens_per_s: tuple[Curve, Curve]  # the same
  validation: Curve  # perplexity, routed
  control: Curve  # of the dense control
  control_training: Curve  # the dense control's training loss
  control_holdout: Curve  # its loss on its hold-out, after each of its phases
  control_learning_rate: Curve  # [T, 1]
  bits: Curve  # validation in bits per byte, routed
  first: Mapping[str, Any]  # row of the base model's validation; empty if there is none
  last: Mapping[str, Any]  # of the paths' newest
  phases: np.ndarray  # [T] numbers of the phases that the following belong to
  norms: dict[str, np.ndarray]  # level: [T] median over modules of the outer gradient's norm
  cosines: dict[str, np.ndarray]  # level: [T] mean cosine between the paths' outer gradients


def read_tasks(workdir: pathlib.Path) -> list[timeline_plot.Task]:
  """Reads the tasks of an islands run; there are none in other runs."""
  file = workdir / 'timeline.json'
  return [timeline_plot.Task(*task) for task in seals.read_json(file, 'tasks')['tasks']] if file.exists() else []


def make_curves(rows: Iterable[Mapping[str, Any]], num_paths: int, control: str = stage.CONTROL) -> History:
  """Returns the curves of rows of metrics.jsonl; empty ones if there are no rows yet.

  `control` is the stage of the dense control's rows.
  """
  stages = {'pretrain': _Steps(1), 'train': _Steps(num_paths), control: _Steps(1)}
  phases, evaluations, of_control, control_phases = (dict[int, Mapping[str, Any]]() for _ in range(4))  # rows
  for row in rows:
    if row['kind'] == 'step' and row['stage'] in stages:
      stages[row['stage']].add(row)
    elif row['kind'] == 'phase' and row['stage'] in ('train', control):
      (control_phases if row['stage'] == control else phases)[row['phase']] = row
    elif row['kind'] == 'evaluation' and row['perplexity'] is not None and row['stage'] in stages:
      (of_control if row['stage'] == control else evaluations)[row['step']] = row
  base, paths, dense = stages.values()
  return History(
    base=_single(base.curve('loss')),
    training=paths.curve('loss'),
    holdout=_by_path(phases.values(), 'holdout_loss_by_path', num_paths),
    before=_by_path(phases.values(), 'holdout_loss_before_by_path', num_paths),
    base_norm=_single(base.curve('grad_norm')),
    norm=paths.curve('grad_norm'),
    learning_rate=(_single(base.curve('learning_rate')), paths.curve('learning_rate')),
    tokens_per_s=(_single(base.curve('tokens_per_s')), paths.curve('tokens_per_s')),
    validation=_evaluated(evaluations, 'perplexity'),
    control=_evaluated(of_control, 'perplexity'),
    control_training=_single(dense.curve('loss')),
    control_holdout=_single(_by_path(control_phases.values(), 'holdout_loss_by_path', 1)),
    control_learning_rate=dense.curve('learning_rate'),
    bits=_evaluated(evaluations, 'bits_per_byte'),
    first=next((row for row in evaluations.values() if row['stage'] == 'pretrain'), {}),
    last=next((row for row in reversed(evaluations.values()) if row['stage'] == 'train'), {}),
    phases=np.array(list(phases), int),
    norms=_by_level(phases.values(), 'outer_gradient_norm'),
    cosines=_by_level(phases.values(), 'cosine'),
  )


def _evaluated(rows: Mapping[int, Mapping[str, Any]], name: str) -> Curve:
  """Returns the curve of a figure over the steps whose rows have it."""
  known = {step: row[name] for step, row in rows.items() if row.get(name) is not None}
  return Curve(np.array([*known], int), np.array([*known.values()], float))


class _Steps:
  """Collects the figures of a stage's steps; paths that take turns have a row each for the same step."""

  def __init__(self, num_paths: int):
    self.by_path: dict[str, dict[int, np.ndarray]] = {'loss': {}, 'grad_norm': {}}  # by name and step, [P]
    self.of_all: dict[str, dict[int, list[float]]] = {'learning_rate': {}, 'tokens_per_s': {}}  # of each turn
    self.num_paths = num_paths

  def add(self, row: Mapping[str, Any]):
    for name, steps in self.by_path.items():
      if name in row:
        values = steps.setdefault(row['step'], np.full(self.num_paths, np.nan, np.float32))
        values[row['paths'] if self.num_paths > 1 else [0]] = _array(row[name])
    for name, by_step in self.of_all.items():
      if row.get(name) is not None:
        by_step.setdefault(row['step'], []).append(row[name])

  def curve(self, name: str) -> Curve:
    """Returns values [T, P], or [T, 1] for what all paths share."""
    if name in self.by_path:
      return _curve(self.by_path[name], self.num_paths)
    return _curve({step: np.array([np.mean(turns)]) for step, turns in self.of_all[name].items()}, 1)


def _single(curve: Curve) -> Curve:
  """Returns a curve of one column as one of [T]."""
  return Curve(curve.steps, curve.values[:, 0])


def _array(values: Iterable[float | None]) -> np.ndarray:
  return np.array([np.nan if v is None else v for v in values], float)


def _curve(rows: Mapping[int, np.ndarray], width: int) -> Curve:
  """Returns at most POINTS points: means over stretches of steps, of the finite values."""
  if not rows:
    return Curve(np.zeros(0, int), np.zeros((0, width)))
  order = sorted(rows)
  stretches = np.array_split(np.arange(len(order)), min(len(order), POINTS))
  values = np.stack([rows[step] for step in order]).astype(float)
  known = np.isfinite(values)
  sums = np.stack([np.where(known[s], values[s], 0).sum(0) for s in stretches])
  counts = np.stack([known[s].sum(0) for s in stretches])
  means = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
  return Curve(np.array([order[s[-1]] for s in stretches]), means)


def _by_path(phases: Iterable[Mapping[str, Any]], name: str, num_paths: int) -> Curve:
  by_phase = [(row['step'], _array(row.get(name) or [None] * num_paths)) for row in phases]
  steps = np.array([step for step, _ in by_phase], int)
  return Curve(steps, np.stack([v for _, v in by_phase]) if by_phase else np.zeros((0, num_paths)))


def _by_level(phases: Iterable[Mapping[str, Any]], name: str) -> dict[str, np.ndarray]:
  """Returns {level: [T]}, with medians over modules where a row has a number for each of them."""
  rows = [row.get(name) or {} for row in phases]
  medians = {}
  for level in dict.fromkeys(level for row in rows for level in row):
    listed = [list(v.values()) if isinstance(v := row.get(level), dict) else [v] for row in rows]
    values = [_array(v) for v in listed]
    medians[level] = np.array([np.median(v[np.isfinite(v)]) if np.isfinite(v).any() else np.nan for v in values])
  return {level: curve for level, curve in medians.items() if np.isfinite(curve).any()}
