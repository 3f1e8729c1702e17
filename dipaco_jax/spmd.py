"""Training as one program on one mesh: phases of tau inner steps, then the outer step (Algorithm 1) [2.5, 2.6].

Positions of the mesh take their paths in turn. A dispatch is k inner steps of the paths in flight; between dispatches the
loop only hands over batches that are already on the device and reads the metrics of the dispatch before.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NamedTuple

import jax
import numpy as np

from dipaco_jax import checkpoint, evaluate, mesh, shards
from dipaco_jax import metrics as metrics_lib
from dipaco_jax.grid import Coordinates
from dipaco_jax.programs import Programs


class Stopped(Exception):
  """The run was asked to stop, and its state is saved."""


@dataclasses.dataclass(frozen=True)
class Job:
  """What to train, and on what."""

  name: str  # the stage
  programs: Programs
  phases: int
  steps_per_phase: int  # tau
  steps_per_dispatch: int  # at most
  first_step: int  # the global step before the first update
  batch_size: int  # rows per path
  batch: Callable[[int, int], tuple[np.ndarray, np.ndarray]]  # (path, global step) -> tokens, segments [B, L]
  weights: Callable[[int], np.ndarray]  # phase -> w_i of every path, shaped like the grid; 0: not trained
  base: dict[str, np.ndarray]  # parameters that every path starts from
  base_state: Any  # inner state that every path starts with; None: fresh
  keep_state: bool
  holdout: evaluate.Rows | None  # for early stopping
  validate: Callable[[Callable[[Coordinates], Any]], dict[str, Any]] | None  # params_of_turn -> a row of figures
  validate_every: int  # phases
  publish: bool  # modules, for others to read
  offload: bool

  @property
  def dispatch_steps(self) -> int:
    """k: the largest divisor of tau up to what was asked."""
    return max(k for k in range(1, self.steps_per_dispatch + 1) if self.steps_per_phase % k == 0)


class Dispatch(NamedTuple):
  """k inner steps of the paths in flight."""

  phase: int
  turn: int
  step: int  # within the phase, of the first of the k
  last_of_turn: bool
  last_of_phase: bool


def updates_after(job: Job, phase: int, turn: int, step: int) -> int:
  """Inner steps that every position has made before (phase, turn, step): the name of a checkpoint there."""
  return (phase * len(job.programs.placement.turns()) + turn) * job.steps_per_phase + step


def dispatches(job: Job, phase: int, turn: int, step: int) -> Iterator[Dispatch]:
  """What is to be done from there on; turns in which no path trains are left out."""
  turns, k = job.programs.placement.turns(), job.dispatch_steps
  for t in range(phase, job.phases):
    active = job.weights(t).reshape(-1) > 0
    trained = [i for i, places in enumerate(turns) if active[job.programs.placement.paths(places)].any()]
    for i in trained:
      if (t, i) < (phase, turn):
        continue
      for s in range(step if (t, i) == (phase, turn) else 0, job.steps_per_phase, k):
        last = s + k == job.steps_per_phase
        yield Dispatch(t, i, s, last, last and i == trained[-1])


@dataclasses.dataclass
class State:
  """Everything that training goes on from: arrays on the devices, figures on the host."""

  modules: Any
  outer: Any
  sums: Any
  squares: Any
  states: dict[int, Any]  # inner states by turn
  params: Any  # of the paths in flight; None between turns
  meta: dict[str, Any]

  def arrays(self) -> dict[str, Any]:
    """What a checkpoint holds: sums and parameters only where they are not what `begin` and zeros would make."""
    kept: dict[str, Any] = {'modules': self.modules, 'outer': self.outer}
    kept['states'] = {str(turn): state for turn, state in sorted(self.states.items())}
    if self.meta['turn']:
      kept |= {'sums': self.sums, 'squares': self.squares}
    return kept | ({'params': self.params} if self.params is not None else {})


def new_meta(num_paths: int) -> dict[str, Any]:
  """Position, early stopping, and sums that the report is made from."""
  return {
    'phase': 0, 'turn': 0, 'step': 0, 'turns_with_state': [], 'in_turn': False,
    'loss_sum': [0.0] * num_paths, 'loss_steps': [0] * num_paths,
    'best_loss': [None] * num_paths, 'best_version': [0] * num_paths,
    'inner_s': 0.0, 'outer_s': 0.0, 'steps': 0, 'tokens': 0,
  }  # fmt: skip


class Trainer:
  """Runs a job from wherever its last checkpoint left it."""

  def __init__(
    self,
    job: Job,
    workdir: pathlib.Path,
    every_steps: int,
    keep: int,
    metrics: metrics_lib.Metrics,
    stop_requested: Callable[[], bool],
  ):
    self.job, self.workdir, self.metrics, self.stop_requested = job, workdir, metrics, stop_requested
    self.every_steps, self.keep = every_steps, keep
    self.run_state = checkpoint.RunState(workdir / 'checkpoints' / job.name, keep)
    self.state = self._restore() or self._start()
    self.publisher = futures.ThreadPoolExecutor(1)
    self.publication = futures.Future[None]()
    self.publication.set_result(None)
    self.referenced = {u: m['best_version'] for u, m in self.run_state.metas().items()}  # by checkpoints
    turns = len(job.programs.placement.turns())
    total = job.phases * turns * job.steps_per_phase
    self.progress = metrics_lib.Progress(job.name, total, 'steps')

  # -- where it starts

  def _start(self) -> State:
    programs = self.job.programs
    modules, outer, sums, squares = programs.start(self.job.base)
    return State(modules, outer, sums, squares, {}, None, new_meta(programs.layout.grid.num_paths))

  def _restore(self) -> State | None:
    found = self.run_state.restore(self._abstract)
    if found is None:
      return None
    arrays, meta = found
    self.metrics.rewind(self.job.name, updates_after(self.job, meta['phase'], meta['turn'], meta['step']))
    fresh = self.job.programs.start(self.job.base)
    sums, squares = (arrays['sums'], arrays['squares']) if meta['turn'] else fresh[2:]
    states = {int(turn): state for turn, state in arrays['states'].items()}
    return State(arrays['modules'], arrays['outer'], sums, squares, states, arrays.get('params'), meta)

  def _abstract(self, meta: dict[str, Any]):
    """ShapeDtypeStructs with shardings of what a checkpoint with this meta holds."""
    programs = self.job.programs
    modules, outer, sums, squares = jax.eval_shape(programs.start, programs.shapes)
    params = jax.eval_shape(programs.begin, modules, np.zeros(programs.num_axes, np.int32))
    inner = jax.eval_shape(programs.fresh_state, params)
    found = State(modules, outer, sums, squares, {}, params if meta['in_turn'] else None, meta)
    found.states = {turn: inner for turn in meta['turns_with_state']}
    specs = State(programs.modules_spec, programs.outer_spec, programs.sums_spec, programs.squares_spec, {}, None, meta)
    specs.states = {turn: programs.state_spec for turn in meta['turns_with_state']}
    specs.params = programs.params_spec if meta['in_turn'] else None

    def with_sharding(struct, sharding):
      return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)

    return jax.tree.map(with_sharding, found.arrays(), programs.shardings(specs.arrays()))

  def _state_of(self, turn: int):
    """Inner state that the paths in flight go on with."""
    programs = self.job.programs
    if turn in self.state.states:
      state = self.state.states.pop(turn)
      return jax.device_put(state, programs.shardings(programs.state_spec)) if self.job.offload else state
    if self.job.base_state is None:
      return programs.fresh_state(self.state.params)
    return jax.tree.map(
      lambda x, spec: programs.placement.assemble(x.shape, spec, lambda _: x), self.job.base_state, programs.state_spec
    )

  # -- the loop

  def train(self) -> State:
    """To the end of the last phase. Raises Stopped after saving, when asked to stop."""
    job, programs, state = self.job, self.job.programs, self.state
    meta, turns = state.meta, programs.placement.turns()
    pending: tuple[Dispatch, Any] | None = None  # the dispatch whose metrics are not read yet
    inner = state.states.pop(meta['turn'], None) if meta['in_turn'] else None
    self.clock = self.phase_started = time.monotonic()
    self.timed = False  # the first dispatch compiles
    position = meta['phase'], meta['turn'], meta['step']
    ahead = dispatches(job, *position)
    count = sum(1 for _ in dispatches(job, *position))
    for dispatch, batch in shards.prefetch(lambda _: self._load(next(ahead)), 0, count):
      turn = np.array(turns[dispatch.turn], np.int32)
      if state.params is None:
        state.params = programs.begin(state.modules, turn)
        inner = self._state_of(dispatch.turn)
      first_step = np.int32(job.first_step + dispatch.phase * job.steps_per_phase + dispatch.step)
      state.params, inner, found = programs.steps(state.params, inner, *batch, first_step)
      if pending:
        self._log(*pending)
      pending = dispatch, found
      meta |= {'phase': dispatch.phase, 'turn': dispatch.turn, 'step': dispatch.step + job.dispatch_steps}
      if dispatch.last_of_turn:
        weights = job.weights(dispatch.phase)
        state.sums, state.squares = programs.finish(
          state.sums, state.squares, state.modules, state.params, weights, turn
        )
        state.params = None
        if job.keep_state:
          state.states[dispatch.turn] = self._waiting(inner)
        meta |= {'turn': dispatch.turn + 1, 'step': 0}
      if dispatch.last_of_phase:
        self._log(*pending)
        pending = None
        self._end_phase(dispatch)
      asked = self.stop_requested()
      if asked or self._due(dispatch):
        if pending:
          self._log(*pending)
          pending = None
        self._save(inner)
      if asked:
        self._finish()
        raise Stopped
    self._finish()
    return state

  def _load(self, dispatch: Dispatch):
    """The dispatch with its rows on the devices, [k, m_a, ..., B, L]; every process reads its own paths' shards."""
    job, placement = self.job, self.job.programs.placement
    first = job.first_step + dispatch.phase * job.steps_per_phase + dispatch.step
    turn = placement.turns()[dispatch.turn]
    steps, shape = range(first, first + job.dispatch_steps), (job.batch_size, job.programs.model.config.seq_len)
    loaded: dict[Coordinates, np.ndarray] = {}
    n = len(placement.positions)

    def rows(position):
      if position not in loaded:
        path = placement.path(turn, position)
        loaded[position] = np.stack([np.stack(job.batch(path, step)) for step in steps], axis=1)  # [2, k, B, L]
      return loaded[position]

    def piece(i, index):
      block = rows(tuple(s.start or 0 for s in index[1 : n + 1]))[i][:, *index[n + 1 :]]
      return block.reshape(len(steps), *(1,) * n, *block.shape[1:])

    whole, sharding = (len(steps), *placement.positions, *shape), placement.sharding(*job.programs.rows_spec(1))
    return dispatch, [
      jax.make_array_from_callback(whole, sharding, lambda index, i=i: piece(i, index)) for i in range(2)
    ]

  def _waiting(self, inner):
    """Inner state of paths that wait for their next phase, in host memory where the config asks."""
    if not self.job.offload:
      return inner
    programs = self.job.programs
    host = jax.tree.map(lambda s: s.with_memory_kind('pinned_host'), programs.shardings(programs.state_spec))
    return jax.device_put(inner, host)

  def _log(self, dispatch: Dispatch, found):
    """A row of metrics and the progress line, from a dispatch that the device has finished or is about to."""
    job, meta, k = self.job, self.state.meta, self.job.dispatch_steps
    loss, norm = (mesh.fetch(found[name]).reshape(k, -1) for name in ('loss', 'grad_norm'))
    now = time.monotonic()
    active = job.weights(dispatch.phase).reshape(-1) > 0
    paths = job.programs.placement.paths(job.programs.placement.turns()[dispatch.turn])
    trained = [(i, path) for i, path in enumerate(paths) if active[path]]
    for i, path in trained:
      meta['loss_sum'][path] += float(loss[:, i].astype(np.float64).sum())
      meta['loss_steps'][path] += k
    tokens = k * len(trained) * job.batch_size * job.programs.model.config.seq_len
    meta['tokens'] += tokens
    meta['steps'] += k
    if self.timed:
      meta['inner_s'] += now - self.clock
      meta['timed_tokens'] = meta.get('timed_tokens', 0) + tokens
      meta['timed_steps'] = meta.get('timed_steps', 0) + k
    rate = tokens / (now - self.clock) if self.timed else None
    self.clock, self.timed = now, True
    done = updates_after(job, dispatch.phase, dispatch.turn, dispatch.step + k)
    step = job.first_step + dispatch.phase * job.steps_per_phase + dispatch.step + k
    figures = {'loss': loss.mean(0)[[i for i, _ in trained]], 'grad_norm': norm.mean(0)[[i for i, _ in trained]]}
    learning_rate = float(job.programs.inner.learning_rate(np.asarray(step - 1)))
    self.metrics.write(
      'step', job.name, done, step=step, phase=dispatch.phase, paths=[path for _, path in trained], **figures,
      learning_rate=learning_rate, tokens_per_s=rate,
    )  # fmt: skip
    shown = {'phase': f'{dispatch.phase + 1}/{job.phases}'} if job.phases > 1 else {}
    self.progress.update(done, **shown, loss=float(figures['loss'].mean()), **({'tokens_per_s': rate} if rate else {}))

  def _end_phase(self, dispatch: Dispatch):
    """The outer step, then what follows from the new modules: hold-out losses, validation, publication."""
    job, state, meta, programs = self.job, self.state, self.state.meta, self.job.programs
    self.publication.result()  # it reads the modules that the outer step is about to overwrite
    started = time.monotonic()
    state.modules, state.outer, state.sums, state.squares, statistics = programs.outer(
      state.modules, state.outer, state.sums, state.squares, job.weights(dispatch.phase)
    )
    statistics = jax.tree.map(lambda x: mesh.fetch(x).reshape(-1), statistics)
    outer_s = time.monotonic() - started
    meta['outer_s'] += outer_s
    version = dispatch.phase + 1
    meta |= {'phase': version, 'turn': 0, 'step': 0}

    def params_of_turn(turn):
      return programs.begin(state.modules, np.array(turn, np.int32))

    holdout = self._early_stopping(version, params_of_turn)
    means = [s / n if n else None for s, n in zip(meta['loss_sum'], meta['loss_steps'], strict=True)]
    meta |= {'loss_sum': [0.0] * len(means), 'loss_steps': [0] * len(means)}
    done, step = updates_after(job, version, 0, 0), job.first_step + version * job.steps_per_phase
    self.metrics.write(
      'phase', job.name, done, phase=version, step=step, inner_s=started - self.phase_started, outer_s=outer_s,
      loss_by_path=means, holdout_loss_by_path=holdout, best_version_by_path=meta['best_version'],
      outer_gradient_norm=statistics['norm'], cosine={k: float(v.mean()) for k, v in statistics['cosine'].items()},
    )  # fmt: skip
    if job.validate and (version == job.phases or (job.validate_every and version % job.validate_every == 0)):
      row = job.validate(params_of_turn)
      self.metrics.write('evaluation', job.name, done, phase=version, step=step, **row)
    if job.publish:
      self.publication = self.publisher.submit(self._publish, version, state.modules, list(meta['best_version']))
    self.clock = self.phase_started = time.monotonic()

  def _early_stopping(self, version: int, params_of_turn) -> list[float | None]:
    """Points each path whose hold-out loss is its best so far at this version of its modules [2.7]."""
    meta, num_paths = self.state.meta, self.job.programs.layout.grid.num_paths
    if self.job.holdout is None:
      meta['best_version'] = [version] * num_paths
      return [None] * num_paths
    found = evaluate.mean_by_path(evaluate.losses(self.job.programs, params_of_turn, self.job.holdout))
    for path, loss in enumerate(found):
      best = meta['best_loss'][path]
      if loss is None or best is None or loss < best:
        meta['best_loss'][path], meta['best_version'][path] = loss, version
    return found

  # -- what survives

  def _publish(self, version: int, modules, best: list[int]):
    """Modules, then the pointers to them, then what nobody points at goes: in this order no pointer ever dangles."""
    checkpoint.publish_modules(self.workdir, version, self.job.programs.layout, modules)
    if jax.process_index() == 0:
      pointers = {'version': best, 'holdout_loss': self.state.meta['best_loss']}
      checkpoint.write_json(self.workdir / 'paths' / 'best.json', pointers)
      checkpoint.collect(self.workdir, {*best, *(v for held in self.referenced.values() for v in held)})

  def _due(self, dispatch: Dispatch) -> bool:
    """A multiple of every_steps was passed, or the job is done."""
    after = updates_after(self.job, dispatch.phase, dispatch.turn, dispatch.step + self.job.dispatch_steps)
    last = dispatch.last_of_phase and dispatch.phase + 1 == self.job.phases
    return last or after // self.every_steps > (after - self.job.dispatch_steps) // self.every_steps

  def _save(self, inner):
    """Waits for the publication that it refers to; the arrays are copied here, and written in the background."""
    self.publication.result()
    state, meta = self.state, self.state.meta
    meta['in_turn'] = state.params is not None
    if meta['in_turn']:
      state.states[meta['turn']] = inner
    meta['turns_with_state'] = sorted(state.states)
    updates = updates_after(self.job, meta['phase'], meta['turn'], meta['step'])
    self.run_state.save(updates, state.arrays(), meta)
    if meta['in_turn']:
      del state.states[meta['turn']]
    held = {**self.referenced, updates: list(meta['best_version'])}
    self.referenced = {u: held[u] for u in sorted(held)[-self.keep - 1 :]}

  def _finish(self):
    self.publication.result()
    self.publisher.shutdown()
    self.run_state.wait()
    self.run_state.close()
    self.progress.close()
