"""A worker: trains a path for a phase of tau steps, with the SPMD programs on its own devices [2.5, 3].

The AdamW state of a path stays with the worker that trains the path, its holder. A worker without the state trains the
phases since the last published state again (lineage.py). A worker may span several hosts (`worker_hosts`): all of them
train, and the first does everything else.
"""

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NamedTuple

import jax

from dipaco_jax.islands import (
  evaluator,
  hand_over,
  inner_phase,
  lineage,
  own_levels,
  own_text,
  path_exchange,
  path_messages,
  path_state,
  path_steps,
  pieces,
  quorum,
  schedule,
  screening_facts,
  shared_stages,
)
from dipaco_jax.islands.guard import Gone, Later
from dipaco_jax.islands.held_states import HeldStates, Key
from dipaco_jax.islands.inner_phase import Start
from dipaco_jax.islands.island import OWN_TEXT, Island
from dipaco_jax.islands.lease import Lease
from dipaco_jax.islands.messages import Sent
from dipaco_jax.islands.path_state import Arrays, PathState
from dipaco_jax.islands.path_steps import PathSteps
from dipaco_jax.islands.phase_metrics import PhaseMetrics
from dipaco_jax.islands.pieces import Part
from dipaco_jax.islands.reading_ahead import ReadingAhead
from dipaco_jax.islands.role_loop import Publish
from dipaco_jax.islands.state_facts import Line
from dipaco_jax.islands.worker_hosts import Hosts
from dipaco_jax.processes import time_use
from dipaco_jax.registry.registry import Fact, Task

TRAIN = ('train', 'piece')
KINDS = ('prepare', *TRAIN, 'reroute')  # kinds of tasks of a worker with one host
OWNERS_KINDS = (OWN_TEXT, *TRAIN, 'evaluate')  # kinds of tasks of an owner's worker


class Beginning(NamedTuple):
  """Where the training for a task begins."""

  parts: tuple[Part, ...]  # parts to train: those to replay, then the task's own
  step: int  # of the phase, where the first part begins
  state: PathState  # before that step
  fresh: bool  # whether the path was excluded before [lineage.NewestState]


class Trained(NamedTuple):
  """The result of training a piece of a phase."""

  metrics: PhaseMetrics
  sent: dict[str, Sent]  # by level, for the levels that are sent after the piece
  state: PathState
  steps: PathSteps  # of the phase
  loss: float | None  # hold-out loss at the end of the phase
  evaluations: list[Fact]  # of the version at the beginning of the phase, if this piece evaluates it

  @property
  def squares(self) -> dict[str, float]:
    """|d|^2 of the messages, by level."""
    return {level: message.square for level, message in self.sent.items()}


class Worker:
  """Performs all tasks of a worker, with the states that it holds. Only the first of several hosts has a Worker."""

  def __init__(
    self, held: HeldStates, hosts: Hosts | None = None, line: Line | None = None, only_replays: bool = False
  ):  # fmt: skip
    """`only_replays`: whether all that it trains was trained before; nothing is then scheduled, or asked of holders."""
    self.held = held
    self.only_replays = only_replays
    self.hosts = hosts or Hosts()
    self.line = line or Line()
    self.scheduler = futures.ThreadPoolExecutor(1)  # schedules tasks that may begin before this one is published
    self.at_work: tuple[int, Part] | None = None  # path and piece that are being trained
    self.is_warm = False  # whether anything has been trained

  def perform(self, island: Island, task: Task, lease: Lease) -> Publish | None:
    """Performs a task; returns a function that publishes its facts."""
    if task.kind in TRAIN:
      if why := quorum.decided(island, int(task.key), task.number):
        return lambda: quorum.late_facts(island, int(task.key), task.number, why)
      return self.train(island, task, lease)
    others = dict.fromkeys(shared_stages.KINDS, shared_stages.perform) | {OWN_TEXT: own_text.perform}
    return others.get(task.kind, evaluator.perform)(island, task, lease)

  def fetch(self, island: Island, task: Task) -> Callable[[], Beginning]:
    """Reads a path's shard, parameters and state for a task; returns a function that returns the task's beginning.

    If the previous piece of the path is still being trained, only the modules that the task takes over are read now,
    and the returned function reads the rest. Raises Later.
    """
    path, part = int(task.key), pieces.part_of(island, task)
    inner_phase.make_job(island, island.round_of(part.phase))
    if not pieces.begins_whole(island, part):
      path_exchange.take_over(island, path, part)
      if self.at_work == (path, pieces.before(island, part)):
        return lambda: self.fetch(island, task)()
    beginning = self.find_beginning(island, task)
    return lambda: beginning

  def find_beginning(self, island: Island, task: Task) -> Beginning:
    """Finds and reads the newest state from which the training of a task can begin."""
    path = int(task.key)
    if not any(key.path == path for key in self.held.names()):  # paths move: others may have left
      lineage.forget_moved(island, self.held)
    newest = lineage.find(island, self.held, task)
    if not self.only_replays:
      hand_over.ask(island, task, newest)
    first = newest.parts[0]
    with self.looking_again(island, task, first):
      inner_phase.make_job(island, island.round_of(first.phase))
      if newest.within:
        state = path_state.from_arrays(newest.within[1], island.shapes)
      else:
        state = path_exchange.whole(island, path, first.phase, newest.carried)
    return Beginning(newest.parts, newest.within[0] if newest.within else 0, state, newest.fresh)

  @contextlib.contextmanager
  def looking_again(self, island: Island, task: Task, first: Part) -> Iterator[None]:
    """Raises Later instead of Gone if a newer state than the one before `first` has become available.

    When a state is published late, the modules that led to it are deleted, and need not be computed again.
    """
    try:
      yield
    except Gone as e:
      if lineage.find(island, self.held, task).parts[0] > first:
        raise Later(f'a newer state of path {task.key} has become available: {e}') from e
      raise

  def train(self, island: Island, task: Task, lease: Lease) -> Publish:
    """Trains a piece of a path's phase, or the rest of a piece that was begun on this machine."""
    path = int(task.key)
    part = pieces.part_of(island, task)
    self.at_work = None
    beginning, replay = self.replay(island, lease, lease.fetched()())
    self.at_work = path, part
    started, step = time.time(), beginning.step
    trained = self.train_first(island, lease, beginning)
    del beginning
    ended = time.time()
    about = trained.metrics.close() | replay | {'holdout_loss': trained.loss, 'worker': island.name, 'from_step': step}
    about |= {'started': started, 'ended': ended, 'busy_s': ended - started, 'holder': self.held.holder}
    about |= path_steps.noted(island, trained.steps)
    squares, own = trained.squares, own_levels.facts(part.phase, trained.state)
    judged = screening_facts.judge(island, path, part.phase, squares, trained.steps, own)
    if trained.state.excluded and 'excluded' not in judged:
      judged['excluded'] = screening_facts.EARLIER
    why, own_modules = judged.get('excluded'), list[Fact]()
    state = trained.state._replace(excluded=bool(why))
    if pieces.is_last(island, part):
      state, own_modules = own_levels.take_step(island, path, part.phase, state, trained.steps, why)
    self.hold_piece(island, path, part, state)
    self.at_work = None
    if not state.excluded or not pieces.is_last(island, part):
      self.scheduler.submit(self.schedule_next, island, path, part)

    def publish() -> list[Fact]:
      with self.line.message():
        objects = {} if why else path_messages.write_objects(island, path, part, trained.sent)
        own_levels.publish(island, own_modules, state)
      kind, number = pieces.fact_name(island, part)
      noted = about | judged
      noted |= path_messages.phase_sums(island, path, part, about) if pieces.is_last(island, part) else {}
      checkpoint = schedule.checkpoint_fact(path, number, objects, noted, kind, own_modules)
      excluded = [screening_facts.exclusion(island, checkpoint, why)] if why else []
      self.hold(island, checkpoint, state)  # before the fact, which announces it
      return [checkpoint, *excluded, *own_modules, *trained.evaluations]

    return publish

  def schedule_next(self, island: Island, path: int, part: Part):
    """Schedules the tasks that may begin before a piece is published; publishing the piece schedules them, too."""
    try:
      schedule.go_on(island, path, part, self.held.holder)
    except Exception as e:
      logging.warning('path %d continues only when its last piece is published: %s', path, e)

  @time_use.doing(time_use.LOST)
  def replay(self, island: Island, lease: Lease, beginning: Beginning) -> tuple[Beginning, dict[str, Any]]:
    """Replays the pieces before the task's own; returns the task's beginning, and the note for its checkpoint."""
    path = int(lease.task.key)
    parts = beginning.parts
    began = time.monotonic()
    differing = set[int]()
    if len(parts) == 1:
      return beginning, {}
    first, last = parts[0].phase + 1, parts[-2].phase + 1
    logging.warning('the state of path %d is not available here; phases %d to %d are trained again', path, first, last)
    for i, part in enumerate(parts[:-1]):
      lease.about['replay'] = [part.phase + 1, first, last]
      with self.looking_again(island, lease.task, part):
        trained = self.train_first(island, lease, beginning)
        state, own_modules = trained.state, list[Fact]()
        if pieces.is_last(island, part):
          state, own_modules = own_levels.take_step(island, path, part.phase, state, trained.steps, None)
        is_other, state = self.hold_replayed(island, path, part, trained.sent, own_modules, state)
        differing |= {part.phase} if is_other else set()
        try:
          beginning = begin_after(island, path, parts[i + 1 :], path_exchange.after(island, part, state))
        except Gone:
          path_messages.send_again(island, path, part, trained.sent)
          raise
    del lease.about['replay']
    seconds, phases = time.monotonic() - began, sorted({part.phase for part in parts[:-1]})
    return beginning, {'replay': {'phases': phases, 'seconds': seconds, 'differing': sorted(differing)}}

  def train_first(self, island: Island, lease: Lease, beginning: Beginning) -> Trained:
    """Trains the first piece of a beginning."""
    path, part = int(lease.task.key), beginning.parts[0]
    is_replay = self.only_replays or len(beginning.parts) > 1
    phase, piece = part.phase, pieces.piece(island, part)
    job = inner_phase.make_job(island, island.round_of(phase))
    metrics, origin = PhaseMetrics(lease, job, phase, self.is_warm), functools.cache(lineage.origin)
    clock = path_steps.Clock(path_steps.seconds(island, path, phase), self.is_warm)
    self.is_warm, ahead = True, ReadingAhead(island, path, part)

    def done(after: int, step_metrics: dict[str, jax.Array], kept: PathState | None) -> bool:
      metrics.dispatched(after, step_metrics)
      clock.dispatched()
      if not is_replay:
        left = min((piece.end - after) / (piece.end - piece.begin), clock.left())
        lease.ahead(left)
        ahead.look(left)
      if self.hosts.is_alone:
        lease.check()  # an error here would leave the other hosts waiting
      if kept and not lease.is_copy:
        writer.submit(keep, after, state._replace(params=kept.params, inner=kept.inner).to_arrays())
      return clock.is_over()

    def keep(step: int, arrays: Arrays):
      if lineage.is_finite(arrays):
        self.held.put_within(Key(path, phase, origin(island, path, phase), step), arrays)

    state = first_state(island, path, beginning)
    is_due = own_levels.evaluates(island, part) and bool(island.active_paths(phase - 1)[path])
    is_first = lease.task.is_first and not is_replay
    evaluated = island.registry.facts('evaluation', [str(path)], phase) if is_due and not is_first else []
    is_due &= not evaluated
    first, end = path_steps.first(island, path, phase), piece.end
    if decided := path_steps.decided(island, path, phase, is_replay):
      end = decided.taken
    by_time = path_steps.are_timed(island) and not decided
    late = beginning.fresh and lineage.was_late(island, path, phase)  # nothing was wrong with it
    fresh = beginning.fresh and not late
    start = Start(path, phase, beginning.step, end, fresh, bool(state.inner), is_replay, is_due, first, by_time, late)
    begins_with = path_exchange.parameters_before(island, path, phase, state) if start.evaluates else {}
    with futures.ThreadPoolExecutor(1) as writer:
      if not is_replay and not pieces.is_last(island, part):  # a last piece may be excluded, which is not known yet
        self.scheduler.submit(self.schedule_next, island, path, part)
      result = inner_phase.run(island, self.hosts, start, state, begins_with, done)
    if result.evaluation:
      evaluated = [own_levels.evaluation_fact(path, phase, *result.evaluation)]
    for fact in evaluated:
      state = own_levels.note_evaluation(island, fact, state)
    sent, state = path_messages.send(island, path, part, state, result.state)
    steps = path_steps.planned(island, phase) if first is None else PathSteps(first, result.end)
    return Trained(metrics, sent, state, steps, result.loss, evaluated)

  def hold_replayed(
    self, island: Island, path: int, part: Part, sent: dict[str, Sent], own_modules: list[Fact], state: PathState
  ) -> tuple[bool, PathState]:  # fmt: skip
    """Holds the state after a replayed piece.

    Returns whether the results differ from the published ones, and the state, marked as excluded if the
    published piece was.
    """
    kind, number = pieces.fact_name(island, part)
    published = island.registry.facts(kind, [str(path)], number)
    state = state._replace(excluded=state.excluded or any('excluded' in fact.meta for fact in published))
    self.hold_piece(island, path, part, state)
    if not published:  # its task is running, or will run again
      return False, state
    self.hold(island, published[0], state)
    if levels := [*lineage.differing_levels(published[0], sent), *own_levels.differing(island, own_modules)]:
      other_worker, here = published[0].meta.get('worker', 'another'), island.name
      message = f'{here} computed other values of {", ".join(levels)} of path {path} than {other_worker}'
      logging.warning(
        'phase %d, trained again: %s; their machines or libraries compute differently', part.phase + 1, message
      )
    return bool(levels), state

  def hold(self, island: Island, checkpoint: Fact, state: PathState):
    """Holds a path's state after the phase of this checkpoint."""
    key = Key(int(checkpoint.key), checkpoint.number, checkpoint.sha256)
    is_closed = island.timetable.is_closed(checkpoint.number)
    continues = island.own_levels or not state.excluded  # an excluded path begins again with fresh state
    if checkpoint.kind == pieces.CHECKPOINT and continues and (lineage.has_state(island) or not is_closed):
      carried = path_exchange.carried(island, checkpoint.number, state)
      self.held.put(key, carried)
      if lineage.publishes_state(island, key.path, key.phase):
        self.held.set_aside(key, carried)

  def hold_piece(self, island: Island, path: int, part: Part, state: PathState):
    """Holds a path's whole state after a piece, unless the next piece begins from modules alone."""
    following = pieces.after(island, part)
    if following and not pieces.begins_whole(island, following):
      key = Key(path, part.phase, lineage.origin(island, path, part.phase), pieces.piece(island, part).end)
      self.held.put_piece(key, path_exchange.after(island, part, state).to_arrays())


def begin_after(island: Island, path: int, parts: tuple[Part, ...], state: PathState) -> Beginning:
  """Returns the beginning of these pieces, given a path's state after the previous piece."""
  first = parts[0]
  fresh = first.nth == 0 and lineage.previous(island, path, first.phase)[1]
  if fresh or pieces.begins_whole(island, first):
    carried = state.own_arrays() if fresh else state.carried()
    state = path_exchange.whole(island, path, first.phase, carried)
  return Beginning(parts, pieces.piece(island, first).begin, state, fresh)


def first_state(island: Island, path: int, beginning: Beginning) -> PathState:
  """Returns the state before the first inner step; at the beginning of a piece, it includes the new modules."""
  part = beginning.parts[0]
  if beginning.step == pieces.piece(island, part).begin and not pieces.begins_whole(island, part):
    return path_exchange.mixed(island, path, part, beginning.state)
  return beginning.state
