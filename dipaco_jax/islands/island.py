"""An island: one process of a run, with the registry and the storage that it shares with the others."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import pathlib
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dipaco_jax.algorithm import compression, modules as modules_lib, streaming
from dipaco_jax.algorithm.grid import Coordinates, Level
from dipaco_jax.config import choices, owners, wires
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import tokenizer_files
from dipaco_jax.islands import messages
from dipaco_jax.islands.guard import Gone, Later, Malformed, guarding, objects_of, raising_gone
from dipaco_jax.islands.module_weights import BEFORE, MASTER, SINCE, ModuleWeights, check_name
from dipaco_jax.models import transformer
from dipaco_jax.pipeline import jobs, own_text_stage, run as run_lib
from dipaco_jax.registry import fact_names
from dipaco_jax.registry.registry import Fact, Registry, Task
from dipaco_jax.storage import files, lock, module_store, object_store as storage_lib, seals, tensors
from dipaco_jax.training import module_publishing

OBJECTS = 'objects'  # in storage; the published modules are elsewhere
OUTER = 'outer'  # a module's outer state: its object in the fact's metadata
DIFFERENCES = 'differences'  # of modules, in storage
STATES = 'states'  # of paths, in storage
STATE = 'state'  # kind of the facts that name these
OWN_TEXT = 'own_text'  # kind of the task and of the fact of an owner's text
AUDIT, CONFIRM = 'audit', 'confirm'  # kinds of tasks that train phases again
OWN_TREES = tuple(tree.partition('/')[0] for tree in own_text_stage.TREES)  # directories of an owner's text
OF_PATHS = ('train', 'piece', 'evaluate', 'ship', 'judge', AUDIT, CONFIRM)  # kinds of tasks whose key is a path
CARRIED = 'usual', OUTER, SINCE  # see `carried_metadata`


def carried_metadata(module: Fact) -> dict[str, Any]:
  """Returns the metadata of a module that its next version keeps where no path trains it."""
  return {name: module.meta[name] for name in CARRIED if name in module.meta}


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity
class Island:
  """One process of an islands run, in any role: the run, registry and storage that it reads and writes."""

  run: run_lib.Run  # with a workdir on this machine, for files fetched from storage
  registry: Registry
  storage: storage_lib.Storage
  name: str  # of this process
  resumed: int = 0  # how often the run had been resumed after it diverged, when this process began
  weights: ModuleWeights = dataclasses.field(default_factory=ModuleWeights)  # of modules that it has read or made
  exclusions: dict[tuple[int, int, int], bool] = dataclasses.field(default_factory=dict)  # see pieces.excluded_before
  owner: str = ''  # whose worker this is, if text stays with its owners
  own_globs: tuple[str, ...] = ()  # the files of that owner's text
  decisions: Any = None  # Decisions that it follows, in a replay of another run (decisions.py)
  members: owners.Members = owners.Members()  # who has joined and left; the settings have the owners that joined

  def __post_init__(self):
    s = self.run.settings
    self.registry.names = fact_names.FactNames(s.num_paths, self.all_modules, s.train.phases)
    self.registry.known_members = self.members.num_facts

  def error_text(self, error: Exception, message: str = '') -> str:
    """Returns what others are told of an error; its kind alone by an owner's worker: messages quote text."""
    return type(error).__name__ if self.owner else message or str(error)

  # -- objects

  def write_object(self, name: str, arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Publishes arrays; returns [name, sha256]. Equal arrays get equal names, and so are only one object."""
    data = tensors.to_bytes(arrays)
    name, sha256 = self.object_name(name, data)
    self.storage.write(name, data, sha256)
    return [name, sha256]

  def object_name(self, name: str, data: bytes | memoryview) -> tuple[str, str]:
    """Returns the name and the sha256 of the object that `write_object` publishes."""
    sha256 = hashlib.sha256(data).hexdigest()
    return f'{OBJECTS}/{name}-{sha256[:16]}.safetensors', sha256

  def read_object(self, name: str, sha256: str, like: messages.Shapes | None = None) -> dict[str, np.ndarray]:
    """Reads what `write_object` published; raises Gone, or Malformed if the arrays are not `like` these."""
    with guarding(name), raising_gone(name):
      arrays = tensors.from_bytes(self.storage.read(name, sha256))
      if like is not None:
        messages.check_shapes(arrays, like)
      return arrays

  def read_contribution(self, checkpoint: Fact, level: Level) -> dict[str, np.ndarray]:
    """Reads a path's message of a level that its checkpoint or piece names. Raises Gone or Malformed.

    A message that is lost is Gone, and its path trains again, unless its owner has left: then it counts as Malformed.
    """
    named = objects_of(checkpoint).get(level.name)
    with guarding(f'the {checkpoint.kind}'):
      if named is None or maker(named[0])[:2] not in (('train', checkpoint.key), ('piece', checkpoint.key)):
        raise ValueError(f'it names no object of level {level.name}')
    by_row = self.run.settings.outer.row_weights
    try:
      return self.read_object(*named, messages.expected(self.kind(level), self.level_shapes(level), by_row))
    except Gone as e:
      if int(checkpoint.key) in self.members.until:
        raise Malformed(e.name, str(e)) from e
      raise

  def level_shapes(self, level: Level) -> messages.Shapes:
    """Returns the shapes of a level's parameters in one path."""
    return {name: self.shapes[name] for name in self.layout.names(level)}

  def fetch_trees(self, *trees: str):
    """Downloads directories of the workdir, as facts name them, and the stages' records; raises Gone."""
    for tree in ('stages', *trees):
      with raising_gone(tree):
        self.storage.download_tree(tree, self.run.workdir / tree, self.tree_sha256(tree))

  def tree_sha256(self, tree: str) -> str:
    """Returns the digest of a directory's index, from its maker's fact; '' for the stages' records: they have times."""
    kind, key, number = maker(tree, self)
    fact_kind = {'prepare': 'prepared', 'reroute': 'round'}.get(kind, kind)
    [fact] = self.registry.facts(fact_kind, [key], number=number)
    return fact.meta['trees'].get(tree, '')

  def publish_trees(
    self, kind: str, number: int, trees: Sequence[str], about: dict[str, Any], key: str = '', replaces: str = ''
  ) -> Fact:  # fmt: skip
    """Uploads directories of the workdir; raises InputError, before anything changes, where facts name others.

    `replaces`: sha256 of a fact that may name others.
    """
    indices = {tree: storage_lib.tree_index(self.run.workdir / tree) for tree in trees}
    about = about | {'trees': {tree: hashlib.sha256(index).hexdigest() for tree, index in indices.items()}}
    fact = Fact(kind, key, number, '', hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest(), about)
    if any(published.sha256 not in (fact.sha256, replaces) for published in self.registry.facts(kind, [key], number)):
      raise InputError(
        f'{", ".join(trees)}: the results of this machine differ from those in use; run it on a machine like the first'
      )
    for tree in trees:
      self.storage.upload_tree(self.run.workdir / tree, tree)
    return fact

  def distrust(self, e: seals.Damaged):
    """Compares all that was fetched with its digests again when it is next asked for; called when a file is damaged."""
    self.storage.verified_trees.clear()
    if pathlib.Path(e.file).parent == self.run.workdir / 'stages':  # no fact names them
      shutil.rmtree(self.run.workdir / 'stages', ignore_errors=True)

  def fetch_tokenizer(self):
    """Downloads the tokenizer's files, unless they are here; raises Gone."""
    [fact] = self.registry.facts('prepared')
    for name, sha256 in fact.meta['tokenizer'].items():
      file = self.run.workdir / name
      if not file.exists() or hashlib.sha256(file.read_bytes()).hexdigest() != sha256:
        with raising_gone(name):
          files.write_file(file, self.storage.read(name, sha256))

  def publish_tokenizer(self) -> dict[str, str]:
    """Writes the tokenizer's files to storage; returns their sha256 by name."""
    tokenizer = self.run.settings.tokenizer
    names = tokenizer_files.names(tokenizer, lambda name: (self.run.workdir / name).exists())
    return {name: self.storage.write(name, (self.run.workdir / name).read_bytes()) for name in names}

  @contextlib.contextmanager
  def hold_workdir(self) -> Iterator[None]:
    """Holds the workdir for this process alone; raises Later if another of this machine holds it."""
    with contextlib.ExitStack() as stack:
      try:
        stack.enter_context(lock.hold(self.run.workdir))
      except InputError as e:
        raise Later(str(e)) from e
      yield

  # -- modules

  @functools.cached_property
  def layout(self) -> modules_lib.Layout:
    """The modules' layout; unlike the run's, it needs nothing that the run has made."""
    s = self.run.settings
    return modules_lib.make_layout(s.grid, s.levels, self.shapes)

  @functools.cached_property
  def shapes(self) -> dict[str, Any]:
    """Shapes of one path's parameters, by name."""
    s = self.run.settings
    return transformer.shapes(transformer.make_model(s.model, s.tokenizer.vocab_size))

  def modules_of(self, path: int) -> dict[str, str]:
    """Returns the keys of the modules that a path goes through, by level."""
    grid = self.layout.grid
    at = grid.coordinates(path)
    return {level.name: module_store.module_key(level, grid.module(level, at)) for level in self.layout.levels}

  def shared_modules(self, path: int) -> dict[str, str]:
    """Returns the keys of the modules that a path goes through and that do not stay with it, by level."""
    return {level: module for level, module in self.modules_of(path).items() if level not in self.own_levels}

  def own_modules(self, path: int) -> list[str]:
    """Returns the keys of the modules that stay with a path."""
    return [module for level, module in self.modules_of(path).items() if level in self.own_levels]

  def words(self, task: Task) -> str:
    """Returns what people are shown of a task: its kind, its path by name or its module, and its number."""
    name = self.layout.grid.path_name(int(task.key)) if task.kind in OF_PATHS else task.key
    return f'{task.kind} {name} {task.number}'.replace('  ', ' ')

  def paths_through(self, module: str) -> list[int]:
    """Returns the paths that go through a module."""
    grid, (level, fixed) = self.layout.grid, self.parse_module(module)
    at = dict(zip(grid.positions(level), fixed, strict=True))
    ranges = ([at[axis]] if axis in at else range(size) for axis, size in enumerate(grid.shape))
    return [grid.path(point) for point in itertools.product(*ranges)]

  def parse_module(self, module: str) -> tuple[Level, Coordinates]:
    """Splits a module's key into its level and coordinates."""
    name, _, coordinates = module.partition('/')
    level = self.layout.level(name)
    return level, tuple(map(int, coordinates.split('-'))) if level.axes else ()

  def all_modules(self) -> list[str]:
    """Returns the keys of all modules, level by level."""
    layout = self.layout
    return [module_store.module_key(level, module) for level in layout.levels for module in layout.grid.modules(level)]

  def path_parameters(self, path: int, version: int, levels: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """Reads one path's parameters of a version, maybe of some levels only: its modules and no others."""
    params: dict[str, np.ndarray] = {}
    modules = [module for level, module in self.modules_of(path).items() if levels is None or level in levels]
    facts = self.registry.facts('module', modules, version) if modules else []
    if len(facts) < len(modules):
      raise Later(f'a module of path {path} is not there in version {version}')
    for fact in facts:
      params |= self.read_weights(fact)
    return dict(sorted(params.items()))

  @functools.cached_property
  def wire(self) -> streaming.Wire:
    """Compression, streaming and overlap of messages."""
    return wires.make_wire(self.run.settings.outer, self.run.settings.train)

  @functools.cached_property
  def timetable(self) -> streaming.Timetable:
    """When levels exchange."""
    return choices.make_timetable(self.run.settings, self.layout.shared_sizes(self.shapes))

  @functools.cached_property
  def own_levels(self) -> frozenset[str]:
    """The levels that one path has alone, where they stay with it (own_levels.py)."""
    s = self.run.settings
    if s.train.paths_per_phase or s.train.schedule:
      return frozenset()
    return frozenset(level.name for level in self.layout.levels if self.layout.grid.paths_through(level) == 1)

  @property
  def shared_levels(self) -> list[str]:
    """The other levels."""
    return [level.name for level in self.layout.levels if level.name not in self.own_levels]

  def has_own_objects(self, version: int) -> bool:
    """Returns whether own modules of a version are objects: those of the ends of rounds, and of the run, are."""
    s = self.run.settings
    return not self.own_levels or version == 0 or any(version == jobs.round_end(s, n) for n in range(s.rounds + 1))

  def kind(self, level: Level) -> str:
    """Returns how outer gradients of a level are compressed, one of compression.KINDS."""
    return self.wire.compress if self.layout.grid.paths_through(level) > 1 else 'none'

  def read_weights(self, fact: Fact) -> dict[str, np.ndarray]:
    """Reads the weights of a module's version, as paths read them; nobody may change them."""
    return self.weights.read(self, fact)

  def read_module(self, fact: Fact) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Reads the weights and the outer state of a module's version, or {} if it has had no outer step."""
    weights, state = self.read_weights(fact), dict[str, np.ndarray]()
    if OUTER in fact.meta:
      with guarding(fact.uri):
        check_name(fact, fact.meta[OUTER][0])
        state = self.weights.read_state(self, *fact.meta[OUTER])
        messages.check_shapes(state, self.outer_shapes(self.parse_module(fact.key)[0]))
    return weights, state

  def read_whole(self, module: str, name: str, sha256: str) -> dict[str, np.ndarray]:
    """Reads a module's object that is no difference; raises Gone."""
    arrays = self.read_object(name, sha256)
    with guarding(name):
      messages.check_shapes(arrays, self.level_shapes(self.parse_module(module)[0]))
    return arrays

  def read_difference(self, fact: Fact, weights: dict[str, np.ndarray], of: str = '') -> dict[str, np.ndarray]:
    """Returns a module's version from the weights of the version before; raises Gone.

    `of`: the object of the version before, where that may have been replaced since this one was made.
    """
    if of and fact.meta.get(BEFORE, of) != of:
      raise Gone(fact.uri, f'{fact.uri} differs from weights that were replaced')
    level = self.parse_module(fact.key)[0]
    kind = compression.of_modules(self.kind(level))
    like = messages.expected(kind, self.level_shapes(level))
    return messages.add(kind, weights, self.read_object(fact.uri, fact.sha256, like))

  def outer_shapes(self, level: Level) -> messages.Shapes:
    """Returns the shapes of the state of a level's outer optimizer, with M where modules are compressed."""
    shapes = self.level_shapes(level)
    state = jax.eval_shape(choices.make_outer_optimizer(self.run.settings.outer).init, dict(shapes))
    master = {} if self.kind(level) == 'none' else {MASTER + name: x for name, x in shapes.items()}
    return jobs.by_place(state) | master

  @functools.cached_property
  def inner_shapes(self) -> messages.Shapes:
    """The shapes of a path's inner state, by place."""
    s = self.run.settings
    optimizer = choices.make_inner_of_run(s)
    return jobs.by_place(jax.eval_shape(optimizer.init, self.shapes))

  @functools.lru_cache(4)  # noqa: B019 - a process has one of these
  def active_paths(self, phase: int) -> np.ndarray:
    """Returns which paths train in a phase, bool [P]."""
    s = self.run.settings
    active = choices.active_paths(s.train, self.layout.grid.num_paths, s.seed, phase)
    if self.members.num_facts:
      active = active & np.array(owners.active_paths(self.layout.grid, self.members, phase))
    return active

  def modules_of_version(self, version: int) -> list[str]:
    """Returns the keys of the modules that are made in a version: all, unless their owners have left or not begun."""
    if not version or not self.members.num_facts:
      return self.all_modules()
    active = self.active_paths(version - 1)
    return [module for module in self.all_modules() if active[self.paths_through(module)].any()]

  def round_of(self, phase: int) -> int:
    """Returns the round of re-sharding whose shards a phase trains on."""
    s = self.run.settings
    return next(n for n in range(s.rounds + 1) if phase < jobs.round_end(s, n))

  def is_chosen(self, module: Fact, best_version: Sequence[int]) -> bool:
    """Returns whether a module of a chosen version is one of a path that points at it; own ones need not be.

    `best_version`: where early stopping points, by path. At the ends of rounds, and of the run, all modules count.
    """
    is_own = module.key.partition('/')[0] in self.own_levels and not self.has_own_objects(module.number)
    return not is_own or best_version[self.paths_through(module.key)[0]] == module.number

  def publish_version(self, version: int, best_version: Sequence[int] = ()):
    """Writes `modules/<version>/` in the workdir, as SPMD does: weights alone; see `is_chosen`."""
    facts = [f for f in self.registry.facts('module', number=version) if self.is_chosen(f, best_version)]
    modules = ((*self.parse_module(fact.key), self.read_weights(fact)) for fact in facts)
    module_publishing.publish_module_files(self.run.workdir, version, modules)


def maker(name: str, island: Island | None = None) -> tuple[str, str, int]:
  """Returns the task (kind, key, number) that wrote an object or a directory, from its name.

  `island`: one whose own modules may be meant, which a path's worker writes at the end of a round, or own text.
  """
  parts = name.removeprefix(f'{OBJECTS}/').split('/')
  if parts[0] == 'paths':
    path, _, number = parts[2].partition('-')[0].partition('.')  # 3, or 3.17 of an earlier piece of the phase
    return ('piece', path, int(number)) if number else ('train', path, int(parts[1]))
  if parts[0] in ('modules', DIFFERENCES, OUTER) and parts[1] != '0':
    module, version = '/'.join(parts[2:]).rpartition('-')[0], int(parts[1])
    if island and module.partition('/')[0] in island.own_levels:
      end = next(v for v in itertools.count(version) if island.has_own_objects(v))
      return 'train', str(island.paths_through(module)[0]), end - 1
    return 'outer', module, version
  if island and island.owner and parts[0] in OWN_TREES:
    return OWN_TEXT, island.owner, 0
  if parts[0] in ('routing', 'shards') and parts[1] != '0':
    return 'reroute', '', int(parts[1])
  return 'prepare', '', 0
