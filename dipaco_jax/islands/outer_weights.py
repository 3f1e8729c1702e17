"""The weights w_i with which paths count in the outer step of a module [2.7]."""

import functools
import math

import numpy as np

from dipaco_jax.algorithm import weight_cap
from dipaco_jax.islands import owner_facts
from dipaco_jax.islands.island import Island
from dipaco_jax.pipeline import jobs


def module_weights(island: Island, module: str, phase: int) -> dict[str, float]:
  """Returns w_i of a module's paths, by name, divided by the power of two that brings the largest into (1/2, 1].

  The mean stays the same, and whether a contribution is in the exact sum's range depends on the path's move alone.
  """
  grid, everyone = island.layout.grid, path_weights(island, phase)
  most, level = island.run.settings.outer.max_weight, island.parse_module(module)[0]
  weights = weight_cap.cap_weights(grid, level, everyone.reshape(grid.shape), most).reshape(-1)
  weight_by_path = {str(path): float(weights[path]) for path in island.paths_through(module) if weights[path] > 0}
  fraction, exponent = math.frexp(max(weight_by_path.values(), default=1.0))
  return {path: math.ldexp(w, int(fraction == 0.5) - exponent) for path, w in weight_by_path.items()}


@functools.lru_cache(4)
def path_weights(island: Island, phase: int) -> np.ndarray:
  """Returns w_i of every path [2.7], [P]; 0 for one that takes no part."""
  if island.run.settings.data.own_text:
    return owner_facts.weights(island)(phase).reshape(-1)
  number = island.round_of(phase)
  island.fetch_trees(f'shards/{number}')
  return jobs.weights(island.run, number)(phase).reshape(-1)
