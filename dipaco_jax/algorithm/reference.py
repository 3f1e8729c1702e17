"""Algorithm 1 of DiPaCo as a naive loop, to be read beside the paper [arXiv 2403.10616, 2.3 to 2.7].

    for each phase t                                                     Algorithm 1
      for each path i that takes part, alone and anywhere
        theta_i <- the modules that the path picks                       [2.3]
        theta_i <- InnerOpt(theta_i), tau steps on its own shard D_i     AdamW [2.5, 7.1]
      for each level l and each of its modules e
        Delta <- sum_i alpha_i (theta_{l,e} - theta_i), over the paths i through the module    [2.5]
        theta_{l,e} <- OuterOpt(theta_{l,e}, sqrt(number of those paths) Delta)                Nesterov [2.5, 2.7]

`train` is that loop; the functions above it implement its lines. Only the loss and its gradient are compiled, nothing
is stacked or sharded, and every equation is written out in float64. The tests of the compiled programs, of islands and
of the library compare with this file; only the grid is code that they share with it.

A module is named by its level and its coordinates on the level's axes: `modules[level.name, coordinates]` is a dict of
arrays by parameter name. A path is an index; `owner` names the level of each parameter.
"""

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dipaco_jax.algorithm.grid import Coordinates, Grid, Level

Arrays = dict[str, np.ndarray]
ModuleName = tuple[str, Coordinates]
Modules = dict[ModuleName, Arrays]
Loss = Callable[..., jax.Array]  # (parameters, *batch) -> mean loss, []


# -- the grid


def module_of(grid: Grid, level: Level, path: int) -> ModuleName:
  """Returns the module of a level that a path picks: the path's coordinates on the level's axes [2.3].

  Example:
    >>> module_of(Grid(a=2, b=3), Level('high', 'block_1', ('b',)), 5)  # its coordinates are a=1, b=2
    ('high', (2,))
  """
  coordinates = zip(grid.names, grid.coordinates(path), strict=True)
  return level.name, tuple(c for axis, c in coordinates if axis in level.axes)


def start_modules(params: Mapping[str, Any], grid: Grid, owner: Mapping[str, Level]) -> Modules:
  """Returns all modules, each a copy of its part of one pretrained model [Algorithm 1, initialization]."""
  modules: Modules = {}
  for path in range(grid.num_paths):
    for name, level in owner.items():
      modules.setdefault(module_of(grid, level, path), {})[name] = np.asarray(params[name], np.float64)
  return modules


def path_params(modules: Modules, grid: Grid, owner: Mapping[str, Level], path: int) -> Arrays:
  """Returns theta_i, copies of the modules that a path picks [2.3]."""
  return {name: modules[module_of(grid, level, path)][name].copy() for name, level in owner.items()}


# -- InnerOpt


class Inner(NamedTuple):
  """The inner optimizer of all paths."""

  rate: Callable[[int], float]  # eta_s by global step s
  b1: float = 0.9
  b2: float = 0.95
  epsilon: float = 1e-8
  weight_decay: float = 0.1  # lambda
  clip_norm: float = 1.0  # c; 0: gradients are not clipped
  update: Callable[..., tuple[Arrays, Any]] | None = None  # a function like `adamw`, the default


def fresh_state(params: Arrays) -> dict[str, Any]:
  """Returns AdamW's state before any step."""
  return {k: {n: np.zeros(x.shape) for n, x in params.items()} for k in 'mv'} | {'t': 0}


def clip(grads: Arrays, clip_norm: float) -> Arrays:
  """Clips gradients by their global norm |g|: returns g min(1, c / |g|), or g if c = 0.

  Example:
    >>> clip({'w': np.array([3.0, 4.0])}, clip_norm=1.0)
    {'w': array([0.6, 0.8])}
  """
  norm = math.sqrt(sum(float((g**2).sum()) for g in grads.values()))
  scale = min(1, clip_norm / norm) if clip_norm and norm else 1
  return {name: g * scale for name, g in grads.items()}


def adamw(params: Arrays, state: dict[str, Any], grads: Arrays, rate: float, inner: Any) -> tuple[Arrays, dict]:
  """Makes one step of AdamW [7.1]; lambda is 0 for vectors.

  m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2
  theta <- theta - eta_s (m^ / (sqrt(v^) + epsilon) + lambda theta)      m^, v^: divided by 1 - b^t
  """
  t = state['t'] + 1
  new_params, new_state = dict(params), {'m': {}, 'v': {}, 't': t}
  for name, g in grads.items():
    m = new_state['m'][name] = inner.b1 * state['m'][name] + (1 - inner.b1) * g
    v = new_state['v'][name] = inner.b2 * state['v'][name] + (1 - inner.b2) * g**2
    direction = (m / (1 - inner.b1**t)) / (np.sqrt(v / (1 - inner.b2**t)) + inner.epsilon)
    if g.ndim >= 2:
      direction = direction + inner.weight_decay * params[name]
    new_params[name] = params[name] - rate * direction
  return new_params, new_state


def sgd(params: Arrays, state: Any, grads: Arrays, rate: float, inner: Any) -> tuple[Arrays, Any]:
  """Makes one step of gradient descent: theta <- theta - eta_s g."""
  return {name: x - rate * grads[name] for name, x in params.items()}, state


@functools.cache
def with_gradient(loss: Loss) -> Callable[..., tuple[jax.Array, dict[str, jax.Array]]]:
  """Returns (parameters, *batch) -> (loss, its gradient)."""
  return jax.jit(jax.value_and_grad(loss))


def inner_phase(
  params: Arrays, state: Any, batches: Sequence[tuple], first_step: int, loss: Loss, inner: Inner
) -> tuple[Arrays, Any, list[float]]:
  """Trains one path for one step per batch.

  Args:
    params: theta_i.
    state: optimizer state after an earlier phase, or None for a fresh state.
    batches: tau batches, each with the arguments of `loss` that follow the parameters.
    first_step: global step of the first batch, pretraining included.
    loss: (parameters, *batch) -> mean loss.
    inner: the optimizer.

  Returns:
    theta_i after the phase, the optimizer's state and the loss before each step.
  """
  params = {name: np.asarray(x, np.float64) for name, x in params.items()}
  state, losses = state or fresh_state(params), []
  for s, batch in enumerate(batches, first_step):
    rounded = {name: jnp.asarray(x, jnp.float32) for name, x in params.items()}
    value, grads = with_gradient(loss)(rounded, *batch)
    losses.append(float(value))
    clipped = clip({name: np.asarray(g, np.float64) for name, g in grads.items()}, inner.clip_norm)
    params, state = (inner.update or adamw)(params, state, clipped, inner.rate(s), inner)
  return params, state, losses


# -- OuterOpt


class Outer(NamedTuple):
  """The outer optimizer, and how outer gradients are averaged."""

  optimizer: str = 'nesterov'
  learning_rate: float = 0.7  # eta
  momentum: float = 0.9  # mu
  b2: float = 0.99  # of adam, like epsilon
  epsilon: float = 0.1
  rescale: bool = True  # multiplies Delta by sqrt(P_{l,e}): norm rescaling [2.7]
  reweigh: bool = True  # makes alpha_i proportional to |D_i|: loss reweighing [2.7]
  max_weight: float = 1.0  # largest share of an owner, or path, in a module's mean: not in the paper [weight_cap.py]


def owner_of(grid: Grid, path: int) -> int:
  """Returns the coordinate of a path on the only axis with names, or the path itself if there is no such axis."""
  named = [axis for axis in grid.names if axis in grid.coordinate_names]
  return grid.coordinates(path)[grid.names.index(named[0])] if len(named) == 1 else path


def cap_shares(shares: Mapping[int, float], owners: Mapping[int, int], most: float) -> dict[int, float]:
  """Returns alpha_i of the paths of a module, with no owner's sum above `most`, or equal sums if that is too low.

  Example:
    >>> cap_shares({0: 8.0, 1: 1.0, 2: 1.0}, owners={0: 0, 1: 1, 2: 2}, most=0.5)
    {0: 0.5, 1: 0.25, 2: 0.25}
  """
  total = sum(shares.values())
  sums = {owner: sum(w for i, w in shares.items() if owners[i] == owner) for owner in {owners[i] for i in shares}}
  alphas = {owner: w / total for owner, w in sums.items()}
  if len(alphas) * most <= 1:
    alphas = dict.fromkeys(alphas, 1 / len(alphas))
  capped: set[int] = set()
  while above := {owner for owner, alpha in alphas.items() if alpha > most * (1 + 1e-12) and owner not in capped}:
    if len(alphas) * most <= 1:
      break
    capped |= above
    rest = sum(alpha for owner, alpha in alphas.items() if owner not in capped)
    left = 1 - len(capped) * most
    alphas = {owner: most if owner in capped else alpha * left / rest for owner, alpha in alphas.items()}
  return {i: alphas[owners[i]] * w / sums[owners[i]] for i, w in shares.items()}


def outer_opt(theta: np.ndarray, momentum: Any, delta: np.ndarray, outer: Any) -> tuple[np.ndarray, Any]:
  """Returns an array of a module and its momentum after OuterOpt.

  The momentum is None before the first step; that of adam is (m, v, t).

  sgd         theta <- theta - eta Delta
  momentum    m <- mu m + Delta
              theta <- theta - eta m
  nesterov    m <- mu m + Delta
              theta <- theta - eta (Delta + mu m)
  adam        m <- mu m + (1 - mu) Delta        v <- b2 v + (1 - b2) Delta^2
              theta <- theta - eta m^ / (sqrt(v^) + epsilon)        m^ = m / (1 - mu^t), v^ = v / (1 - b2^t), in step t

  Example:
    >>> theta, momentum = outer_opt(np.ones(1), None, np.ones(1), Outer(learning_rate=0.5, momentum=0.5))
    >>> theta, momentum  # 1 - 0.5 (1 + 0.5)
    (array([0.25]), array([1.]))
  """
  mu, rate = outer.momentum, outer.learning_rate
  if outer.optimizer == 'sgd':
    return theta - rate * delta, None
  if outer.optimizer == 'adam':
    m, v, t = momentum or (0, 0, 0)
    m = mu * m + (1 - mu) * delta
    v = outer.b2 * v + (1 - outer.b2) * delta**2
    t = t + 1
    return theta - rate * (m / (1 - mu**t)) / (np.sqrt(v / (1 - outer.b2**t)) + outer.epsilon), (m, v, t)
  if outer.optimizer not in ('nesterov', 'momentum'):
    raise ValueError(f'the reference does not know {outer.optimizer}: add its equation here')
  m = delta if momentum is None else mu * momentum + delta
  return theta - rate * (delta + mu * m if outer.optimizer == 'nesterov' else m), m


def outer_step(
  modules: Modules, momenta: dict, new_params: Mapping[int, Arrays], weights: Sequence[float], layout: Any, outer: Any,
  rows: Mapping[int, Arrays] | None = None,
) -> tuple[Modules, dict]:  # fmt: skip
  """Makes one outer step of every module [2.5, 2.7].

  Args:
    modules: the modules before the phase.
    momenta: {module: {parameter: momentum}}; {} before the first outer step.
    new_params: theta_i after the phase, for the paths that took part.
    weights: |D_i| of each path in the grid, used only with `outer.reweigh`.
    layout: an object with `grid` and `levels`.
    outer: the optimizer, see `Outer`.
    rows: row weights {path: {parameter: s_{i,r}}}, which are not in the paper (see outer.py); None for no row weights.

  Returns:
    The new modules and momenta. A module is unchanged if none of its paths took part.
  """
  new_modules, new_momenta = dict(modules), dict(momenta)
  grid = layout.grid
  for level in layout.levels:
    for module in {module_of(grid, level, path) for path in range(grid.num_paths)}:
      through = [i for i in new_params if module_of(grid, level, i) == module]
      if not through:
        continue
      shares: dict[int, float] = {i: weights[i] if outer.reweigh else 1 for i in through}
      if outer.max_weight < 1:
        shares = cap_shares(shares, {i: owner_of(grid, i) for i in through}, outer.max_weight)
      new_modules[module], new_momenta[module] = {}, {}
      for name, old in modules[module].items():
        spread = (-1, *[1] * (old.ndim - 1))  # a row weight applies to all elements of its row
        w = [w_i * rows[i][name].reshape(spread) if rows else w_i for i, w_i in shares.items()]
        moves = [old - new_params[i][name] for i in shares]
        delta = sum(map(operator.mul, w, moves)) / sum(w)  # alpha_i = w_i / sum_j w_j
        if outer.rescale:
          delta = delta * math.sqrt(len(through))
        momentum = momenta.get(module, {}).get(name)
        new_modules[module][name], new_momenta[module][name] = outer_opt(old, momentum, delta, outer)
  return new_modules, new_momenta


# -- Algorithm 1


def train(
  params: Mapping[str, Any], layout: Any, batches: Callable[[int, int], tuple], active: Sequence[Sequence[int]],
  tau: int, loss: Loss, inner: Inner, outer: Outer, weights: Sequence[float],
) -> tuple[Modules, dict, list[dict[int, list[float]]]]:  # fmt: skip
  """Runs Algorithm 1, beginning with one pretrained model.

  Args:
    params: the pretrained model, by parameter name.
    layout: an object with `grid`, `levels` and `owner`, the level of each parameter.
    batches: (path, step) -> batch of the path's shard; each path counts its own steps from 0.
    active: for each phase, the paths that take part [2.6.2].
    tau: inner steps in a phase.
    loss: (parameters, *batch) -> mean loss.
    inner, outer: the optimizers.
    weights: |D_i| of each path.

  Returns:
    The modules, their momenta, and for each phase {path: [loss before each step]}.
  """
  grid, owner = layout.grid, layout.owner
  modules, history = start_modules(params, grid, owner), []
  momenta: dict[ModuleName, dict[str, Any]] = {}
  states: dict[int, Any] = dict.fromkeys(range(grid.num_paths))
  steps_done = [0] * grid.num_paths
  for t, paths in enumerate(active):
    new_params, losses = {}, {}
    for path in paths:
      theta = path_params(modules, grid, owner, path)
      shard = [batches(path, steps_done[path] + i) for i in range(tau)]
      new_params[path], states[path], losses[path] = inner_phase(theta, states[path], shard, t * tau, loss, inner)
      steps_done[path] += tau
    modules, momenta = outer_step(modules, momenta, new_params, weights, layout, outer)
    history.append(losses)
  return modules, momenta, history
