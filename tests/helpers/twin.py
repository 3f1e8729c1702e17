"""The naive twin: Algorithm 1 of DiPaCo as it is written, the oracle that the product is held against [2.5, 2.7].

Loops over paths and modules, nothing stacked, nothing compiled but the loss with its gradient, which come from outside;
every equation by hand in float64. It shares no code with the product but the grid, which has a brute force of its own.

`modules` is {(level name, coordinates on the level's axes): {parameter name: array}}; paths are indices.
"""

import bisect
import fractions
import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np


def module_of(grid, level, path):
  """Which of the level's modules the path picks."""
  return level.name, tuple(c for axis, c in zip(grid.names, grid.coordinates(path), strict=True) if axis in level.axes)


def initial_modules(params, grid, owner):
  """Every module its part of the base model. `owner` is {parameter name: level}."""
  modules = {}
  for path in range(grid.num_paths):
    for name, level in owner.items():
      modules.setdefault(module_of(grid, level, path), {})[name] = np.asarray(params[name], np.float64)
  return modules


def path_params(modules, grid, owner, path):
  """theta of one path: a copy of its modules."""
  return {name: modules[module_of(grid, level, path)][name].copy() for name, level in owner.items()}


def learning_rate(s, inner, total_steps, pretrain_steps):
  """Of global step s = 0, 1, ...: linear warm-up times cosine, warmed up again after pretraining if asked."""
  cosine = 0.5 * (1 + math.cos(math.pi * min(1, s / (inner.decay_steps or total_steps))))
  rate = inner.learning_rate * (inner.final_fraction + (1 - inner.final_fraction) * cosine)
  if inner.warmup_steps:
    rate *= min(1, (s + 1) / inner.warmup_steps)
  if inner.rewarm_steps and s >= pretrain_steps:
    rate *= min(1, (s - pretrain_steps + 1) / inner.rewarm_steps)
  return rate


def fresh_state(params):
  """AdamW's, before any step."""
  return {k: {n: np.zeros(x.shape) for n, x in params.items()} for k in 'mv'} | {'t': 0}


def clip(grads, clip_norm):
  norm = math.sqrt(sum(float((g**2).sum()) for g in grads.values()))
  scale = min(1, clip_norm / norm) if clip_norm and norm else 1
  return {name: g * scale for name, g in grads.items()}


def adamw(params, state, grads, rate, inner):
  """One step, on every array in turn; only matrices decay."""
  t = state['t'] + 1
  new = {'m': {}, 'v': {}, 't': t}
  params = dict(params)
  for name, g in grads.items():
    m = new['m'][name] = inner.b1 * state['m'][name] + (1 - inner.b1) * g
    v = new['v'][name] = inner.b2 * state['v'][name] + (1 - inner.b2) * g**2
    direction = (m / (1 - inner.b1**t)) / (np.sqrt(v / (1 - inner.b2**t)) + inner.epsilon)
    if g.ndim >= 2:
      direction = direction + inner.weight_decay * params[name]
    params[name] = params[name] - rate * direction
  return params, new


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
  found, new = adamw(params, state, grads, rate, inner)
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


@functools.cache
def with_gradient(loss_fn):
  return jax.jit(jax.value_and_grad(loss_fn))


def inner_phase(params, opt_state, batches, first_step, loss_fn, inner, total_steps, pretrain_steps):
  """tau inner steps of one path: (new params, new opt_state, [loss before each step]).

  Args:
    params: {name: array}.
    opt_state: as `fresh_state` makes it or an earlier phase left it; None for a fresh one.
    batches: tau pairs (tokens, segments).
    first_step: global step of the first batch, pretraining included.
    loss_fn: (params, tokens, segments) -> scalar.
    inner: settings.Inner.
    total_steps: length of the cosine where inner.decay_steps is 0.
    pretrain_steps: the global step from which inner.rewarm_steps count.
  """
  params = {name: np.asarray(x, np.float64) for name, x in params.items()}
  opt_state = opt_state or fresh_state(params)
  losses = []
  for s, (tokens, segments) in enumerate(batches, first_step):
    rounded = {name: jnp.asarray(x, jnp.float32) for name, x in params.items()}
    loss, grads = with_gradient(loss_fn)(rounded, tokens, segments)
    losses.append(float(loss))
    grads = clip({name: np.asarray(g, np.float64) for name, g in grads.items()}, inner.clip_norm)
    rate = learning_rate(s, inner, total_steps, pretrain_steps)
    if inner.optimizer == 'sgd':
      params = {name: x - rate * grads[name] for name, x in params.items()}
    else:
      step = {'adamw': adamw, 'muon': muon}[inner.optimizer]
      params, opt_state = step(params, opt_state, grads, rate, inner)
  return params, opt_state, losses


def outer_opt(theta, momentum, delta, outer):
  """OuterOpt of one array: (new theta, new momentum). `momentum` is None before the first step; adam's is (m, v, t)."""
  mu, rate = outer.momentum, outer.learning_rate
  if outer.optimizer == 'sgd':
    return theta - rate * delta, None
  if outer.optimizer == 'adam':
    m, v, t = momentum or (0, 0, 0)
    m, v, t = mu * m + (1 - mu) * delta, outer.b2 * v + (1 - outer.b2) * delta**2, t + 1
    return theta - rate * (m / (1 - mu**t)) / (np.sqrt(v / (1 - outer.b2**t)) + outer.epsilon), (m, v, t)
  if outer.optimizer not in ('nesterov', 'momentum'):
    raise ValueError(f'the twin does not know {outer.optimizer}: add its equation here')
  m = delta if momentum is None else mu * momentum + delta
  return theta - rate * (delta + mu * m if outer.optimizer == 'nesterov' else m), m


VALUES = {'int8': range(128), 'int4': range(8), 'e3m0': [0, 1, 2, 4, 8, 16, 32, 64]}


def compressed(x, kind):
  """Q(x) of algorithm/compression.py, element by element, in fractions."""
  values, found = list(VALUES[kind]), []
  flat = np.asarray(x, np.float32).reshape(-1)
  for begin in range(0, flat.size, 64):
    block = flat[begin : begin + 64]
    share = np.float32(1 / 64 if kind == 'e3m0' else 1 / values[-1])
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


def outer_step(modules, momenta, new_params, weights, grid, levels, outer, rows=None):
  """One outer step of every module: (new modules, new momenta).

  Args:
    modules: before the phase.
    momenta: {(level name, coordinates): {parameter name: momentum}}; {} before the first outer step.
    new_params: {path: {name: array}} after the phase, of the paths that took part.
    weights: of each path in the grid, for instance its shard's tokens; looked at only if outer.reweigh.
    grid: Grid.
    levels: its levels.
    outer: settings.Outer.
    rows: {path: its `row_weights`}, with outer.row_weights.
  """
  new_modules, new_momenta = dict(modules), dict(momenta)
  for level in levels:
    for module in {module_of(grid, level, path) for path in range(grid.num_paths)}:
      through = [path for path in new_params if module_of(grid, level, path) == module]
      if not through:
        continue
      shares = [weights[path] if outer.reweigh else 1 for path in through]
      new_modules[module], new_momenta[module] = {}, {}
      for name, old in modules[module].items():
        if outer.row_weights:
          spread = (-1, *[1] * (old.ndim - 1))
          each = [w * rows[path][name].reshape(spread) for w, path in zip(shares, through, strict=True)]
        else:
          each = shares
        delta = sum(w * (old - new_params[path][name]) for w, path in zip(each, through, strict=True)) / sum(each)
        if outer.rescale:
          delta = delta * math.sqrt(len(through))
        momentum = momenta.get(module, {}).get(name)
        new_modules[module][name], new_momenta[module][name] = outer_opt(old, momentum, delta, outer)
  return new_modules, new_momenta


def train(
  params, opt_state, batches, active, weights, grid, levels, owner, loss_fn, config, total_steps, lost=lambda phase: (),
  excluded=lambda phase: (),
):  # fmt: skip
  """Algorithm 1, from the base model on.

  Args:
    params: the base model.
    opt_state: its AdamW state, or None: paths start with a fresh one.
    batches: (path, step) -> (tokens, segments); steps are the path's own, and go on from those of the base.
    active: for each phase, the paths that take part.
    weights: of each path.
    grid, levels, owner: the grid, its levels, {parameter name: level}.
    loss_fn: as for `inner_phase`.
    config: Settings; `pretrain.steps`, `train.steps_per_phase`, `inner` and `outer` are looked at.
    total_steps: length of the cosine.
    lost: phase -> the paths whose outer gradient is lost, which go on from their own parameters.
    excluded: phase -> the paths that take no part, and go on from the new modules with a fresh AdamW state.

  Returns:
    modules, momenta, {path: AdamW state}, and for each phase {path: [loss before each step]}.
  """
  modules, momenta, history, own = initial_modules(params, grid, owner), {}, [], {}
  states = dict.fromkeys(range(grid.num_paths), opt_state)
  tau = config.train.steps_per_phase
  own_step = [config.pretrain.steps] * grid.num_paths
  for t, paths in enumerate(active):
    first_step = config.pretrain.steps + t * tau
    new_params, losses, rows = {}, {}, {}
    for path in paths:
      new_params[path], states[path], losses[path] = inner_phase(
        own[path] if path in own else path_params(modules, grid, owner, path),
        states[path],
        [batches(path, own_step[path] + i) for i in range(tau)],
        first_step,
        loss_fn,
        config.inner,
        total_steps,
        config.pretrain.steps,
      )
      rows[path] = row_weights(states[path], config.inner) if config.inner.optimizer == 'adamw' else None
      own_step[path] += tau
      if not config.inner.keep_state:
        states[path] = None  # the base model's, if any, was for its first phase
    own = {path: new_params.pop(path) for path in lost(t)}
    for path in excluded(t):
      new_params.pop(path, None), own.pop(path, None)
      states[path] = None
    modules, momenta = outer_step(modules, momenta, new_params, weights, grid, levels, config.outer, rows)
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
  read = initial_modules(params, grid, owner)  # m, what paths read
  masters, momenta, residuals = dict(read), {}, {}
  theta = {path: path_params(read, grid, owner, path) for path in range(num_paths)}
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
        shared = any(module_of(grid, level, p) == module_of(grid, level, 0) for p in range(1, num_paths))
        if s != (tau if t in closed else places[level.name]):
          continue
        sent = {}
        for path in paths:
          module, sent[path] = module_of(grid, level, path), {}
          for name, old in read[module].items():
            wanted = old - theta[path][name] + residuals.get((path, name), 0)
            message = compressed(wanted, kind) if kind != 'none' and shared else wanted
            residuals[path, name] = bfloat16(wanted - message) if kind != 'none' and shared else 0
            sent[path][name] = masters[module][name] - message
        moved, momenta = outer_step(masters, momenta, sent, weights, grid, [level], config.outer)
        for module in {module_of(grid, level, path) for path in paths}:
          masters[module], new = moved[module], {}
          for name, m in read[module].items():
            lossy = kind != 'none' and shared
            new[name] = m + compressed(masters[module][name] - m, kind) if lossy else masters[module][name]
          read[module] = new
        later = 0 if t in closed or not shared else overlap
        due.append((now + later, level, alpha, dict(theta) if later and keeps else None, later))
      for _, level, share, left, later in [entry for entry in due if entry[0] == now]:
        for path in range(num_paths):
          for name, new in read[module_of(grid, level, path)].items():
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
