"""The library: DiPaCo around any training step and pytree is the reference's Algorithm 1."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import slow

from dipaco_jax.algorithm import Grid, Levels, OuterStep, outer_step, phase, reference

GRID = Grid(a=2, b=2)
LEVELS = dict(low=('block_0', 'a'), high=('block_1', 'b'), ends=('embed', ()), own=('scale', 'a b'))
TAU, PHASES, PATHS = 3, 3, 4
RATE = 0.05


def make_params(seed=0) -> dict:
  rng = np.random.default_rng(seed)
  shapes = {'embed': (4, 3), 'block_0': {'w': (3, 3)}, 'block_1': {'w': (3, 3)}, 'scale': (3,)}
  draw = functools.partial(rng.normal, 0, 0.5)
  return jax.tree.map(lambda shape: draw(shape).astype('f'), shapes, is_leaf=lambda x: isinstance(x, tuple))


def loss(params, x, y):
  h = jnp.tanh(x @ params['embed'])
  h = h + jnp.tanh(h @ params['block_0']['w'])
  h = h + jnp.tanh(h @ params['block_1']['w'])
  return jnp.mean((h * params['scale'] - y) ** 2)


def flat_loss(named, x, y):
  nested = {'embed': named['embed'], 'scale': named['scale']}
  return loss(nested | {b: {'w': named[f'{b}/w']} for b in ('block_0', 'block_1')}, x, y)


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE, weight_decay=0.0))


def train_step(params, state, batch):
  value, grads = jax.value_and_grad(loss)(params, *batch)
  updates, state = OPTIMIZER.update(grads, state, params)
  return optax.apply_updates(params, updates), state, value


run_in_one_program = jax.jit(functools.partial(phase.train_phase, train_step))  # traced once for all tests


def draw_batches(t: int) -> tuple[np.ndarray, np.ndarray]:
  rng = np.random.default_rng([7, t])
  return rng.normal(size=(PATHS, TAU, 8, 4)).astype('f'), rng.normal(size=(PATHS, TAU, 8, 3)).astype('f')


def make(optimizer=None, **options) -> tuple[Levels, OuterStep]:
  levels = Levels(GRID, make_params(), **LEVELS)
  return levels, OuterStep(levels, optimizer or optax.sgd(0.7, 0.9, nesterov=True), **options)


def train(levels, outer, weights=None):
  """Three phases; `weights` are those of each phase."""
  params = make_params()
  modules, inner = levels.start(params), levels.per_path(OPTIMIZER.init(params))
  state, reports, make_outer_step = outer.init(modules), [], jax.jit(outer.step)
  for t in range(PHASES):
    paths, inner, losses = run_in_one_program(levels.paths(modules), inner, draw_batches(t))
    assert losses.shape == (PATHS, TAU)
    modules, state, report = make_outer_step(modules, state, paths, weights)
    reports.append(report)
  return modules, state, reports


@pytest.mark.parametrize('rescale, weights', [(False, None), (True, [3.0, 1.0, 2.0, 0.5])])
def test_it_is_algorithm_1(rescale, weights):
  levels, outer = make(rescale=rescale)
  modules, _, _ = train(levels, outer, weights)
  inner = reference.Inner(lambda s: RATE, b2=0.999, weight_decay=0.0)  # optax.adamw's b2
  of_outer = reference.Outer(rescale=rescale, reweigh=weights is not None)
  all_batches = [draw_batches(t) for t in range(PHASES)]
  expected, _, _ = reference.train(
    levels.flat(make_params()), levels.layout, lambda i, s: tuple(x[i, s % TAU] for x in all_batches[s // TAU]),
    [range(PATHS)] * PHASES, TAU, flat_loss, inner, of_outer, weights or [1] * PATHS,
  )  # fmt: skip
  assert len(expected) == 2 + 2 + 1 + 4
  for (level, module), arrays in expected.items():
    for name, x in arrays.items():
      np.testing.assert_allclose(modules[level][name][module], x, rtol=0, atol=2e-5, err_msg=f'{level} {module} {name}')


def test_paths_in_turn_by_vmap_and_on_devices_are_the_same():
  levels, _ = make()
  params = make_params()
  arguments = levels.paths(levels.start(params)), levels.per_path(OPTIMIZER.init(params)), draw_batches(0)
  expected = run_in_one_program(*arguments)
  mesh = jax.make_mesh((2, 2), ('a', 'b'))
  ways = (dict(in_turn=True), arguments), (dict(mesh=mesh), phase.spread(arguments, mesh))
  for options, given in ways:
    found = jax.jit(functools.partial(phase.train_phase, train_step, **options))(*given)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)


def test_on_a_mesh_a_phase_has_no_collectives():
  levels, _ = make()
  mesh = jax.make_mesh((4,), ('path',))
  params = make_params()
  arguments = levels.paths(levels.start(params)), levels.per_path(OPTIMIZER.init(params)), draw_batches(0)
  program = jax.jit(functools.partial(phase.train_phase, train_step, mesh=mesh))
  text = program.lower(*phase.spread(arguments, mesh)).compile().as_text()
  assert 'HloModule' in text
  assert not [name for name in ('all-reduce', 'all-gather', 'collective-permute', 'all-to-all') if f'{name}(' in text]


def test_a_step_and_a_phase_are_one_program():
  levels, outer = make(rescale=True, exclude_above=10.0, compress='int4')
  modules, inner = levels.start(make_params()), levels.per_path(OPTIMIZER.init(make_params()))

  def both(modules, state, inner, batches):
    paths, inner, _ = phase.train_phase(train_step, levels.paths(modules), inner, batches)
    return outer.step(modules, state, paths, rates=TAU * RATE)

  paths, *_ = run_in_one_program(levels.paths(modules), inner, draw_batches(0))
  expected = jax.jit(outer.step)(modules, outer.init(modules), paths, rates=TAU * RATE)
  found = jax.jit(both)(modules, outer.init(modules), inner, draw_batches(0))
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-2), found, expected)


def test_a_path_that_does_not_train_moves_nothing():
  levels, outer = make(optax.sgd(1.0))
  modules, _, _ = train(levels, outer, [1, 0, 0, 0])
  start = levels.start(make_params())
  np.testing.assert_array_equal(modules['low']['block_0/w'][1], start['low']['block_0/w'][1])
  np.testing.assert_array_equal(modules['own']['scale'][0, 1], start['own']['scale'][0, 1])
  assert (modules['low']['block_0/w'][0] != start['low']['block_0/w'][0]).all()


@pytest.mark.parametrize('damage, options', [(np.nan, {}), (1e3, {'exclude_above': 10.0})])
def test_a_poisoned_path_is_left_out(damage, options):
  levels, outer = make(optax.sgd(1.0), **options)
  modules = levels.start(make_params())
  paths = jax.tree.map(lambda x: x + 0.01, levels.paths(modules))
  bad = paths | {'embed': paths['embed'].at[2, 0, 0].add(damage)}
  found, _, report = outer.step(modules, outer.init(modules), bad, rates=0.1)
  assert report.excluded.tolist() == [False, False, True, False]
  expected, *_ = outer.step(modules, outer.init(modules), paths, [1, 1, 0, 1], rates=0.1)
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_row_weights_weigh_each_row():
  levels, outer = make(optax.sgd(1.0))
  modules = levels.start(make_params())
  rng = np.random.default_rng(0)
  paths = jax.tree.map(lambda x: x + rng.normal(0, 0.1, x.shape).astype('f'), levels.paths(modules))
  moments = jax.tree.map(lambda x: jnp.asarray(rng.exponential(1e-4, x.shape), jnp.float32), paths)
  rows = outer_step.row_weights(levels, moments, 9)
  found, *_ = outer.step(modules, outer.init(modules), paths, rows=rows)
  s = np.sqrt(np.mean(moments['block_0']['w'], 2) / (1 - 0.999**9)) + 1e-8  # [P, rows]
  np.testing.assert_allclose(rows['block_0/w'], s, rtol=1e-4)
  for module, through in enumerate([(0, 1), (2, 3)]):
    w = np.stack([s[i] for i in through])[..., None]
    mean = sum(w * np.stack([paths['block_0']['w'][i] for i in through])) / sum(w)
    np.testing.assert_allclose(found['low']['block_0/w'][module], mean, rtol=0, atol=1e-5)


def test_what_rounding_withholds_comes_later():
  levels, outer = make(optax.sgd(1.0), compress='int4')
  modules = levels.start(make_params())
  state, goal = outer.init(modules), jax.tree.map(lambda x: x + 0.1 * jnp.sin(40 * x), levels.paths(modules))
  step = jax.jit(outer.step)
  for _ in range(6):  # paths that always end at the same place
    modules, state, _ = step(modules, state, goal)
  assert set(state.residuals) == {'embed', 'block_0/w', 'block_1/w'}, 'what one path has alone is not sent'
  np.testing.assert_array_equal(modules['own']['scale'].reshape(4, 3), goal['scale'])
  np.testing.assert_allclose(modules['ends']['embed'], goal['embed'][0], rtol=0, atol=2e-3)


def test_levels_that_exchange_alone():
  levels, outer = make(optax.sgd(1.0))
  modules = levels.start(make_params())
  state, paths = outer.init(modules), jax.tree.map(lambda x: x + 1, levels.paths(modules))
  found, _, report = outer.step(modules, state, paths, only=('low',))
  assert report.moved.keys() == {'low'} and found['high'] is modules['high']
  np.testing.assert_allclose(found['low']['block_0/w'], modules['low']['block_0/w'] + 1, atol=1e-6)
  taken = levels.take_over(paths, jax.tree.map(lambda x: x * 0, found), ('low',))
  assert not taken['block_0']['w'].any() and (taken['block_1']['w'] == paths['block_1']['w']).all()


class Pair(NamedTuple):
  first: jax.Array
  rest: tuple


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
  weight: jax.Array
  pair: Pair


def test_any_pytree_will_do():
  model = Model(jnp.ones(2), Pair(jnp.zeros(3), (jnp.ones(()), jnp.ones((1, 4)))))
  levels = Levels(Grid(a=3), model, first=('^weight|pair/first', 'a'), rest=('rest/', ''))
  modules = levels.start(model)
  assert modules['first']['pair/first'].shape == (3, 3) and modules['rest']['pair/rest/1'].shape == (1, 4)
  one = levels.path(modules, 2)
  assert isinstance(one, Model) and isinstance(one.pair, Pair)
  jax.tree.map(np.testing.assert_array_equal, one, model)


def test_the_empty_grid_is_one_model():
  params = {'w': jnp.ones(2)}
  levels = Levels(Grid(), params, all=('', ''))
  jax.tree.map(np.testing.assert_array_equal, levels.path(levels.start(params), 0), params)


def test_levels_are_shown_as_a_table():
  table = [line.split() for line in repr(Levels(GRID, make_params(), **LEVELS)).splitlines()]
  assert table[1:5] == [
    ['low', 'a', '2', '9'],
    ['high', 'b', '2', '9'],
    ['ends', '-', '1', '12'],
    ['own', 'a', 'b', '4', '3'],
  ]
  assert ' '.join(table[5]) == 'grid a2xb2: 4 paths of 33 parameters, all modules 60'


@pytest.mark.parametrize(
  'levels, message',
  [
    (dict(low=('block_0', 'a')), "'block_1/w' matches no level; add a pattern to the arguments of Levels"),
    (dict(all=('', 'c')), "varies over \\['c'\\], .*; mend the arguments of Levels"),
    (dict(low=('a', 'block_0')), "varies over \\['block_0'\\], .*; swap its pattern and its axes in the arguments"),
    (dict(ends=((), 'embed')), "level 'ends' is .*: give a pattern and axes"),
    (dict(all=('', ''), low=('block_0', 'a')), "'block_0/w' matches levels 'all' and 'low'"),
    (dict(all=('', ''), more=('head', '')), 'matches no parameter'),
  ],
)
def test_wrong_levels(levels, message):
  with pytest.raises(ValueError, match=message):
    Levels(GRID, make_params(), **levels)


def test_what_is_no_array_is_named():
  with pytest.raises(ValueError, match=r'f/0 is builtin_function_or_method, not an array: give .* as .* eqx.partition'):
    Levels(GRID, {'f': [max], 'w': jnp.ones(1)}, all=('', ''))


@pytest.mark.parametrize('optimizer', [optax.sgd(0.7, 0.9, nesterov=True), optax.adam(0.1)])
@pytest.mark.parametrize('compress', slow.but(['none', 'int8'], 'none'))
def test_bfloat16_parameters_keep_their_dtype_and_are_stepped_in_float32(optimizer, compress):
  exact, params = make_params(), jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), make_params())
  levels = Levels(GRID, params, **LEVELS)
  outer = OuterStep(levels, optimizer, compress=compress)
  modules = levels.start(params)
  state = outer.init(modules)
  paths = jax.tree.map(lambda x: x + jnp.bfloat16(0.5), levels.paths(modules))
  found, after, _ = outer.step(modules, state, paths)
  dtypes = functools.partial(jax.tree.map, lambda x: x.dtype)
  assert dtypes(found) == dtypes(modules) and dtypes(after) == dtypes(state)
  in_float32 = OuterStep(Levels(GRID, exact, **LEVELS), optimizer, compress=compress)
  up = functools.partial(jax.tree.map, lambda x: x.astype(jnp.float32))
  expected, *_ = in_float32.step(up(modules), in_float32.init(up(modules)), up(paths))
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y.astype(x.dtype)), found, expected)


def test_a_phase_without_learning_rate_excludes_nobody():
  levels, outer = make(exclude_above=10.0)
  modules = levels.start(make_params())
  _, _, report = outer.step(modules, outer.init(modules), levels.paths(modules), rates=0.0)
  assert not report.excluded.any()


def test_an_excluded_path_begins_again():
  levels, outer = make()
  modules, fresh = levels.start(make_params()), OPTIMIZER.init(make_params())
  states = jax.tree.map(lambda x: x.at[2].set(7), levels.per_path(fresh))
  bad = levels.paths(modules)
  bad['scale'] = bad['scale'].at[2].set(jnp.inf)
  _, _, report = outer.step(modules, outer.init(modules), bad)
  renewed = levels.renew(states, fresh, report.excluded)
  jax.tree.map(np.testing.assert_array_equal, renewed, levels.per_path(fresh))
  kept = levels.renew(states, fresh, jnp.zeros(PATHS, bool))
  jax.tree.map(np.testing.assert_array_equal, kept, states)


def take_step(exclude_above=0.0, rescale=False, **arguments):
  levels, outer = make(exclude_above=exclude_above, rescale=rescale)
  modules = levels.start(make_params())
  return outer.step(modules, outer.init(modules), arguments.pop('paths', levels.paths(modules)), **arguments)


@pytest.mark.parametrize(
  'call, message',
  [
    (lambda: take_step(paths=make_params()), r"paths: 'block_0/w' has shape \(3, 3\) instead of \(4, 3, 3\)"),
    (lambda: take_step(weights=[1, 2, 3]), r'weights have shape \(3,\): give one for each of the 4 paths'),
    (lambda: take_step(only='lwo'), "only='lwo': no level is named lwo; the levels are low, high, ends, own"),
    (lambda: take_step(exclude_above=10.0), 'give rates'),
    (lambda: take_step(rescale=True, rows={'w': jnp.ones(PATHS)}), 'row weights go with rescale=False'),
    (lambda: make(compress='int3'), "compress='int3': use one of none, int8"),
    (lambda: make(exclude_above=-1.0), 'is negative'),
    (lambda: make()[0].path(make()[0].start(make_params()), 4), 'path 4 is not in the grid'),
    (
      lambda: Levels(GRID, {'n': jnp.zeros(3, int)}, all=('', '')),
      "'n' has dtype int32, which cannot be averaged: give the floating-point arrays",
    ),
    (lambda: Levels(GRID, {'key': jax.random.key(0)}, all=('', '')), "'key' has dtype key"),
    (lambda: Levels(GRID, {'a/b': jnp.ones(1), 'a': {'b': jnp.ones(1)}}, all=('', '')), "the name 'a/b'"),
    (lambda: Levels(GRID, {'w': jnp.ones(1)}, all='ab'), "level 'all' is 'ab': give a pattern and axes"),
    (lambda: phase.spread(jnp.ones(3), jax.make_mesh((2,), ('path',))), '3 paths cannot be spread evenly over 2'),
  ],
)
def test_wrong_arguments(call, message):
  with pytest.raises(ValueError, match=message):
    call()


def test_levels_may_have_any_name():
  levels = Levels(GRID, {'w': jnp.ones(1)}, self=('w', ''))
  assert Levels(GRID, {'w': jnp.ones(1)}, params=('w', '')).layout.levels[0].name == 'params'
  assert levels.select('self') == ('self',)


@pytest.mark.parametrize('number', [4, -1, np.int64(4), np.int64(-1), jnp.int32(9)])
def test_a_path_outside_the_grid_is_an_error_for_every_kind_of_integer(number):
  levels = Levels(Grid(a=2, b=2), {'w': jnp.ones(2)}, all=('w', 'b'))
  with pytest.raises(ValueError, match=str(int(number))):
    levels.path(levels.start({'w': jnp.ones(2)}), number)
