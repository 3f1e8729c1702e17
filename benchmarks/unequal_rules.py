"""What unequal_simulation.py simulates: rules, workers, the work, and what a trainer has to do. Pure."""

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from dipaco_jax.algorithm import grid as grid_lib

NEXT, DROP = 'next', 'drop'


class Rule(NamedTuple):
  """When a version closes, when a task ends, and who continues it."""

  quorum: float = 1.0  # share of a module's paths after which a version closes; at least one path
  grace: float = 0.0  # for which a version stays open then, in phases of the mean worker
  late: str = NEXT  # whether a late contribution counts in the open version or is dropped
  begins_at_once: bool = False  # whether a late path does not wait for the version that its contribution is in
  decay: float = 0.5  # factor of a late contribution's weight for each version that it is late
  by_time: bool = False  # whether a task ends after `phase_s` instead of tau steps
  hand_over: float = math.inf  # multiple of the usual time after which a free worker continues a task from a checkpoint
  spares: int = 0  # additional workers that are backups
  moves: bool = False  # whether a free worker takes the path that has trained least, whoever trained it last


class Workers(NamedTuple):
  """Workers and what happens to them; the last `Rule.spares` of them are backups."""

  speeds: tuple[float, ...]  # steps per second
  failures_per_hour: float = 0.0  # of all workers together
  restart_s: float = 30.0
  move_s: float = 5.0  # to fetch the state of a path that another worker trained
  lease_s: float = 30.0
  look_s: float = 10.0
  checkpoint_steps: int = 4


class Work(NamedTuple):
  """What there is to train."""

  modules: Mapping[Hashable, tuple[int, ...]]  # the paths through each module
  tau: int
  phase_s: float  # of tau steps of the mean worker

  @property
  def num_paths(self) -> int:
    """Returns the number of paths."""
    return 1 + max(path for paths in self.modules.values() for path in paths)


class Method(NamedTuple):
  """A grid and its levels, (pattern, axes) by name, and whether each path has a shard of its own or all text."""

  grid: Mapping[str, int]
  levels: Mapping[str, tuple[str, tuple[str, ...]]]
  has_shards: bool

  def module_paths(self) -> dict[Hashable, tuple[int, ...]]:
    """Returns the paths through each module, by level and coordinates."""
    grid = grid_lib.Grid(self.grid)
    found: dict[Hashable, tuple[int, ...]] = {}
    for name, (pattern, axes) in self.levels.items():
      for path in range(grid.num_paths):
        key = name, grid.module(grid_lib.Level(name, pattern, axes), grid.coordinates(path))
        found[key] = (*found.get(key, ()), path)
    return found


FOUR_BY_FOUR = {'a': 4, 'b': 4}
LOW_AND_HIGH = {'low': ('block_0', ('a',)), 'high': ('block_1', ('b',))}
METHODS = {
  'diloco': Method({'replica': 8}, {'all': ('', ())}, False),
  'diloco-1000': Method({'replica': 1000}, {'all': ('', ())}, False),
  'grid': Method(FOUR_BY_FOUR, {'ends': ('embed|head', ()), **LOW_AND_HIGH}, True),
  'grid-apart': Method(FOUR_BY_FOUR, {'low': ('embed|block_0', ('a',)), 'high': ('block_1|head', ('b',))}, True),
}


class Begin(NamedTuple):
  """A path takes the newest versions of its modules."""

  time: float
  task: int
  path: int


class End(NamedTuple):
  """A path has trained for so many steps since its last Begin."""

  time: float
  task: int
  path: int
  steps: int


class Close(NamedTuple):
  """A module makes an outer step from the contributions of these tasks, with their weights."""

  time: float
  module: Hashable
  terms: tuple[tuple[int, float], ...]


@dataclasses.dataclass(eq=False)
class Module:
  """A module's open version, and what has been contributed to it."""

  paths: tuple[int, ...]
  version: int = 0
  terms: list[tuple[int, float]] = dataclasses.field(default_factory=list)
  on_time: int = 0
  is_due: bool = False  # whether the grace window is over
  has_timer: bool = False


@dataclasses.dataclass(eq=False)
class Path:
  """A path between and during its tasks."""

  index: int
  modules: list[Hashable]
  ready_at: float | None = 0.0
  holder: int | None = None  # the worker that trained it last
  steps: int = 0
  task: 'Task | None' = None  # the last one


@dataclasses.dataclass(eq=False)
class Task:
  """A task: a path, from some versions of its modules."""

  number: int
  path: Path
  versions: dict[Hashable, int]
  began: float
  claimed: float  # by the present worker
  kept: int = 0  # steps up to the last checkpoint that is continued from
  parts: list[tuple[int, float]] = dataclasses.field(default_factory=list)  # workers and their seconds that were kept
  is_done: bool = False


@dataclasses.dataclass(eq=False)
class Attempt:
  """A worker's work on a task."""

  worker: int
  task: Task
  begin: float
  first: int
  end: float
  is_copy: bool
  moved_s: float = 0.0  # that it takes to fetch the path's state, before `begin`
  is_over: bool = False


def first_time(times: Sequence[float], losses: Sequence[float], target: float) -> float:
  """Returns the time at which a loss first reaches a target, interpolated."""
  for i, value in enumerate(losses):
    if value <= target:
      share = (losses[i - 1] - target) / (losses[i - 1] - value) if i else 1.0
      return times[i - 1] + share * (times[i] - times[i - 1]) if i else times[0]
  return math.inf
