"""What many independent jobs share instead of a mesh: facts in a registry, objects in storage.

A fact is an immutable row, inserted once, and the only authority; a task only says who may do what. Both are named by
(kind, key, number), and a task's completion is the insertion of its facts:

    task                        done by           facts
    prepare                     worker            prepared; module of version 0, each a part of the base
    train (path, phase)         worker            checkpoint (path, phase): the path's parameters after tau steps
    outer (module, version)     outer executor    module (module, version): weights and outer state, one object
    evaluate (path, version)    evaluator         evaluation (path, version): its loss on the shard's hold-out
    reroute (round)             worker            round: all text is sharded anew
    finish                      evaluator         finished: published, evaluated, reported

Two kinds of facts more come along with these, see `screening_facts`: excluded (path, phase), diverged.

`schedule` says what a fact makes possible. It runs after the fact is committed, and again by anybody who finds a fact
that nobody has scheduled: nothing is lost with the process that had the trigger. A path's next phase starts when its
own modules are there [3]; there is no barrier but those of `advance`.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import pathlib
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dipaco_jax.core import modules as modules_lib
from dipaco_jax.core import outer
from dipaco_jax.core.errors import InputError
from dipaco_jax.core.grid import Coordinates, Level
from dipaco_jax.islands import registry as registry_lib
from dipaco_jax.islands.registry import Fact, NewTask
from dipaco_jax.models import transformer
from dipaco_jax.pipeline import jobs
from dipaco_jax.pipeline import run as run_lib
from dipaco_jax.storage import files, lock, module_store, seals, tensors
from dipaco_jax.storage import object_store as storage_lib
from dipaco_jax.storage import trees as trees_lib
from dipaco_jax.training import module_publishing

OBJECTS = 'objects'  # in storage; the published modules are elsewhere
TOKENIZER = 'tokenizer.model'
INNER = 'inner'  # the AdamW state among a checkpoint's objects
CARRIED = ('usual',)  # of what is said of a module's version, what the next one has too where nobody trains it


class Later(OSError):
  """A task cannot be done now, through no fault of who tries: it is to be tried again."""


class Busy(Later):
  """Another process of this machine holds the workdir; it may be one that was stopped past its lease."""


class Gone(Later):
  """An object or a tree is missing or corrupt; `name` says which."""

  def __init__(self, name: str, words: str):
    super().__init__(words)
    self.name = name


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity
class Islands:
  """A run, as a process of any role sees it."""

  run: run_lib.Run  # its workdir is on this machine, and holds what was fetched of the run's
  registry: registry_lib.Registry
  storage: storage_lib.Storage
  name: str  # of this process
  resumed: int = 0  # how often the run had diverged, and was gone on with, when this process began

  # -- objects

  def write(self, name: str, arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Publishes arrays; returns [name, sha256]. Equal arrays have equal names, so that what is done twice is one."""
    data = tensors.to_bytes(arrays)
    sha256 = hashlib.sha256(data).hexdigest()
    name = f'{OBJECTS}/{name}-{sha256[:16]}.safetensors'
    self.storage.write(name, data, sha256)
    return [name, sha256]

  def read(self, name: str, sha256: str) -> dict[str, np.ndarray]:
    """Raises Gone."""
    with noticing(name):
      return tensors.from_bytes(self.storage.read(name, sha256))

  def fetch(self, *trees: str):
    """Makes directories of the workdir's be on this machine, as facts tell, and the stages' records. Raises Gone."""
    for tree in ('stages', *trees):
      with noticing(tree):
        self.storage.download_tree(tree, self.run.workdir / tree, self.tree_sha256(tree))

  @functools.lru_cache(64)  # noqa: B019
  def tree_sha256(self, tree: str) -> str:
    """Of its index, by the fact of the task that made it; '' for the stages' records, which tell of time."""
    kind, _, number = maker(tree)
    [fact] = self.registry.facts({'prepare': 'prepared', 'reroute': 'round'}[kind], number=number)
    return fact.meta['trees'].get(tree, '')

  def publish_trees(self, kind: str, number: int, trees: Sequence[str], about: dict[str, Any]) -> Fact:
    """Uploads directories of the workdir's. Raises InputError, before anything is changed, where others are facts."""
    indices = {tree: trees_lib.index_of(self.run.workdir / tree) for tree in trees}
    about = about | {'trees': {tree: hashlib.sha256(index).hexdigest() for tree, index in indices.items()}}
    fact = Fact(kind, '', number, '', hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest(), about)
    if any(there.sha256 != fact.sha256 for there in self.registry.facts(kind, number=number)):
      raise InputError(f'{", ".join(trees)}: this machine makes others than are in use; let one make them that is like')
    for tree in trees:
      self.storage.upload_tree(self.run.workdir / tree, tree)
    return fact

  def look_again(self, e: seals.Damaged):
    """A file of this machine's is not as it was fetched: everything is compared anew when it is next asked for."""
    self.storage.whole.clear()
    if pathlib.Path(e.file).parent == self.run.workdir / 'stages':  # no fact tells what they were
      shutil.rmtree(self.run.workdir / 'stages', ignore_errors=True)

  def fetch_tokenizer(self):
    """Makes it be on this machine. Raises Gone."""
    [fact], file = self.registry.facts('prepared'), self.run.workdir / TOKENIZER
    sha256 = fact.meta['tokenizer']
    if not file.exists() or hashlib.sha256(file.read_bytes()).hexdigest() != sha256:
      with noticing(TOKENIZER):
        files.write_file(file, self.storage.read(TOKENIZER, sha256))

  @contextlib.contextmanager
  def hold(self) -> Iterator[None]:
    """The workdir for this process alone. Raises Busy."""
    with contextlib.ExitStack() as stack:
      try:
        stack.enter_context(lock.hold(self.run.workdir))
      except ValueError as e:
        raise Busy(str(e)) from e
      yield

  # -- modules

  @functools.cached_property
  def layout(self) -> modules_lib.Layout:
    """Of the modules; unlike the run's, it needs nothing that the run has made."""
    return modules_lib.make_layout(self.run.settings.grid, self.run.settings.levels, self.shapes)

  @functools.cached_property
  def shapes(self) -> dict[str, Any]:
    """One path's parameters."""
    s = self.run.settings
    return transformer.shapes(transformer.make(s.model, s.tokenizer.vocab_size))

  def modules_of(self, path: int) -> dict[str, str]:
    """{level: key of the module that the path picks}."""
    coordinates = self.layout.grid.coordinates(path)
    grid = self.layout.grid
    return {level.name: module_store.module_key(level, grid.module(level, coordinates)) for level in self.layout.levels}

  def paths_through(self, module: str) -> list[int]:
    """Paths that pick a module."""
    grid, (level, fixed) = self.layout.grid, self.parse(module)
    positions = grid.positions(level)
    ranges = [
      [fixed[positions.index(axis)]] if axis in positions else range(size) for axis, size in enumerate(grid.shape)
    ]
    return [grid.path(point) for point in itertools.product(*ranges)]

  def parse(self, module: str) -> tuple[Level, Coordinates]:
    """A module's level and coordinates, from its key."""
    name, _, coordinates = module.partition('/')
    level = next(level for level in self.layout.levels if level.name == name)
    return level, tuple(map(int, coordinates.split('-'))) if level.axes else ()

  def all_modules(self) -> list[str]:
    layout = self.layout
    return [module_store.module_key(level, module) for level in layout.levels for module in layout.grid.modules(level)]

  def path_parameters(self, path: int, version: int) -> dict[str, np.ndarray]:
    """One path's parameters of a version; reads its modules and no others."""
    params: dict[str, np.ndarray] = {}
    for fact in self.registry.facts('module', list(self.modules_of(path).values()), version):
      params |= split(self.read(fact.uri, fact.sha256))[0]
    return dict(sorted(params.items()))

  @functools.lru_cache(4)  # noqa: B019 - a process has one of these
  def active(self, phase: int) -> np.ndarray:
    """Which paths train in a phase, bool [P]."""
    s = self.run.settings
    return outer.active_paths(s.train, self.layout.grid.num_paths, s.seed, phase)

  def round(self, phase: int) -> int:
    """Of sharding, that a phase trains on."""
    s = self.run.settings
    return next(n for n in range(s.rounds + 1) if phase < jobs.round_end(s, n))

  def publish(self, version: int):
    """`modules/<version>/` in the workdir, as SPMD has it: weights alone."""
    facts = self.registry.facts('module', number=version)
    module_publishing.publish_module_files(
      self.run.workdir, version, ((*self.parse(f.key), split(self.read(f.uri, f.sha256))[0]) for f in facts)
    )


@contextlib.contextmanager
def noticing(name: str) -> Iterator[None]:
  """What storage says of an object or a tree, as Gone."""
  try:
    yield
  except (storage_lib.Missing, storage_lib.Corrupt) as e:
    raise Gone(name, str(e)) from e


def maker(name: str) -> tuple[str, str, int]:
  """The task (kind, key, number) that wrote an object or a tree: the inverse of how these are named."""
  parts = name.removeprefix(f'{OBJECTS}/').split('/')
  if parts[0] == 'paths':
    return 'train', parts[2].partition('-')[0], int(parts[1])
  if parts[0] == 'modules' and parts[1] != '0':
    return 'outer', '/'.join(parts[2:]).rpartition('-')[0], int(parts[1])
  if parts[0] in ('routing', 'shards') and parts[1] != '0':
    return 'reroute', '', int(parts[1])
  return 'prepare', '', 0


OUTER = 'outer'  # before the names of a module's outer state, in its object


def join(params: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Weights and outer state, as one object has them; `split` is the inverse."""
  return {**params, **{OUTER + name: x for name, x in state.items()}}


def split(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
  state = {name.removeprefix(OUTER): x for name, x in arrays.items() if name.startswith(OUTER + '[')}
  return {name: x for name, x in arrays.items() if not name.startswith(OUTER + '[')}, state


def checkpoint_fact(path: int, phase: int, objects: dict[str, list[str]], about: dict[str, Any]) -> Fact:
  """What a path has come to after a phase; the digest is over all its objects, one for each level.

  One that is excluded has none, for nobody would read them.
  """
  digest = hashlib.sha256(json.dumps(sorted(objects.items())).encode()).hexdigest()
  return Fact('checkpoint', str(path), phase, '', digest, about | {'objects': objects})


# -- what follows from what


def schedule(islands: Islands, facts: Sequence[Fact]):
  """Inserts the tasks that facts make possible, once, and wakes those that wait for them."""
  in_order = sorted(facts, key=lambda fact: (fact.kind, fact.number, fact.key))
  by_kind = {kind: list(found) for kind, found in itertools.groupby(in_order, lambda fact: fact.kind)}
  _after_modules(islands, by_kind.get('module', []))
  _after_checkpoints(islands, by_kind.get('checkpoint', []))
  for fact in by_kind.get('round', []):
    _after_round(islands, fact.number)
  islands.registry.mark_scheduled(facts)


def _after_modules(islands: Islands, facts: Iterable[Fact]):
  """Paths all of whose modules are there train on, and are evaluated; what nobody trains is the next version."""
  s, carried = islands.run.settings, []
  for version, found in itertools.groupby(facts, lambda fact: fact.number):
    group = list(found)
    paths = sorted({path for fact in group for path in islands.paths_through(fact.key)})
    rounds = len(islands.registry.facts('round')) if s.rounds else 0
    _after_paths(islands, _with_modules(islands, paths, version), version, rounds)
    if version < s.train.phases:
      active = islands.active(version)
      carried += [
        fact._replace(number=version + 1, meta={name: fact.meta[name] for name in CARRIED if name in fact.meta})
        for fact in group
        if not active[islands.paths_through(fact.key)].any()
      ]
  if carried:
    islands.registry.put(carried)


def _with_modules(islands: Islands, paths: Sequence[int], version: int) -> list[int]:
  """The paths all of whose modules of a version are there."""
  needed = {path: list(islands.modules_of(path).values()) for path in paths}
  there = {f.key for f in islands.registry.facts('module', sorted({m for n in needed.values() for m in n}), version)}
  return [path for path in paths if there.issuperset(needed[path])]


def _after_paths(islands: Islands, paths: Sequence[int], version: int, rounds: int):
  """Paths that have come to a version are evaluated and train on, if so many rounds have made the shards for it."""
  s = islands.run.settings
  end = jobs.round_end(s, rounds)
  if 0 < version <= end and s.train.early_stopping:
    islands.registry.add_tasks(NewTask('evaluate', str(path), version) for path in paths)
  if version < end:
    active = islands.active(version)
    islands.registry.add_tasks(NewTask('train', str(path), version) for path in paths if active[path])


def _after_round(islands: Islands, number: int):
  """Paths go on from the version that the round has waited for, or from a later one that nobody has to train."""
  s, paths = islands.run.settings, range(islands.layout.grid.num_paths)
  for version in range(jobs.round_end(s, number - 1), jobs.round_end(s, number) + 1):
    _after_paths(islands, _with_modules(islands, paths, version), version, number)


def _after_checkpoints(islands: Islands, facts: Iterable[Fact]):
  """Every module of the path has a contribution more."""
  for phase, found in itertools.groupby(facts, lambda fact: fact.number):
    modules = sorted({module for fact in found for module in islands.modules_of(int(fact.key)).values()})
    islands.registry.add_tasks(NewTask('outer', module, phase + 1, 'waiting') for module in modules)
    islands.registry.wake('outer', modules, phase + 1)


def advance(islands: Islands):
  """Where nothing is left to do: the next thing that needs all paths, a round of re-sharding or the end."""
  registry, s = islands.registry, islands.run.settings
  if lost := registry.unscheduled():
    schedule(islands, lost)
    return
  if not registry.is_idle():
    return
  if not registry.facts('prepared'):
    registry.add_tasks([NewTask('prepare', '', 0)])
    return
  rounds = len(registry.facts('round'))  # before we ask: or there may be one more by the time that we go on
  if registry.is_idle():
    registry.add_tasks([NewTask('reroute', '', rounds + 1) if rounds < s.rounds else NewTask('finish', '', 0)])


def is_finished(islands: Islands) -> bool:
  return bool(islands.registry.facts('finished'))
