"""What a workdir tells of its run: its settings, the results of complete stages, and curves from metrics.jsonl."""

import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from dipaco_jax import metrics, settings
from dipaco_jax.drawing import Curve

POINTS = 200  # of a curve of training losses; the steps between are averaged


class History(NamedTuple):
  """Curves of a run."""

  base: Curve  # the base model's training loss
  training: Curve  # each path's training loss, [T, P]
  holdout: Curve  # each path's loss on what its shard holds back, after each phase, [T, P]
  validation: Curve  # perplexity, routed
  control: Curve  # of the dense control
  phases: np.ndarray  # [T] numbers of the phases that the following belong to
  norms: dict[str, np.ndarray]  # level: [T] median over modules of the outer gradient's norm
  cosines: dict[str, np.ndarray]  # level: [T] mean cosine between the paths' outer gradients


def read_settings(workdir: pathlib.Path) -> settings.Settings:
  """Raises ValueError where there is no run, or one of another program or version."""
  file = workdir / 'config.json'
  if not file.exists():
    raise ValueError(f'--workdir={workdir}: there is no run here (no config.json); name the directory of one')
  try:
    return settings.from_dict(json.loads(file.read_text()))
  except (ValueError, AttributeError, TypeError) as e:
    raise ValueError(f'--workdir={workdir}: its config.json is not that of a run ({e}); name another directory') from e


def read_stages(workdir: pathlib.Path) -> dict[str, dict[str, Any]]:
  """{stage: {'digest', 'wall_s', 'result'}} of the stages that are complete, in their order."""
  files = {name: workdir / 'stages' / f'{name}.json' for name in settings.STAGES}
  return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def read_results(workdir: pathlib.Path) -> dict[str, dict[str, Any]]:
  """{stage: what it found}; where text was sharded anew, 'route' tells of the last shards."""
  results = {name: stage['result'] for name, stage in read_stages(workdir).items()}
  for found in results.get('train', {}).get('rounds', []):
    results['route'] = results['route'] | found
  return results


def read(workdir: pathlib.Path, num_paths: int) -> History:
  """Curves from metrics.jsonl; empty ones where there are no rows yet."""
  steps: dict[str, dict[int, np.ndarray]] = {'pretrain': {}, 'train': {}}
  phases: dict[int, Mapping[str, Any]] = {}
  evaluations: dict[str, dict[int, float]] = {'train': {}, 'control': {}}
  for row in metrics.read_rows(workdir):
    if row['kind'] == 'step' and row['stage'] in steps:
      width = num_paths if row['stage'] == 'train' else 1
      # Paths that take turns have a row each for the same step.
      losses = steps[row['stage']].setdefault(row['step'], np.full(width, np.nan, np.float32))
      losses[row['paths'] if row['stage'] == 'train' else [0]] = _array(row['loss'])
    elif row['kind'] == 'phase' and row['stage'] == 'train':
      phases[row['phase']] = row
    elif row['kind'] == 'evaluation' and row['perplexity'] is not None:
      evaluations['control' if row['stage'] == 'control' else 'train'][row['step']] = row['perplexity']
  base = _curve(steps['pretrain'], 1)
  validation, control = (Curve(np.array([*of], int), np.array([*of.values()], float)) for of in evaluations.values())
  return History(
    Curve(base.steps, base.values[:, 0]),
    _curve(steps['train'], num_paths),
    _holdout(phases.values(), num_paths),
    validation,
    control,
    np.array(list(phases), int),
    _by_level(phases.values(), 'outer_gradient_norm'),
    _by_level(phases.values(), 'cosine'),
  )


def _array(values: Iterable[float | None]) -> np.ndarray:
  return np.array([np.nan if v is None else v for v in values], float)


def _curve(rows: Mapping[int, np.ndarray], width: int) -> Curve:
  """At most POINTS points: means of stretches of steps, over the values that there are."""
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


def _holdout(phases: Iterable[Mapping[str, Any]], num_paths: int) -> Curve:
  found = [(row['step'], _array(row['holdout_loss_by_path'])) for row in phases]
  steps = np.array([step for step, _ in found], int)
  return Curve(steps, np.stack([v for _, v in found]) if found else np.zeros((0, num_paths)))


def _by_level(phases: Iterable[Mapping[str, Any]], name: str) -> dict[str, np.ndarray]:
  """{level: [T]}, medians over modules where a row has a number for each of them."""
  rows = [row.get(name) or {} for row in phases]
  found = {}
  for level in dict.fromkeys(level for row in rows for level in row):
    listed = [list(v.values()) if isinstance(v := row.get(level), dict) else [v] for row in rows]
    values = [_array(v) for v in listed]
    found[level] = np.array([np.median(v[np.isfinite(v)]) if np.isfinite(v).any() else np.nan for v in values])
  return {level: curve for level, curve in found.items() if np.isfinite(curve).any()}
