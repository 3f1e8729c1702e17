"""Hashes for random draws: equal numbers or names give equal draws on every machine. Not cryptographic."""

import hashlib
from typing import Literal

import numpy as np


def of_integers(*numbers: int | np.ndarray) -> np.ndarray:
  """Hashes tuples of integers to uint64, elementwise over arrays."""
  x: np.ndarray = np.zeros(1, np.uint64)
  for number in numbers:
    x = mix((x ^ np.asarray(number).astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15))
  return x


def mix(x: np.ndarray) -> np.ndarray:
  """Applies the finalizer of SplitMix64 to uint64."""
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))


def of_name(name: str, order: Literal['big', 'little'] = 'big') -> int:
  """Hashes a name to an integer below 2^64."""
  # Both orders are in published runs: `router` has little, all else big.
  return int.from_bytes(hashlib.blake2b(name.encode('utf-8', 'replace'), digest_size=8).digest(), order)
