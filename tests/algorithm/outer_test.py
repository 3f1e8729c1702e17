"""The outer step by hand, weights, untouched modules, path sampling, bytes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dipaco_jax.algorithm import modules, outer, reference
from dipaco_jax.config import choices, fields, settings

SPECS = (('shared', 'x', ()), ('low', 'y', ('a',)), ('own', 'z', ('a', 'b')))
LAYOUT = modules.make_layout({'a': 2, 'b': 3}.items(), SPECS, ('x', 'y', 'z'))
PARAMS = {'x': jnp.zeros(4), 'y': jnp.zeros((2, 2)), 'z': jnp.zeros(1)}


def step(weights, deltas, state=None, old=None, **changes):
  """deltas: {name: [2, 3]} old - new of every element of a path's parameter, by path."""
  config = settings.Outer(**({'rescale': False} | changes))
  old = old or modules.stack(LAYOUT, PARAMS)
  state = state or outer.init(LAYOUT, choices.make_outer_optimizer(config), old, 'adamw')
  sums = {}
  for level in LAYOUT.levels:
    sums[level.name] = {}
    for name in LAYOUT.names(level):
      total = (jnp.asarray(deltas[name]) * weights).sum(LAYOUT.grid.lacking(level))
      shape = (*total.shape, *[1] * PARAMS[name].ndim)
      sums[level.name][name] = jnp.broadcast_to(total.reshape(shape), old[level.name][name].shape)
  new, _, *rest = outer.update(LAYOUT, choices.make_outer(config), old, state, outer.Sums(sums, jnp.asarray(weights)))
  return new, *rest


DELTAS = {name: np.arange(6.0).reshape(2, 3) + i for i, name in enumerate('xyz')}


def test_modules_move_by_the_weighted_mean_of_their_paths():
  weights = np.array([[1.0, 2, 3], [1, 1, 2]], 'f')
  new, _, norms = step(weights, DELTAS, optimizer='sgd', learning_rate=1.0)
  for name, level, axes in (('x', 'shared', (0, 1)), ('y', 'low', (1,)), ('z', 'own', ())):
    mean = np.average(DELTAS[name], axis=axes, weights=weights) if axes else DELTAS[name]
    moved = new[level][name].reshape(*mean.shape, -1)
    np.testing.assert_allclose(moved, np.broadcast_to(-mean[..., None], moved.shape), rtol=1e-6)
    np.testing.assert_allclose(norms[level], np.abs(mean) * PARAMS[name].size ** 0.5, rtol=1e-6)


def test_rescaling_is_by_the_root_of_the_paths_that_took_part():
  weights = np.array([[1.0, 1, 0], [1, 1, 1]], 'f')
  plain, scaled = (step(weights, DELTAS, rescale=r, optimizer='sgd', learning_rate=1.0)[0] for r in (False, True))
  np.testing.assert_allclose(scaled['shared']['x'], plain['shared']['x'] * 5**0.5, rtol=1e-6)
  roots = np.array([2, 3])[:, None, None] ** 0.5
  np.testing.assert_allclose(scaled['low']['y'], plain['low']['y'] * roots, rtol=1e-6)
  np.testing.assert_allclose(scaled['own']['z'], plain['own']['z'], rtol=1e-6)


@pytest.mark.parametrize('shared', [False, True])
@pytest.mark.parametrize('changes', [{}, dict(optimizer='nesterov'), dict(learning_rate=0.7), dict(rescale=True)])
def test_paths_are_taken_over_where_the_outer_step_leads_to_each_of_them(shared, changes):
  config = settings.Outer(**({'optimizer': 'sgd', 'learning_rate': 1.0, 'rescale': False} | changes))
  layout = LAYOUT if shared else modules.make_layout({'a': 2, 'b': 3}.items(), (('own', '.', ('a', 'b')),), 'z')
  old, deltas = modules.stack(layout, {n: PARAMS[n] for n in layout.owner}), jnp.asarray(DELTAS['z'])
  means = {'own': {'z': deltas[..., None]}}
  if shared:
    means |= {
      'shared': {'x': jnp.full(4, deltas.mean())},
      'low': {'y': deltas.mean(1)[:, None, None] + jnp.zeros((2, 2, 2))},
    }
  sums = {l.name: {n: x * layout.grid.paths_through(l) for n, x in means[l.name].items()} for l in layout.levels}
  made = choices.make_outer(config)
  state = outer.init(layout, made.optimizer, old, 'adamw')
  new, *_ = outer.update(layout, made, old, state, outer.Sums(sums, jnp.ones((2, 3))))
  paths = [modules.take(layout, new, point) for point in np.ndindex(2, 3)]
  led = all(
    np.allclose(x, -deltas[point]) for path, point in zip(paths, np.ndindex(2, 3), strict=True) for x in path.values()
  )
  assert choices.takes_over(layout, config) == led


def test_a_module_without_active_paths_keeps_its_parameters_and_momentum():
  everyone, some = np.ones((2, 3), 'f'), np.array([[1.0, 0, 0], [0, 0, 0]], 'f')
  new, state, _ = step(everyone, DELTAS)
  later, state_later, norms = step(some, DELTAS, state, new)
  untouched = lambda tree: jax.tree.map(lambda x: x[1], tree['low'])  # noqa: E731
  for before, after in ((new, later), (state, state_later)):
    for x, y in zip(jax.tree.leaves(untouched(before)), jax.tree.leaves(untouched(after)), strict=True):
      np.testing.assert_array_equal(x, y)
  assert norms['low'][1] == 0 and not np.array_equal(new['low']['y'][0], later['low']['y'][0])
  np.testing.assert_array_equal(new['own']['z'][0, 1:], later['own']['z'][0, 1:])


def test_with_row_weights_every_row_is_divided_by_its_own_weight():
  old, one = modules.stack(LAYOUT, PARAMS), np.ones((2, 3), 'f')
  config = settings.Outer(optimizer='sgd', learning_rate=1.0, rescale=False)
  sums = jax.tree.map(lambda x: jnp.full(x.shape, 6.0), old)
  masses = {name: {n: jnp.ones(x.shape) for n, x in level.items()} for name, level in old.items()}
  masses['low']['y'] = jnp.array([[1.0, 2], [3, 0]])  # [K_a, rows]; no path has a weight for the last
  state = outer.init(LAYOUT, choices.make_outer_optimizer(config), old, 'adamw')
  new, *_ = outer.update(LAYOUT, choices.make_outer(config), old, state, outer.Sums(sums, one, masses))
  np.testing.assert_allclose(new['low']['y'][:, :, 0], [[-6, -3], [-2, 0]], rtol=1e-6)
  assert (new['shared']['x'] == -6).all()
  rescaled = choices.make_outer(dataclasses.replace(config, rescale=True))
  with pytest.raises(ValueError, match='row weights go with rescale=False'):
    outer.update(LAYOUT, rescaled, old, state, outer.Sums(sums, one, masses))


def test_the_usual_move_follows_the_paths_that_took_part():
  old, weights = modules.stack(LAYOUT, PARAMS), jnp.array([[1.0, 1, 0], [0, 0, 0]])
  state = outer.init(LAYOUT, choices.make_outer_optimizer(settings.Outer()), old, 'adamw')
  assert state['low'].usual.tolist() == [2, 2], 'the square root of 4 parameters'
  moved = {level.name: jnp.array([[1.0, 5, 100], [7, 7, 7]]) for level in LAYOUT.levels}
  found = outer.update_usual(LAYOUT, old, state, weights, moved, 'adamw')
  assert found['shared'].usual == (2 + 3) / 2 and found['low'].usual.tolist() == [(2 + 3) / 2, 2]
  assert found['own'].usual.tolist() == [[1, 3, 1], [1, 1, 1]]


@pytest.mark.parametrize('angle', [0, 1, 2])
def test_the_cosine_is_that_of_outer_gradients_of_one_length(angle):
  one, other = np.array([3.0, 0]), 3 * np.array([np.cos(angle), np.sin(angle)])
  square_of_sum, sum_of_squares = ((one + other) ** 2).sum(), (one**2).sum() + (other**2).sum()
  assert float(outer.cosine(jnp.array(2.0), square_of_sum, sum_of_squares)) == pytest.approx(np.cos(angle), abs=1e-6)
  assert jnp.isnan(outer.cosine(jnp.array(1.0), square_of_sum, square_of_sum))


def test_nesterov_is_its_equation():
  ones, momentum, at = np.ones((2, 3), 'f'), 0.0, 0.0
  state = old = None
  for scale in (1.0, -0.5, 2.0):
    deltas = {name: np.full((2, 3), scale) for name in 'xyz'}
    old, state, _ = step(ones, deltas, state, old)
    momentum = 0.9 * momentum + scale
    at -= 0.7 * (scale + 0.9 * momentum)
    np.testing.assert_allclose(old['shared']['x'], at, rtol=1e-6)


def test_paths_weigh_by_their_shards_tokens_or_alike_and_nothing_if_not_active():
  active = np.array([True, True, False, True])
  found = outer.path_weights(active, [10, 20, 30, 40], True, (2, 2))
  np.testing.assert_allclose(found, [[0.4, 0.8], [0, 1.6]])
  assert found.dtype == np.float32
  np.testing.assert_array_equal(outer.path_weights(active, [10, 20, 30, 40], False, (2, 2)), [[1, 1], [0, 1]])


def test_paths_are_sampled_by_seed_and_phase_or_follow_the_schedule():
  everyone = choices.active_paths(settings.Train(), 4, 0, 3)
  assert everyone.dtype == bool and everyone.all()
  sampled = settings.Train(paths_per_phase=3)
  drawn = [choices.active_paths(sampled, 8, 5, phase) for phase in range(40)]
  assert {int(x.sum()) for x in drawn} == {3} and np.any(drawn, 0).all() and len({x.tobytes() for x in drawn}) > 20
  np.testing.assert_array_equal(drawn[7], choices.active_paths(sampled, 8, 5, 7))
  assert any((drawn[p] != choices.active_paths(sampled, 8, 6, p)).any() for p in range(5))
  schedule = settings.Train(schedule=((0, (1,)), (3, (0, 2))), paths_per_phase=1)
  found = [np.flatnonzero(choices.active_paths(schedule, 4, 0, phase)).tolist() for phase in range(5)]
  assert found == [[1], [1], [1], [0, 2], [0, 2]]


def test_exchanged_bytes_are_those_of_shared_modules_both_ways():
  assert outer.exchanged_bytes(LAYOUT, PARAMS, 6) == 2 * 4 * 6 * (4 + 4)
  assert outer.exchanged_bytes(LAYOUT, PARAMS, 1.5) == 2 * 4 * 1.5 * (4 + 4), 'of the paths that train in a phase'


def test_exchanged_bytes_are_fewer_where_they_are_compressed():
  shapes = {'x': jnp.zeros((65,)), 'y': jnp.zeros((2, 64)), 'z': jnp.zeros(1)}
  blocks, rows = 2 + 2, 65 + 2
  for kind, sent, read in (('int8', 64, 64), ('int4', 32, 32), ('int2', 16, 24)):
    found = outer.exchanged_bytes(LAYOUT, shapes, 3, True, kind)
    codes = sent + 2 + read + 2  # of a block, with its scales
    assert found == 3 * (blocks * codes + 4 * rows), 'whole blocks and their scales; row weights are float32'


@pytest.mark.parametrize('optimizer', dict(fields.fields(settings.Outer))['optimizer'].choices)
def test_every_optimizer_goes_down(optimizer):
  new, _, _ = step(np.ones((2, 3), 'f'), {name: np.ones((2, 3)) for name in 'xyz'}, optimizer=optimizer)
  assert all((x < 0).all() for x in jax.tree.leaves(new))


@pytest.mark.parametrize('optimizer', dict(fields.fields(settings.Outer))['optimizer'].choices)
def test_every_optimizer_is_that_of_the_reference(optimizer):
  config = settings.Outer(optimizer=optimizer, learning_rate=0.1, momentum=0.8, b2=0.95, epsilon=0.01)  # no defaults
  opt, rng = choices.make_outer_optimizer(config), np.random.default_rng(0)
  module = expected = np.ones(7, 'f')
  state, momentum = opt.init(module), None
  for _ in range(4):
    delta = rng.normal(size=7).astype('f')
    module, state, _ = outer.module_step(opt, module, state, delta)
    expected, momentum = reference.outer_opt(expected, momentum, delta, config)
  np.testing.assert_allclose(module, expected, rtol=1e-5, atol=1e-5)


def test_exchanged_bytes_of_a_parameter_without_axes():
  found = outer.exchanged_bytes(LAYOUT, {'x': jnp.zeros(()), 'y': jnp.zeros((2, 3)), 'z': jnp.zeros(1)}, 2, True)
  assert found == 2 * (2 * 4 * (1 + 6) + 4 * (1 + 2)), 'it is one row'
