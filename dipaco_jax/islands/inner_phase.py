"""The inner steps of one phase of a path, on the devices of all hosts of a worker [2.5, 3]."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from dipaco_jax.core.errors import Diverged
from dipaco_jax.data import prefetching
from dipaco_jax.islands import owner_facts, path_state
from dipaco_jax.islands.island import Island
from dipaco_jax.islands.path_state import Arrays, PathState
from dipaco_jax.islands.worker_hosts import Hosts, pass_on_sigterm
from dipaco_jax.pipeline import jobs
from dipaco_jax.processes import stopping, time_use
from dipaco_jax.training import evaluation, mesh
from dipaco_jax.training.job import Dispatch, Job, load_batch
from dipaco_jax.training.programs import Programs

# After every dispatch: the steps of the phase so far, their metrics and, when a checkpoint is due, the state. Returns
# whether the time of the phase is over.
Done = Callable[[int, dict[str, jax.Array], PathState | None], bool]


class Start(NamedTuple):
  """The point at which the training of a path begins or continues; the hosts of a worker tell each other."""

  path: int
  phase: int
  step: int  # of the phase
  end: int  # of the phase, at which this training ends
  fresh: bool  # whether a path without inner state gets a fresh one, rather than the base model's
  has_inner: bool
  is_replay: bool = False  # then nothing is measured
  evaluates: bool = False  # whether `begins_with` is evaluated first
  first: int | None = None  # the path's own steps before the phase, where phases are timed [path_steps.py]
  ends_by_time: bool = False  # whether the training may end before `end`; a replay takes as many steps as were taken
  at_rest: bool = False  # whether the base model's inner state has no first moments [Job.first_state]


class Result(NamedTuple):
  """What the inner steps have made."""

  state: PathState
  end: int  # steps of the phase so far
  loss: float | None  # on the hold-out at the end of the phase
  evaluation: tuple[float | None, float] | None  # of what the phase begins with: nats a target, and how many targets


def run(
  island: Island, hosts: Hosts, start: Start, state: PathState, begins_with: Arrays, done: Done
) -> Result:  # fmt: skip
  """Takes the inner steps of a phase from `start` on, on all hosts.

  Only the first host has `state`, calls this and gets a meaningful result; the others `follow`. `begins_with`: the
  modules of the version that the phase begins with, where that is evaluated.
  """
  job = make_job(island, island.round_of(start.phase))
  with hosts.ending_together():
    hosts.broadcast(start._asdict())
    evaluated = evaluate_first(job, start, hosts.share(begins_with)) if start.evaluates else None
    trained, end, loss = inner_steps(island, job, start, broadcast_state(hosts, state), done, hosts)
    hosts.barrier()
  return Result(trained, end, loss, evaluated)


def follow(island: Island, hosts: Hosts):
  """Trains with the first host, on another, until that is done. Raises Diverged if the run has diverged."""
  with stopping.listening() as signals, signals.answered(pass_on_sigterm):
    while message := hosts.receive():
      if why := message.get('diverged'):
        raise Diverged(why)
      with hosts.ending_together():
        start = Start(**message)
        job = make_job(island, island.round_of(start.phase))
        zeros = path_state.zeros(job, start.has_inner)
        if start.evaluates:
          evaluate_first(job, start, hosts.share(zeros.params))
        inner_steps(island, job, start, broadcast_state(hosts, zeros), lambda *_: False, hosts)
        hosts.barrier()


def broadcast_state(hosts: Hosts, state: PathState) -> PathState:
  """Returns the first host's parameters and inner state, on all hosts of this worker."""
  return path_state.from_arrays(hosts.share(PathState(state.params, state.inner).to_arrays()), state.params)


def inner_steps(
  island: Island, job: Job, start: Start, state: PathState, done: Done, hosts: Hosts
) -> tuple[PathState, int, float | None]:  # fmt: skip
  """Takes the inner steps on this host; `done` gets the state after every `checkpoint.every_steps`.

  Returns the state, the steps of the phase so far, and the loss on the hold-out at the end of the phase.
  """
  every, profiler = island.run.settings.checkpoint.every_steps, island.run.profiler
  programs, (path, phase, step, end, fresh, *_) = job.programs, start
  params, inner = path_state.to_devices(job, phase, state, fresh, start.at_rest)
  del state
  before = job.schedule.global_step(phase, 0) if start.first is None else start.first
  weights, turn = job.weights(phase), np.array(programs.layout.grid.coordinates(path), np.int32)
  batches = prefetching.prefetch(lambda d: load_batch(job, d, start.first), remaining(job, path, phase, step, end))
  metrics: dict[str, jax.Array] = {}

  def is_busy() -> bool:
    return bool(metrics) and not mesh.is_ready(metrics['loss'])

  def settle():
    jax.block_until_ready(params)

  with time_use.doing(time_use.INNER):
    for dispatch, batch in time_use.fed(batches, is_busy):
      first, after = before + dispatch.step, dispatch.step + job.schedule.dispatch_steps
      stop = first + job.schedule.dispatch_steps
      profiler.begin(first, stop, settle)
      params, inner, metrics = programs.steps(params, inner, *batch, np.int32(first), weights, turn)
      profiler.end(stop, after == end, settle)
      is_due = after < end and after // every > dispatch.step // every
      is_over = done(after, metrics, path_state.to_host(programs, params, inner) if is_due else None)
      if start.ends_by_time and after < end and hosts.decide(is_over):
        end = after
        break
    settle()  # so that what follows is not taken for inner steps
  with time_use.doing(time_use.EVALUATE):
    is_last = end == job.schedule.steps_per_phase or start.first is not None
    loss = holdout_loss(job, path, params) if is_last and not start.is_replay else None
  return path_state.to_host(programs, params, inner), end, loss


def holdout_loss(job: Job, path: int, params) -> float | None:
  """Returns a path's loss before the outer step, nats per target of its hold-out; None without one, or if infinite."""
  if job.evaluation.holdout is None:
    return None
  turn = job.programs.layout.grid.coordinates(path)
  turn_loss = next(evaluation.turn_losses(job.programs, turn, lambda _: params, job.evaluation.holdout), None)
  return evaluation.finite_mean(*turn_loss[1:]) if turn_loss else None


@time_use.doing(time_use.EVALUATE)
def evaluate(programs: Programs, rows: evaluation.Rows, path: int, params: Arrays) -> tuple[float | None, float]:
  """Returns a path's loss on its hold-out, nats per target, None without one, and how many targets that has."""
  loaded = evaluation.in_flight(programs, turn := programs.layout.grid.coordinates(path), lambda _: params)
  turn_loss = next(iter(evaluation.turn_losses(programs, turn, lambda _: loaded, rows)), None)
  if not turn_loss:
    return None, 0.0
  return evaluation.to_compare(evaluation.mean(*turn_loss[1:])), float(turn_loss[2].sum())


def evaluate_first(job: Job, start: Start, params: Arrays) -> tuple[float | None, float]:
  """Evaluates, on this host, what a phase begins with; see `evaluate`."""
  assert job.evaluation.holdout
  return evaluate(job.programs, job.evaluation.holdout, start.path, params)


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
  job = jobs.paths_job(island.run, number)
  if island.run.settings.data.own_text:  # its shards are of one owner
    return dataclasses.replace(job, weights=owner_facts.weights(island))
  return job
