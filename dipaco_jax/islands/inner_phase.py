"""The inner steps of one phase of a path, on the devices of all hosts of a worker [2.5, 3]."""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from dipaco_jax.core.errors import Diverged
from dipaco_jax.data import prefetching
from dipaco_jax.islands import path_state
from dipaco_jax.islands.island import Island
from dipaco_jax.islands.path_state import PathState
from dipaco_jax.islands.worker_hosts import Hosts, pass_on_sigterm
from dipaco_jax.pipeline import jobs
from dipaco_jax.storage import time_use
from dipaco_jax.training import evaluation, stopping
from dipaco_jax.training.job import Dispatch, Job, load_batch

# After every dispatch: the steps of the phase so far, their metrics and, when a checkpoint is due, the state.
Done = Callable[[int, dict[str, jax.Array], PathState | None], None]


class Start(NamedTuple):
  """The point at which the training of a path begins or goes on; the hosts of a worker tell each other."""

  path: int
  phase: int
  step: int  # of the phase
  end: int  # of the phase; where it is trained to
  fresh: bool  # whether a path without inner state gets a fresh one, rather than the base model's
  has_inner: bool
  is_replay: bool = False  # then nothing is measured


def run(island: Island, hosts: Hosts, start: Start, state: PathState, done: Done) -> tuple[PathState, float | None]:
  """Takes the inner steps of a phase from `start` on, on all hosts; returns the path's state, and its hold-out's loss.

  Only the first host has `state`, calls this and gets a meaningful result; the others `follow`.
  """
  job = make_job(island, island.round_of(start.phase))
  with hosts.ending_together():
    hosts.broadcast(start._asdict())
    found = inner_steps(island, job, start, broadcast_state(hosts, state), done)
    hosts.barrier()
  return found


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


def broadcast_state(hosts: Hosts, state: PathState) -> PathState:
  """Returns the first host's state, on all hosts of this worker."""
  return path_state.from_arrays(hosts.share(state.to_arrays()), state.params)


def inner_steps(island: Island, job: Job, start: Start, state: PathState, done: Done) -> tuple[PathState, float | None]:
  """Takes the inner steps on this host."""
  programs, every = job.programs, island.run.settings.checkpoint.every_steps
  path, phase, step, end, fresh, *_ = start
  params, inner = path_state.to_devices(job, phase, state, fresh)
  del state
  weights, turn = job.weights(phase), np.array(island.run.layout.grid.coordinates(path), np.int32)
  batches = prefetching.prefetch(lambda d: load_batch(job, d), remaining(job, path, phase, step, end))
  with time_use.doing(time_use.INNER):
    for dispatch, batch in batches:
      first, after = job.schedule.global_step(phase, dispatch.step), dispatch.step + job.schedule.dispatch_steps
      with time_use.doing(time_use.INNER, first='step'):
        params, inner, found = programs.steps(params, inner, *batch, np.int32(first), weights, turn)
      is_due = after < end and after // every > dispatch.step // every
      done(after, found, path_state.to_host(programs, params, inner) if is_due else None)
    jax.block_until_ready(params)  # so that what follows is not taken for inner steps
  with time_use.doing(time_use.OTHER, first='hold-out'):
    loss = None if start.is_replay or end < job.schedule.steps_per_phase else holdout_loss(job, path, params)
  return path_state.to_host(programs, params, inner), loss


def holdout_loss(job: Job, path: int, params) -> float | None:
  """Returns a path's loss before the outer step, nats per target of its hold-out; None without one, or if infinite."""
  if job.evaluation.holdout is None:
    return None
  turn = job.programs.layout.grid.coordinates(path)
  found = next(evaluation.turn_losses(job.programs, turn, lambda _: params, job.evaluation.holdout), None)
  return evaluation.finite_mean(*found[1:]) if found else None


def remaining(job: Job, path: int, phase: int, step: int, end: int) -> Iterator[Dispatch]:
  """Yields the dispatches of a path's phase from `step` on; its turn is its index, as it is alone on the devices."""
  for s in range(step, end, job.schedule.dispatch_steps):
    last = s + job.schedule.dispatch_steps == job.schedule.steps_per_phase
    yield Dispatch(phase, path, s, last, last, last)


def make_job(island: Island, number: int) -> Job:
  """Makes the job of training paths in a round, with all that it needs on this machine."""
  island.fetch_trees('base', f'shards/{number}')
  return _job(island, number)


@functools.lru_cache(1)
def _job(island: Island, number: int) -> Job:
  return jobs.paths_job(island.run, number)
