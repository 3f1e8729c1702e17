"""TensorBoard's view of the rows of metrics.jsonl: against the global step, which a grid and its dense control share.

    train/loss                           mean over the paths that train at this step
    train/loss/path_3                    one of them
    phase/outer_gradient_norm/low        mean over the modules of a level
    phase/outer_gradient_norm/low/0-1    one of them, by its coordinates
    evaluation/perplexity                of the whole; `.../path_3` and `.../domain/law` are parts of it

Paths that take turns have a row each for the same step, a turn apart. A mean is written when the last of them has come,
or the phase is over.
"""

import itertools
import os
import pathlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

MAX_TAGGED = 64  # paths, or modules of a level: TensorBoard grows slow beyond, and metrics.jsonl has them all
POSITION = ('kind', 'stage', 'updates', 'time', 'step', 'phase', 'paths', 'paths_in_phase')  # no figures
UNAVERAGED = ('perplexity', 'best_version')  # that of the whole has this tag, or a mean says nothing

Scalar = tuple[str, float]  # tag and number


def position(row: Mapping[str, Any]) -> int:
  """Returns the global step after which a row was written."""
  return row.get('step', row['updates'])


class Events:
  """Writes one stage's events. In this thread: tensorboardX's own writer thread dies and blocks on a full disk."""

  def __init__(self, folder: pathlib.Path, purge_step: int | None = None):
    """Opens a stage's events; from `purge_step` on, what earlier files hold is hidden."""
    from tensorboardX import event_file_writer
    from tensorboardX.proto import event_pb2

    folder.mkdir(parents=True, exist_ok=True)
    # The name that tensorboardX makes is only as fine as a second.
    suffix = f'.{os.getpid()}.{time.time_ns() % 10**9:09d}'
    self._writer = event_file_writer.EventsWriter(str(folder / 'events'), suffix)
    self._paths: dict[int, set[int]] = {}  # by step, those whose rows have come
    self._values: dict[int, dict[str, list[float]]] = {}  # by step and tag
    if purge_step is not None:
      log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
      self._writer.write_event(event_pb2.Event(wall_time=time.time(), step=purge_step, session_log=log))
    self._writer.flush()

  def write(self, row: Mapping[str, Any]):
    for step, values in self._completed(row):
      self._write(row['time'], step, ((tag, sum(v) / len(v)) for tag, v in values.items() if v))
    self._write(row['time'], position(row), scalars(row))

  def _write(self, wall_time: float, step: int, found: Iterable[Scalar]):
    from tensorboardX.proto import event_pb2, summary_pb2

    values = [summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in found]
    if values:
      summary = summary_pb2.Summary(value=values)
      self._writer.write_event(event_pb2.Event(wall_time=wall_time, step=step, summary=summary))
      self._writer.flush()

  def close(self):
    self._writer.close()

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


def figures(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
  """Yields (name, value) of what a row has measured."""
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
