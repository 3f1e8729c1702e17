"""Perplexity by the place of an answer in its conversation: of all first answers, of all second ones..."""

from collections.abc import Callable
from typing import Any

import numpy as np

from dipaco_jax.data import packing
from dipaco_jax.data.sequences import Sequence
from dipaco_jax.pipeline import run as run_lib, token_losses
from dipaco_jax.processes import display
from dipaco_jax.training import evaluation, mesh
from dipaco_jax.training.programs import Programs

MOST = 8  # places; the last one is of all answers that come later, too


def number_answers(sequences: list[Sequence]) -> list[np.ndarray]:
  """Returns the place of the answer that each token belongs to, from 1, in its conversation; 0 if it is given.

  The sequences of a conversation, where it has several, follow one another.
  """
  numbers = []
  last = document = -1
  for sequence in sequences:
    assert sequence.marked is not None
    is_learned = sequence.marked >= 0
    begins = is_learned & ~np.concatenate([[False], is_learned[:-1]])
    last, document = (last if sequence.document == document else 0), sequence.document
    numbers.append(np.where(is_learned, np.minimum(last + np.cumsum(begins), MOST), 0))
    last += int(begins.sum())
  return numbers


def perplexities(
  run: run_lib.Run, programs: Programs, params_of_path: Callable[[int], Any], assignment: np.ndarray | None = None
) -> dict[str, float]:
  """Returns the perplexity of the answers at each place, '1' to '8 and later', for those places that there are.

  All processes call it.

  Args:
    params_of_path: returns a path's parameters, on the host.
    assignment: path of each validation sequence, [N]; None if there is only one path.
  """
  validation, num_paths = run.sequences('validation'), programs.layout.grid.num_paths
  paths_N = np.zeros(len(validation), np.int32) if assignment is None else assignment
  sequences = validation.read(range(len(validation)))
  numbers = number_answers(sequences)
  mine = [np.flatnonzero(paths_N == path) for path in range(num_paths)]

  def load(path: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    return packing.pad([sequences[n].to_pack for n in mine[path][start:stop]], run.eval_len)

  rows = evaluation.Rows([len(indices) for indices in mine], load, run.eval_batch, run.eval_len)
  nats, tokens = np.zeros(MOST + 1), np.zeros(MOST + 1)
  with display.doing('validating answers'):
    for path, start, nll_BL in _nll(programs, params_of_path, rows):
      for nll_L, n in zip(nll_BL, mine[path][start : start + len(nll_BL)], strict=False):
        at = numbers[n][1 : run.eval_len]
        nats += np.bincount(at, nll_L[: len(at)], MOST + 1)
        tokens += np.bincount(at, minlength=MOST + 1)
  names = {place: f'{place}{" and later" * (place == MOST)}' for place in range(1, MOST + 1) if tokens[place]}
  return {name: evaluation.perplexity(nats[place] / tokens[place]) for place, name in names.items()}


def _nll(programs: Programs, params_of_path: Callable[[int], Any], rows: evaluation.Rows) -> Any:
  """Yields (path, its first row, nats of the token that follows each token, [B, L]) of all rows, some at a time."""
  score = token_losses.program(programs)
  for turn in programs.placement.turns():
    paths = programs.placement.paths(turn)
    most = max(rows.counts[path] for path in paths)
    if not most:
      continue
    params = evaluation.in_flight(programs, turn, params_of_path)
    for start in range(0, most, rows.batch_size):
      nll = mesh.fetch(score(params, *evaluation.load_batch(programs, turn, rows, start)))
      for path, nll_BL in zip(paths, nll.reshape(len(paths), -1, rows.seq_len), strict=True):
        yield path, start, nll_BL
