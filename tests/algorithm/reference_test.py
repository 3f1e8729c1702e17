"""The twin's own equations against Optax, so that the oracle can be believed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import twin

from dipaco_jax.algorithm import grid as grids, reference
from dipaco_jax.config import fields, settings

LEVELS = (
  grids.Level('ends', 'w', ('a', 'b')),
  grids.Level('middle', 'b', ('a',)),
  grids.Level('all', 's', ()),
)
OWNER = {'w': LEVELS[0], 'b': LEVELS[1], 's': LEVELS[2]}


def make_params(seed=0):
  rng = np.random.default_rng(seed)
  return {name: rng.normal(size=size).astype('f') for name, size in (('w', (4, 3)), ('b', (3,)), ('s', (2, 2)))}


def loss_fn(params, tokens, segments):
  out = jnp.tanh(tokens @ params['w']) * params['b']
  return jnp.mean((out - segments) ** 2) * 5 + jnp.sum(params['s'] ** 3)


def make_batches(num, seed=0):
  rng = np.random.default_rng(seed)
  return [(rng.normal(size=(8, 4)).astype('f'), rng.normal(size=(8, 3)).astype('f')) for _ in range(num)]


@pytest.mark.parametrize(
  'change',
  [
    {},
    {'clip_norm': 0.0},
    {'rewarm_steps': 3},
    {'warmup_steps': 0},
    {'optimizer': 'sgd'},
    {'optimizer': 'sgd', 'clip_norm': 0.1},
  ],
)
def test_inner_phase_is_that_of_optax(change):
  inner = dataclasses.replace(settings.Inner(learning_rate=0.03, warmup_steps=4), **change)
  params, batches, first = make_params(), make_batches(6), 3

  def rate(count):
    s = count + first
    rate = optax.cosine_decay_schedule(inner.learning_rate, 20, inner.final_fraction)(s)
    rate *= jnp.minimum(1.0, (s + 1) / 4) if inner.warmup_steps else 1.0
    return rate * jnp.where(s >= 5, jnp.minimum(1.0, (s - 4) / 3), 1.0) if inner.rewarm_steps else rate

  mask = {'w': True, 'b': False, 's': True}
  adamw = optax.adamw(rate, inner.b1, inner.b2, inner.epsilon, weight_decay=inner.weight_decay, mask=mask)
  clip = optax.clip_by_global_norm(inner.clip_norm) if inner.clip_norm else optax.identity()
  transformation = optax.chain(clip, optax.sgd(rate) if inner.optimizer == 'sgd' else adamw)
  expected, state, expected_losses = params, transformation.init(params), []
  for batch in batches:
    loss, grads = jax.value_and_grad(loss_fn)(expected, *batch)
    expected_losses.append(float(loss))
    updates, state = transformation.update(grads, state, expected)
    expected = optax.apply_updates(expected, updates)

  halfway, state, first_losses = twin.inner_phase(params, None, batches[:2], first, loss_fn, inner, 20, 5)
  ours, _, losses = twin.inner_phase(halfway, state, batches[2:], first + 2, loss_fn, inner, 20, 5)
  assert first_losses + losses == pytest.approx(expected_losses, rel=1e-5)
  for name in params:
    # 6 steps of 0.03, each rounded to float32 where the twin is not, and divided by a root of a tenth of it.
    np.testing.assert_allclose(ours[name], expected[name], atol=3e-6)


@pytest.mark.parametrize('optimizer', dict(fields.fields(settings.Outer))['optimizer'].choices)
def test_outer_opt_is_that_of_optax(optimizer):
  outer = settings.Outer(optimizer=optimizer, momentum=0.8, b2=0.95, epsilon=0.01)  # no defaults
  transformation = {
    'nesterov': optax.sgd(0.7, 0.8, nesterov=True),
    'momentum': optax.sgd(0.7, 0.8),
    'sgd': optax.sgd(0.7),
    'adam': optax.adam(0.7, b1=0.8, b2=0.95, eps=0.01),
  }[optimizer]
  rng = np.random.default_rng(0)
  theta = expected = rng.normal(size=5).astype('f')
  momentum, state = None, transformation.init(expected)
  for _ in range(4):
    delta = rng.normal(size=5).astype('f')
    updates, state = transformation.update(delta, state, expected)
    expected = optax.apply_updates(expected, updates)
    theta, momentum = reference.outer_opt(theta, momentum, delta, outer)
  np.testing.assert_allclose(theta, expected, rtol=1e-5, atol=1e-5)


def test_outer_step_by_hand():
  grid = grids.Grid({'a': 2, 'b': 2})
  base = make_params()
  modules = reference.start_modules(base, grid, OWNER)
  assert len(modules) == 4 + 2 + 1
  new = {path: {name: x + path + 1 for name, x in base.items()} for path in (0, 1, 2)}  # the fourth takes no part
  outer = settings.Outer(optimizer='sgd', learning_rate=1.0)
  moved, momenta = reference.outer_step(modules, {}, new, [1, 3, 2, 100], twin.Layout(grid, LEVELS), outer)
  shift = {module: next(iter(moved[module].values())) - next(iter(modules[module].values())) for module in moved}
  expected = {
    ('ends', (0, 0)): 1,
    ('ends', (0, 1)): 2,
    ('ends', (1, 0)): 3,
    ('ends', (1, 1)): 0,
    ('middle', (0,)): 2**0.5 * (1 * 1 + 3 * 2) / 4,
    ('middle', (1,)): 3,
    ('all', ()): 3**0.5 * (1 * 1 + 3 * 2 + 2 * 3) / 6,
  }
  assert {module: pytest.approx(x) for module, x in shift.items()} == expected
  assert ('ends', (1, 1)) not in momenta


def test_one_path_and_plain_outer_sgd_is_the_inner_run():
  grid, levels = grids.Grid(), (grids.Level('all', '.*', ()),)
  config = settings.Settings(
    pretrain=settings.Pretrain(steps=2),
    train=settings.Train(steps_per_phase=3),
    inner=settings.Inner(learning_rate=0.03, warmup_steps=2),
    outer=settings.Outer(optimizer='sgd', learning_rate=1.0),
  )
  params, batches = make_params(), make_batches(8)
  owner = dict.fromkeys(params, levels[0])
  modules, _, _, history = twin.train(
    params, None, lambda path, s: batches[s], [[0], [0]], [1], grid, levels, owner, loss_fn, config, 8
  )
  expected, _, losses = twin.inner_phase(params, None, batches[2:], 2, loss_fn, config.inner, 8, 2)
  assert history[0][0] + history[1][0] == pytest.approx(losses, rel=1e-6)
  for name in params:
    np.testing.assert_allclose(modules['all', ()][name], expected[name], rtol=1e-12)


def run(active, opt_state=None, **inner):
  grid = grids.Grid({'a': 2, 'b': 1})
  config = settings.Settings(
    pretrain=settings.Pretrain(steps=0), train=settings.Train(steps_per_phase=1), inner=settings.Inner(**inner)
  )
  batches = make_batches(4)
  return twin.train(
    make_params(), opt_state, lambda path, s: batches[s], active, [1, 1], grid, LEVELS, OWNER, loss_fn, config, 4
  )


def test_a_path_that_waits_keeps_its_state_and_modules():
  modules, momenta, states, history = run([[0, 1], [0]])
  after_one = run([[0, 1]])
  for module in (('ends', (1, 0)), ('middle', (1,))):
    np.testing.assert_equal((modules[module], momenta[module]), (after_one[0][module], after_one[1][module]))
  assert (states[0]['t'], states[1]['t']) == (2, 1) and list(history[1]) == [0]


def test_a_state_that_is_not_kept_is_inherited_once():
  inherited = reference.fresh_state(make_params()) | {'t': 5}
  kept, dropped = (run([[0], [0]], inherited, keep_state=keep)[2] for keep in (True, False))
  assert (kept[0]['t'], kept[1]['t']) == (7, 5)
  assert dropped[0] is None and dropped[1]['t'] == 5


@pytest.mark.parametrize(
  'optimizer, section', [(reference.Inner, settings.Inner()), (reference.Outer, settings.Outer())]
)
def test_its_defaults_are_those_of_the_config(optimizer, section):
  defaults = {name: value for name, value in optimizer._field_defaults.items() if name != 'update'}
  assert defaults == {name: getattr(section, name) for name in defaults}
