"""What a path sends of its outer gradient at the end of its steps, and the sums of a phase that it is added to.

These run inside the program `accumulate` (programs.py), one path per position of the mesh.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dipaco_jax.algorithm import (
  compression,
  inner as inner_lib,
  modules as modules_lib,
  outer as outer_lib,
  screening,
)
from dipaco_jax.training.specs import Gathered, Specs


class Sender(NamedTuple):
  """A path at the end of its steps, and what decides whether its outer gradient counts; arguments of `accumulate`."""

  modules: modules_lib.Modules  # of a level that is sent, the version that the path began with or last took over
  usual: dict[str, Any]  # h of screening.py by level, shaped like its modules
  params: dict[str, Any]  # of this path alone, as is `state`
  state: Any
  weights: Any  # w_i of all paths, shaped like the grid; with `outer.max_weight`, by level
  limits: Any  # f of screening.py of all paths
  last: Any  # global step
  num_steps: dict[str, Any]  # by level, since its last exchange
  turn: Any  # [n], the path's index along each axis among this device's shards of modules and sums


def accumulate(
  specs: Specs, levels: tuple[str, ...], gathered: Gathered, residuals: dict[str, jax.Array], sender: Sender
) -> tuple[Gathered, dict[str, jax.Array]]:  # fmt: skip
  """Adds a path's messages of some levels to the sums of a phase; returns the sums and the path's new residuals."""
  turn = tuple(sender.turn)
  module = {level.name: specs.layout.grid.module(level, turn) for level in specs.layout.levels if level.name in levels}
  deltas, kept = _messages(specs, _outer_gradients(specs, levels, sender), residuals)
  squares = {level: _square(specs, delta) for level, delta in deltas.items()}
  moved = _moved(specs, squares, sender)
  plausible = [
    screening.is_plausible(moved[level], sender.usual[level][at], sender.limits[turn]) for level, at in module.items()
  ]
  ok = jnp.all(jnp.stack(plausible)) & ~gathered.excluded[turn]
  weights = sender.weights if isinstance(sender.weights, dict) else dict.fromkeys(module, sender.weights)
  counts = ok & (weights[next(iter(module))][turn] > 0)
  rows = _row_weights(specs, sender.state) if specs.settings.outer.row_weights else {}
  sums = dict(gathered.sums)
  squares_of_sums = dict(gathered.squares)
  masses = dict(gathered.masses)
  for level, at in module.items():
    weight = weights[level][turn]
    term = outer_lib.term(deltas[level], weight, counts, rows)
    square = _square(specs, term.moves) if rows else squares[level]
    add = functools.partial(jax.tree.map, lambda total, x, at=at: total.at[0, *at].add(x))
    sums[level] = add(gathered.sums[level], term.delta)
    squares_of_sums[level] = add(gathered.squares[level], jnp.where(counts, weight * weight * square, 0))
    if rows:
      masses[level] = add(gathered.masses[level], term.mass)
  of_path = gathered.moved | {level: gathered.moved[level].at[turn].set(r) for level, r in moved.items()}
  excluded = gathered.excluded.at[turn].set(~ok)
  # What was lost, or sent by a path that does not train, has left nothing behind; a path left out begins again, with
  # what levels that left earlier in the phase have kept too.
  residuals = {n: jnp.where(ok, e, 0) for n, e in residuals.items()}
  residuals |= {n: jnp.where(counts, e, residuals[n]) for n, e in kept.items()}
  return Gathered(sums, squares_of_sums, of_path, excluded, masses), residuals


def _outer_gradients(specs: Specs, levels: tuple[str, ...], sender: Sender) -> modules_lib.Modules:
  """Returns old - new of the path in flight, by level and parameter."""
  old, new = modules_lib.take(specs.layout, sender.modules, tuple(sender.turn)), sender.params
  return {
    level.name: {name: old[name] - new[name] for name in specs.layout.names(level)}
    for level in specs.layout.levels
    if level.name in levels
  }


def _moved(specs: Specs, squares: dict[str, jax.Array], sender: Sender) -> dict[str, jax.Array]:
  """Returns r of screening.py by level, from the squares of the outer gradients' norms."""
  rate = specs.inner.learning_rate
  last = sender.last
  count = sender.num_steps
  rates = {level: screening.sum_of_rates(rate, last - count[level], count[level]) for level in squares}
  return {level: jnp.sqrt(square) / rates[level] for level, square in squares.items()}


def _messages(
  specs: Specs, deltas: modules_lib.Modules, residuals: dict[str, jax.Array]
) -> tuple[modules_lib.Modules, dict[str, jax.Array]]:  # fmt: skip
  """Returns the messages of outer gradients, and the new residuals of compressed ones."""
  delta = {name: d for of_level in deltas.values() for name, d in of_level.items()}
  totals = {name: compression.total(d, residuals[name]) for name, d in delta.items() if name in residuals}
  gathered = inner_lib.gather(totals, specs.dims)  # blocks do not depend on how a path's slice is laid out
  sent = {name: compression.rounded(x, specs.compress) for name, x in gathered.items()}
  sent = {name: _own_part(specs, name, x) for name, x in sent.items()}
  messages = {level: {name: sent.get(name, d) for name, d in of_level.items()} for level, of_level in deltas.items()}
  return messages, {name: compression.next_residual(totals[name], x) for name, x in sent.items()}


def _own_part(specs: Specs, name: str, x: jax.Array) -> jax.Array:
  """Returns the part of a path's parameter that is on this device of its slice."""
  if (dim := specs.dims[name]) is None:
    return x
  size = x.shape[dim] // specs.placement.data
  return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index('data') * size, size, dim)


def _row_weights(specs: Specs, state: Any) -> dict[str, jax.Array]:
  """Row weights of one path; for a row that is split over the devices of its slice, their mean."""
  adam, dims = state.optimizer[0], specs.dims
  config = specs.settings.inner
  return outer_lib.row_weights(
    adam.nu, adam.count, config.b2, config.epsilon,
    lambda name, x: x if dims[name] in (None, 0) else jax.lax.pmean(x, 'data'),
  )  # fmt: skip


def _square(specs: Specs, delta: dict[str, jax.Array]) -> jax.Array:
  """|delta|^2 of one module's parameters, over the slice."""
  sharded = {n: d for n, d in delta.items() if specs.dims[n] is not None}
  replicated = optax.tree.norm({n: d for n, d in delta.items() if specs.dims[n] is None}, squared=True)
  return replicated + (jax.lax.psum(optax.tree.norm(sharded, squared=True), 'data') if sharded else 0)
