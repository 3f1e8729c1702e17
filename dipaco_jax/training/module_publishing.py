"""Modules of a version, written by all processes of a job: `modules/<version>/`, seen whole or not at all."""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from dipaco_jax.algorithm.grid import Coordinates, Level
from dipaco_jax.algorithm.modules import Layout, Modules
from dipaco_jax.buckets import disks
from dipaco_jax.buckets.run_objects import index_name
from dipaco_jax.processes import processes
from dipaco_jax.storage import files, module_store, seals, tensors


def addressable_modules(layout: Layout, modules: Modules) -> Iterator[tuple[Level, Coordinates, dict[str, np.ndarray]]]:
  """Yields the modules that this process writes: those whose first replica is on its devices."""
  for level in layout.levels:
    n = len(level.axes)
    own_modules: dict[Coordinates, dict[str, np.ndarray]] = {}
    for name, stacked in modules[level.name].items():
      for shard in stacked.addressable_shards:
        if shard.replica_id == 0:
          block, first = np.asarray(shard.data), [s.start or 0 for s in shard.index[:n]]
          for local in np.ndindex(*block.shape[:n]):
            own_modules.setdefault(tuple(f + i for f, i in zip(first, local, strict=True)), {})[name] = block[local]
    for module in sorted(own_modules):
      yield level, module, own_modules[module]


def publish_modules(
  workdir: Path, version: int, layout: Layout, modules: Modules, name: str = 'train', disk: disks.Disk = disks.SHARED
):
  """Publishes modules; every process of a job writes those whose first replica is on its devices."""
  publish_module_files(workdir, version, addressable_modules(layout, modules), name, disk)


def publish_module_files(
  workdir: Path, version: int, modules: Iterable[tuple[Level, Coordinates, dict[str, np.ndarray]]], name: str = 'train',
  disk: disks.Disk = disks.SHARED,
):  # fmt: skip
  """Writes `modules/<version>/`, with each file's sha256 in index-<process>.json.

  A version, the number of outer steps inside, that already exists is replaced: a run that was killed and continues
  makes it again, with the same bytes unless the config was lengthened or the devices changed.

  `modules` are those that this process writes; `name` is what is trained, for the names of barriers. On disks apart
  each process has its own modules and all indices.
  """
  aside, occasion = workdir / f'.version-{version}', f'{name}: version {version}'
  if disk.is_ours:
    shutil.rmtree(aside, ignore_errors=True)  # of a run that was killed
  processes.barrier(f'{occasion} begins')
  index = {}
  for level, module, arrays in modules:
    data = tensors.to_bytes(arrays)
    file = module_store.module_file(aside, version, level, module)
    files.write_file(file, data)
    index[f'{level.name}/{file.name}'] = hashlib.sha256(data).hexdigest()
  here = aside / 'modules' / str(version)
  indices = processes.exchange(json.dumps(index, indent=1) + '\n', occasion)
  if disk.is_ours:
    for process, index_text in enumerate(indices):
      files.write_file(here / index_name(process), index_text)
    files.write_file(here / seals.SUMS, seals.sums(here))
    (workdir / 'modules').mkdir(exist_ok=True)
    files.put_in_place(here, workdir / 'modules' / str(version))
    shutil.rmtree(aside)
  processes.barrier(f'{occasion} is out')
  processes.forget(occasion)
