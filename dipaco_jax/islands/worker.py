"""A worker: trains a path for a phase of tau steps, with the programs of SPMD on its own devices [2.5, 3].

AdamW state travels with the path: it is an object of the path's checkpoint, and the next worker reads it. A worker may
span several hosts (`worker_hosts`): all of them train, and the first does the rest.
"""

import functools
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NamedTuple

import jax
import numpy as np

from dipaco_jax.core.errors import Diverged
from dipaco_jax.data import prefetching
from dipaco_jax.islands import island, screening_facts
from dipaco_jax.islands import schedule as islands_lib
from dipaco_jax.islands.island import TOKENIZER, Islands
from dipaco_jax.islands.lease import Lease
from dipaco_jax.islands.registry import Fact, Task
from dipaco_jax.islands.role_loop import Publish
from dipaco_jax.islands.schedule import INNER
from dipaco_jax.islands.worker_hosts import Hosts, leaving
from dipaco_jax.pipeline import jobs, resharding_round, stage_records, stages
from dipaco_jax.storage import object_store as storage_lib
from dipaco_jax.training import evaluation, mesh, metrics_log, stopping, train_log
from dipaco_jax.training import job as job_lib

TRAIN = ('train',)
KINDS = ('prepare', *TRAIN, 'reroute')  # of a worker of one host
PARAMS = 'params'  # beside INNER, in what a phase begins with
TREES = ('sequences', 'base', 'routing/0', 'shards/0')  # that `prepare` leaves in storage


def perform(islands: Islands, task: Task, lease: Lease, hosts: Hosts | None = None) -> Publish | None:
  """Whatever a worker is asked for; of several hosts, the first."""
  if task.kind == 'train':
    return train(islands, task, lease, hosts or Hosts())
  return {'prepare': prepare, 'reroute': reroute}[task.kind](islands, task, lease)


def follow(islands: Islands, hosts: Hosts):
  """Another host than the first: trains with it until it says no more, or that the run has diverged."""
  with stopping.listening() as signals, signals.answered(leaving):
    while words := hosts.hear():
      if why := words.get('diverged'):
        raise Diverged(why)
      with hosts.together():
        job, has_inner = make_job(islands, islands.round(words['phase'])), words.pop('has_inner')
        inner_steps(islands, job, **words, arrays=hosts.share(blank(job, has_inner)), done=lambda *_: None)
        hosts.meet()


# -- a phase of a path


class Loaded(NamedTuple):
  """What a phase is trained with, on the host."""

  job: job_lib.Job
  step: int  # of the phase
  arrays: dict[str, np.ndarray]  # parameters and inner state by place, as `keep` has them; maybe no inner state
  old: dict[str, np.ndarray]  # parameters at the phase's start
  anew: bool  # where there is no inner state, whether a fresh one is wanted, be there one of the base model


def fetch(islands: Islands, task: Task) -> Loaded:
  """The path's shard, and its state of a former owner within the phase, or of the phase's start."""
  job, path = make_job(islands, islands.round(task.number)), int(task.key)
  old, before = islands.path_parameters(path, task.number), trained_before(islands, path, task.number)
  anew = before is not None and job.keep_state and screening_facts.begins_anew(islands, path, before)
  if found := resume(islands, task.progress):
    return Loaded(job, *found, old, anew)
  inner = {} if before is None or anew or not job.keep_state else inner_state(islands, path, before)
  return Loaded(job, 0, {place(PARAMS, name): x for name, x in old.items()} | inner, old, anew)


def train(islands: Islands, task: Task, lease: Lease, hosts: Hosts) -> Publish:
  """tau steps of a path from its modules of this version, or from where a former owner has left them."""
  path, number, started = int(task.key), task.number, time.time()
  job, step, arrays, old, anew = lease.fetched()
  losses = Losses(islands, lease, job)

  def done(after: int, found: dict[str, jax.Array], kept: dict[str, np.ndarray] | None):
    losses.dispatched(after, found)
    lease.ahead(1 - after / job.steps_per_phase)
    if hosts.alone:
      lease.check()  # others would wait for us in vain
    if kept and not lease.is_copy:
      writer.submit(keep, islands, lease, task, after, kept)

  words = {'path': path, 'phase': number, 'step': step, 'anew': anew}
  with futures.ThreadPoolExecutor(1) as writer, hosts.together():
    hosts.say(words | {'has_inner': has_inner(arrays)})
    arrays, loss = inner_steps(islands, job, **words, arrays=hosts.share(arrays), done=done)
    hosts.meet()
  about = losses.close() | {
    'holdout_loss': loss,
    'worker': islands.name,
    'started': started,
    'ended': time.time(),
    'from_step': step,
  }

  def publish() -> list[Fact]:
    new = {name: arrays[place(PARAMS, name)] for name in old}
    judged = screening_facts.judge(islands, path, number, old, new)
    if why := judged.get('excluded'):
      told = screening_facts.exclusion(islands, path, number, why, islands.name)
      return [islands_lib.checkpoint_fact(path, number, {}, about | judged), told]
    return [islands_lib.checkpoint_fact(path, number, write(islands, job, path, number, arrays), about | judged)]

  return publish


def inner_steps(
  islands: Islands, job: job_lib.Job, path: int, phase: int, step: int, anew: bool, arrays: dict[str, np.ndarray],
  done: Callable,
) -> tuple[dict[str, np.ndarray], float | None]:  # fmt: skip
  """The inner steps of a phase from `step` on; returns what `arrays` have become, and their loss on the hold-out.

  After every dispatch `done` gets the number of steps, their metrics, and from time to time the arrays, to be kept.
  """
  programs, every = job.programs, islands.run.settings.checkpoint.every_steps
  params, inner = in_flight(job, phase, arrays, anew)
  del arrays
  weights, turn = job.weights(phase), np.array(islands.run.layout.grid.coordinates(path), np.int32)
  for dispatch, batch in prefetching.prefetch(lambda d: job_lib.load(job, d), remaining(job, path, phase, step)):
    first, after = job.global_step(phase, dispatch.step), dispatch.step + job.dispatch_steps
    params, inner, found = programs.steps(params, inner, *batch, np.int32(first), weights, turn)
    is_due = not dispatch.last_of_turn and after // every > dispatch.step // every
    done(after, found, to_host(programs, {PARAMS: params, INNER: inner}) if is_due else None)
  return to_host(programs, {PARAMS: params, INNER: inner}), own_loss(job, path, params)


def own_loss(job: job_lib.Job, path: int, params) -> float | None:
  """Of a path's parameters before the outer step, nats a target of its hold-out; None where there is no number."""
  if job.holdout is None:
    return None
  turn = job.programs.layout.grid.coordinates(path)
  for _, nll, targets in evaluation.turn_losses(job.programs, turn, lambda _: params, job.holdout):
    return evaluation.finite_mean(nll, targets)
  return None


def make_job(islands: Islands, number: int) -> job_lib.Job:
  """What is trained on in a round, with all that it needs on this machine."""
  islands.fetch('base', f'shards/{number}')
  return _job(islands, number)


@functools.lru_cache(1)
def _job(islands: Islands, number: int) -> job_lib.Job:
  return jobs.paths_job(islands.run, number)


def remaining(job: job_lib.Job, path: int, phase: int, step: int) -> Iterator[job_lib.Dispatch]:
  """Dispatches of a path's phase; the turn of a path that is alone on the devices is its index."""
  for s in range(step, job.steps_per_phase, job.dispatch_steps):
    last = s + job.dispatch_steps == job.steps_per_phase
    yield job_lib.Dispatch(phase, path, s, last, last)


def trained_before(islands: Islands, path: int, phase: int) -> int | None:
  """The phase before this one in which the path was trained."""
  return next((t for t in reversed(range(phase)) if islands.active(t)[path]), None)


def inner_state(islands: Islands, path: int, phase: int) -> dict[str, np.ndarray]:
  """What the path had come to after a phase."""
  [found] = islands.registry.facts('checkpoint', [str(path)], phase)
  return islands.read(*found.meta['objects'][INNER])


def resume(islands: Islands, progress: dict[str, Any] | None) -> tuple[int, dict[str, np.ndarray]] | None:
  """Step and state that a former owner has kept within the phase; None where there is none to be read."""
  if not progress:
    return None
  try:
    return progress['step'], islands.read(progress['name'], progress['sha256'])
  except OSError as e:
    logging.warning('%s: the phase is trained from its start', e)
    return None


def in_flight(job: job_lib.Job, phase: int, arrays: dict[str, np.ndarray], anew: bool) -> tuple[Any, Any]:
  """Parameters and inner state on the devices; where a path has no inner state, the base model's or a fresh one."""
  programs = job.programs
  params = to_device(programs, {PARAMS: programs.specs.params}, arrays)[PARAMS]
  if not has_inner(arrays):
    return params, programs.fresh_state(params) if anew else job.first_state(phase, params)
  return params, to_device(programs, {INNER: programs.specs.state}, arrays)[INNER]


def has_inner(arrays: dict[str, np.ndarray]) -> bool:
  return any(name.startswith(place(INNER)) for name in arrays)


def place(*names: str) -> str:
  """Of an array, in `arrays`."""
  return jax.tree_util.keystr(tuple(map(jax.tree_util.DictKey, names)))


def blank(job: job_lib.Job, has_inner: bool) -> dict[str, np.ndarray]:
  """Zeros instead of a phase's arrays."""
  tree: dict[str, Any] = {PARAMS: job.programs.shapes}
  if has_inner:
    tree[INNER] = jax.eval_shape(job.programs.inner.init, job.programs.shapes)
  return {jax.tree_util.keystr(at): np.zeros(x.shape, x.dtype) for at, x in jax.tree_util.tree_leaves_with_path(tree)}


def keep(islands: Islands, lease: Lease, task: Task, step: int, arrays: dict[str, np.ndarray]):
  """A checkpoint within the phase: the object first, then the row that names it. Nobody could go on from NaN."""
  if not all(np.isfinite(x).all() for x in arrays.values()):
    return
  name, sha256 = islands.write(f'paths/{task.number}/{task.key}-step{step}', arrays)
  lease.keep({'step': step, 'name': name, 'sha256': sha256})


def write(
  islands: Islands, job: job_lib.Job, path: int, phase: int, arrays: dict[str, np.ndarray]
) -> dict[str, list[str]]:
  """An object for each level, so that an executor reads its own module's part only; and the inner state."""
  layout, prefix = islands.run.layout, f'paths/{phase}/{path}'
  objects = {
    level.name: islands.write(f'{prefix}-{level.name}', {n: arrays[place(PARAMS, n)] for n in layout.names(level)})
    for level in layout.levels
  }
  if job.keep_state:
    inner = {name: x for name, x in arrays.items() if name.startswith(place(INNER))}
    objects[INNER] = islands.write(f'{prefix}-{INNER}', inner)
  return objects


def to_host(programs, tree) -> dict[str, np.ndarray]:
  """In-flight arrays of one path by their place in the tree, without the mesh's axes."""
  first = (0,) * programs.specs.num_axes
  return {name: x[first] for name, x in jobs.named_leaves(tree).items()}


def to_device(programs, specs, arrays: dict[str, np.ndarray]):
  """The inverse of `to_host`: a tree like that of the PartitionSpecs."""

  def one(at, spec):
    x = arrays[jax.tree_util.keystr(at)]
    return programs.placement.assemble(x.shape, spec, lambda _: x)

  return jax.tree_util.tree_map_with_path(one, specs, is_leaf=lambda s: isinstance(s, jax.sharding.PartitionSpec))


class Losses:
  """What a phase says of itself; metrics are read from the device one dispatch late."""

  def __init__(self, islands: Islands, lease: Lease, job: job_lib.Job):
    self.islands, self.lease, self.job = islands, lease, job
    self.pending: tuple[int, Any] | None = None
    self.rows: list[list[Any]] = []  # steps, loss, norm, learning rate, and how many steps were finite, and skipped
    self.begun: float | None = None  # when the first dispatch was done, which may have compiled
    self.timed_steps = 0
    self.is_finite = True  # whether the last step was
    self.last = time.monotonic()

  def dispatched(self, after: int, found: dict[str, jax.Array]):
    self.catch_up()
    self.pending = after, found

  def catch_up(self):
    """Waits for the dispatch before."""
    if self.pending:
      after, found = self.pending
      steps = train_log.of_steps({name: mesh.fetch(x).reshape(-1, 1) for name, x in found.items()})
      loss, norm = (float(steps.means[name][0]) for name in ('loss', 'grad_norm'))
      counts = int(steps.finite.sum()), int(steps.skipped[0])
      self.rows.append(metrics_log.plain([after, loss, norm, steps.learning_rate, *counts]))
      self.warn(after, steps)
      self.last = time.monotonic()
      if self.begun is None:
        self.begun = self.last
      else:
        self.timed_steps += self.job.dispatch_steps
      self.lease.about |= {'step': after, 'of': self.job.steps_per_phase, 'loss': metrics_log.plain(loss)} | self.rate()
    self.pending = None

  def warn(self, after: int, steps: train_log.Steps):
    """Of the first step that was not finite, and again after those that were."""
    if self.is_finite and not steps.finite.all():
      task, last = self.lease.task, self.job.global_step(self.lease.task.number, after)
      train_log.warn_not_finite(self.job.name, int(task.key), last, steps.finite[:, 0], steps.skipped[0])
    self.is_finite = bool(steps.finite[-1, 0])

  def rate(self) -> dict[str, float]:
    """Tokens/s since the first dispatch."""
    if self.begun is None or not self.timed_steps:
      return {}
    tokens = self.timed_steps * self.job.batch_size * self.job.programs.model.config.seq_len
    return {'tokens_per_s': tokens / max(1e-9, self.last - self.begun)}

  def close(self) -> dict[str, Any]:
    self.catch_up()
    seconds = self.last - self.begun if self.begun is not None else 0.0
    return {'rows': self.rows, 'timed_steps': self.timed_steps, 'timed_s': seconds}


# -- what all paths need


def prepare(islands: Islands, task: Task, lease: Lease) -> Publish:
  """Text, base model, routing and shards; every module of version 0 is its part of the base."""
  run = islands.run
  with islands.hold():
    for before in islands.registry.facts('prepared'):
      take_over(islands, before)
      try:
        islands.fetch_tokenizer()
      except island.Gone:
        (run.workdir / TOKENIZER).unlink(missing_ok=True)
    if run.record('route') and not all((run.workdir / name).exists() for name in (*TREES, TOKENIZER)):
      stage_records.reopen(run.workdir, 'tokenize')  # records that came from storage, which has lost the rest
    stages.run_all(run, 'route')
    lease.check()  # whoever was stopped for long leaves alone what is in use by now
    tokenizer = islands.storage.write(TOKENIZER, (run.workdir / TOKENIZER).read_bytes())
    prepared = islands.publish_trees('prepared', 0, TREES, {'tokenizer': tokenizer})
    islands.storage.upload_tree(run.workdir / 'stages', 'stages')
  base = run.base()
  objects = {
    level.name: islands.write(f'modules/0/{level.name}', {n: base[n] for n in run.layout.names(level)})
    for level in run.layout.levels
  }
  named = ((module, *objects[module.split('/')[0]]) for module in islands.all_modules())
  modules = [Fact('module', module, 0, name, sha256, {}) for module, name, sha256 in named]
  return lambda: [prepared, *modules]


def take_over(islands: Islands, made: Fact):
  """What is done again makes only what nobody has as it was published; that is removed from this machine."""
  for tree, sha256 in ({'stages': ''} | made.meta['trees']).items():
    islands.storage.verified_trees.discard((tree, sha256))
    try:
      islands.storage.download_tree(tree, islands.run.workdir / tree, sha256)
    except (storage_lib.Missing, storage_lib.Corrupt):
      shutil.rmtree(islands.run.workdir / tree, ignore_errors=True)


def reroute(islands: Islands, task: Task, lease: Lease) -> Publish:
  """A round of re-sharding; needs all paths at the version that ends the round before [2.4.2]."""
  run, number = islands.run, task.number
  version = jobs.round_end(run.settings, number - 1)
  islands.fetch('sequences', 'base', f'routing/{number - 1}', f'shards/{number - 1}')
  with islands.hold():
    islands.publish(version)
    for before in islands.registry.facts('round', number=number):
      take_over(islands, before)
    resharding_round.reroute(run, number, version)
    lease.check()
    trees = f'routing/{number}', f'shards/{number}'
    made = islands.publish_trees('round', number, trees, {'version': version})
  return lambda: [made]
