"""Losses of paths on rows of tokens: hold-outs for early stopping, routed validation [2.7, 4]."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dipaco_jax import mesh as mesh_lib
from dipaco_jax.grid import Coordinates
from dipaco_jax.programs import Programs


class Rows(NamedTuple):
  """Rows to evaluate, by path."""

  counts: Sequence[int]  # of rows, [P]
  load: Callable[[int, int, int], tuple[np.ndarray, np.ndarray]]  # (path, start, stop) -> tokens, segments [n, L]
  batch_size: int
  seq_len: int


class Losses(NamedTuple):
  """Of every row: nats over the targets that count, and how many those are; a [rows] float64 array per path."""

  nll: list[np.ndarray]
  targets: list[np.ndarray]


def losses(programs: Programs, params_of_turn: Callable[[Coordinates], Any], rows: Rows) -> Losses:
  """Every path's losses on its own rows."""
  num_paths = len(rows.counts)
  result = Losses([np.zeros(0)] * num_paths, [np.zeros(0)] * num_paths)
  for turn in programs.placement.turns():
    for path, nll, targets in turn_losses(programs, turn, params_of_turn, rows):
      result.nll[path], result.targets[path] = nll, targets
  return result


def turn_losses(
  programs: Programs, turn: Coordinates, params_of_turn: Callable[[Coordinates], Any], rows: Rows
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
  """(path, nats, targets) of a turn's paths. Programs are dispatched ahead; the device is read once."""
  paths = programs.placement.paths(turn)
  longest = max(rows.counts[path] for path in paths)
  if not longest:
    return
  params = params_of_turn(turn)
  starts = range(0, longest, rows.batch_size)
  outputs = [programs.evaluate(params, *_batch(programs, turn, rows, start)) for start in starts]
  nll, count = (
    np.concatenate([mesh_lib.fetch(o[i]).reshape(len(paths), -1) for o in outputs], axis=1) for i in (0, 1)
  )
  for i, path in enumerate(paths):
    mine = slice(rows.counts[path])
    yield path, nll[i, mine].astype(np.float64), count[i, mine].astype(np.float64)


def _batch(programs: Programs, turn: Coordinates, rows: Rows, start: int) -> list[jax.Array]:
  """Tokens and segments `[m_a, ..., B, L]`; a path that has no rows left gets padding."""
  placement, shape = programs.placement, (rows.batch_size, rows.seq_len)
  loaded: dict[Coordinates, np.ndarray] = {}

  def load(position):
    if position not in loaded:
      path = placement.path(turn, position)
      block = np.zeros((2, *shape), np.int32)
      stop = min(start + rows.batch_size, rows.counts[path])
      if stop > start:
        block[:, : stop - start] = rows.load(path, start, stop)
      loaded[position] = block
    return loaded[position]

  parts = (lambda position: load(position)[0]), (lambda position: load(position)[1])
  return [placement.assemble(shape, programs.rows_spec(), part) for part in parts]


def mean_by_path(found: Losses) -> list[float | None]:
  """nats per target of each path; None where it has none."""
  return [float(n.sum() / c.sum()) if c.sum() else None for n, c in zip(found.nll, found.targets, strict=True)]


def to_compare(mean: float | None) -> float | None:
  """A hold-out's mean for early stopping: one that is not a number is worse than any [2.7]."""
  return math.inf if mean is not None and math.isnan(mean) else mean


def is_best(loss: float | None, best: float | None) -> bool:
  """Whether a path points at this version from now on; one without a hold-out points at the newest [2.7]."""
  return loss is None or best is None or loss < best


def matrix(programs: Programs, params_of_path: Callable[[int], Any], rows: Rows) -> list[list[float | None]]:
  """Every path's mean loss on every path's rows, [path][rows]: P passes, on request only."""
  num_paths = len(rows.counts)
  table: list[list[float | None]] = [[None] * num_paths for _ in range(num_paths)]
  for shift in range(num_paths):  # path i is evaluated on the rows of path i + shift

    def shifted(path: int, start: int, stop: int, shift=shift):
      return rows.load((path + shift) % num_paths, start, stop)

    def params_of_turn(turn):
      return in_flight(programs, turn, params_of_path)

    counts = [rows.counts[(path + shift) % num_paths] for path in range(num_paths)]
    means = mean_by_path(losses(programs, params_of_turn, rows._replace(counts=counts, load=shifted)))
    for path, mean in enumerate(means):
      table[path][(path + shift) % num_paths] = mean
  return table


def in_flight(programs: Programs, turn: Coordinates, params_of_path: Callable[[int], dict[str, np.ndarray]]) -> Any:
  """Parameters of the paths in flight, from the host or from files; each process loads its own paths only."""
  placement = programs.placement
  loaded: dict[Coordinates, dict[str, np.ndarray]] = {}

  def load(name, position):
    if position not in loaded:
      loaded[position] = params_of_path(placement.path(turn, position))
    return loaded[position][name]

  return {
    name: placement.assemble(s.shape, programs.params_spec[name], functools.partial(load, name))
    for name, s in programs.shapes.items()
  }
