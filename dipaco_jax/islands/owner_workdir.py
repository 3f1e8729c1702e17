"""The end of a run in an owner's store: it becomes a workdir of the owner's paths, which all commands can use.

It has tokenizer, config and base of the run, and the modules of the owner's paths in their last version and in those
that early stopping points to.
"""

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import NamedTuple

from dipaco_jax.algorithm.grid import Coordinates, Level
from dipaco_jax.config import owners
from dipaco_jax.data import tokenizer_files
from dipaco_jax.islands import final_files, path_steps, run_history
from dipaco_jax.islands.guard import Later
from dipaco_jax.islands.island import Island
from dipaco_jax.islands.owner_store import OwnerStorage
from dipaco_jax.islands.path_state import Arrays
from dipaco_jax.storage import publishing, remedies
from dipaco_jax.storage.object_store import Storage
from dipaco_jax.training import module_publishing

POINTERS = remedies.POINTERS  # written last
PHASES = 'paths/phases.json'  # a Part
PAUSE_S = 1.0


class Part(NamedTuple):
  """What an owner's store says of the part that the owner took in its run."""

  owner: str
  paths: list[int]
  first_phase: int  # that they trained in
  steps: list[int] | None = None  # of each path in all phases, where these end by time


def complete(island: Island):
  """Makes a workdir of the store of an owner whose run is finished, unless another worker of the owner has made it."""
  storage = island.storage
  assert isinstance(storage, OwnerStorage)
  while not storage.store.exists(POINTERS):
    try:
      with island.hold_workdir():
        _write(island)
        _upload(island, storage.store)
    except Later:  # another worker of the owner holds it
      time.sleep(PAUSE_S)


def has_ended_early(island: Island) -> bool:
  """Returns whether an owner's worker ends without a model, and says why: the owner has left, or joined too late."""
  owner, members = island.owner, island.members
  if not owner or (owner not in members.left and not is_too_late(island)):
    return False
  if owner in members.left:
    logging.warning('%s has left this run: its store keeps its text and states; its worker ends', owner)
  else:
    logging.warning('%s has joined this run too late: no phase was left for its paths; its worker ends', owner)
  return True


def is_too_late(island: Island) -> bool:
  """Returns whether the paths of an owner that joined have not trained at all."""
  members, phases = island.members, island.run.settings.train.phases
  return island.owner in members.joined and members.since.get(island.owner, phases) >= phases


def _write(island: Island):
  """Writes the files of the workdir on this machine."""
  island.fetch_trees('base')
  island.fetch_tokenizer()
  final_files.restore_config(island)
  final_files.write_grown_config(island)
  pointers = run_history.read_pointers(island)
  paths = owners.paths_of(island.layout.grid, island.owner)
  for version in sorted({island.run.settings.train.phases, *(pointers.version[path] for path in paths)}):
    module_publishing.publish_module_files(island.run.workdir, version, _modules(island, version, pointers.version))
  with contextlib.suppress(FileExistsError):
    (island.run.workdir / 'paths').mkdir()
  publishing.write_json(island.run.workdir / PHASES, _part(island)._asdict())
  best = {'version': pointers.version, 'holdout_loss': pointers.loss}
  publishing.write_json(island.run.workdir / POINTERS, best)


def _part(island: Island) -> Part:
  """Returns what `owner_comparison` needs of the run's facts."""
  paths, s = owners.paths_of(island.layout.grid, island.owner), island.run.settings
  ends = [path_steps.first(island, path, s.train.phases) for path in paths]
  steps = [end - s.pretrain.steps for end in ends if end is not None] or None
  return Part(island.owner, paths, island.members.since.get(island.owner, 0), steps)


def _modules(island: Island, version: int, best_version: list[int]) -> Iterator[tuple[Level, Coordinates, Arrays]]:
  """Yields the modules that the owner's paths go through in a version."""
  paths = owners.paths_of(island.layout.grid, island.owner)
  keys = {key for path in paths for key in island.modules_of(path).values()}
  for fact in island.registry.facts('module', sorted(keys), version):
    if island.is_chosen(fact, best_version):
      yield *island.parse_module(fact.key), island.read_weights(fact)


def _upload(island: Island, store: Storage):
  """Uploads the workdir if the store is a bucket, the pointers last."""
  workdir = island.run.workdir
  if store.local_path('') is not None:
    return
  for tree in ('modules', 'base', 'stages'):
    store.upload_tree(workdir / tree, tree)
  names = tokenizer_files.names(island.run.settings.tokenizer, lambda name: (workdir / name).exists())
  for name in ('config.json', *names, PHASES, POINTERS):
    store.write(name, (workdir / name).read_bytes())
