"""The programs of a phase, compared with plain NumPy: parameters of a path, sums, and the outer step."""

import jax
import numpy as np
import pytest
import slow
import small

from dipaco_jax.telemetry import performance
from dipaco_jax.training import programs

GRID = {'a': 2, 'b': 2}
SGD = {'outer': dict(optimizer='sgd', learning_rate=1.0, rescale=False, reweigh=False)}


# One device is quick in invariant_3_naive_twin_test.py and invariant_4_placements_test.py.
@pytest.fixture(scope='module', params=slow.but([1, 2], 1), ids='{} devices'.format)
def made(request):
  return small.make_programs(small.settings(GRID, small.MIXED_LEVELS, **SGD), request.param)


def turns(made):
  return [np.array(turn, np.int32) for turn in made.placement.turns()]


def by_path(made, found, turn) -> dict[int, dict[str, np.ndarray]]:
  """In-flight parameters, apart."""
  axes = made.specs.num_axes
  flat = {name: np.asarray(x).reshape(-1, *x.shape[axes:]) for name, x in found.items()}
  return {path: {n: x[i] for n, x in flat.items()} for i, path in enumerate(made.placement.paths(tuple(turn)))}


def level_of(made, name: str):
  return next(level for level in made.layout.levels if name in made.layout.names(level))


def in_flight(made, turn, params_of):
  """Parameters of each path, on the devices."""
  return {
    name: made.placement.assemble(
      x.shape, made.specs.params[name], lambda at, n=name: params_of(made.placement.path(tuple(turn), at))[n]
    )
    for name, x in made.shapes.items()
  }


def test_a_path_takes_its_module_of_every_level(made):
  base = small.base(made.model)
  modules = made.start(base)[0]
  drawn = {
    level: {n: np.random.default_rng(len(n)).normal(size=x.shape).astype('f') for n, x in m.items()}
    for level, m in modules.items()
  }
  seen = {}
  for turn in turns(made):
    seen |= by_path(
      made, made.gather_path(jax.device_put(drawn, jax.tree.map(lambda x: x.sharding, modules)), turn), turn
    )
  assert sorted(seen) == [0, 1, 2, 3]
  for path, params in seen.items():
    at = made.layout.grid.coordinates(path)
    for name, x in params.items():
      level = level_of(made, name)
      np.testing.assert_array_equal(x, drawn[level.name][name][made.layout.grid.module(level, at)])


def test_the_outer_step_is_the_mean_of_the_paths_that_a_module_has(made):
  """Plain averages: SGD with a rate of 1 and equal weights, from sums that `accumulate` gathers turn by turn."""
  modules, masters, outer, gathered = made.start(small.base(made.model))
  new = {path: small.base(made.model, 10 + path) for path in range(4)}
  weights, far = np.ones((2, 2), np.float32), np.zeros((2, 2), np.float32)  # no limit to the length
  for turn in turns(made):
    params = in_flight(made, turn, lambda path: new[path])
    state = made.fresh_state(params)
    step, steps = np.int32(1), dict.fromkeys(made.levels, np.int32(1))
    gathered, _ = made.program('accumulate')(
      gathered, {}, modules, programs.usual(outer), params, state, weights, far, step, steps, turn
    )
  modules, _, _, statistics = made.program('outer')(modules, masters, outer, gathered, weights)
  assert not np.asarray(statistics['excluded']).any()
  for level in made.layout.levels:
    for module in made.layout.grid.modules(level):
      mine = [p for p in range(4) if made.layout.grid.module(level, made.layout.grid.coordinates(p)) == module]
      for name in made.layout.names(level):
        expected = np.mean([new[path][name] for path in mine], axis=0)
        found = np.asarray(modules[level.name][name])[module]
        np.testing.assert_allclose(found, expected, rtol=0, atol=8 * small.EPS * np.abs(expected).max() + 8 * small.EPS)


def test_a_path_whose_parameters_are_not_finite_is_left_out_of_every_sum(made):
  modules, masters, outer, gathered = made.start(small.base(made.model))
  bad = {name: np.full_like(x, np.nan) for name, x in small.base(made.model).items()}
  good = small.base(made.model, 3)
  weights = np.ones((2, 2), np.float32)
  for turn in turns(made):
    params = in_flight(made, turn, lambda path: bad if path == 2 else good)
    state, step = made.fresh_state(params), np.int32(1)
    steps = dict.fromkeys(made.levels, step)
    gathered, _ = made.program('accumulate')(
      gathered, {}, modules, programs.usual(outer), params, state, weights, np.zeros((2, 2), 'f'), step, steps, turn
    )
  assert np.asarray(gathered.excluded).tolist() == [[False, False], [True, False]]
  modules, *_ = made.program('outer')(modules, masters, outer, gathered, weights)
  assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(modules))
  ends = {n: np.asarray(x) for n, x in modules['ends'].items()}
  for name, x in ends.items():  # the mean of the three others
    np.testing.assert_allclose(x, good[name], rtol=0, atol=16 * small.EPS * max(1, np.abs(good[name]).max()))


def test_sums_are_zero_after_an_outer_step(made):
  modules, _, outer, gathered = made.start(small.base(made.model))
  turn = turns(made)[0]
  params = in_flight(made, turn, lambda path: small.base(made.model, path + 1))
  state, step, ones = made.fresh_state(params), np.int32(1), np.ones((2, 2), np.float32)
  steps = dict.fromkeys(made.levels, step)
  gathered, _ = made.program('accumulate')(
    gathered, {}, modules, programs.usual(outer), params, state, ones, 0 * ones, step, steps, turn
  )
  assert any(np.asarray(x).any() for x in jax.tree.leaves(gathered.sums))
  assert not any(np.asarray(x).any() for x in jax.tree.leaves(made.program('zero_sums')(gathered)))


def test_the_display_has_words_for_every_program():
  assert set(programs.NAMES) <= performance.WORDS.keys()


def test_a_step_with_loss_on_the_prefix_counts_all_targets_and_evaluation_does_not():
  changes = {'model': dict(num_layers=1), 'inner': dict(optimizer='sgd', clip_norm=0.0, warmup_steps=0)}
  s = small.settings(train=dict(loss_on_prefix=True), **changes)
  made = small.make_programs(s)
  base, rows = small.base(made.model), small.batch(0, 0)
  usual = small.make_programs(small.settings(**changes))
  assert len({of.evaluate.lower(base, *rows).as_text() for of in (made, usual)}) == 1

  turn, params = np.zeros(0, np.int32), jax.device_put(base)
  arguments = rows[0][None], rows[1][None], np.int32(0), np.ones((), 'f'), turn
  stepped, _, metrics = made.steps(params, made.fresh_state(params), *arguments)
  loss, gradient = jax.jit(jax.value_and_grad(small.mean_loss(made.model, 0)))(base, *rows)
  # Losses near 4 nats and gradients below 10, sums over the rows' targets.
  close = 10 * small.ROWS * small.LENGTH * small.EPS
  np.testing.assert_allclose(metrics['loss'], [loss], rtol=0, atol=close)
  expected = {name: base[name] - s.inner.learning_rate * np.asarray(gradient[name]) for name in base}
  small.assert_close(small.fetched(stepped), expected, close)
