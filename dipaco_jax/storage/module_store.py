"""Reads published modules; `training.module_publishing` writes them.

Each is one self-contained safetensors file, `modules/<version>/<level>/<c0-c1>.safetensors`, where the version is the
number of outer steps inside. A version is published whole, with {file: sha256} in `index-<process>.json`, one for every
process of the job.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from dipaco_jax.algorithm.grid import Coordinates, Level
from dipaco_jax.algorithm.modules import Layout
from dipaco_jax.storage import seals, tensors

MAX_VERSION = 10**6  # of modules: as many phases a run has at most


def module_name(module: Coordinates) -> str:
  """Returns a module's name among those of its level: its coordinates."""
  return '-'.join(map(str, module)) or 'shared'


def module_key(level: Level, module: Coordinates) -> str:
  """Returns a module's name among those of its version."""
  return f'{level.name}/{module_name(module)}'


def module_file(workdir: Path, version: int, level: Level, module: Coordinates) -> Path:
  """Returns the file of a module of a version."""
  return workdir / 'modules' / str(version) / f'{module_key(level, module)}.safetensors'


def check_module(file: Path):
  """Raises seals.Damaged if the sha256 of a published module is not the recorded one."""
  seals.check(file, recorded_modules(file.parent.parent).get(f'{file.parent.name}/{file.name}', seals.UNKNOWN))


def recorded_modules(folder: Path) -> dict[str, str]:
  """Reads {module's file: sha256} of a version from its index files. Raises seals.Damaged."""
  recorded: dict[str, str] = {}
  for index in folder.glob('index-*.json'):
    recorded |= seals.read_json(index)
  return recorded


def load_path(workdir: Path, layout: Layout, path: int, version: int | None = None) -> dict[str, np.ndarray]:
  """Reads one path's parameters, and no other files; by default of its pointer's version. Raises seals.Damaged."""
  version = best_versions(workdir)[path] if version is None else version
  at, params = layout.grid.coordinates(path), dict[str, np.ndarray]()
  for level in layout.levels:
    check_module(file := module_file(workdir, version, level, layout.grid.module(level, at)))
    params |= tensors.read_arrays(file)
  return dict(sorted(params.items()))


def best_versions(workdir: Path) -> list[int]:
  """Reads the version that each path's early-stopping pointer names. Raises seals.Damaged."""
  file = workdir / 'paths' / 'best.json'
  if not are_versions(versions := seals.read_json(file, 'version')['version']):
    raise seals.Damaged(file)
  return versions


def are_versions(value: Any) -> bool:
  """Returns whether a value is a list of versions; the author of a workdir may have written anything there."""
  return isinstance(value, list) and all(type(version) is int and 0 <= version <= MAX_VERSION for version in value)


def versions(workdir: Path) -> list[int]:
  """Lists the published versions in ascending order."""
  return sorted(int(p.name) for p in (workdir / 'modules').glob('*') if p.name.isdecimal())


def collect(workdir: Path, keep: Iterable[int]):
  """Deletes the published versions but those in `keep` and the newest (garbage collection)."""
  for leftover in (*workdir.glob('.collected-*'), *workdir.glob('.version-*')):  # of runs that were killed
    shutil.rmtree(leftover)
  for version in set(versions(workdir)[:-1]) - set(keep):
    doomed = workdir / f'.collected-{version}'
    os.replace(workdir / 'modules' / str(version), doomed)  # seen whole or not at all
    shutil.rmtree(doomed)


def modules_sha256(workdir: Path, version: int) -> str:
  """Returns the sha256 over all modules' parameters, sorted by level, module and name. Raises seals.Damaged."""
  total = hashlib.sha256()
  for file in sorted((workdir / 'modules' / str(version)).glob('*/*.safetensors')):
    check_module(file)
    for name, array in sorted(tensors.read_arrays(file).items()):
      total.update(f'{file.parent.name}/{file.stem}/{name}'.encode())
      total.update(array.tobytes())
  return total.hexdigest()
