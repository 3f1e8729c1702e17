"""One turn of the paths in flight: their state before a piece of a phase, and their messages after it."""

from typing import Any

import jax
import numpy as np

from dipaco_jax.algorithm import streaming
from dipaco_jax.training import programs as programs_lib, train_state
from dipaco_jax.training.job import Dispatch, Job
from dipaco_jax.training.train_state import State


def piece_of(job: Job, dispatch: Dispatch) -> streaming.Piece:
  """Returns the piece of a phase that a dispatch is of."""
  return job.times.pieces(dispatch.phase)[dispatch.piece]


def begin(job: Job, state: State, dispatch: Dispatch, turn: np.ndarray) -> tuple[Any, Any]:
  """Returns parameters and inner states of the paths in flight, before a piece of a phase."""
  programs = job.programs
  place, times = programs.placement.turns()[dispatch.turn], job.times
  piece = piece_of(job, dispatch)
  renewed = programs.placement.in_flight(np.array(state.record.excluded), place) > 0
  renewed &= piece.begin == 0
  own = state.own.pop(dispatch.turn, None)
  if times.begins_whole(dispatch.phase) and piece.begin == 0:
    params = programs.gather_path(state.modules, turn)
    if own is not None:
      params = train_state.choose(own, params, job.lost_in_flight(dispatch.phase - 1, place) & ~renewed)
  else:
    params = own
    if renewed.any():
      current = programs.gather_path(state.modules, turn)
      params = train_state.choose(current, params, renewed)
      if (kept := state.left.get(dispatch.turn)) is not None:  # messages under way are not theirs
        state.left[dispatch.turn] = train_state.choose({name: current[name] for name in kept}, kept, renewed)
    if piece.mixed:
      left = {name: state.left[dispatch.turn].pop(name) for name in programs.left_names(piece.mixed)}
      params = programs.mix(piece.mixed)(params, left, state.modules, turn)
  if (inner := state.inner.get(dispatch.turn)) is None:
    inner = job.first_state(dispatch.phase, params)
  else:
    inner = jax.device_put(inner, programs.specs.shardings(programs.specs.state))
  return params, train_state.choose(programs.fresh_state(params), inner, renewed) if renewed.any() else inner


def send(job: Job, state: State, dispatch: Dispatch, piece: streaming.Piece):
  """Adds the outer gradients of the turn's paths, of some levels, to the sums."""
  programs = job.programs
  turn = np.array(programs.placement.turns()[dispatch.turn], np.int32)
  times, last = job.times, job.schedule.global_step(dispatch.phase, piece.end)
  if leaving := times.left(piece.sent, dispatch.phase):
    state.left[dispatch.turn] = state.left.get(dispatch.turn, {}) | programs.leave(leaving)(state.params)
  steps = {level: np.int32(times.steps_since(level, dispatch.phase)) for level in piece.sent}
  if (residuals := state.residuals.pop(dispatch.turn, None)) is None:
    residuals = programs.fresh_residuals() if programs.specs.compressed else {}
  state.gathered, residuals = programs.accumulate(piece.sent)(
    state.gathered, residuals, state.modules, programs_lib.usual(state.outer), state.params,
    state.inner[dispatch.turn], job.weights_by_level(dispatch.phase), job.limits(dispatch.phase), np.int32(last), steps,
    turn,
  )  # fmt: skip
  if residuals:
    state.residuals[dispatch.turn] = residuals
