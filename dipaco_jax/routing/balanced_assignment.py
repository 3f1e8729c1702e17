"""Balanced assignment: each sequence to a path, no path over its capacity: SMALLTALK LM (arXiv 2410.03529). Pure.

And something for paths that no sequence was assigned to. The paper has no capacities: its shards are as unequal as the
text. Numpy: sorting and counting, once, on the host.

Dimensions: N sequences, P paths, E of them empty.
"""

import numpy as np

from dipaco_jax.core.errors import InputError

BLOCK = 8192  # sequences that choose at one time


def quotas(num: int, share_P: np.ndarray) -> np.ndarray:
  """`num` sequences divided among the paths as nearly in proportion to `share_P` as whole ones allow: int64 [P].

  Largest remainders, ties to the lower index: |quota_p - num share_p / sum(share)| < 1, and the sum is `num`.
  """
  share_P = np.asarray(share_P, np.float64)  # before the sum, which an array of JAX would make in float32
  exact_P = num * share_P / share_P.sum()
  quota_P = np.floor(exact_P).astype(np.int64)
  left = num - quota_P.sum()
  quota_P[np.argsort(quota_P - exact_P, kind='stable')[:left]] += 1
  return quota_P


def assign(scores_NP: np.ndarray, capacity_P: np.ndarray) -> np.ndarray:
  """The path of each sequence, int32 [N]: sequences in the order of their best score, each to its best path with room.

  In the order of max_p score_np, highest first, sequence n goes to argmax_p score_np over the paths that have fewer
  than capacity_p sequences yet. Ties go to the earlier sequence and to the lower path. The total score is not the
  highest there is, where some paths are better than others for all: with the bias of `classifier.calibration`, to the
  capacities as the target, added to the scores it nearly is.

  Args:
    scores_NP: higher is better, and comparable between sequences: log-likelihoods, not k-means' scores.
    capacity_P: the number of sequences that each path takes at most; `quotas` makes even ones.

  Raises:
    InputError: the capacities are fewer than the sequences, or a score is NaN.
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
      # All choose at once; that holds as far as the first whose path is full by then.
      open_P = np.flatnonzero(room_P)
      choice = open_P[scores_NP[np.ix_(todo, open_P)].argmax(axis=1)]
      holds = _first_too_many(choice, room_P)
      path_N[todo[:holds]] = choice[:holds]
      room_P -= np.bincount(choice[:holds], minlength=num_paths)
      todo = todo[holds:]
  return path_N


def give(lack_NE: np.ndarray, owner_N: np.ndarray, count_P: np.ndarray, quota: int) -> list[np.ndarray]:
  """Sequences for each of E empty paths, one path after another: those that suit it best, at most `quota`.

  Args:
    lack_NE: by how much a sequence's score for an empty path is below its highest.
    owner_N: the path that gives a sequence away, which keeps `quota` itself.
    count_P: the number of sequences of each path.
    quota: 1 or more.
  """
  left_P, taken, found = np.array(count_P), np.zeros(len(owner_N), bool), []
  for lack_N in lack_NE.T:
    mine: list[int] = []
    for n in np.argsort(lack_N, kind='stable'):
      if len(mine) < quota and not taken[n] and left_P[owner_N[n]] > quota:
        mine.append(n)
        taken[n] = True
        left_P[owner_N[n]] -= 1
    found.append(np.array(mine, np.int64))
  return found


def _first_too_many(choice: np.ndarray, room_P: np.ndarray) -> int:
  """The place of the first choice of a path that as many before it as it has room for chose; their number if none."""
  count_P = np.bincount(choice, minlength=len(room_P))
  over_P = count_P > room_P
  if not over_P.any():
    return len(choice)
  by_path, first_P = np.argsort(choice, kind='stable'), np.cumsum(count_P) - count_P
  return int(by_path[(first_P + room_P)[over_P]].min())
