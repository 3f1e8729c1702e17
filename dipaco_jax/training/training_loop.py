"""Training as one program on one mesh: phases of tau inner steps, then the outer step (Algorithm 1) [2.5, 2.6].

Positions of the mesh take their paths in turn. A dispatch is k inner steps of the paths in flight; between dispatches
the loop only hands over batches that are on the device already and reads the metrics of the dispatch before.
"""

import functools
import pathlib
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax
import numpy as np

from dipaco_jax.algorithm import screening
from dipaco_jax.algorithm.grid import Coordinates
from dipaco_jax.buckets import disks
from dipaco_jax.config import settings
from dipaco_jax.core.errors import Diverged
from dipaco_jax.data import prefetching
from dipaco_jax.processes import processes, stopping, time_use
from dipaco_jax.storage import module_store, publishing, remedies, seals
from dipaco_jax.telemetry import profiling
from dipaco_jax.telemetry.metrics_log import Metrics
from dipaco_jax.training import evaluation, job as job_lib, module_publishing, run_checkpoints, train_state, turns
from dipaco_jax.training.job import Dispatch, Job
from dipaco_jax.training.mesh import fetch
from dipaco_jax.training.train_log import Journal

CLOSE_S = 30  # time after an error to finish writes
Stop = Callable[[], bool]


class Stopped(KeyboardInterrupt):
  """The run was asked to stop, and its last finite state is saved."""


class Trainer:
  """Runs a job from wherever its last checkpoint left it."""

  def __init__(
    self, job: Job, workdir: pathlib.Path, config: settings.Checkpoint, rows: Metrics, stop: Stop,
    disk: disks.Disk = disks.SHARED,
  ):  # fmt: skip
    """`stop` is asked after every dispatch whether to save and stop; `disk` is the workdir's."""
    self.job = job
    self.workdir = workdir
    self.every_steps = config.every_steps
    self.stop = stop
    self.disk, folder = disk, workdir / 'checkpoints' / job.name
    sealed = disk.mirror.publish_checkpoint if disk.mirror else None
    self.checkpoints = run_checkpoints.RunCheckpoints(folder, config.keep, job.phase_updates, sealed, disk)
    restored = train_state.restore(self.checkpoints, job.programs, functools.partial(job.first_state, 0))
    self.state = restored or train_state.new_state(job.programs, job.base)
    record = self.state.record
    time_use.lose_since(record.seconds)
    if record.phase < job.schedule.begin:  # else all phases would train on the shards of this round
      self.checkpoints.close()
      raise seals.Damaged(folder, remedies.explain_lost_checkpoints(workdir))
    if record.round != job.round:
      record.round, record.best_loss = job.round, [None] * len(record.best_loss)
    self.profiler = profiling.NONE
    self.rows = rows
    rows.rewind(job.name, self._updates())
    self.journal = Journal(job, rows, record)
    self.publisher = futures.ThreadPoolExecutor(1)
    self.publication: futures.Future = self.publisher.submit(lambda: None)
    # The versions that each checkpoint's pointers name, so that none is collected before the checkpoint is.
    self.pointed = {u: meta['record']['best_version'] for u, meta in self.checkpoints.metas.items()}
    self.own_losses: list[evaluation.PendingTurn] = []  # of the turns whose inner steps are done, on hold-outs
    self.statistics: list[dict[str, Any]] = []  # of the outer steps of the phase, on the devices
    self.outer_s = 0.0  # of them
    self.unsaved = 0  # steps since the last checkpoint
    self.dispatched = False  # since there is a state that is not the one it began with, or may be

  def _updates(self) -> int:
    record = self.state.record
    return self.job.updates(record.phase, record.turn, record.step, record.piece)

  def has_news(self) -> bool:
    """Returns whether an exit now would lose updates, or leave other processes waiting."""
    return self.dispatched or processes.joined()

  def train(self, profiler: profiling.Profiler = profiling.NONE) -> train_state.State:
    """Trains to the end of the round's last phase, and profiles the inner steps that the profiler names.

    Raises Stopped after saving, when asked to stop; or Diverged, when nothing is saved that was not there before.
    """
    self.profiler = profiler
    with time_use.doing(time_use.CHECKPOINT), stopping.closing(CLOSE_S) as opened:  # closing waits for the last one
      opened.callback(self.checkpoints.close)
      opened.callback(self.publisher.shutdown)
      opened.callback(self.journal.close)
      with time_use.doing(time_use.INNER):
        return self._to_the_end()

  def _to_the_end(self) -> train_state.State:
    record = self.state.record
    todo = job_lib.dispatches(self.job, record.phase, record.turn, record.step, record.piece)
    batches = prefetching.prefetch(functools.partial(job_lib.load_batch, self.job), todo)
    try:
      for dispatch, batch in time_use.fed(batches, self.journal.is_busy):
        self._inner(dispatch, batch)
        if dispatch.last_of_turn:
          self._end_turn(dispatch)
        if dispatch.last_of_piece:
          self._end_piece(dispatch)
        if dispatch.last_of_phase:
          self._end_phase(dispatch)
        # Signals reach processes apart: they stop after the same dispatch, or would wait for each other.
        stop = processes.any_process(self.stop(), f'{self.job.name} stops after {dispatch}')
        if stop or self._due(dispatch):
          self._save(dispatch)
        if stop:
          raise Stopped
      self.journal.catch_up()
      self._await_publication()
      return self.state
    except Exception as e:
      processes.end_if_another_is_gone(e)
      raise

  # -- inner

  def _inner(self, dispatch: Dispatch, batch: list[jax.Array]):
    """Makes k inner steps of the paths in flight; the first of a turn copies their modules."""
    job = self.job
    programs = self.job.programs
    state = self.state
    turn = np.array(programs.placement.turns()[dispatch.turn], np.int32)
    if state.params is None:
      state.params, state.inner[dispatch.turn] = turns.begin(job, state, dispatch, turn)
    first, after = job.schedule.global_step(dispatch.phase, dispatch.step), dispatch.step + job.schedule.dispatch_steps
    stop = first + job.schedule.dispatch_steps
    self.profiler.begin(first, stop, self.journal.catch_up)
    state.params, state.inner[dispatch.turn], metrics = programs.steps(
      state.params, state.inner[dispatch.turn], *batch, np.int32(first), job.weights(dispatch.phase), turn
    )
    self.dispatched, record = True, state.record
    record.move_to(dispatch.phase, dispatch.piece, dispatch.turn, after)
    self.unsaved += job.schedule.dispatch_steps
    self.journal.dispatched(dispatch, metrics)
    if self.profiler.end(stop, dispatch.last_of_turn, self.journal.catch_up):
      self.journal.lap()

  # -- outer

  def _end_turn(self, dispatch: Dispatch):
    """Adds the outer gradients that leave now to the sums; the turn's AdamW state waits, perhaps in host memory."""
    job = self.job
    programs = self.job.programs
    state = self.state
    place, params = programs.placement.turns()[dispatch.turn], state.params
    piece = turns.piece_of(job, dispatch)
    ends_phase = piece.end == job.schedule.steps_per_phase
    if ends_phase and (holdout := job.rows_for_gap) is not None:  # before the outer step
      self.own_losses.append(evaluation.dispatch_turn(programs, place, lambda _: params, holdout))
    if piece.sent:
      turns.send(job, state, dispatch, piece)
    if job.lost_in_flight(dispatch.phase, place).any() or not (ends_phase and job.times.is_closed(dispatch.phase)):
      state.own[dispatch.turn] = state.params
    state.params = None
    state.record.turn, state.record.step = dispatch.turn + 1, 0
    inner = state.inner.pop(dispatch.turn)
    if job.keep_state or not ends_phase:
      state.inner[dispatch.turn] = jax.device_put(inner, programs.specs.waiting)

  def _end_piece(self, dispatch: Dispatch):
    """Makes the outer step of the levels that have left."""
    self.state.record.move_to(dispatch.phase, dispatch.piece + 1)
    if not (sent := turns.piece_of(self.job, dispatch).sent):
      return
    if dispatch.last_of_phase:
      self.journal.catch_up()
      self._read_own_losses()
    self._await_publication()  # it reads the modules that the outer step is about to overwrite
    self._outer_step(dispatch, sent)

  @time_use.doing(time_use.OUTER)
  def _outer_step(self, dispatch: Dispatch, sent: tuple[str, ...]):
    """Makes the outer step of these levels; at the end of a phase, waits for it."""
    job = self.job
    state = self.state
    programs = self.job.programs
    started = time.monotonic()
    state.modules, state.masters, state.outer, statistics = programs.outer(sent)(
      state.modules, state.masters, state.outer, state.gathered, job.weights_by_level(dispatch.phase)
    )
    state.gathered = programs.zero_sums(sent, dispatch.last_of_phase)(state.gathered)
    self.statistics.append(statistics)
    if dispatch.last_of_phase:
      self._read_statistics()
    self.outer_s += time.monotonic() - started

  def _read_statistics(self):
    """Moves the statistics of the phase's outer steps from the devices to the record; waits for them."""
    record = self.state.record
    for statistics in self.statistics:
      for name, values in jax.tree.map(lambda x: fetch(x).tolist(), statistics).items():
        record.sent[name] = record.sent.get(name, {}) | values if isinstance(values, dict) else values
    self.statistics = []

  def _end_phase(self, dispatch: Dispatch):
    """Looks at the outer steps of the phase; then hold-out losses, publication and validation of the new modules."""
    job = self.job
    state = self.state
    programs = self.job.programs
    statistics = jax.tree.map(np.asarray, state.record.sent, is_leaf=lambda x: isinstance(x, list))
    outer_s = self.outer_s
    self.outer_s = 0.0
    state.record.sent = {}
    version = dispatch.phase + 1
    excluded = self._screened(dispatch.phase, statistics)
    state.record.move_to(version)

    def params_of_turn(turn: Coordinates) -> Any:
      return programs.gather_path(state.modules, np.array(turn, np.int32))

    holdout = self._early_stopping(version, params_of_turn)
    if job.publish:
      best = list(state.record.best_version), list(state.record.best_loss)
      self.publication = self.publisher.submit(self._publish, version, programs.unshard(state.modules), *best)
    self.journal.write_phase(outer_s, statistics, holdout, excluded)
    if job.evaluation.sample:
      with time_use.doing(time_use.EVALUATE):
        job.evaluation.sample(version, params_of_turn)
    every = job.evaluation.validate_every
    if job.evaluation.validate and (version == job.schedule.phases or (every and version % every == 0)):
      with time_use.doing(time_use.EVALUATE):
        self.journal.write_evaluation(job.evaluation.validate(params_of_turn))
    self.journal.lap()

  def _screened(self, phase: int, statistics: dict) -> dict[int, str]:
    """Returns why paths took no part in the outer step, by path; raises Diverged if training cannot continue."""
    job = self.job
    record = self.state.record
    layout = self.job.programs.layout
    config = job.programs.settings.outer
    trained = job.weights(phase) > 0
    excluded = statistics['excluded']
    record.excluded = screening.count_in_a_row(record.excluded, trained, excluded)
    reasons = {}
    for point in map(tuple, np.argwhere(trained & excluded).tolist()):
      path = layout.grid.path(point)
      moved = {level: float(r[point]) for level, r in statistics['moved'].items()}
      usual = {l.name: float(statistics['usual'][l.name][layout.grid.module(l, point)]) for l in layout.levels}
      reasons[path] = screening.exclusion_reason(moved, usual, config.exclude_above)
      self.journal.log_excluded(phase, path, reasons[path])
    try:
      screening.check_paths(layout, job.outer_weights(phase) > 0, excluded, record.excluded, config.max_excluded)
      screening.check_modules(layout, statistics['sound'])
    except Diverged as e:
      self.checkpoints.set_aside(job.updates(phase, 0, 0), 'diverged')
      raise Diverged(f'{job.name} diverged in phase {phase + 1}: {e}') from e
    return reasons

  @time_use.doing(time_use.EVALUATE)
  def _early_stopping(self, version: int, params_of_turn) -> list[float | None]:
    """Points each path whose hold-out loss is its best so far at this version of its modules [2.7]."""
    record, programs = self.state.record, self.job.programs
    if self.job.evaluation.holdout is None:
      record.best_version = [version] * len(record.best_version)
      return [None] * len(record.best_version)
    losses = evaluation.losses(programs, params_of_turn, self.job.evaluation.holdout)
    path_losses = [evaluation.to_compare(loss) for loss in evaluation.mean_by_path(losses)]
    of_models = evaluation.by_model(programs.layout.models(), path_losses, [float(n.sum()) for n in losses.targets])
    evaluation.update_best(version, of_models, record.best_version, record.best_loss)
    return path_losses

  @time_use.doing(time_use.EVALUATE)
  def _read_own_losses(self):
    record, trained = self.state.record, self.job.weights(self.state.record.phase).reshape(-1) > 0
    for begun in self.own_losses:
      for path, nll, targets in evaluation.collect_turn(begun):
        record.own_loss[path] = evaluation.finite_mean(nll, targets) if trained[path] else None
    self.own_losses = []

  # -- what survives

  @time_use.doing(time_use.CHECKPOINT)
  def _await_publication(self):
    self.publication.result()

  def _publish(self, version: int, modules, best: list[int], losses: list[float | None]):
    """Publishes modules, then the pointers, then deletes versions without pointers: no pointer ever dangles."""
    layout, name = self.job.programs.layout, self.job.name
    module_publishing.publish_modules(self.workdir, version, layout, modules, name, self.disk)
    if self.disk.is_ours:
      pointers = self.workdir / 'paths' / 'best.json'
      publishing.write_json(pointers, {'version': best, 'holdout_loss': losses})
      if self.disk.mirror:
        self.disk.mirror.publish_version(self.workdir / 'modules' / str(version), pointers)
      module_store.collect(self.workdir, {*best, *(v for held in list(self.pointed.values()) for v in held)})

  def _due(self, dispatch: Dispatch) -> bool:
    """Returns whether to save: after `every_steps` steps; if a phase has no more, at its end only; after the round.

    A longer phase ends with a checkpoint: only from there can a run continue with other positions.
    """
    job = self.job
    is_long = len(job.programs.placement.turns()) * job.schedule.steps_per_phase > self.every_steps
    after_all = dispatch.last_of_phase and (is_long or dispatch.phase + 1 == job.schedule.end)
    return after_all or (self.unsaved >= self.every_steps and (is_long or dispatch.last_of_phase))

  def _save(self, dispatch: Dispatch):
    """Saves a checkpoint, after everything that it refers to has been published and logged.

    If the last step was not finite for any path, nothing is saved, because the parameters may be the cause.
    """
    self.journal.catch_up()
    self._read_own_losses()
    if not dispatch.last_of_phase and self.journal.all_are_skipping():
      return
    self._read_statistics()
    self._write_checkpoint()
    self.unsaved = 0
    self.journal.lap()

  @time_use.doing(time_use.CHECKPOINT)
  def _write_checkpoint(self):
    """Copies the state off the devices, for writing in the background, and notes the files to which it points."""
    self.rows.sync()
    self._await_publication()
    record, updates = self.state.record, self._updates()
    record.seconds = time_use.read()
    train_state.save(self.checkpoints, updates, self.state, self.job.programs.placement.positions)
    pointed, kept = self.pointed | {updates: list(record.best_version)}, self.checkpoints.kept
    still_there = kept(self.pointed)  # until this one is written
    self.pointed = {u: pointed[u] for u in kept(pointed) | still_there}
