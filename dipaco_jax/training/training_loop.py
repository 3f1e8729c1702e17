"""Training as one program on one mesh: phases of tau inner steps, then the outer step (Algorithm 1) [2.5, 2.6].

Positions of the mesh take their paths in turn. A dispatch is k inner steps of the paths in flight; between dispatches
the loop only hands over batches that are on the device already and reads the metrics of the dispatch before.
"""

import dataclasses
import functools
import math
import pathlib
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NamedTuple

import jax
import numpy as np

from dipaco_jax.core import screening
from dipaco_jax.core.errors import Diverged
from dipaco_jax.core.grid import Coordinates, largest_divisor
from dipaco_jax.data import loader
from dipaco_jax.storage import module_store, publishing, seals
from dipaco_jax.training import evaluation, mesh, metrics_log, module_publishing, processes, stopping, train_log
from dipaco_jax.training import programs as programs_lib
from dipaco_jax.training import run_checkpoints as run_state_lib
from dipaco_jax.training import train_state as state_lib
from dipaco_jax.training.programs import Programs

CLOSE_S = 30  # after an error, for what was begun to be written


class Stopped(KeyboardInterrupt):
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
  batch: Callable[[int, int], tuple[np.ndarray, np.ndarray]]  # (path, its own step) -> tokens, segments [B, L]
  weights: Callable[[int], np.ndarray]  # phase -> w_i of every path, shaped like the grid; 0: not trained
  base: dict[str, np.ndarray]  # parameters that every path starts from
  base_state: Any  # inner state that every path starts with; None: fresh
  keep_state: bool = True
  holdout: evaluation.Rows | None = None  # for early stopping
  validate: Callable[[Callable[[Coordinates], Any]], dict[str, Any]] | None = None  # params_of_turn -> figures
  validate_every: int = 0  # phases; 0: after the last
  publish: bool = False  # modules, for others to read
  round: int = 0  # of sharding: a new one's hold-outs are others, and early stopping begins anew
  begin: int = 0  # the phase that this round begins with
  until: int | None = None  # the phase before which this round ends; None: it is the last
  lost: Callable[[int], np.ndarray] | None = None  # phase -> whose outer gradient is lost, shaped like the grid

  @property
  def end(self) -> int:
    return self.phases if self.until is None else self.until

  @property
  def dispatch_steps(self) -> int:
    """k: the largest divisor of tau up to what was asked."""
    return largest_divisor(self.steps_per_phase, self.steps_per_dispatch)

  def updates(self, phase: int, turn: int, step: int) -> int:
    """The name of a checkpoint at (phase, turn, step), on whatever devices: the inner steps of all paths before it.

    A path counts where it does not train too.
    """
    in_turn = math.prod(self.programs.placement.positions)
    return phase * self.phase_updates + in_turn * (turn * self.steps_per_phase + step)

  @property
  def phase_updates(self) -> int:
    """Of a phase in which all paths train; any other counts as many."""
    return self.programs.layout.grid.num_paths * self.steps_per_phase

  def global_step(self, phase: int, step: int) -> int:
    """Of the schedules."""
    return self.first_step + phase * self.steps_per_phase + step

  def own_step(self, path: int, phase: int, step: int) -> int:
    """Of the data: a path's global step less the steps of the phases that it has sat out, so that it misses no row.

    A round's new shard is entered at the step that the path has come to.
    """
    return self.first_step + int(self._trained_before[phase, path]) * self.steps_per_phase + step

  @functools.cached_property
  def _trained_before(self) -> np.ndarray:
    """In how many of the phases before each a path was trained, [phases, P]; by the phase's number alone."""
    trained = [self.weights(phase).reshape(-1) > 0 for phase in range(self.end)]
    return np.cumsum([np.zeros_like(trained[0]), *trained[:-1]], axis=0, dtype=np.int32)

  def first_state(self, phase: int, params) -> Any:
    """The inner state of paths in flight that have none of their own: the base model's, or a fresh one."""
    programs = self.programs
    if self.base_state is None or (phase and not self.keep_state):
      return programs.fresh_state(params)
    return jax.tree.map(
      lambda x, spec: programs.placement.assemble(x.shape, spec, lambda _: x), self.base_state, programs.state_spec
    )

  def heard(self, phase: int) -> np.ndarray:
    """w_i of every path in the outer step, shaped like the grid; 0: it takes no part."""
    return self.weights(phase) if self.lost is None else self.weights(phase) * ~self.lost(phase)

  def limits(self, phase: int) -> np.ndarray:
    """f of screening.py, shaped like the grid; 0 for paths that go on from their own parameters.

    Those are as far from the modules as these have moved since, whatever the learning rate is by now.
    """
    limits = np.full(self.programs.layout.grid.shape, self.programs.settings.outer.exclude_above, np.float32)
    return limits if self.lost is None or not phase else limits * ~self.lost(phase - 1)

  def lost_in_flight(self, phase: int, turn: Coordinates) -> np.ndarray:
    """Which positions' outer gradients are lost, bool [m..]."""
    placement = self.programs.placement
    lost = np.zeros(self.programs.layout.grid.shape, bool) if self.lost is None else self.lost(phase)
    return lost.reshape(-1)[placement.paths(turn)].reshape(placement.positions)

  def trained(self, phase: int, turn: Coordinates) -> list[int]:
    """The path of every position during a turn, -1 where it does not train in this phase."""
    active = self.weights(phase).reshape(-1) > 0
    return [path if active[path] else -1 for path in self.programs.placement.paths(turn)]


class Dispatch(NamedTuple):
  """k inner steps of the paths in flight."""

  phase: int
  turn: int
  step: int  # within the phase, of the first of the k
  last_of_turn: bool
  last_of_phase: bool


def dispatches(job: Job, phase: int, turn: int, step: int) -> Iterator[Dispatch]:
  """What is to be done from there on; turns in which no path trains are left out."""
  turns = job.programs.placement.turns()
  for t in range(phase, job.end):
    active = [i for i, places in enumerate(turns) if max(job.trained(t, places)) >= 0]
    for i in active:
      first = 0 if (t, i) > (phase, turn) else step if (t, i) == (phase, turn) else job.steps_per_phase
      for s in range(first, job.steps_per_phase, job.dispatch_steps):
        last = s + job.dispatch_steps == job.steps_per_phase
        yield Dispatch(t, i, s, last, last and i == active[-1])


def load(job: Job, dispatch: Dispatch) -> tuple[Dispatch, list[jax.Array]]:
  """The dispatch with its rows on the devices; every process reads its own paths' shards."""
  placement = job.programs.placement
  turn, k = placement.turns()[dispatch.turn], job.dispatch_steps
  loaded: dict[Coordinates, np.ndarray] = {}

  def rows(position):
    if position not in loaded:
      path = placement.path(turn, position)
      first = job.own_step(path, dispatch.phase, dispatch.step)
      loaded[position] = np.stack([np.stack(job.batch(path, first + i)) for i in range(k)], axis=1)  # [2, k, B, L]
    return loaded[position]

  shape, spec = (k, job.batch_size, job.programs.model.config.seq_len), job.programs.rows_spec(1)
  parts = (lambda position: rows(position)[0]), (lambda position: rows(position)[1])
  return dispatch, [placement.assemble(shape, spec, part, lead=1) for part in parts]


class Trainer:
  """Runs a job from wherever its last checkpoint left it."""

  def __init__(
    self,
    job: Job,
    workdir: pathlib.Path,
    every_steps: int,
    keep: int,
    rows: metrics_log.Metrics,
    stop: Callable[[], bool],
  ):
    """`every_steps` and `keep`: checkpoints; `stop`: asked after every dispatch whether to save and stop."""
    self.job, self.workdir, self.every_steps, self.stop = job, workdir, every_steps, stop
    self.run_state = run_state_lib.RunState(workdir / 'checkpoints' / job.name, keep, job.phase_updates)
    restored = state_lib.restore(self.run_state, job.programs, functools.partial(job.first_state, 0))
    self.state = restored or state_lib.start(job.programs, job.base)
    record = self.state.record
    if record.phase < job.begin:  # else all phases would train on the shards of this round
      self.run_state.close()
      raise seals.Damaged(seals.lost(workdir), workdir / 'checkpoints' / job.name)
    if record.round != job.round:
      record.round, record.best_loss = job.round, [None] * len(record.best_loss)
    self.rows = rows
    rows.rewind(job.name, job.updates(record.phase, record.turn, record.step))
    self.journal = train_log.Journal(job.name, job.programs, job.updates(job.phases, 0, 0), rows, record)
    self.publisher = futures.ThreadPoolExecutor(1)
    self.publication: futures.Future = self.publisher.submit(lambda: None)
    # The versions that each checkpoint's pointers name, so that none is collected before the checkpoint is.
    self.pointed = {u: meta['record']['best_version'] for u, meta in self.run_state.metas.items()}
    self.own_losses: list[evaluation.Begun] = []  # of the turns whose inner steps are done, on hold-outs
    self.unsaved = 0  # steps since the last checkpoint
    self.dispatched = False  # since there is a state that is not the one it began with, or may be

  def has_news(self) -> bool:
    """Whether something would be lost if the process ended now; others would wait for one of several."""
    return self.dispatched or processes.joined()

  def train(self) -> state_lib.State:
    """To the end of the round's last phase.

    Raises:
      Stopped: after saving, when asked to stop.
      Diverged: nothing is saved then that was not there before.
    """
    with stopping.closing(CLOSE_S) as opened:
      opened.callback(self.run_state.close)
      opened.callback(self.publisher.shutdown)
      opened.callback(self.journal.close)
      return self._to_the_end()

  def _to_the_end(self) -> state_lib.State:
    record = self.state.record
    todo = dispatches(self.job, record.phase, record.turn, record.step)
    try:
      for dispatch, batch in loader.prefetch(functools.partial(load, self.job), todo):
        self._inner(dispatch, batch)
        if dispatch.last_of_turn:
          self._end_turn(dispatch)
        if dispatch.last_of_phase:
          self._end_phase(dispatch)
        # Signals reach processes apart: they stop after the same dispatch, or would wait for each other.
        stop = processes.any_process(self.stop(), f'{self.job.name} stops after {self._updates_after(dispatch)}')
        if stop or self._due(dispatch):
          self._save(dispatch)
        if stop:
          raise Stopped
      self.journal.catch_up()
      self.publication.result()
      return self.state
    except Exception as e:
      processes.end_if_another_is_gone(e)
      raise

  # -- inner

  def _inner(self, dispatch: Dispatch, batch: list[jax.Array]):
    """k inner steps of the paths in flight; the first of a turn copies their modules."""
    job, programs, state = self.job, self.job.programs, self.state
    turn = np.array(programs.placement.turns()[dispatch.turn], np.int32)
    if state.params is None:
      state.params = programs.begin(state.modules, turn)
      renewed = self._in_flight(state.record.excluded, turn) > 0
      if (own := state.own.pop(dispatch.turn, None)) is not None:
        lost = job.lost_in_flight(dispatch.phase - 1, tuple(turn))
        state.params = state_lib.choose(own, state.params, lost & ~renewed)
      state.inner[dispatch.turn] = self._inner_state(dispatch)
      if renewed.any():
        fresh = programs.fresh_state(state.params)
        state.inner[dispatch.turn] = state_lib.choose(fresh, state.inner[dispatch.turn], renewed)
    first, after = job.global_step(dispatch.phase, dispatch.step), dispatch.step + job.dispatch_steps
    state.params, state.inner[dispatch.turn], found = programs.steps(
      state.params, state.inner[dispatch.turn], *batch, np.int32(first), job.weights(dispatch.phase), turn
    )
    self.dispatched = True
    state.record.phase, state.record.turn, state.record.step = dispatch.phase, dispatch.turn, after
    self.unsaved += job.dispatch_steps
    self.journal.dispatched(
      dispatch.phase,
      job.updates(dispatch.phase, dispatch.turn, after),
      first + job.dispatch_steps,
      job.trained(dispatch.phase, tuple(turn.tolist())),
      int((job.weights(dispatch.phase) > 0).sum()),
      job.batch_size,
      found,
    )

  def _in_flight(self, of_path: list[int], turn) -> np.ndarray:
    """What is known of paths, of those that are in flight, [m..]."""
    placement = self.job.programs.placement
    return np.array(of_path)[placement.paths(tuple(turn.tolist()))].reshape(placement.positions)

  def _inner_state(self, dispatch: Dispatch):
    """What the paths in flight go on with: their own, or the base model's, or a fresh one."""
    programs = self.job.programs
    if dispatch.turn in self.state.inner:
      return jax.device_put(self.state.inner[dispatch.turn], programs.shardings(programs.state_spec))
    return self.job.first_state(dispatch.phase, self.state.params)

  # -- outer

  def _end_turn(self, dispatch: Dispatch):
    """The paths' part of the outer gradient; their AdamW state waits, in host memory if the config asks."""
    programs, state = self.job.programs, self.state
    self._begin_own_losses(dispatch)
    turn = np.array(programs.placement.turns()[dispatch.turn], np.int32)
    first, steps = self.job.global_step(dispatch.phase, 0), self.job.steps_per_phase
    state.gathered = programs.finish(
      state.gathered, state.modules, programs_lib.usual(state.outer), state.params, state.inner[dispatch.turn],
      self.job.heard(dispatch.phase), self.job.limits(dispatch.phase), np.int32(first), np.int32(steps), turn,
    )  # fmt: skip
    if self.job.lost_in_flight(dispatch.phase, tuple(turn)).any():
      state.own[dispatch.turn] = state.params
    state.params = None
    state.record.turn, state.record.step = dispatch.turn + 1, 0
    inner = state.inner.pop(dispatch.turn)
    if self.job.keep_state:
      state.inner[dispatch.turn] = jax.device_put(inner, programs.waiting_shardings)

  def _end_phase(self, dispatch: Dispatch):
    """The outer step, and what follows from the new modules: hold-out losses, publication, validation."""
    job, state, programs = self.job, self.state, self.job.programs
    self.journal.catch_up()
    self._read_own_losses()
    self.publication.result()  # it reads the modules that the outer step is about to overwrite
    started = time.monotonic()
    state.modules, state.outer, statistics = programs.outer(
      state.modules, state.outer, state.gathered, job.heard(dispatch.phase)
    )
    state.gathered = programs.clear(state.gathered)
    statistics = jax.tree.map(mesh.fetch, statistics)
    outer_s = time.monotonic() - started
    version = dispatch.phase + 1
    excluded = self._screened(dispatch.phase, statistics)
    state.record.phase, state.record.turn, state.record.step = version, 0, 0

    def params_of_turn(turn):
      return programs.begin(state.modules, np.array(turn, np.int32))

    holdout = self._early_stopping(version, params_of_turn)
    if job.publish:
      best = list(state.record.best_version), list(state.record.best_loss)
      self.publication = self.publisher.submit(self._publish, version, programs.whole(state.modules), *best)
    updates, step = job.updates(version, 0, 0), job.global_step(version, 0)
    self.journal.phase(updates, step, outer_s, statistics, holdout, excluded)
    if job.validate and (version == job.phases or (job.validate_every and version % job.validate_every == 0)):
      self.journal.evaluation(updates, step, job.validate(params_of_turn))
    self.journal.lap()

  def _screened(self, phase: int, statistics: dict) -> dict[int, str]:
    """Why paths took no part in the outer step, by path; raises Diverged where it is no use to go on."""
    job, record, layout = self.job, self.state.record, self.job.programs.layout
    config, trained, excluded = job.programs.settings.outer, job.weights(phase) > 0, statistics['excluded']
    record.excluded = screening.count_in_a_row(record.excluded, trained, excluded)
    found = {}
    for point in map(tuple, np.argwhere(trained & excluded).tolist()):
      path = layout.grid.path(point)
      moved = {level: float(r[point]) for level, r in statistics['moved'].items()}
      usual = {l.name: float(statistics['usual'][l.name][layout.grid.module(l, point)]) for l in layout.levels}
      found[path] = screening.why(moved, usual, config.exclude_above)
      self.journal.excluded(phase, job.global_step(phase + 1, 0), path, found[path])
    try:
      screening.check(layout, job.heard(phase) > 0, excluded, record.excluded, config.max_excluded)
      screening.check_modules(layout, statistics['sound'])
    except Diverged as e:
      self.run_state.set_aside(job.updates(phase, 0, 0), 'diverged')
      raise Diverged(f'{job.name} diverged in phase {phase + 1}: {e}') from e
    return found

  def _early_stopping(self, version: int, params_of_turn) -> list[float | None]:
    """Points each path whose hold-out loss is its best so far at this version of its modules [2.7]."""
    record, programs = self.state.record, self.job.programs
    if self.job.holdout is None:
      record.best_version = [version] * len(record.best_version)
      return [None] * len(record.best_version)
    losses = evaluation.losses(programs, params_of_turn, self.job.holdout)
    found = [evaluation.to_compare(loss) for loss in evaluation.mean_by_path(losses)]
    of_models = evaluation.by_model(programs.layout.models(), found, [float(n.sum()) for n in losses.targets])
    evaluation.point(version, of_models, record.best_version, record.best_loss)
    return found

  def _begin_own_losses(self, dispatch: Dispatch):
    """Hold-out losses of what the paths in flight have come to, for the averaging gap; they are read later."""
    if self.job.holdout is not None:
      turn = self.job.programs.placement.turns()[dispatch.turn]
      params = self.state.params
      self.own_losses.append(evaluation.begin(self.job.programs, turn, lambda _: params, self.job.holdout))

  def _read_own_losses(self):
    record, trained = self.state.record, self.job.weights(self.state.record.phase).reshape(-1) > 0
    for begun in self.own_losses:
      for path, nll, targets in evaluation.read(begun):
        record.own_loss[path] = evaluation.finite_mean(nll, targets) if trained[path] else None
    self.own_losses = []

  # -- what survives

  def _publish(self, version: int, modules, best: list[int], losses: list[float | None]):
    """Modules, then the pointers to them, then what nobody points at goes: in this order no pointer ever dangles."""
    module_publishing.publish_modules(self.workdir, version, self.job.programs.layout, modules, self.job.name)
    if jax.process_index() == 0:
      publishing.write_json(self.workdir / 'paths' / 'best.json', {'version': best, 'holdout_loss': losses})
      module_store.collect(self.workdir, {*best, *(v for held in list(self.pointed.values()) for v in held)})

  def _updates_after(self, dispatch: Dispatch) -> int:
    return self.job.updates(dispatch.phase, dispatch.turn, dispatch.step + self.job.dispatch_steps)

  def _due(self, dispatch: Dispatch) -> bool:
    """So many steps were made since the last; in a phase of no more steps than these, at its end; or the round is done.

    A longer phase ends with one: only from there can a run go on with other positions.
    """
    job = self.job
    is_long = len(job.programs.placement.turns()) * job.steps_per_phase > self.every_steps
    after_all = dispatch.last_of_phase and (is_long or dispatch.phase + 1 == job.end)
    return after_all or (self.unsaved >= self.every_steps and (is_long or dispatch.last_of_phase))

  def _save(self, dispatch: Dispatch):
    """Everything that goes before is published and noted first: a checkpoint refers to nothing that isn't there.

    Where there is one path and its last step was not finite, the checkpoint before stays the newest: parameters may be
    what is wrong, and there is nothing else to go on from.
    """
    self.journal.catch_up()
    self._read_own_losses()
    if not dispatch.last_of_phase and self.journal.all_are_skipping():
      return
    self.rows.sync()
    self.publication.result()
    record = self.state.record
    updates = self.job.updates(record.phase, record.turn, record.step)
    state_lib.save(self.run_state, updates, self.state, self.job.programs.placement.positions)
    self.unsaved = 0
    pointed, kept = self.pointed | {updates: list(record.best_version)}, self.run_state.kept
    still_there = kept(self.pointed)  # until this one is written
    self.pointed = {u: pointed[u] for u in kept(pointed) | still_there}
    self.journal.lap()
