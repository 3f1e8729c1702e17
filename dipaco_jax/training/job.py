"""What a training loop is to do: its programs, phases, batches and evaluation; and the dispatches that this takes."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from dipaco_jax.algorithm import inner, streaming, weight_cap
from dipaco_jax.algorithm.grid import Coordinates, largest_divisor
from dipaco_jax.config import choices
from dipaco_jax.training.evaluation import Rows
from dipaco_jax.training.programs import Programs


@dataclasses.dataclass(frozen=True)
class Schedule:
  """Phases of tau inner steps, and where in the learning rate's schedule they are."""

  phases: int
  steps_per_phase: int  # tau
  steps_per_dispatch: int  # at most
  first_step: int = 0  # the global step before the first update
  begin: int = 0  # the phase that this round of sharding begins with
  until: int | None = None  # the phase before which this round ends; None: it is the last
  timetable: streaming.Timetable | None = None  # None: phases are of one piece

  @property
  def end(self) -> int:
    """The phase before which training on these shards ends."""
    return self.phases if self.until is None else self.until

  @property
  def dispatch_steps(self) -> int:
    """k: the largest divisor of tau, and of the pieces of phases, up to the configured number."""
    return self.timetable.unit if self.timetable else largest_divisor(self.steps_per_phase, self.steps_per_dispatch)

  def global_step(self, phase: int, step: int) -> int:
    """Returns the step of the learning rate's schedule, pretraining included."""
    return self.first_step + phase * self.steps_per_phase + step


class Point(NamedTuple):
  """A point of a phase, whose pieces the paths go through in turns."""

  phase: int
  turn: int
  step: int  # from the beginning of the phase
  piece: int = 0


def count_updates(times: streaming.Timetable, num_paths: int, turns: int, point: Point) -> int:
  """Returns the inner steps of all paths before a point of a phase, which takes a number of turns.

  Paths that do not train count too, so that the number does not depend on the schedule.
  """
  begin, end, *_ = times.pieces(point.phase)[point.piece]
  in_turn = turns * begin + point.turn * (end - begin) + max(0, point.step - begin)
  return num_paths * times.tau * point.phase + num_paths // turns * in_turn


@dataclasses.dataclass(frozen=True)
class Data:
  """What is trained on."""

  batch_size: int  # rows per path
  batch: Callable[[int, int], tuple[np.ndarray, np.ndarray]]  # (path, its own step) -> tokens, segments [B, L]


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """What is measured at the end of phases."""

  holdout: Rows | None = None  # for early stopping
  validate: Callable[[Callable[[Coordinates], Any]], dict[str, Any]] | None = None  # params_of_turn -> figures
  validate_every: int = 0  # phases; 0: after the last
  sample: Callable[[int, Callable[[Coordinates], Any]], None] | None = None  # (phase from 1, params_of_turn)


@dataclasses.dataclass(frozen=True)
class Job:
  """What to train, and on what."""

  name: str  # the stage
  programs: Programs
  schedule: Schedule
  data: Data
  weights: Callable[[int], np.ndarray]  # phase -> w_i of every path, shaped like the grid; 0: not trained
  base: dict[str, np.ndarray]  # parameters that every path starts from
  base_state: Any  # inner state that every path starts with; None: fresh
  keep_state: bool = True
  evaluation: Evaluation = Evaluation()
  publish: bool = False  # modules, for others to read
  later_work: float = 0.0  # of the run's training after this job, in multiples of this job's
  round: int = 0  # of sharding: a new one's hold-outs are others, and early stopping begins again
  lost: Callable[[int], np.ndarray] | None = None  # phase -> whose outer gradient is lost, shaped like the grid

  @functools.cached_property
  def times(self) -> streaming.Timetable:
    """When levels exchange."""
    schedule, levels = self.schedule, self.programs.levels
    return schedule.timetable or streaming.at_the_end(levels, schedule.steps_per_phase, schedule.dispatch_steps)

  @functools.cached_property
  def rows_for_gap(self) -> Rows | None:
    """The rows to evaluate paths on before the outer step too, or None if it changes nothing, as with one path."""
    programs = self.programs
    return None if choices.takes_over(programs.layout, programs.settings.outer) else self.evaluation.holdout

  def updates(self, phase: int, turn: int, step: int, piece: int = 0) -> int:
    """Returns `count_updates` on this job's devices: a checkpoint's name."""
    num_paths, turns = self.programs.layout.grid.num_paths, len(self.programs.placement.turns())
    return count_updates(self.times, num_paths, turns, Point(phase, turn, step, piece))

  @property
  def phase_updates(self) -> int:
    """Number of inner steps of all paths in a phase; phases in which some do not train count as many."""
    return self.programs.layout.grid.num_paths * self.schedule.steps_per_phase

  def own_step(self, path: int, phase: int, step: int) -> int:
    """Returns the step of a path's data: its global step minus those of phases without it, so that it misses no row.

    The path enters the new shard of a round at its present step.
    """
    return self.schedule.first_step + int(self._trained_before[phase, path]) * self.schedule.steps_per_phase + step

  @functools.cached_property
  def _trained_before(self) -> np.ndarray:
    """Number of earlier phases in which each path was trained, [phases, P]."""
    trained = [self.weights(phase).reshape(-1) > 0 for phase in range(self.schedule.end)]
    return np.cumsum([np.zeros_like(trained[0]), *trained[:-1]], axis=0, dtype=np.int32)

  def first_state(self, phase: int, params, at_rest: bool = False) -> Any:
    """Returns the inner state of paths in flight that have none of their own: the base model's, or a fresh one.

    With `at_rest`, the base model's has first moments of 0, because its last gradients say nothing any more.
    """
    if self.base_state is None or (phase and not self.keep_state):
      return self.programs.fresh_state(params)
    state = inner.at_rest(self.base_state) if at_rest else self.base_state
    assemble = self.programs.placement.assemble
    return jax.tree.map(lambda x, s: assemble(x.shape, s, lambda _: x), state, self.programs.specs.state)

  def outer_weights(self, phase: int) -> np.ndarray:
    """Returns w_i of every path in the outer step, shaped like the grid, or 0 if it takes no part."""
    return self.weights(phase) if self.lost is None else self.weights(phase) * ~self.lost(phase)

  def weights_by_level(self, phase: int) -> Any:
    """Returns `outer_weights`; with `outer.max_weight`, by level [weight_cap.py]."""
    layout, most = self.programs.layout, self.programs.settings.outer.max_weight
    return weight_cap.by_level(layout.grid, layout.levels, self.outer_weights(phase), most)

  def limits(self, phase: int) -> np.ndarray:
    """Returns f of screening.py, shaped like the grid; 0 for paths that continue from their own parameters.

    After a lost outer gradient a path starts from its own parameters, so its distance to the modules says nothing about
    one phase.
    """
    limits = np.full(self.programs.layout.grid.shape, self.programs.settings.outer.exclude_above, np.float32)
    return limits if self.lost is None or not phase else limits * ~self.lost(phase - 1)

  def lost_in_flight(self, phase: int, turn: Coordinates) -> np.ndarray:
    """Marks the positions whose outer gradients are lost, bool [m..]."""
    lost = np.zeros(self.programs.layout.grid.shape, bool) if self.lost is None else self.lost(phase)
    return self.programs.placement.in_flight(lost, turn)

  def trained(self, phase: int, turn: Coordinates) -> list[int]:
    """Returns the path of every position during a turn, -1 where it does not train in this phase."""
    active = self.weights(phase).reshape(-1) > 0
    return [path if active[path] else -1 for path in self.programs.placement.paths(turn)]


class Dispatch(NamedTuple):
  """k inner steps of the paths in flight."""

  phase: int
  turn: int
  step: int  # within the phase, of the first of the k
  last_of_turn: bool  # in its piece of the phase
  last_of_piece: bool
  last_of_phase: bool
  piece: int = 0


def dispatches(job: Job, phase: int, turn: int, step: int, piece: int = 0) -> Iterator[Dispatch]:
  """Yields the dispatches from (phase, piece, turn, step) on; turns in which no path trains are left out.

  `step` is that of the phase; earlier steps than the piece's first one mean that.
  """
  turns, k = job.programs.placement.turns(), job.schedule.dispatch_steps
  for t in range(phase, job.schedule.end):
    active = [i for i, places in enumerate(turns) if max(job.trained(t, places)) >= 0]
    pieces = job.times.pieces(t)
    for number, i in itertools.product(range(len(pieces)), active):
      if (t, number, i) < (phase, piece, turn):
        continue
      begin, end, *_ = pieces[number]
      first = max(begin, step) if (t, number, i) == (phase, piece, turn) else begin
      for s in range(first, end, k):
        last = s + k == end
        last_of_piece = last and i == active[-1]
        yield Dispatch(t, i, s, last, last_of_piece, last_of_piece and number + 1 == len(pieces), number)


def load_batch(job: Job, dispatch: Dispatch, own_first: int | None = None) -> tuple[Dispatch, list[jax.Array]]:
  """Returns the dispatch and its rows on the devices; every process reads its own paths' shards.

  `own_first`: the own step before the phase of the one path in flight, where that is not the job's.
  """
  placement = job.programs.placement
  turn, k = placement.turns()[dispatch.turn], job.schedule.dispatch_steps

  def rows(position: Coordinates) -> np.ndarray:
    path = placement.path(turn, position)
    before = job.own_step(path, dispatch.phase, 0) if own_first is None else own_first
    first = before + dispatch.step
    return np.stack([np.stack(job.data.batch(path, first + i)) for i in range(k)], axis=1)  # [2, k, B, L]

  shape = k, job.data.batch_size, job.programs.model.config.seq_len
  return dispatch, placement.assemble_pair(shape, job.programs.specs.rows(1), rows, lead=1)
