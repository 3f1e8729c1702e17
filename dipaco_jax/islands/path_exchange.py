"""Exchange of a path: modules that it takes over before a piece of a phase, and messages and state after the piece.

The path's own levels (own_levels.py) are exchanged without a message: their new modules are in its state.
"""

import functools
from collections.abc import Collection

import jax
import numpy as np

from dipaco_jax.algorithm import outer, streaming
from dipaco_jax.config import settings
from dipaco_jax.islands import messages, own_levels, path_state, pieces
from dipaco_jax.islands.island import Island
from dipaco_jax.islands.messages import Sent
from dipaco_jax.islands.path_state import Arrays, PathState
from dipaco_jax.islands.pieces import Part


def whole(island: Island, path: int, phase: int, carried: Arrays) -> PathState:
  """Returns a path's state at the beginning of a phase: the modules, and the state that the path carries."""
  state = own_levels.begin(island, path, path_state.from_carried(carried, island.shapes))
  state = own_levels.note_left_out(island, path, phase, state)
  return state._replace(params=parameters_before(island, path, phase, state))


def parameters_before(island: Island, path: int, phase: int, state: PathState) -> Arrays:
  """Returns a path's parameters as all of its modules have them before a phase."""
  params = island.path_parameters(path, phase, island.shared_levels) | own_levels.weights(state)
  return dict(sorted(params.items()))


def take_over(island: Island, path: int, part: Part) -> Arrays:
  """Reads the parameters that a path takes over before a piece, of levels that it shares."""
  params: Arrays = {}
  piece = pieces.piece(island, part)
  for level in {*piece.mixed} - island.own_levels:
    version = island.timetable.version(level, part.phase, piece.begin)
    params |= island.path_parameters(path, version, [level])
  return params


def mixed(island: Island, path: int, part: Part, state: PathState) -> PathState:
  """Returns a path's state after it has taken new parameters over, before a piece."""
  if part.nth == 0 and pieces.excluded_before(island, [path], part):  # messages under way are not its own
    before = island.timetable.left(island.timetable.places, part.phase - 1)
    return state._replace(left=of_levels(island, state.params, before))
  own_weights = of_levels(island, own_levels.weights(state), pieces.piece(island, part).mixed)
  new = take_over(island, path, part) | own_weights
  own = state.params
  left = state.left
  alphas = {n: island.timetable.mix(island.layout.owner[n].name) for n in new}
  moved = {n: np.asarray(_taken(alphas[n], own[n], left.get(n), x)) for n, x in new.items()}
  return state._replace(params=own | moved, left={name: x for name, x in left.items() if name not in new})


def of_levels(island: Island, params: Arrays, levels: Collection[str]) -> Arrays:
  """Returns the parameters of some levels."""
  return {name: x for name, x in params.items() if island.layout.owner[name].name in levels}


@functools.partial(jax.jit, static_argnums=0)
def _taken(alpha: float, own: jax.Array, left: jax.Array | None, new: jax.Array) -> jax.Array:
  return streaming.taken(alpha, own, left, new)


def after(island: Island, part: Part, state: PathState) -> PathState:
  """Returns the state with which a path continues after a piece."""
  drops = pieces.is_last(island, part) and not island.run.settings.inner.keep_state
  return state._replace(inner={}) if drops else state


def carried(island: Island, phase: int, state: PathState) -> Arrays:
  """Returns the state that a path carries to its next phase: only its own modules if it starts with fresh state."""
  state = after(island, Part(phase, len(pieces.of_phase(island, phase)) - 1), state)
  if state.excluded:
    return state.own_arrays()
  return state.carried() if island.timetable.is_closed(phase) else state.to_arrays()


def send(
  island: Island, path: int, part: Part, trained: PathState, state: PathState
) -> tuple[dict[str, Sent], Arrays]:  # fmt: skip
  """Returns a path's messages of all levels that are sent after a piece, including its own levels, and its residuals.

  `trained` has the path's parameters and inner state after the piece, `state` everything else.
  """
  sent = {}
  levels = pieces.piece(island, part).sent
  residuals = state.residuals
  old = island.path_parameters(path, part.phase, {*levels} - island.own_levels) | own_levels.weights(state)
  for level in (level for level in island.layout.levels if level.name in levels):
    new = {name: trained.params[name] for name in island.layout.names(level)}
    rows = row_weights(island, trained.inner, new) if level.name not in island.own_levels else {}
    sent[level.name] = messages.send(island.kind(level), old, new, residuals, rows)
  return sent, residuals | {name: e for message in sent.values() for name, e in message.residuals.items()}


def row_weights(island: Island, inner: Arrays, names: Collection[str]) -> Arrays:
  """Returns a path's row weights of some parameters, from its inner state; {} without `outer.row_weights`."""
  s = island.run.settings
  if not s.outer.row_weights:
    return {}
  moments, count = path_state.second_moments(inner, names)
  return {name: np.asarray(x) for name, x in _row_weights(s.inner, moments, count).items()}


@functools.partial(jax.jit, static_argnums=0)
def _row_weights(config: settings.Inner, moments: dict[str, jax.Array], count: jax.Array) -> dict[str, jax.Array]:
  return outer.row_weights(moments, count, config.b2, config.epsilon)
