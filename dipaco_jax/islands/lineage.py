"""Where a path's state comes from: it is held, published, or made again from modules, which are facts [3].

A path's state (of AdamW; with compression its residuals; modules that it has alone) stays with the worker that trains
it, its *holder* (held_states.py), and is published only after every k-th phase, k = `checkpoint.state_every_phases`,
behind all messages (state_facts.py); with streaming, after the next closed phase (algorithm/streaming.py).
Who lacks the state of a path goes back to the last phase after which it is held or published, or to the base model, or
to a phase from which the path was excluded, after which it begins without it, but with its own modules; and
repeats the phases since: a *replay*. Modules of those versions are facts, shards and order of the rows follow from the
settings, so the state is the same, to the bit, on machines that compute alike.

With sampled paths, the state is published after the first phase of the path that completes a k-th.
"""

import collections
import functools
import hashlib
import json
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from dipaco_jax.islands import path_state, path_steps, pieces, state_facts
from dipaco_jax.islands.guard import objects_of
from dipaco_jax.islands.held_states import HeldStates
from dipaco_jax.islands.island import Island
from dipaco_jax.islands.messages import Sent
from dipaco_jax.islands.path_state import Arrays
from dipaco_jax.islands.pieces import Part
from dipaco_jax.registry.registry import Fact, Task
from dipaco_jax.storage import tensors

RECENT = 32  # number of tasks; their median duration estimates that of a phase


class NewestState(NamedTuple):
  """The newest state of a path from which a task can be done."""

  parts: tuple[Part, ...]  # to train from there: those to replay, then the task's own
  carried: Arrays  # `PathState.carried` before the first of them, or {} if the path has nothing
  fresh: bool  # whether it was excluded before, so that it begins without what it carried, but for its own modules
  within: tuple[int, Arrays] | None = None  # steps of the phase of the first of them, and the whole state there

  @property
  def phases(self) -> tuple[int, ...]:
    """The phases of the pieces to train."""
    return tuple(sorted({part.phase for part in self.parts}))


def publishes_state(island: Island, path: int, phase: int) -> bool:
  """Returns whether a path's state is published after a phase in which it is trained."""
  before, times = pieces.trained_before(island, path, phase), island.timetable
  if not has_state(island) or not times.is_closed(phase) or phase + 1 == island.run.settings.train.phases:
    return False
  done = 0 if before is None else min(before + 1, times.last_whole(phase))  # phases at the last chance to publish
  every = island.run.settings.checkpoint.state_every_phases
  return (phase + 1) // every > done // every


def has_state(island: Island) -> bool:
  """Returns whether paths take anything along from phase to phase: AdamW state, residuals, or modules of their own."""
  return bool(island.run.settings.inner.keep_state or island.wire.compress != 'none' or island.own_levels)


def find(island: Island, held: HeldStates, task: Task) -> NewestState:
  """Finds the newest state of a path that the task can be done from. Raises island.Gone."""
  path, target = int(task.key), pieces.part_of(island, task)
  parts: tuple[Part, ...] = tuple(Part(target.phase, index) for index in range(target.nth + 1))
  while True:
    phase = parts[0].phase
    is_target = phase == target.phase
    until = pieces.piece(island, target).end if is_target else path_steps.published(island, path, phase).taken
    within = None
    if held.has_within(path, phase):
      within = held.get_within(path, phase, origin(island, path, phase), until - 1)
    if within:
      left = (part for part in parts if (part.phase, pieces.piece(island, part).end) > (phase, within[0]))
      return NewestState(tuple(left), {}, False, within)
    before, fresh = previous(island, path, phase)
    if fresh and island.own_levels:
      before, state = before_exclusions(island, held, path, before)
    elif before is not None and not fresh:
      state = read_after(island, held, path, before, not island.timetable.begins_whole(phase))
    else:
      before, state = None, None
    if before is None:
      return NewestState(parts, {}, fresh)
    if state is not None:
      is_whole = fresh or island.timetable.begins_whole(phase)
      carried = path_state.own_alone(state) if fresh else state
      return NewestState(parts, carried, fresh) if is_whole else NewestState(parts, {}, False, (0, state))
    parts = *(Part(before, index) for index in range(len(pieces.of_phase(island, before)))), *parts


def previous(island: Island, path: int, phase: int) -> tuple[int | None, bool]:
  """Returns the phase with the state from which a path continues, if any, and whether it has a fresh state instead.

  With streaming, a path that an executor has left out of an open phase gets a fresh state at the next phase that begins
  whole, because the path may already have trained further.
  """
  before = pieces.trained_before(island, path, phase) if has_state(island) else None
  if before is None:
    return None, False
  return before, bool(exclusions(island, path, before, not island.timetable.begins_whole(phase)))


def was_late(island: Island, path: int, phase: int) -> bool:
  """Returns whether a path was excluded from the phase before this one only because it was late."""
  before = pieces.trained_before(island, path, phase)
  facts = [] if before is None else island.registry.facts('excluded', [str(path)], before)
  return any(pieces.LATE in fact.meta for fact in facts)


def before_exclusions(
  island: Island, held: HeldStates, path: int, phase: int | None
) -> tuple[int | None, Arrays | None]:  # fmt: skip
  """Returns the last phase up to this one with a state of the path, or that left one, and that state if it is there.

  Phases in which its worker has excluded the path leave its own modules as they were. Raises island.Gone.
  """
  while phase is not None:
    state = read_after(island, held, path, phase, not island.timetable.is_closed(phase))
    if state is not None or not exclusions(island, path, phase, is_open=True):
      return phase, state
    phase = pieces.trained_before(island, path, phase)
  return None, None


def read_after(island: Island, held: HeldStates, path: int, phase: int, is_open: bool) -> Arrays | None:
  """Returns the available state of a path after a phase: its carried state or, after an open phase, its whole state."""
  return (read_open if is_open else read_state)(island, held, path, phase)


def exclusions(island: Island, path: int, phase: int, is_open: bool) -> list[Fact]:
  """Returns the facts because of which a path starts with fresh state after a phase."""
  first = phase
  while not is_open and not island.timetable.begins_whole(first):
    first -= 1
  facts = island.registry.facts('excluded', [str(path)], at_least=first, at_most=phase)
  by_worker = [fact for fact in facts if 'executor' not in fact.meta and fact.number == phase]
  return by_worker if is_open else by_worker + [fact for fact in facts if 'executor' in fact.meta]


def read_state(island: Island, held: HeldStates, path: int, phase: int) -> Arrays | None:
  """Returns a path's carried state after a phase, or None if it is neither held nor published. Raises island.Gone."""
  checkpoints = island.registry.facts('checkpoint', [str(path)], phase)
  if not checkpoints:
    return None  # it was withdrawn
  inner = held.get(path, phase, checkpoints[0].sha256)
  return state_facts.read(island, checkpoints[0]) if inner is None else inner


def read_open(island: Island, held: HeldStates, path: int, phase: int) -> Arrays | None:
  """Returns a path's whole state after an open phase, or None if it is neither held nor handed over."""
  is_here = held.has_within(path, phase)
  at_end = is_here and held.get_within(path, phase, origin(island, path, phase), at_least=island.timetable.tau)
  if at_end:
    return at_end[1]
  checkpoints = island.registry.facts('checkpoint', [str(path)], phase)
  state = held.get(path, phase, checkpoints[0].sha256) if checkpoints else None
  return state_facts.read(island, checkpoints[0]) if checkpoints and state is None else state


@functools.lru_cache(1024)
def origin(island: Island, path: int, phase: int) -> str:
  """Returns a digest of the beginning of a path's phase. A state within the phase is valid only for the same digest.

  A phase that does not begin whole has the digest of the last phase that did, which determines all that follows.
  """
  first, again = phase, []
  while not island.timetable.begins_whole(first):
    again += [bool(pieces.excluded_before(island, [path], Part(first, 0)))]
    first -= 1
  before, fresh = previous(island, path, first)
  facts = island.registry.facts('module', sorted(island.modules_of(path).values()), first)
  facts += island.registry.facts('checkpoint', [str(path)], before) if before is not None else []
  contents: list[Any] = [island.resumed, fresh, *([*fact[:3], fact.sha256] for fact in facts)]
  contents += [phase, again] if phase > first else []
  return hashlib.sha256(json.dumps(contents).encode()).hexdigest()


def holders(island: Island, paths: Iterable[int], part: Part) -> dict[int, str]:
  """Returns who holds the states from which paths continue with a piece; paths without any are left out."""
  holder_by_path: dict[int, str] = {}
  groups = collections.defaultdict[tuple[str, int], list[str]](list)
  for path in paths if has_state(island) or not pieces.begins_whole(island, part) else ():
    if part.nth:
      groups[pieces.fact_name(island, part._replace(nth=part.nth - 1))].append(str(path))
    elif (before := pieces.trained_before(island, path, part.phase)) is not None:
      groups['checkpoint', before].append(str(path))
  for (kind, before), keys in groups.items():
    is_anew = not part.nth and not island.own_levels  # an excluded path begins with fresh state
    excluded = {fact.key for fact in island.registry.facts('excluded', keys, before)} if is_anew else set()
    facts = island.registry.facts(kind, keys, before)
    holder_by_path |= {int(fact.key): fact.meta.get('holder', '') for fact in facts if fact.key not in excluded}
  return holder_by_path


def forget_moved(island: Island, held: HeldStates):
  """Forgets the states of paths that another worker has trained further since this one first looked.

  A newer checkpoint that was there from the start is no reason: in a replay, all of them are newer.
  """
  keys = held.names()
  newest = island.registry.newest('checkpoint', keys=sorted({str(key.path) for key in keys})) if keys else {}
  for key in keys:
    number = newest.get(str(key.path), -1)
    if number > held.note_newest(key, number) and number >= key.phase + (key.step is None):
      checkpoints = island.registry.facts('checkpoint', [str(key.path)], number)
      if any(fact.meta.get('holder') != held.holder for fact in checkpoints):
        held.forget(key.path, key.phase)


def differing_levels(checkpoint: Fact, sent: Mapping[str, Sent]) -> list[str]:
  """Returns the levels with messages that differ from the objects in the checkpoint's fact."""
  digests = {level: hashlib.sha256(tensors.to_bytes(message.arrays)).hexdigest() for level, message in sent.items()}
  published = objects_of(checkpoint)  # not of own levels, nor of a path that was excluded
  return [name for name, digest in digests.items() if name in published and digest != published[name][1]]


def costs(island: Island) -> dict[tuple[int, float], list[int]]:
  """Returns the cost by path of losing its holder now: phases to repeat, and an estimate in seconds.

  Paths that cost nothing are left out.
  """
  registry, paths_by_cost = island.registry, collections.defaultdict[tuple[int, float], list[int]](list)
  anew = {} if island.own_levels else registry.newest('excluded')
  published, seconds = registry.newest(state_facts.STATE), phase_s(island)
  newest = registry.newest('checkpoint') if has_state(island) else {}
  for key, phase in newest.items():
    if int(key) in island.members.until:
      continue
    since = max(published.get(key, -1), anew.get(key, -1)) + 1
    phases = sum(bool(island.active_paths(t)[int(key)]) for t in range(since, phase + 1))
    if phases and phase + 1 < island.run.settings.train.phases:
      paths_by_cost[phases, phases * seconds].append(int(key))
  return dict(sorted(paths_by_cost.items(), reverse=True))


def phase_s(island: Island) -> float:
  """Returns about how many seconds a path's phase takes, with all its pieces; 0 while none is done."""
  earlier = island.timetable.most_pieces - 1  # of unequal length: their mean counts, over as many phases
  pieces_s = island.registry.durations(pieces.PIECE, RECENT * earlier) if earlier else []
  last_s = statistics.median(island.registry.durations('train', RECENT) or [0.0])
  return last_s + (earlier * statistics.fmean(pieces_s) if pieces_s else 0.0)


def is_finite(arrays: Arrays) -> bool:
  """Returns whether all values are finite: else nobody could continue from them."""
  return all(np.isfinite(x).all() for x in arrays.values())
