"""Balanced assignment of sequences to paths of limited capacity, and sequences for paths that got none. Pure.

Neither is in the paper, whose shards are as unequal as the text; the assignment is that of SMALLTALK LM (arXiv
2410.03529). NumPy, as this is sorting and counting on the host.

Dimensions: N sequences, P paths, E of them empty.
"""

import numpy as np

from dipaco_jax.core.errors import InputError

BLOCK = 8192  # sequences that choose at one time


def assign(scores_NP: np.ndarray, capacity_P: np.ndarray) -> np.ndarray:
  """Assigns sequences in the order of their best score, each to its best path with room: int32 [N].

  In descending order of max_p score_np, sequence n goes to argmax_p score_np over the paths that have fewer than
  capacity_p sequences so far. Ties go to the earlier sequence and to the lower path. The total score is not optimal
  where some paths are better than others for all sequences; it nearly is if the bias of `classifier.calibration`, with
  the capacities as the target, is added to the scores.

  Scores are comparable between sequences, as log-likelihoods are. k-means' scores lack -|x|^2, on which it then depends
  too who has to take another path; capacities are kept all the same. Raises InputError if the capacities are fewer than
  the sequences, or a score is NaN.
  """
  num, num_paths = scores_NP.shape
  if capacity_P.sum() < num:
    raise InputError(f'{num} sequences exceed the capacities, {capacity_P.sum()} in all: raise them')
  best_N = scores_NP.max(axis=1)
  if np.isnan(best_N).any():
    raise InputError('scores are NaN: did a path diverge?')
  path_N, room_P = np.empty(num, np.int32), capacity_P.astype(np.int64)
  order_N = np.argsort(-best_N, kind='stable')
  for start in range(0, num, BLOCK):
    todo = order_N[start : start + BLOCK]
    while len(todo):
      # All choose at once; choices hold up to the first sequence whose path is full by then.
      open_P = np.flatnonzero(room_P)
      choice = open_P[scores_NP[np.ix_(todo, open_P)].argmax(axis=1)]
      count_P, holds = np.bincount(choice, minlength=num_paths), len(choice)
      if (over_P := count_P > room_P).any():
        by_path, first_P = np.argsort(choice, kind='stable'), np.cumsum(count_P) - count_P
        holds = int(by_path[(first_P + room_P)[over_P]].min())
      path_N[todo[:holds]] = choice[:holds]
      room_P -= np.bincount(choice[:holds], minlength=num_paths)
      todo = todo[holds:]
  return path_N


def fill_empty_paths(lack_NE: np.ndarray, owner_N: np.ndarray, count_P: np.ndarray, quota: int) -> list[np.ndarray]:
  """Chooses sequences for each of E empty paths in turn: the best ones for it, at most `quota`, which is 1 or more.

  Args:
    lack_NE: by how much a sequence's score for an empty path is below its highest score.
    owner_N: the path that a sequence would be taken from, which keeps at least `quota`.
    count_P: the number of sequences of each path.
  """
  left_P = np.array(count_P)
  taken = np.zeros(len(owner_N), bool)
  chosen = []
  for lack_N in lack_NE.T:
    mine: list[int] = []
    for n in np.argsort(lack_N, kind='stable'):
      if len(mine) == quota:
        break
      if not taken[n] and left_P[owner_N[n]] > quota:
        mine.append(n)
        taken[n] = True
        left_P[owner_N[n]] -= 1
    chosen.append(np.array(mine, np.int64))
  return chosen
