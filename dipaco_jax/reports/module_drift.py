"""The drift of modules from the base model that they started as, and from the other modules of their level.

It is read from the published files a parameter at a time, so that the whole grid is never in memory [3].
"""

import itertools
import math
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import safetensors

from dipaco_jax.algorithm import grid as grids
from dipaco_jax.algorithm.grid import Grid, Level
from dipaco_jax.storage import seals


class Storey(NamedTuple):
  """A storey of the grid: consecutive parts of the network that one level holds."""

  level: Level
  parts: str  # in words: 'embed, blocks 0-1'; '(part)' where several levels share them
  names: tuple[str, ...] = ()  # of parameters


class Drift(NamedTuple):
  """The drift of each module of a storey, row-major, relative to the norm of the base's parameters."""

  from_base: np.ndarray  # [K] |module - base| / |base|
  from_siblings: np.ndarray  # [K] |module - mean of modules| / |base|; nan where the level has one module


def storeys(levels: Sequence[Level], names: Iterable[str]) -> list[Storey]:
  """Cuts the network where the levels change; returns its storeys from the bottom to the top."""
  owners = grids.assign_levels(levels, names)
  parts: dict[str, list[str]] = {}
  for name in sorted(owners, key=_height):
    parts.setdefault(name.split('/')[0], []).append(name)
  held = [tuple(level for level in levels if level in {owners[n] for n in parts[part]}) for part in parts]
  storeys = []
  for here, group in itertools.groupby(zip(parts, held, strict=True), key=lambda pair: pair[1]):
    run = [part for part, _ in group]
    for level in here:
      own = tuple(n for part in run for n in parts[part] if owners[n] is level)
      storeys.append(Storey(level, _describe_parts(run) + (' (part)' if len(here) > 1 else ''), own))
  return storeys


def _height(name: str) -> tuple[int, str]:
  """Returns the key by which parameters sort in the order that the network applies them."""
  block = re.match(r'block_(\d+)/', name)
  return (int(block[1]) if block else -1 if name.startswith('embed') else 10**9), name


def _describe_parts(parts: Sequence[str]) -> str:
  blocks = [int(part.removeprefix('block_')) for part in parts if part.startswith('block_')]
  named_parts = [part.replace('_', ' ') for part in parts if not part.startswith('block_')]
  if blocks:
    several = f'blocks {blocks[0]}-{blocks[-1]}' if len(blocks) > 1 else f'block {blocks[0]}'
    named_parts.insert(1 if named_parts[:1] == ['embed'] else 0, several)
  return ', '.join(named_parts)


def measure(workdir: pathlib.Path, version: int, grid: Grid, levels: Sequence[Level]) -> list[tuple[Storey, Drift]]:
  """Returns every storey's drift at a published version. Raises seals.Damaged."""
  base = workdir / 'base' / 'params.safetensors'
  with seals.reading(base), safetensors.safe_open(base, 'np') as f:
    names = list(f.keys())
  return [(storey, _measure(workdir, version, base, grid, storey)) for storey in storeys(levels, names)]


def _measure(workdir: pathlib.Path, version: int, base: pathlib.Path, grid: Grid, storey: Storey) -> Drift:
  from dipaco_jax.storage import module_store  # imports jax

  files = [module_store.module_file(workdir, version, storey.level, m) for m in grid.modules(storey.level)]
  for file in files:
    module_store.check_module(file)
  own = np.zeros(len(files))
  mutual = np.zeros(len(files))
  norm = 0.0
  for name in storey.names:
    start = _read(base, name)
    norm += float((start**2).sum())
    moved = np.zeros_like(start)  # the mean over modules, twice through the files rather than all in memory
    for i, file in enumerate(files):
      delta = _read(file, name) - start
      own[i] += (delta**2).sum()
      moved += delta / len(files)
    for i, file in enumerate(files if len(files) > 1 else []):
      mutual[i] += ((_read(file, name) - start - moved) ** 2).sum()
  scale = math.sqrt(norm) or 1.0
  return Drift(np.sqrt(own) / scale, np.sqrt(mutual) / scale if len(files) > 1 else np.full(1, np.nan))


def _read(file: pathlib.Path, name: str) -> np.ndarray:
  with safetensors.safe_open(file, 'np') as f:
    return f.get_tensor(name).astype(np.float64)
