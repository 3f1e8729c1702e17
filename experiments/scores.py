"""Labels without scoring all paths, tried on the scores that a run's first round of re-sharding has kept."""

import math
import pathlib
from typing import Any

import numpy as np

from dipaco_jax import labels, sequences, settings, shards

SWEEPS = 8


def read(workdir: pathlib.Path, s: settings.Settings) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """Scores [N, P] of all router data, where the first router sent it [N], its documents [N]; which sequences it is."""
  num_paths = math.prod(size for _, size in s.grid)
  scores_NP = np.stack([np.load(workdir / 'routing' / '1-scores' / f'{p}.npy') for p in range(num_paths)], axis=1)
  documents, _ = sequences.Sequences(workdir / 'sequences', 'train').columns()
  kept = shards.drawn(documents, s.seed, s.routing.router_fraction, 'router data')
  return scores_NP, np.load(workdir / 'routing' / '0' / 'train.npy')[kept, 0], documents[kept], kept


def compare(workdir: pathlib.Path, s: settings.Settings) -> dict[str, Any]:
  """Of each way: agreement with exact labels, scores taken as a share of all, and regret in nats a sequence.

  Coordinate ascent starts from the path that the first router sent a sequence to. The additive fit is given that path's
  cross, the paths that differ from it in one coordinate; `additive_more` as many again, drawn at random.
  """
  shape = tuple(size for _, size in s.grid)
  scores_NP, start_N, _, _ = read(workdir, s)

  def score(chosen, paths):
    return scores_NP[chosen, paths]

  cross_NM = labels.cross(start_N, shape)
  random_NM = np.random.default_rng(s.seed).integers(scores_NP.shape[1], size=cross_NM.shape)
  found = {
    'one_sweep': labels.coordinate_ascent(score, start_N, shape, 1),
    'ascent': labels.coordinate_ascent(score, start_N, shape, SWEEPS),
    'additive': labels.additive(score, cross_NM, shape),
    'additive_more': labels.additive(score, np.concatenate([cross_NM, random_NM], axis=1), shape),
    'first': labels.Labels(start_N, 0, np.zeros(math.prod(shape), np.int64)),
  }
  exact_N = labels.exact(scores_NP).paths
  return {'router_sequences': len(start_N)} | {
    name: {
      'agreement': labels.agreement(of.paths, exact_N),
      'scored': of.scored / scores_NP.size,
      'regret': labels.regret(scores_NP, of.paths),
    }
    for name, of in found.items()
  }  # fmt: skip
