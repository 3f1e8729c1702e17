"""A worker: trains a path for a phase of tau steps, with the programs of SPMD on its own devices [2.5, 3].

AdamW state stays with the worker that trains the path, its holder; who lacks it replays (lineage.py). A worker may span
several hosts (`worker_hosts`): all of them train, and the first does the rest.
"""

import functools
import logging
import time
from concurrent import futures
from typing import Any, NamedTuple

import jax

from dipaco_jax.islands import inner_phase, lineage, messages, path_state, schedule, screening_facts, shared_stages
from dipaco_jax.islands.held_states import HeldStates, Key
from dipaco_jax.islands.inner_phase import Start
from dipaco_jax.islands.island import Island
from dipaco_jax.islands.lease import Lease
from dipaco_jax.islands.messages import Sent
from dipaco_jax.islands.path_state import INNER, Arrays, PathState
from dipaco_jax.islands.phase_metrics import PhaseMetrics
from dipaco_jax.islands.registry import Fact, Task
from dipaco_jax.islands.role_loop import Publish
from dipaco_jax.islands.worker_hosts import Hosts

TRAIN = ('train',)
KINDS = ('prepare', *TRAIN, 'reroute')  # of a worker of one host


class Beginning(NamedTuple):
  """Where the training for a task begins."""

  phases: tuple[int, ...]  # to train: those to replay, then the task's own
  step: int  # of the first of them
  old: Arrays  # parameters at the start of the first of them
  state: PathState  # at that step
  fresh: bool  # whether a path without inner state gets a fresh one, rather than the base model's


class Worker:
  """Does a worker's tasks of all kinds, with the states that it holds; of several hosts, the first has this."""

  def __init__(self, held: HeldStates, hosts: Hosts | None = None):
    self.held, self.hosts = held, hosts or Hosts()

  def perform(self, island: Island, task: Task, lease: Lease) -> Publish | None:
    """Does a task; returns what publishes its facts."""
    if task.kind == 'train':
      return self.train(island, task, lease)
    return {'prepare': shared_stages.prepare, 'reroute': shared_stages.reshard}[task.kind](island, task, lease)

  def fetch(self, island: Island, task: Task) -> Beginning:
    """Reads what the training for a task begins with: a path's shard, parameters, and state."""
    if not any(key.path == int(task.key) for key in self.held.names()):  # paths move: others may have left
      lineage.forget_moved(island, self.held)
    found = lineage.find(island, self.held, task)
    inner_phase.make_job(island, island.round_of(found.phases[0]))
    old = island.path_parameters(int(task.key), found.phases[0])
    step, state = 0, path_state.from_carried(found.carried, old)
    if found.within:
      step, state = found.within[0], path_state.from_arrays(found.within[1], old)
    return Beginning(found.phases, step, old, state, found.fresh)

  def train(self, island: Island, task: Task, lease: Lease) -> Publish:
    """Takes tau steps of a path from its modules of this version, or the rest of what was begun on this machine."""
    path, phase = int(task.key), task.number
    beginning, replay = self.replay(island, lease, lease.fetched())
    started, old, step = time.time(), beginning.old, beginning.step
    metrics, state, loss = self.train_first(island, lease, beginning)
    del beginning
    about = metrics.close() | replay | {'holdout_loss': loss, 'worker': island.name, 'from_step': step}
    about |= {'started': started, 'ended': time.time(), 'holder': self.held.holder}

    def publish() -> list[Fact]:
      sent, after = send(island, old, state)
      judged = screening_facts.judge(island, path, phase, {level: message.square for level, message in sent.items()})
      why = judged.get('excluded')
      objects = {} if why else write_objects(island, path, phase, sent, after)
      made = schedule.checkpoint_fact(path, phase, objects, about | judged)
      if why:
        return [made, screening_facts.exclusion(island, path, phase, why, island.name)]
      self.hold(island, made, after)  # before the fact, which says that it is there
      return [made]

    return publish

  def replay(self, island: Island, lease: Lease, beginning: Beginning) -> tuple[Beginning, dict[str, Any]]:
    """Repeats the phases before the task's own; returns where that begins, and what its checkpoint notes of this."""
    path, phases, began = int(lease.task.key), beginning.phases, time.monotonic()
    differing: list[int] = []
    if len(phases) == 1:
      return beginning, {}
    logging.warning('path %d: its state is not here, phases %d to %d are trained again', path, *_span(phases))
    with futures.ThreadPoolExecutor(1) as reader:
      for i, phase in enumerate(phases[:-1]):
        parameters = reader.submit(island.path_parameters, path, phases[i + 1])  # beside the steps
        lease.about['replay'] = [phase + 1, *_span(phases)]
        _, state, _ = self.train_first(island, lease, beginning)
        sent, state = send(island, beginning.old, state)
        differing += [phase] if self.hold_replayed(island, path, phase, sent, state) else []
        old = parameters.result()
        beginning = Beginning(phases[i + 1 :], 0, old, state._replace(params=old), fresh=False)
    del lease.about['replay']
    seconds = time.monotonic() - began
    return beginning, {'replay': {'phases': phases[:-1], 'seconds': seconds, 'differing': differing}}

  def train_first(self, island: Island, lease: Lease, beginning: Beginning):
    """Trains the first of the phases from where it begins; returns its metrics, and the path's state and loss."""
    path, phase, is_replay = int(lease.task.key), beginning.phases[0], len(beginning.phases) > 1
    job = inner_phase.make_job(island, island.round_of(phase))
    metrics, origin = PhaseMetrics(lease, job, phase), functools.cache(lineage.origin)

    def done(after: int, found: dict[str, jax.Array], kept: PathState | None):
      metrics.dispatched(after, found)
      if not is_replay:
        lease.ahead(1 - after / job.schedule.steps_per_phase)
      if self.hosts.is_alone:
        lease.check()  # other hosts would wait in vain for a process that ends here
      if kept and not lease.is_copy:
        writer.submit(keep, after, kept.to_arrays())

    def keep(step: int, arrays: Arrays):
      if lineage.is_finite(arrays):
        self.held.put_within(Key(path, phase, origin(island, path, phase), step), arrays)

    start = Start(path, phase, beginning.step, beginning.fresh, bool(beginning.state.inner), is_replay)
    with futures.ThreadPoolExecutor(1) as writer:
      state, loss = inner_phase.run(island, self.hosts, start, beginning.state, done)
    return metrics, state, loss

  def hold_replayed(self, island: Island, path: int, phase: int, sent: dict[str, Sent], state: PathState) -> bool:
    """Holds the state after a phase that was trained again; returns whether it differs from what was published."""
    [made] = island.registry.facts('checkpoint', [str(path)], phase)
    self.hold(island, made, state)
    if levels := lineage.differing_levels(made, sent):
      there, here = made.meta.get('worker', 'another'), island.name
      words = f'{here} has made {", ".join(levels)} of path {path} otherwise than {there} did'
      logging.warning('phase %d, trained again: %s; their machines or libraries compute otherwise', phase + 1, words)
    return bool(levels)

  def hold(self, island: Island, made: Fact, state: PathState):
    """Holds a path's state after the phase of this checkpoint."""
    if lineage.has_state(island):
      self.held.put(Key(int(made.key), made.number, made.sha256), carried(island, state))


def carried(island: Island, state: PathState) -> Arrays:
  """Returns what a path takes along to its next phase."""
  return (state if island.run.settings.inner.keep_state else state._replace(inner={})).carried()


def send(island: Island, old: Arrays, state: PathState) -> tuple[dict[str, Sent], PathState]:
  """Returns what a path sends of each level, and its state after that; `old` is what it began the phase with."""
  sent = {}
  for level in island.layout.levels:
    new = {name: state.params[name] for name in island.layout.names(level)}
    sent[level.name] = messages.send(island.kind(level), old, new, state.residuals)
  after = {name: residual for message in sent.values() for name, residual in message.residuals.items()}
  return sent, state._replace(residuals=after)


def write_objects(
  island: Island, path: int, phase: int, sent: dict[str, Sent], state: PathState
) -> dict[str, list[str]]:
  """Writes an object for each level, so that an executor reads its own module's part only; and at times the state."""
  prefix = f'paths/{phase}/{path}'
  objects = {level: island.write_object(f'{prefix}-{level}', message.arrays) for level, message in sent.items()}
  there = island.registry.facts('checkpoint', [str(path)], phase)  # made before, maybe by an earlier version of this
  if any(INNER in made.meta['objects'] for made in there) or lineage.publishes_state(island, path, phase):
    objects[INNER] = island.write_object(f'{prefix}-{INNER}', carried(island, state))
  return objects


def _span(phases: tuple[int, ...]) -> tuple[int, int]:
  """Returns the first and the last of the phases to replay, counted from 1."""
  return phases[0] + 1, phases[-2] + 1
