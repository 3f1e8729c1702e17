"""Losses of paths on rows of tokens: hold-outs for early stopping, routed validation [2.7, 4]."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dipaco_jax.algorithm.grid import Coordinates
from dipaco_jax.core.errors import InputError
from dipaco_jax.training import mesh as mesh_lib
from dipaco_jax.training.programs import Programs

ParamsOfTurn = Callable[[Coordinates], Any]  # turn -> in-flight parameters
PathLosses = tuple[int, np.ndarray, np.ndarray]  # path, nats, targets


class Rows(NamedTuple):
  """Rows to evaluate, by path."""

  counts: Sequence[int]  # of rows, [P]
  load: Callable[[int, int, int], tuple[np.ndarray, np.ndarray]]  # (path, start, stop) -> tokens, segments [n, L]
  batch_size: int
  seq_len: int


class Losses(NamedTuple):
  """Losses by path and row: nats over the targets that count, and the number of these; float64 [rows] per path."""

  nll: list[np.ndarray]
  targets: list[np.ndarray]


def losses(programs: Programs, params_of_turn: ParamsOfTurn, rows: Rows) -> Losses:
  """Computes every path's losses on its own rows."""
  num_paths = len(rows.counts)
  result = Losses([np.zeros(0)] * num_paths, [np.zeros(0)] * num_paths)
  for turn in programs.placement.turns():
    for path, nll, targets in turn_losses(programs, turn, params_of_turn, rows):
      result.nll[path], result.targets[path] = nll, targets
  return result


def turn_losses(programs: Programs, turn: Coordinates, params: ParamsOfTurn, rows: Rows) -> Iterator[PathLosses]:
  """Yields (path, nats, targets) of those of a turn's paths that have rows."""
  return collect_turn(dispatch_turn(programs, turn, params, rows))


class PendingTurn(NamedTuple):
  """The evaluation of a turn's paths, dispatched and not waited for."""

  paths: Sequence[int]
  counts: Sequence[int]  # of rows, of these paths
  outputs: list[tuple[jax.Array, jax.Array]]  # nats and targets of every batch, [m_a, ..., B]


def dispatch_turn(programs: Programs, turn: Coordinates, params_of_turn: ParamsOfTurn, rows: Rows) -> PendingTurn:
  """Dispatches the evaluation of a turn's paths on their own rows; `collect_turn` waits for it."""
  paths = programs.placement.paths(turn)
  counts = [rows.counts[path] for path in paths]
  if not max(counts):
    return PendingTurn(paths, counts, [])
  params = params_of_turn(turn)
  starts = range(0, max(counts), rows.batch_size)
  outputs = [programs.evaluate(params, *load_batch(programs, turn, rows, start)) for start in starts]
  return PendingTurn(paths, counts, outputs)


def collect_turn(begun: PendingTurn) -> Iterator[PathLosses]:
  """Yields (path, nats, targets), float64, of a dispatched evaluation; the device is read once."""
  if not begun.outputs:
    return
  fetched = [[mesh_lib.fetch(x).reshape(len(begun.paths), -1) for x in pair] for pair in begun.outputs]
  nll, count = (np.concatenate(parts, axis=1).astype(np.float64) for parts in zip(*fetched, strict=True))
  for i, (path, rows) in enumerate(zip(begun.paths, begun.counts, strict=True)):
    yield path, nll[i, :rows], count[i, :rows]


def load_batch(programs: Programs, turn: Coordinates, rows: Rows, start: int) -> list[jax.Array]:
  """Loads tokens and segments `[m_a, ..., B, L]`; a path that has no rows left gets padding."""
  shape = rows.batch_size, rows.seq_len

  def load(position: Coordinates) -> np.ndarray:
    path = programs.placement.path(turn, position)
    block, stop = np.zeros((2, *shape), np.int32), min(start + rows.batch_size, rows.counts[path])
    if stop > start:
      block[:, : stop - start] = rows.load(path, start, stop)
    return block

  return programs.placement.assemble_pair(shape, programs.specs.rows(), load)


def mean_by_path(path_losses: Losses) -> list[float | None]:
  """Returns the nats per target of each path, or None if it has none."""
  return [mean(nll, targets) for nll, targets in zip(path_losses.nll, path_losses.targets, strict=True)]


def mean(nll: np.ndarray, targets: np.ndarray) -> float | None:
  """Returns the nats per target of one path's rows, or None if they have none."""
  return float(nll.sum() / targets.sum()) if targets.sum() else None


def finite_mean(nll: np.ndarray, targets: np.ndarray) -> float | None:
  """Returns the nats per target of one path's rows; None if there are none, or the mean is not finite."""
  value = mean(nll, targets)
  return value if value is not None and math.isfinite(value) else None


def to_compare(mean: float | None) -> float | None:
  """Converts a hold-out's mean for early stopping: one that is not finite is worse than any [2.7]."""
  return mean if mean is None or math.isfinite(mean) else math.inf


def by_model(
  models: Sequence[Sequence[int]], losses: Sequence[float | None], targets: Sequence[float]
) -> list[float | None]:
  """Returns each path's hold-out loss; for replicas, the mean over the targets of all their hold-outs [2.7].

  Replicas, such as DiLoCo's workers, have one set of parameters (see `Layout.models`): so only one version is
  evaluated, exported and served, although each replica's own hold-out could prefer another. `losses` are nats per
  target on each path's own hold-out, or None if it has none; `targets` their numbers.
  """
  result = list(losses)
  for paths in models:
    measured = [(loss, targets[path]) for path in paths if (loss := losses[path]) is not None]
    if len(paths) > 1 and measured:  # a path alone keeps its own to the bit
      mean = math.fsum(loss * n for loss, n in measured) / math.fsum(n for _, n in measured)
      for path in paths:
        result[path] = mean
  return result


def update_best(version: int, losses: Sequence[float | None], best_version: list[int], best_loss: list[float | None]):
  """Points each path whose loss is its best so far at this version, in place [2.7].

  One without a hold-out points at the newest. A loss that is not finite is never the best, not of a round's first
  version either; but a path has to point somewhere. With the losses of `by_model`, replicas point at one version.
  """
  for path, loss in enumerate(losses):
    best = best_loss[path]
    is_best = loss is None or (math.isfinite(loss) if best is None else loss < best)
    if is_best or not best_version[path]:
      best_version[path], best_loss[path] = version, loss


def loss_matrix(programs: Programs, params_of_path: Callable[[int], Any], rows: Rows) -> list[list[float | None]]:
  """Computes every path's mean loss on every path's rows, [path][rows]: P passes, on request only."""
  num_paths = len(rows.counts)
  table: list[list[float | None]] = [[None] * num_paths for _ in range(num_paths)]
  for shift in range(num_paths):  # path i is evaluated on the rows of path i + shift
    whose = [(path + shift) % num_paths for path in range(num_paths)]
    shifted = rows._replace(
      counts=[rows.counts[i] for i in whose], load=lambda path, *part, whose=whose: rows.load(whose[path], *part)
    )
    path_losses = losses(programs, lambda turn: in_flight(programs, turn, params_of_path), shifted)
    for path, mean in enumerate(mean_by_path(path_losses)):
      table[path][whose[path]] = mean
  return table


def in_flight(programs: Programs, turn: Coordinates, params_of_path: Callable[[int], dict[str, np.ndarray]]) -> Any:
  """Makes the parameters of the paths in flight, from the host or from files; each process loads its own paths only."""
  placement, specs = programs.placement, programs.specs.params
  load = functools.cache(lambda position: params_of_path(placement.path(turn, position)))

  def part(name: str, position: Coordinates) -> np.ndarray:
    return load(position)[name]

  shapes = programs.shapes.items()
  return {name: placement.assemble(s.shape, specs[name], functools.partial(part, name)) for name, s in shapes}


class Scored(NamedTuple):
  """What is known of N validation sequences."""

  nll: np.ndarray  # nats, summed over the counted tokens of a sequence, [N]
  tokens: np.ndarray  # number of the counted tokens (those after the prefix), [N]
  num_bytes: np.ndarray  # bytes of text that the counted tokens stand for, [N]
  path: np.ndarray  # index of the path that a sequence was routed to, [N]
  domain: np.ndarray  # index of a sequence's domain, [N]


def summarize(scored: Scored, num_paths: int, domain_names: Sequence[str]) -> dict[str, Any]:
  """Computes the perplexity exp(sum nll / sum tokens) of validation sequences, in float64.

  Returns:
    perplexity, perplexity_by_path and perplexity_by_domain (None where there is no token), bits_per_byte =
    sum nll / (ln 2 * sum bytes), validation_tokens.

  Raises:
    InputError: no sequence has a counted token.
  """
  nll, tokens, num_bytes = (np.asarray(x, np.float64) for x in scored[:3])
  if not tokens.sum():
    raise InputError('no validation sequence is longer than the prefix: config.data.validation needs longer documents')
  by_domain = _perplexities(nll, tokens, np.asarray(scored.domain), len(domain_names))
  return {
    'perplexity': perplexity(nll.sum() / tokens.sum()),
    'perplexity_by_path': _perplexities(nll, tokens, np.asarray(scored.path), num_paths),
    'perplexity_by_domain': dict(zip(domain_names, by_domain, strict=True)),
    'bits_per_byte': float(nll.sum() / math.log(2) / num_bytes.sum()) if num_bytes.sum() else None,
    'validation_tokens': int(tokens.sum()),
  }


def _perplexities(nll: np.ndarray, tokens: np.ndarray, group: np.ndarray, size: int) -> list[float | None]:
  sums, counts = (np.bincount(group, weights=x, minlength=size)[:size] for x in (nll, tokens))
  return [perplexity(n / t) if t else None for n, t in zip(sums, counts, strict=True)]


def perplexity(nats: float) -> float:
  """Returns e to the mean loss, infinity where float64 ends."""
  return math.exp(nats) if nats < 700 else math.inf
