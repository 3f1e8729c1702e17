"""Points to cluster and to classify, seeded, and their distances by plain numpy: for the tests of routers."""

import numpy as np


def blobs(num_points: int, width: int, num_blobs: int, spread: float, seed: int = 0) -> np.ndarray:
  rng = np.random.default_rng(seed)
  centres = rng.normal(size=(num_blobs, width))
  return (centres[rng.integers(num_blobs, size=num_points)] + spread * rng.normal(size=(num_points, width))).astype('f')


def hidden_like(num_points: int, width: int, seed: int = 0) -> np.ndarray:
  """Unequal overlapping clusters, a decaying spectrum, heavy tails."""
  rng = np.random.default_rng(seed)
  centres = rng.normal(size=(40, width))
  label = rng.choice(40, size=num_points, p=rng.dirichlet(np.full(40, 0.5)))
  spectrum = np.arange(1, width + 1) ** -0.5
  return ((centres[label] + rng.standard_t(5, size=(num_points, width))) * spectrum).astype('f')


def squared_distances(z_ND, centroids_KD) -> np.ndarray:
  z_ND, centroids_KD = (np.asarray(x, np.float64) for x in (z_ND, centroids_KD))
  return np.stack([((z_ND - c_D) ** 2).sum(1) for c_D in centroids_KD], 1)
