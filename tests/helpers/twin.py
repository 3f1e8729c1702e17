"""The reference (dipaco_jax/algorithm/reference.py) with what is not in Algorithm 1: the settings' schedules, Muon, row
weights, paths that are lost or excluded, streaming, overlap and compression. As naive as the reference, in float64.
"""

import bisect
import dataclasses
import fractions
import functools
import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from dipaco_jax.algorithm import reference


def learning_rate(s, inner, total_steps, pretrain_steps):
  """Of global step s = 0, 1, ...: linear warm-up times cosine, warmed up again after pretraining if asked."""
  cosine = 0.5 * (1 + math.cos(math.pi * min(1, s / (inner.decay_steps or total_steps))))
  rate = inner.learning_rate * (inner.final_fraction + (1 - inner.final_fraction) * cosine)
  if inner.warmup_steps:
    rate *= min(1, (s + 1) / inner.warmup_steps)
  if inner.rewarm_steps and s >= pretrain_steps:
    rate *= min(1, (s - pretrain_steps + 1) / inner.rewarm_steps)
  return rate


def newton_schulz(x):
  """Five steps of the quintic iteration that brings singular values near 1, the smaller side first."""
  if x.shape[0] > x.shape[1]:
    return newton_schulz(x.T).T
  x = x / (np.linalg.norm(x) + 1e-8)
  for _ in range(5):
    product = x @ x.T
    x = 3.4445 * x + (-4.7750 * product + 2.0315 * product @ product) @ x
  return x


def muon(params, state, grads, rate, inner):
  """One step: matrices of blocks, inputs by outputs with heads as one dimension, by Muon; all else by AdamW."""
  found, new = reference.adamw(params, state, grads, rate, inner)
  mu, t = inner.muon_momentum, new['t']
  for name, g in grads.items():
    if not name.startswith('block_') or g.ndim < 2:
      continue
    inputs = np.prod(g.shape[:-1] if name.endswith('/o') else g.shape[:1])
    m = new['m'][name] = mu * state['m'][name] + (1 - mu) * g
    ahead = (mu * m / (1 - mu ** (t + 1)) + (1 - mu) * g / (1 - mu**t)).reshape(inputs, -1)
    direction = 0.2 * math.sqrt(max(ahead.shape)) * newton_schulz(ahead).reshape(g.shape)
    found[name] = params[name] - rate * (direction + inner.weight_decay * params[name])
  return found, new


class Layout(NamedTuple):
  """What `reference.outer_step` steps."""

  grid: Any
  levels: Any


UPDATES = {'adamw': reference.adamw, 'sgd': reference.sgd, 'muon': muon}


def inner_phase(params, opt_state, batches, first_step, loss_fn, inner, total_steps, pretrain_steps):
  """`reference.inner_phase` with the learning rate of settings.Inner."""
  of_step = functools.partial(learning_rate, inner=inner, total_steps=total_steps, pretrain_steps=pretrain_steps)
  return reference.inner_phase(params, opt_state, batches, first_step, loss_fn, WithRate(inner, of_step))


class WithRate:
  """A section `inner` of the settings as `reference.Inner` has it, with the fields that Muon needs."""

  def __init__(self, config, rate):
    self.__dict__.update(vars(config))
    self.rate, self.update = rate, UPDATES[config.optimizer]


VALUES = {'int8': range(128), 'int4': range(8), 'int3': range(4), 'int2': range(2)}
RANGE = {'int8': 127, 'int4': 7, 'int3': 3.5, 'int2': 2}  # the largest value of a block, in units of its scale


def compressed(x, kind):
  """Q(x) of algorithm/compression.py, element by element, in fractions."""
  values, found = list(VALUES[kind]), []
  flat = np.asarray(x, np.float32).reshape(-1)
  for begin in range(0, flat.size, 64):
    block = flat[begin : begin + 64]
    share = np.float32(1 / RANGE[kind])
    largest = np.abs(block).max()
    scale = fractions.Fraction(float(ml_dtypes.bfloat16(largest * share))) if largest >= 2.0**-100 else 0
    for element in block:
      size = fractions.Fraction(abs(float(element)))
      guess = bisect.bisect_left(values, size / scale) if scale else 0
      near = [code for code in (guess - 1, guess) if 0 <= code < len(values)]
      # the nearest; of two that are as near, the even code
      code = min(near, key=lambda code: (abs(size - scale * values[code]), code % 2))
      found.append(math.copysign(float(scale * values[code]), element))
  return np.array(found, np.float64).reshape(np.shape(x))


def bfloat16(x):
  return np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float64)


def row_weights(state, inner):
  """{name: root of the mean second moment in each row of a parameter, plus epsilon} of a path's AdamW state."""
  found = {}
  for name, v in state['v'].items():
    corrected = v / (1 - inner.b2 ** state['t'])
    found[name] = np.array([math.sqrt(np.mean(corrected[row])) + inner.epsilon for row in range(v.shape[0])], 'f')
  return found


def train(
  params, opt_state, batches, active, weights, grid, levels, owner, loss_fn, config, total_steps, lost=lambda phase: (),
  excluded=lambda phase: (), late=lambda phase: (), taken=None,
):  # fmt: skip
  """Algorithm 1, from the base model on.

  Args:
    params: the base model.
    opt_state: its AdamW state, or None: paths start with a fresh one.
    batches: (path, step) -> (tokens, segments); steps are the path's own, and go on from those of the base.
    active: for each phase, the paths that take part.
    weights: of each path.
    grid, levels, owner: the grid, its levels, {parameter name: level}.
    loss_fn: as for `reference.inner_phase`.
    config: Settings; `pretrain.steps`, `train.steps_per_phase`, `inner` and `outer` are looked at.
    total_steps: length of the cosine.
    lost: phase -> the paths whose outer gradient is lost, which go on from their own parameters.
    excluded: phase -> the paths that take no part, and go on from the new modules with a fresh AdamW state.
    late: phase -> the paths that take no part, and go on from the new modules with the base's v and t, and m = 0.
    taken: (path, phase) -> its inner steps, where phases end after some time; learning rates are of a path's own steps.

  Returns:
    modules, momenta, {path: AdamW state}, and for each phase {path: [loss before each step]}.
  """
  modules, momenta, history, own = reference.start_modules(params, grid, owner), {}, [], {}
  states = dict.fromkeys(range(grid.num_paths), opt_state)
  tau = config.train.steps_per_phase
  own_step = [config.pretrain.steps] * grid.num_paths
  for t, paths in enumerate(active):
    first_step = config.pretrain.steps + t * tau
    new_params, losses, rows = {}, {}, {}
    steps = {path: taken(path, t) if taken else tau for path in paths}
    for path in paths:
      new_params[path], states[path], losses[path] = inner_phase(
        own[path] if path in own else reference.path_params(modules, grid, owner, path),
        states[path],
        [batches(path, own_step[path] + i) for i in range(steps[path])],
        own_step[path] if taken else first_step,
        loss_fn,
        config.inner,
        total_steps,
        config.pretrain.steps,
      )
      rows[path] = row_weights(states[path], config.inner) if config.inner.optimizer == 'adamw' else None
      own_step[path] += steps[path]
      if not config.inner.keep_state:
        states[path] = None  # the base model's, if any, was for its first phase
    own = {path: new_params.pop(path) for path in lost(t)}
    for path in excluded(t):
      new_params.pop(path, None), own.pop(path, None)
      states[path] = None
    for path in late(t):
      new_params.pop(path, None)
      states[path] = opt_state | {'m': {name: np.zeros_like(x) for name, x in opt_state['m'].items()}}
    by_row = rows if config.outer.row_weights else None
    layout = Layout(grid, levels)
    outer, counted = config.outer, weights
    if taken:  # w_i n_i / tau
      outer = dataclasses.replace(outer, reweigh=True)
      counted = [(w if config.outer.reweigh else 1) * steps.get(path, 0) / tau for path, w in enumerate(weights)]
    modules, momenta = reference.outer_step(modules, momenta, new_params, counted, layout, outer, by_row)
    history.append(losses)
  return modules, momenta, states, history


def train_by_wire(
  params, opt_state, batches, active, weights, grid, levels, owner, loss_fn, config, total_steps, wire, places, closed
):
  """Algorithm 1 with streaming (arXiv 2501.18512, Algorithm 2), overlap, mixing and compression, step by step.

  Args as for `train`, and:
    wire: (kind of compression, _, steps between a level's leaving and its new module, whether they are kept, alpha).
    places: {level: step of the phase after which it leaves}.
    closed: phases at whose end all levels leave, and are taken over at once.
  """
  kind, _, overlap, keeps, alpha = wire
  tau, num_paths = config.train.steps_per_phase, grid.num_paths
  read = reference.start_modules(params, grid, owner)  # m, what paths read
  masters, momenta, residuals = dict(read), {}, {}
  theta = {path: reference.path_params(read, grid, owner, path) for path in range(num_paths)}
  states = dict.fromkeys(range(num_paths), opt_state)
  own_step, due, history = [config.pretrain.steps] * num_paths, [], []
  for t, paths in enumerate(active):
    losses = {path: [] for path in paths}
    for s in range(1, tau + 1):
      for path in paths:
        batch, step = batches(path, own_step[path]), config.pretrain.steps + t * tau + s - 1
        theta[path], states[path], found = inner_phase(
          theta[path], states[path], [batch], step, loss_fn, config.inner, total_steps, config.pretrain.steps
        )
        losses[path] += found
        own_step[path] += 1
      now = t * tau + s
      for level in levels:
        shared = grid.paths_through(level) > 1
        if s != (tau if t in closed else places[level.name]):
          continue
        sent = {}
        for path in paths:
          module, sent[path] = reference.module_of(grid, level, path), {}
          for name, old in read[module].items():
            wanted = old - theta[path][name] + residuals.get((path, name), 0)
            message = compressed(wanted, kind) if kind != 'none' and shared else wanted
            residuals[path, name] = bfloat16(wanted - message) if kind != 'none' and shared else 0
            sent[path][name] = masters[module][name] - message
        moved, momenta = reference.outer_step(masters, momenta, sent, weights, Layout(grid, [level]), config.outer)
        for module in {reference.module_of(grid, level, path) for path in paths}:
          masters[module], new = moved[module], {}
          for name, m in read[module].items():
            lossy, of_modules = kind != 'none' and shared, 'int3' if kind == 'int2' else kind
            new[name] = m + compressed(masters[module][name] - m, of_modules) if lossy else masters[module][name]
          read[module] = new
        later = 0 if t in closed or not shared else overlap
        due.append((now + later, level, alpha, dict(theta) if later and keeps else None, later))
      for _, level, share, left, later in [entry for entry in due if entry[0] == now]:
        for path in range(num_paths):
          for name, new in read[reference.module_of(grid, level, path)].items():
            if left:
              theta[path][name] = theta[path][name] + (1 - share) * (new - left[path][name])
            else:
              theta[path][name] = share * theta[path][name] + (1 - share) * new if later else new
      due = [entry for entry in due if entry[0] > now]
      if not config.inner.keep_state and s == tau:
        states = dict.fromkeys(states)
    history.append(losses)
  assert not due
  return read, masters, residuals, states, history
