"""A worker: trains a path for a phase of tau steps, with the programs of SPMD on its own devices [2.5, 3].

AdamW state travels with the path: it is an object of the path's checkpoint, and the next worker reads it. A worker may
span several hosts (`worker_hosts`): all of them train, and the first does the rest.
"""

import functools
import logging
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NamedTuple

import jax
import numpy as np

from dipaco_jax.core.errors import Diverged
from dipaco_jax.data import prefetching
from dipaco_jax.islands import path_state, schedule, screening_facts, shared_stages
from dipaco_jax.islands.island import Island
from dipaco_jax.islands.lease import Lease
from dipaco_jax.islands.path_state import INNER, Arrays, PathState
from dipaco_jax.islands.registry import Fact, Task
from dipaco_jax.islands.role_loop import Publish
from dipaco_jax.islands.worker_hosts import Hosts, pass_on_sigterm
from dipaco_jax.pipeline import jobs
from dipaco_jax.training import evaluation, mesh, metrics_log, stopping, train_log
from dipaco_jax.training.job import Dispatch, Job, load_batch

TRAIN = ('train',)
KINDS = ('prepare', *TRAIN, 'reroute')  # of a worker of one host
# After every dispatch: the steps of the phase so far, their metrics and, when a checkpoint is due, the state.
Done = Callable[[int, dict[str, jax.Array], PathState | None], None]


def perform(island: Island, task: Task, lease: Lease, hosts: Hosts | None = None) -> Publish | None:
  """Does a worker's task of any kind; of several hosts, the first calls this."""
  if task.kind == 'train':
    return train(island, task, lease, hosts or Hosts())
  return {'prepare': shared_stages.prepare, 'reroute': shared_stages.reshard}[task.kind](island, task, lease)


def follow(island: Island, hosts: Hosts):
  """Trains with the first host, on another, until that is done. Raises Diverged where the run has diverged."""
  with stopping.listening() as signals, signals.answered(pass_on_sigterm):
    while message := hosts.receive():
      if why := message.get('diverged'):
        raise Diverged(why)
      with hosts.ending_together():
        start = Start(**message)
        job = make_job(island, island.round_of(start.phase))
        inner_steps(island, job, start, broadcast_state(hosts, path_state.zeros(job, start.has_inner)), lambda *_: None)
        hosts.barrier()


class Start(NamedTuple):
  """The point at which the training of a path begins or goes on; the hosts of a worker tell each other."""

  path: int
  phase: int
  step: int  # of the phase
  fresh: bool  # whether a path without inner state gets a fresh one, rather than the base model's
  has_inner: bool


def fetch(island: Island, task: Task) -> tuple[Job, Start, PathState, Arrays]:
  """Reads a path's shard, and its state: a former owner's within the phase, or that of the phase's start.

  Returns the job and the point to begin at, the state there, and the parameters at the phase's start.
  """
  path, phase, step = int(task.key), task.number, 0
  job = make_job(island, island.round_of(phase))
  old, before = island.path_parameters(path, phase), trained_before(island, path, phase)
  fresh = before is not None and job.keep_state and screening_facts.begins_anew(island, path, before)
  if found := resume(island, task.progress, old):
    step, state = found
  else:
    state = PathState(old, {})
    if before is not None and job.keep_state and not fresh:
      [made] = island.registry.facts('checkpoint', [str(path)], before)
      state = PathState(old, island.read_object(*made.meta['objects'][INNER]))
  return job, Start(path, phase, step, fresh, bool(state.inner)), state, old


def train(island: Island, task: Task, lease: Lease, hosts: Hosts) -> Publish:
  """Takes tau steps of a path from its modules of this version, or the rest of what a former owner has begun."""
  started = time.time()
  job, start, state, old = lease.fetched()
  path, phase, *_ = start
  metrics = PhaseMetrics(lease, job)

  def done(after: int, found: dict[str, jax.Array], kept: PathState | None):
    metrics.dispatched(after, found)
    lease.ahead(1 - after / job.schedule.steps_per_phase)
    if hosts.is_alone:
      lease.check()  # other hosts would wait in vain for a process that ends here
    if kept and not lease.is_copy:
      writer.submit(keep, island, lease, task, after, kept)

  with futures.ThreadPoolExecutor(1) as writer, hosts.ending_together():
    hosts.broadcast(start._asdict())
    state, loss = inner_steps(island, job, start, broadcast_state(hosts, state), done)
    hosts.barrier()
  about = metrics.close() | {'holdout_loss': loss, 'worker': island.name, 'from_step': start.step}
  about |= {'started': started, 'ended': time.time()}

  def publish() -> list[Fact]:
    judged = screening_facts.judge(island, path, phase, old, state.params)
    why = judged.get('excluded')
    objects = {} if why else write_objects(island, path, phase, state)
    told = [screening_facts.exclusion(island, path, phase, why, island.name)] if why else []
    return [schedule.checkpoint_fact(path, phase, objects, about | judged), *told]

  return publish


def inner_steps(island: Island, job: Job, start: Start, state: PathState, done: Done) -> tuple[PathState, float | None]:
  """Takes the inner steps of a phase from `start` on; returns the path's state and its loss on the hold-out."""
  programs, every = job.programs, island.run.settings.checkpoint.every_steps
  path, phase, step, fresh, _ = start
  params, inner = path_state.to_devices(job, phase, state, fresh)
  del state
  weights, turn = job.weights(phase), np.array(island.run.layout.grid.coordinates(path), np.int32)
  for dispatch, batch in prefetching.prefetch(lambda d: load_batch(job, d), remaining(job, path, phase, step)):
    first, after = job.schedule.global_step(phase, dispatch.step), dispatch.step + job.schedule.dispatch_steps
    params, inner, found = programs.steps(params, inner, *batch, np.int32(first), weights, turn)
    is_due = not dispatch.last_of_turn and after // every > dispatch.step // every
    done(after, found, path_state.to_host(programs, params, inner) if is_due else None)
  return path_state.to_host(programs, params, inner), holdout_loss(job, path, params)


def holdout_loss(job: Job, path: int, params) -> float | None:
  """Returns a path's loss before the outer step, nats per target of its hold-out; None without one, or if infinite."""
  if job.evaluation.holdout is None:
    return None
  turn = job.programs.layout.grid.coordinates(path)
  found = next(evaluation.turn_losses(job.programs, turn, lambda _: params, job.evaluation.holdout), None)
  return evaluation.finite_mean(*found[1:]) if found else None


def make_job(island: Island, number: int) -> Job:
  """Makes the job of training paths in a round, with all that it needs on this machine."""
  island.fetch_trees('base', f'shards/{number}')
  return _job(island, number)


@functools.lru_cache(1)
def _job(island: Island, number: int) -> Job:
  return jobs.paths_job(island.run, number)


def remaining(job: Job, path: int, phase: int, step: int) -> Iterator[Dispatch]:
  """Yields the dispatches of a path's phase from `step` on; its turn is its index, as it is alone on the devices."""
  for s in range(step, job.schedule.steps_per_phase, job.schedule.dispatch_steps):
    last = s + job.schedule.dispatch_steps == job.schedule.steps_per_phase
    yield Dispatch(phase, path, s, last, last, last)


def broadcast_state(hosts: Hosts, state: PathState) -> PathState:
  """Returns the first host's state, on all hosts of this worker."""
  return path_state.from_arrays(hosts.share(state.to_arrays()), state.params)


class PhaseMetrics:
  """Metrics of one phase of a path; each dispatch's are read from the device after the next is dispatched."""

  def __init__(self, lease: Lease, job: Job):
    self.lease, self.job = lease, job
    self.pending: tuple[int, dict[str, jax.Array]] | None = None
    self.rows: list[list[Any]] = []  # steps, loss, norm, learning rate, and how many steps were finite, and skipped
    self.first_done: float | None = None  # when the first dispatch, which may have compiled, was done
    self.last_done = time.monotonic()
    self.timed_steps = 0
    self.is_finite = True  # whether the last step was

  def dispatched(self, after: int, metrics: dict[str, jax.Array]):
    """Reads the metrics of the dispatch before, and keeps these for later; `after`: steps of the phase so far."""
    self.read_pending()
    self.pending = after, metrics

  def read_pending(self):
    """Waits for the last dispatch and adds its row; the lease shows it to others."""
    if not self.pending:
      return
    (after, metrics), self.pending = self.pending, None
    steps = train_log.of_steps({name: mesh.fetch(x).reshape(-1, 1) for name, x in metrics.items()})
    loss, norm = (float(steps.means[name][0]) for name in ('loss', 'grad_norm'))
    counts = int(steps.finite.sum()), int(steps.skipped[0])
    self.rows.append(metrics_log.plain([after, loss, norm, steps.learning_rate, *counts]))
    self.warn_not_finite(after, steps)
    self.last_done = time.monotonic()
    self.lease.about |= {'step': after, 'of': self.job.schedule.steps_per_phase, 'loss': metrics_log.plain(loss)}
    if self.first_done is None:
      self.first_done = self.last_done
      return
    self.timed_steps += self.job.schedule.dispatch_steps
    tokens = self.timed_steps * self.job.data.batch_size * self.job.programs.model.config.seq_len
    self.lease.about['tokens_per_s'] = tokens / max(1e-9, self.last_done - self.first_done)

  def warn_not_finite(self, after: int, steps: train_log.Steps):
    """Logs the first step that is not finite, and the first one after finite steps."""
    if self.is_finite and not steps.finite.all():
      task, last = self.lease.task, self.job.schedule.global_step(self.lease.task.number, after)
      train_log.warn_not_finite(self.job.name, int(task.key), last, steps.finite[:, 0], steps.skipped[0])
    self.is_finite = bool(steps.finite[-1, 0])

  def close(self) -> dict[str, Any]:
    """Reads the last metrics; returns what the path's checkpoint notes about the phase."""
    self.read_pending()
    seconds = self.last_done - self.first_done if self.first_done is not None else 0.0
    return {'rows': self.rows, 'timed_steps': self.timed_steps, 'timed_s': seconds}


def trained_before(island: Island, path: int, phase: int) -> int | None:
  """Returns the last phase before this one in which the path was trained; None where there is none."""
  return next((t for t in reversed(range(phase)) if island.active_paths(t)[path]), None)


def resume(island: Island, progress: dict[str, Any] | None, old: Arrays) -> tuple[int, PathState] | None:
  """Returns the step and state that a former owner kept within the phase; None where it kept none that can be read."""
  if not progress:
    return None
  try:
    return progress['step'], path_state.from_arrays(island.read_object(progress['name'], progress['sha256']), old)
  except OSError as e:
    logging.warning('%s: the phase is trained from its start', e)
    return None


def keep(island: Island, lease: Lease, task: Task, step: int, state: PathState):
  """Writes a checkpoint within the phase: the object first, then the row that names it. NaN is not kept."""
  arrays = state.to_arrays()
  if all(np.isfinite(x).all() for x in arrays.values()):
    name, sha256 = island.write_object(f'paths/{task.number}/{task.key}-step{step}', arrays)
    lease.keep({'step': step, 'name': name, 'sha256': sha256})


def write_objects(island: Island, path: int, phase: int, state: PathState) -> dict[str, list[str]]:
  """Writes an object for each level, so that an executor reads its own module's part only; and the inner state."""
  layout, prefix = island.layout, f'paths/{phase}/{path}'
  objects = {
    level.name: island.write_object(f'{prefix}-{level.name}', {n: state.params[n] for n in layout.names(level)})
    for level in layout.levels
  }
  if island.run.settings.inner.keep_state:
    objects[INNER] = island.write_object(f'{prefix}-{INNER}', state.inner)
  return objects
