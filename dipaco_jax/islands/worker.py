"""A worker: trains a path for a phase of tau steps, with the programs of SPMD on its own devices [2.5, 3].

AdamW state stays with the worker that trains the path, its holder; who lacks it replays (lineage.py). A worker may span
several hosts (`worker_hosts`): all of them train, and the first does the rest.
"""

import functools
import logging
import time
from collections.abc import Collection
from concurrent import futures
from typing import Any, NamedTuple

import jax
import numpy as np

from dipaco_jax.core import streaming
from dipaco_jax.islands import (
  hand_over,
  inner_phase,
  lineage,
  messages,
  path_state,
  pieces,
  schedule,
  screening_facts,
  shared_stages,
)
from dipaco_jax.islands.held_states import HeldStates, Key
from dipaco_jax.islands.inner_phase import Start
from dipaco_jax.islands.island import Island
from dipaco_jax.islands.lease import Lease
from dipaco_jax.islands.messages import Sent
from dipaco_jax.islands.path_state import INNER, Arrays, PathState
from dipaco_jax.islands.phase_metrics import PhaseMetrics
from dipaco_jax.islands.pieces import Part
from dipaco_jax.islands.registry import Fact, Task
from dipaco_jax.islands.role_loop import Publish
from dipaco_jax.islands.worker_hosts import Hosts
from dipaco_jax.storage import time_use

TRAIN = ('train', 'piece')
KINDS = ('prepare', *TRAIN, 'reroute')  # of a worker of one host


class Beginning(NamedTuple):
  """Where the training for a task begins."""

  parts: tuple[Part, ...]  # to train: those to replay, then the task's own
  step: int  # of the phase, in the first of them
  state: PathState  # at that step
  fresh: bool  # whether a path without inner state gets a fresh one, rather than the base model's


class Trained(NamedTuple):
  """A piece of a phase that was trained."""

  metrics: PhaseMetrics
  sent: dict[str, Sent]  # by level, of those that leave after it
  state: PathState
  loss: float | None  # on the hold-out, at the end of the phase


class Worker:
  """Does a worker's tasks of all kinds, with the states that it holds; of several hosts, the first has this."""

  def __init__(self, held: HeldStates, hosts: Hosts | None = None):
    self.held, self.hosts = held, hosts or Hosts()
    self.at_work: tuple[int, Part] | None = None  # path and piece that are being trained
    self.is_warm = False  # whether anything has been trained

  def perform(self, island: Island, task: Task, lease: Lease) -> Publish | None:
    """Does a task; returns what publishes its facts."""
    if task.kind in TRAIN:
      return self.train(island, task, lease)
    return {'prepare': shared_stages.prepare, 'reroute': shared_stages.reshard}[task.kind](island, task, lease)

  def fetch(self, island: Island, task: Task) -> Beginning | None:
    """Reads what the training for a task begins with: a path's shard, parameters, and state.

    None where it goes on from the piece that is being trained now; what that takes over is read all the same. Raises
    Later.
    """
    path, part = int(task.key), pieces.part_of(island, task)
    inner_phase.make_job(island, island.round_of(part.phase))
    if self.at_work == (path, pieces.before(island, part)) and not pieces.begins_whole(island, part):
      take_over(island, path, part)
      return None
    if not any(key.path == path for key in self.held.names()):  # paths move: others may have left
      lineage.forget_moved(island, self.held)
    found = lineage.find(island, self.held, task)
    hand_over.ask(island, task, found)
    first = found.parts[0]
    inner_phase.make_job(island, island.round_of(first.phase))
    if found.within:
      state = path_state.from_arrays(found.within[1], island.shapes)
    else:
      state = path_state.from_carried(found.carried, island.path_parameters(path, first.phase))
    return Beginning(found.parts, found.within[0] if found.within else 0, state, found.fresh)

  def train(self, island: Island, task: Task, lease: Lease) -> Publish:
    """Trains a piece of a path's phase, or the rest of what was begun on this machine."""
    path, part, self.at_work = int(task.key), pieces.part_of(island, task), None
    beginning, replay = self.replay(island, lease, lease.fetched() or self.fetch_here(island, task))
    self.at_work = path, part
    started, step = time.time(), beginning.step
    trained = self.train_first(island, lease, beginning)
    del beginning
    ended = time.time()
    about = trained.metrics.close() | replay | {'holdout_loss': trained.loss, 'worker': island.name, 'from_step': step}
    about |= {'started': started, 'ended': ended, 'busy_s': ended - started, 'holder': self.held.holder}
    squares = {level: message.square for level, message in trained.sent.items()}
    judged = screening_facts.judge(island, path, part.phase, squares)
    if trained.state.excluded and 'excluded' not in judged:
      judged['excluded'] = screening_facts.EARLIER
    state = trained.state._replace(excluded='excluded' in judged)
    self.hold_piece(island, path, part, state)
    self.at_work = None
    if not state.excluded or not pieces.is_last(island, part):
      schedule.go_on(island, path, part, self.held.holder)

    def publish() -> list[Fact]:
      why = judged.get('excluded')
      objects = {} if why else write_objects(island, path, part, trained.sent, state)
      kind, number = pieces.fact_name(island, part)
      noted = about | judged | (earlier(island, path, part, about) if pieces.is_last(island, part) else {})
      made = schedule.checkpoint_fact(path, number, objects, noted, kind)
      if why:
        return [made, screening_facts.exclusion(island, path, part.phase, why, island.name)]
      self.hold(island, made, state)  # before the fact, which says that it is there
      return [made]

    return publish

  def fetch_here(self, island: Island, task: Task) -> Beginning:
    """Fetches, now that the piece before is trained; or was given up."""
    found = self.fetch(island, task)
    assert found
    return found

  @time_use.doing(time_use.REPLAY)
  def replay(self, island: Island, lease: Lease, beginning: Beginning) -> tuple[Beginning, dict[str, Any]]:
    """Repeats the pieces before the task's own; returns where that begins, and what its checkpoint notes of this."""
    path, parts, began = int(lease.task.key), beginning.parts, time.monotonic()
    differing = set[int]()
    if len(parts) == 1:
      return beginning, {}
    first, last = parts[0].phase + 1, parts[-2].phase + 1
    logging.warning('path %d: its state is not here, phases %d to %d are trained again', path, first, last)
    for i, part in enumerate(parts[:-1]):
      lease.about['replay'] = [part.phase + 1, first, last]
      _, sent, state, _ = self.train_first(island, lease, beginning)
      differing |= {part.phase} if self.hold_replayed(island, path, part, sent, state) else set()
      state = after(island, part, state)
      if pieces.begins_whole(island, parts[i + 1]):
        state = state._replace(params=island.path_parameters(path, parts[i + 1].phase))
      end = pieces.piece(island, part).end % island.timetable.tau
      beginning = Beginning(parts[i + 1 :], end, state, fresh=False)
    del lease.about['replay']
    seconds, phases = time.monotonic() - began, sorted({part.phase for part in parts[:-1]})
    return beginning, {'replay': {'phases': phases, 'seconds': seconds, 'differing': sorted(differing)}}

  def train_first(self, island: Island, lease: Lease, beginning: Beginning) -> Trained:
    """Trains the first of the pieces from where it begins."""
    path, part, is_replay = int(lease.task.key), beginning.parts[0], len(beginning.parts) > 1
    phase, piece = part.phase, pieces.piece(island, part)
    job = inner_phase.make_job(island, island.round_of(phase))
    metrics, origin = PhaseMetrics(lease, job, phase, self.is_warm), functools.cache(lineage.origin)
    self.is_warm = True

    def done(after: int, found: dict[str, jax.Array], kept: PathState | None):
      metrics.dispatched(after, found)
      if not is_replay:
        lease.ahead((piece.end - after) / (piece.end - piece.begin))
      if self.hosts.is_alone:
        lease.check()  # other hosts would wait in vain for a process that ends here
      if kept and not lease.is_copy:
        kept = kept._replace(residuals=state.residuals, excluded=state.excluded, left=state.left)
        writer.submit(keep, after, kept.to_arrays())

    def keep(step: int, arrays: Arrays):
      if lineage.is_finite(arrays):
        self.held.put_within(Key(path, phase, origin(island, path, phase), step), arrays)

    state = beginning.state
    if beginning.step == piece.begin and not pieces.begins_whole(island, part):
      state = mixed(island, path, part, state)
    start = Start(path, phase, beginning.step, piece.end, beginning.fresh, bool(state.inner), is_replay)
    with futures.ThreadPoolExecutor(1) as writer:
      if not is_replay and not pieces.is_last(island, part):  # else whether it takes part has to be seen first
        writer.submit(schedule.go_on, island, path, part, self.held.holder)
      trained, loss = inner_phase.run(island, self.hosts, start, state, done)
    sent, residuals = send(island, path, part, trained.params, state.residuals)
    left = state.left | of_levels(island, trained.params, island.timetable.left(piece.sent, phase))
    return Trained(metrics, sent, trained._replace(residuals=residuals, excluded=state.excluded, left=left), loss)

  def hold_replayed(
    self, island: Island, path: int, part: Part, sent: dict[str, Sent], state: PathState
  ) -> bool:  # fmt: skip
    """Holds the state after a piece that was trained again; returns whether it differs from what was published."""
    kind, number = pieces.fact_name(island, part)
    made = island.registry.facts(kind, [str(path)], number)
    self.hold_piece(island, path, part, state)
    if not made:  # its task is at work, or will be done again
      return False
    self.hold(island, made[0], state)
    if levels := lineage.differing_levels(made[0], sent):
      there, here = made[0].meta.get('worker', 'another'), island.name
      words = f'{here} has made {", ".join(levels)} of path {path} otherwise than {there} did'
      logging.warning(
        'phase %d, trained again: %s; their machines or libraries compute otherwise', part.phase + 1, words
      )
    return bool(levels)

  def hold(self, island: Island, made: Fact, state: PathState):
    """Holds a path's state after the phase of this checkpoint."""
    if made.kind == pieces.CHECKPOINT and (lineage.has_state(island) or not island.timetable.is_closed(made.number)):
      self.held.put(Key(int(made.key), made.number, made.sha256), carried(island, made.number, state))

  def hold_piece(self, island: Island, path: int, part: Part, state: PathState):
    """Holds a path's whole state after a piece, for the next one, where that does not begin from modules alone."""
    following = pieces.after(island, part)
    if following and not pieces.begins_whole(island, following):
      key = Key(path, part.phase, lineage.origin(island, path, part.phase), pieces.piece(island, part).end)
      self.held.put_piece(key, after(island, part, state).to_arrays())


def take_over(island: Island, path: int, part: Part) -> Arrays:
  """Reads the parameters that a path takes over before a piece."""
  found: Arrays = {}
  piece = pieces.piece(island, part)
  for level in piece.mixed:
    version = island.timetable.version(level, part.phase, piece.begin)
    found |= island.path_parameters(path, version, [level])
  return found


def mixed(island: Island, path: int, part: Part, state: PathState) -> PathState:
  """Returns a path's state after it has taken new parameters over, before a piece."""
  if part.nth == 0 and pieces.excluded_before(island, [path], part):  # nothing of what was on its way is its own
    before = island.timetable.left(island.timetable.places, part.phase - 1)
    return state._replace(left=of_levels(island, state.params, before))
  new, own, left = take_over(island, path, part), state.params, state.left
  alphas = {n: island.timetable.mix(island.layout.owner[n].name) for n in new}
  moved = {n: np.asarray(_taken(alphas[n], own[n], left.get(n), x)) for n, x in new.items()}
  return state._replace(params=own | moved, left={name: x for name, x in left.items() if name not in new})


def of_levels(island: Island, params: Arrays, levels: Collection[str]) -> Arrays:
  """Returns the parameters of some levels."""
  return {name: x for name, x in params.items() if island.layout.owner[name].name in levels}


@functools.partial(jax.jit, static_argnums=0)
def _taken(alpha: float, own: jax.Array, left: jax.Array | None, new: jax.Array) -> jax.Array:
  return streaming.taken(alpha, own, left, new)


def after(island: Island, part: Part, state: PathState) -> PathState:
  """Returns the state with which a path goes on after a piece."""
  drops = pieces.is_last(island, part) and not island.run.settings.inner.keep_state
  return state._replace(inner={}) if drops else state


def carried(island: Island, phase: int, state: PathState) -> Arrays:
  """Returns what a path takes along to its next phase."""
  state = after(island, Part(phase, len(pieces.of_phase(island, phase)) - 1), state)
  return state.carried() if island.timetable.is_closed(phase) else state.to_arrays()


def send(island: Island, path: int, part: Part, params: Arrays, residuals: Arrays) -> tuple[dict[str, Sent], Arrays]:
  """Returns what a path sends of each level that leaves after a piece, and its residuals then."""
  sent, levels = {}, pieces.piece(island, part).sent
  old = island.path_parameters(path, part.phase, levels)
  for level in (level for level in island.layout.levels if level.name in levels):
    new = {name: params[name] for name in island.layout.names(level)}
    sent[level.name] = messages.send(island.kind(level), old, new, residuals)
  return sent, residuals | {name: e for message in sent.values() for name, e in message.residuals.items()}


def write_objects(
  island: Island, path: int, part: Part, sent: dict[str, Sent], state: PathState
) -> dict[str, list[str]]:  # fmt: skip
  """Writes an object for each level, so that an executor reads its own module's part only; and at times the state."""
  kind, number = pieces.fact_name(island, part)
  prefix = f'paths/{part.phase}/{path}' + (f'.{number}' if kind == pieces.PIECE else '')
  objects = {level: island.write_object(f'{prefix}-{level}', message.arrays) for level, message in sent.items()}
  there = island.registry.facts(kind, [str(path)], number)  # made before, maybe by an earlier version of this
  publishes = pieces.is_last(island, part) and lineage.publishes_state(island, path, part.phase)
  if publishes or any(INNER in made.meta['objects'] for made in there):
    objects[INNER] = island.write_object(f'{prefix}-{INNER}', carried(island, part.phase, state))
  return objects


def earlier(island: Island, path: int, part: Part, about: dict[str, Any]) -> dict[str, Any]:
  """Returns what the checkpoint of a phase notes in place of what was measured of its last piece alone."""
  metas = [*(fact.meta for fact in pieces.earlier_facts(island, part.phase, [str(path)])), about]
  found: dict[str, Any] = {name: sum(meta[name] for meta in metas) for name in ('timed_steps', 'timed_s', 'busy_s')}
  return found | {'rows': [row for meta in metas for row in meta['rows']], 'started': metas[0]['started']}
