"""Curves from the rows of metrics.jsonl: against the global step, which a grid and its dense control share.

    train/loss                           mean over the paths that train at this step
    train/loss/path_3                    one of them
    phase/outer_gradient_norm/low        mean over the modules of a level
    phase/outer_gradient_norm/low/0-1    one of them, by its coordinates
    evaluation/perplexity                of the whole; `.../path_3` and `.../domain/law` are parts of it

Paths that take turns have a row each for the same step, a turn apart. A mean is written when the last of them has come,
or the phase is over.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

MAX_TAGGED = 64  # paths, or modules of a level: TensorBoard grows slow beyond, and metrics.jsonl has them all
POSITION = ('kind', 'stage', 'updates', 'time', 'step', 'phase', 'paths', 'paths_in_phase')  # no figures
UNAVERAGED = ('perplexity', 'best_version')  # a value of the whole has this tag, because a mean would be meaningless

Scalar = tuple[str, float]  # tag and number
Points = tuple[int, dict[str, float]]  # of curves, by name, at a step


def position(row: Mapping[str, Any]) -> int:
  """Returns the global step after which a row was written."""
  return row.get('step', row['updates'])


class Curves:
  """The points of one stage's curves, row by row."""

  def __init__(self):
    self._paths: dict[int, set[int]] = {}  # by step, those whose rows have come
    self._values: dict[int, dict[str, list[float]]] = {}  # by step and tag

  def points(self, row: Mapping[str, Any]) -> Iterator[tuple[int, list[Scalar]]]:
    """Yields (step, points) of the means that a row completes, and of the row itself."""
    for step, values in self._completed(row):
      yield step, [(tag, sum(v) / len(v)) for tag, v in values.items() if v]
    yield position(row), list(scalars(row))

  def _completed(self, row: Mapping[str, Any]) -> list[tuple[int, dict[str, list[float]]]]:
    """Returns the steps that a row completes, with the values of their paths; the row of a phase completes all."""
    steps, step = sorted(self._paths) if row['kind'] == 'phase' else [], position(row)
    if row['kind'] == 'step':
      paths, values = self._paths.setdefault(step, set()), self._values.setdefault(step, {})
      paths.update(row.get('paths', [0]))
      for name, value in figures(row):
        values.setdefault(f'train/{name}', []).extend(numbers(value))
      steps = [step] if len(paths) >= row.get('paths_in_phase', 1) else []
    self._paths = {step: paths for step, paths in self._paths.items() if step not in steps}
    return [(step, self._values.pop(step)) for step in steps]


class CurvesOfStages:
  """Points of the curves of all stages. Stages other than `train` prefix their names: 'control/train/loss'."""

  def __init__(self):
    self._curves: dict[str, Curves] = {}

  def points(self, row: Mapping[str, Any]) -> Iterator[Points]:
    """Yields (step, {name: value}) of the points that come with a row."""
    stage = row['stage']
    prefix = '' if stage == 'train' else f'{stage}/'
    for step, named_values in self._curves.setdefault(stage, Curves()).points(row):
      if named_values:
        yield step, {prefix + tag: value for tag, value in named_values}


def figures(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
  """Yields (name, value) of the measurements of a row."""
  return ((name, value) for name, value in row.items() if name not in POSITION)


def scalars(row: Mapping[str, Any]) -> Iterator[Scalar]:
  """Yields (tag, number) of a row; for a step's row only those of its paths, as their mean needs several rows."""
  for name, value in figures(row):
    if row['kind'] == 'step':
      if isinstance(value, list):
        yield from _of_paths(f'train/{name}', value, row.get('paths') or range(len(value)))
    elif name.endswith('_by_path'):
      tag = f'{row["kind"]}/{name.removesuffix("_by_path")}'
      if tag.split('/')[1] not in UNAVERAGED and (known := numbers(value)):
        yield tag, sum(known) / len(known)
      yield from _of_paths(tag, value, range(len(value)))
    else:
      yield from _named(f'{row["kind"]}/{name.replace("_by_", "/")}', value)


def _of_paths(tag: str, values: Sequence[Any], paths: Iterable[int]) -> Iterator[Scalar]:
  for path, value in zip(paths, values, strict=True):
    for number in numbers(value) if path < MAX_TAGGED else ():
      yield f'{tag}/path_{path}', number


def _named(tag: str, value: Any) -> Iterator[Scalar]:
  """Yields a number, or numbers by name; where names have numbers by name, their mean too."""
  if not isinstance(value, Mapping):
    yield from ((tag, float(value)) for _ in numbers(value) if not isinstance(value, list))
    return
  for name, part in value.items():
    if isinstance(part, Mapping) and (known := numbers(list(part.values()))):
      yield f'{tag}/{name}', sum(known) / len(known)
      part = dict(itertools.islice(part.items(), MAX_TAGGED)) if len(part) > 1 else {}
    yield from _named(f'{tag}/{name}', part)


def numbers(value: Any) -> list[float]:
  """Lists the numbers in a value: of a list those that are finite, which JSON has."""
  return [float(v) for v in (value if isinstance(value, list) else [value]) if isinstance(v, (int, float))]
