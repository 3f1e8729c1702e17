"""How many inner steps a path takes in a phase: tau, or as many as end in `train.phase_s` seconds [2.5].

With `train.phase_s`, a phase of a path ends when its time is over, or after tau steps, whichever comes first. A slow
worker therefore takes fewer steps, and nobody waits for it. The number n_i of steps is a fact: the entry `steps` of the
checkpoint's metadata is [first, n_i], where `first` counts the path's own steps before the phase, the base's included.
Whatever depends on the number reads it there, so a replay ends with the same bits:

    learning rate           of the path's own step
    rows of the shard       from the path's own step on, so that it misses none
    outer step              Delta = sum_i w_i n_i / tau (old - new_i) / sum_i w_i n_i / tau: in proportion to the tokens
                            that a path has trained on
    screening               r is |old - new_i| over the sum of the learning rates of these steps
    replays and audits      take n_i steps
"""

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from dipaco_jax.islands import pieces
from dipaco_jax.islands.guard import Later
from dipaco_jax.islands.island import Island
from dipaco_jax.registry.fact_rows import WITHDRAWN
from dipaco_jax.registry.registry import Fact

STEPS = 'steps'  # in the metadata of a checkpoint
SHORTEST_S = 0.001  # for a phase whose time is over before it begins: it has two dispatches


class PathSteps(NamedTuple):
  """The inner steps of a path's phase."""

  first: int  # the path's own steps before them, the base's included
  taken: int  # n_i

  @property
  def end(self) -> int:
    """The path's own steps after the phase."""
    return self.first + self.taken


def are_timed(island: Island) -> bool:
  """Returns whether phases end after some time, so that paths take different numbers of steps."""
  return island.run.settings.train.phase_s > 0


def of_fact(island: Island, fact: Fact) -> PathSteps:
  """Returns the steps of the phase of a checkpoint, or of the phase that a piece belongs to."""
  if STEPS in fact.meta:
    return PathSteps(*fact.meta[STEPS])
  return planned(island, pieces.part_of(island, fact).phase)


def planned(island: Island, phase: int) -> PathSteps:
  """Returns the steps of a phase of tau steps, by the global step."""
  s = island.run.settings
  return PathSteps(s.pretrain.steps + phase * s.train.steps_per_phase, s.train.steps_per_phase)


def first(island: Island, path: int, phase: int) -> int | None:
  """Returns a path's own steps before a phase where phases are timed, else None. Raises Later."""
  if not are_timed(island):
    return None
  before = pieces.trained_before(island, path, phase)
  return island.run.settings.pretrain.steps if before is None else published(island, path, before).end


def published(island: Island, path: int, phase: int) -> PathSteps:
  """Returns the steps of a path's phase that is a fact; of any, where phases are not timed. Raises Later."""
  if not are_timed(island):
    return planned(island, phase)
  for fact in island.registry.facts(pieces.CHECKPOINT, [str(path)], phase):
    return of_fact(island, fact)
  raise Later(f'phase {phase + 1} of path {path} was withdrawn')


def decided(island: Island, path: int, phase: int, is_replay: bool) -> PathSteps | None:
  """Returns the steps that a path has to take in a timed phase, because it has taken them before. Raises Later."""
  if not are_timed(island):
    return None
  if island.decisions:
    return island.decisions.steps[path, phase]
  return published(island, path, phase) if is_replay else _taken_before(island, path, phase)


def _taken_before(island: Island, path: int, phase: int) -> PathSteps | None:
  """Returns the steps of a phase that was trained before, whose objects are lost or malformed.

  Some modules may contain the first result, and others will contain the second.
  """
  for fact in island.registry.facts(pieces.CHECKPOINT, [str(path)], phase):
    return of_fact(island, fact)
  for mark in island.registry.facts(WITHDRAWN, [f'{pieces.CHECKPOINT} {path} 1'], phase):
    return PathSteps(*mark.meta['meta'][STEPS])
  return None


def seconds(island: Island, path: int, phase: int) -> float:
  """Returns for how many seconds a path may train from now on; 0 means that its phase has tau steps.

  If there is a worker for each path, the time of a phase begins with the first of the paths that share modules with
  this one. A worker that was killed, stopped or slow to read its modules then trains for the rest of it, and the others
  do not wait.
  """
  registry, phase_s = island.registry, island.run.settings.train.phase_s
  if not phase_s or not registry.sees_others or len(registry.workers()) < island.layout.grid.num_paths:
    return phase_s
  peers = {peer for module in island.shared_modules(path).values() for peer in island.paths_through(module)} - {path}
  waited = registry.seconds_since_claim(pieces.TRAIN, sorted(map(str, peers)), phase)
  return max(SHORTEST_S, phase_s - max(waited, default=0.0))


def after(island: Island, phase: int, checkpoints: Sequence[Fact]) -> int:
  """Returns the step after a phase, for people: the mean of its paths' own steps if phases are timed."""
  if not are_timed(island) or not checkpoints:
    return planned(island, phase).end
  return round(sum(of_fact(island, fact).end for fact in checkpoints) / len(checkpoints))


def noted(island: Island, steps: PathSteps) -> dict[str, Any]:
  """Returns what the metadata of a checkpoint says about the steps of its phase: nothing if all phases have tau."""
  return {STEPS: list(steps)} if are_timed(island) else {}


def by_path(island: Island, checkpoints: Iterable[Fact]) -> list[int]:
  """Returns the steps of each path in the phases of these checkpoints, of which none is of a path that was late."""
  steps = [0] * island.layout.grid.num_paths
  for fact in checkpoints:
    steps[int(fact.key)] += of_fact(island, fact).taken
  return steps


def are_planned(island: Island) -> bool:
  """Returns whether all paths took the steps of the config: phases are not timed, and none was late."""
  return not are_timed(island) and not any(pieces.LATE in fact.meta for fact in island.registry.facts('excluded'))


def share(island: Island, steps: PathSteps) -> float:
  """Returns n_i / tau, the factor of a path's weight in the outer step; exactly 1 for a whole phase."""
  return steps.taken / island.run.settings.train.steps_per_phase


class Clock:
  """Tells when the time of a phase is over, so that its last step ends about then."""

  def __init__(self, seconds: float, is_warm: bool):
    """Begins now if this process `is_warm`, otherwise at the first dispatch, which has compiled its program by then.

    With `seconds=0`, the time is never over.
    """
    self.seconds = seconds or math.inf
    self.began = time.monotonic() if is_warm else None
    self.elapsed = 0.0  # at the last dispatch
    self.dispatches = 0

  def dispatched(self):
    """Notes a dispatch: all before it are done."""
    now = time.monotonic()
    self.began = now if self.began is None else self.began
    self.elapsed = now - self.began
    self.dispatches += 1

  def is_over(self) -> bool:
    """Returns whether the phase ends with the present dispatch, because one more would end too late."""
    done = self.dispatches - 1
    two_more = 2 * self.elapsed / done if done else 0.0  # the present dispatch and the next
    return self.elapsed + two_more > self.seconds

  def left(self) -> float:
    """Returns the share of the time that is left."""
    return max(0.0, 1 - self.elapsed / self.seconds)
