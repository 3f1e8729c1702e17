"""Stacked modules: what a path takes, by brute force over paths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from dipaco_jax.algorithm import modules
from dipaco_jax.models import transformer

AXES = {'a': 2, 'b': 3}.items()
SPECS = (('shared', 'x', ()), ('low', 'y', ('a',)), ('high', 'w', ('b',)), ('own', 'z', ('a', 'b')))
SHAPES = {'w': (2,), 'x': (3, 2), 'y': (4,), 'z': ()}
LAYOUT = modules.make_layout(AXES, SPECS, SHAPES)


def numbered():
  """Modules whose every module is filled with a number of its own."""
  stacked = {}
  for level in LAYOUT.levels:
    lead = LAYOUT.grid.level_shape(level)
    for name in LAYOUT.names(level):
      numbers = np.arange(LAYOUT.grid.num_modules(level)).reshape(*lead, *[1] * len(SHAPES[name]))
      stacked.setdefault(level.name, {})[name] = jnp.broadcast_to(numbers, (*lead, *SHAPES[name]))
  return stacked


def test_every_path_takes_its_modules():
  for path, (a, b) in enumerate(LAYOUT.grid.points()):
    params = modules.take(LAYOUT, numbered(), (a, b))
    assert list(params) == sorted(SHAPES) and {n: x.shape for n, x in params.items()} == SHAPES
    found = {name: {int(v) for v in np.ravel(x)} for name, x in params.items()}
    assert found == {'x': {0}, 'y': {a}, 'w': {b}, 'z': {path}}


def test_coordinates_may_be_traced():
  take = jax.jit(lambda at: modules.take(LAYOUT, numbered(), tuple(at)))
  small.assert_close(take(jnp.array([1, 2])), modules.take(LAYOUT, numbered(), (1, 2)), 0)


def test_stack_gives_every_path_the_base():
  params = {name: np.random.default_rng(0).normal(size=shape).astype('f') for name, shape in SHAPES.items()}
  stacked = modules.stack(LAYOUT, params)
  assert stacked['own']['z'].shape == (2, 3) and stacked['low']['y'].shape == (2, 4)
  for point in LAYOUT.grid.points():
    small.assert_close(modules.take(LAYOUT, stacked, point), params, 0)


def test_parameters_of_all_modules_are_counted():
  shapes = {name: jax.ShapeDtypeStruct(shape, 'f') for name, shape in SHAPES.items()}
  assert LAYOUT.num_parameters(shapes) == 6 + 2 * 4 + 3 * 2 + 6
  assert sum(x.size for x in jax.tree.leaves(numbered())) == LAYOUT.num_parameters(shapes)


def test_a_parameter_without_level_is_named():
  shapes = transformer.shapes(small.make_programs(small.settings()).model)
  with pytest.raises(ValueError, match='final_norm/scale'):
    modules.make_layout(AXES, (('blocks', 'block|embed', ('a',)),), shapes)


def test_replicas_are_one_model():
  assert LAYOUT.models() == [[path] for path in range(6)]
  specs = (('shared', '[xz]', ()), ('high', '[yw]', ('b',)))
  assert modules.make_layout(AXES, specs, SHAPES).models() == [[0, 3], [1, 4], [2, 5]]
  assert modules.make_layout(AXES, (('all', '.*', ()),), SHAPES).models() == [list(range(6))]
  assert modules.make_layout({}, (('all', '.*', ()),), SHAPES).models() == [[0]]
