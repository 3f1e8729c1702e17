"""Invariant 4: it doesn't matter where paths are: on 1 device or 8, one or two inside a path, together or in turns."""

import functools
import pathlib
import tempfile

import numpy as np
import pytest
import slow
import small

from dipaco_jax.storage import module_store
from dipaco_jax.telemetry import metrics_log

GRID = {'a': 4, 'b': 2}
PLACEMENTS = {  # devices, mesh: (positions of a and b, devices inside a path)
  'one device, eight turns': (1, {}, (1, 1, 1)),
  'two devices': (2, {}, (2, 1, 1)),
  'a path on every device': (8, {}, (4, 2, 1)),
  'two devices inside a path': (8, {'data': 2}, (4, 1, 2)),
  'states sharded inside a path': (8, {'data': 2, 'shard_states': True}, (4, 1, 2)),
}
OTHERS = slow.all_but(list(PLACEMENTS)[1:], 'a path on every device')


@functools.cache
def trained(name, row_weights=False):
  """(programs, modules and moments by path on the host, rows of metrics, directory) after three phases."""
  devices, mesh, positions = PLACEMENTS[name]
  s = small.settings(GRID, small.MIXED_LEVELS, mesh=mesh, outer=dict(row_weights=row_weights, rescale=not row_weights))
  made = small.make_programs(s, devices)
  assert (*made.placement.positions, made.placement.data) == positions
  workdir = pathlib.Path(tempfile.mkdtemp())
  state = small.train(small.make_job(made, publish=True), workdir)
  moments = {}
  for turn, inner in state.inner.items():
    found = small.fetched(inner.optimizer[0])
    for position in np.ndindex(*made.placement.positions):
      path = made.placement.path(made.placement.turns()[turn], position)
      moments[path] = {k: {n: x[position] for n, x in m.items()} for k, m in (('mu', found.mu), ('nu', found.nu))}
  return made, small.fetched(state.modules), moments, list(metrics_log.read_rows(workdir)), workdir


def tolerance(made):
  """As for the twin: rounding of a parameter, and of a direction that is a sum over targets, for each step."""
  s = made.settings
  steps = s.train.phases * s.train.steps_per_phase
  return 1.33 * 8**0.5 * steps * small.EPS * (2 + s.inner.learning_rate * small.ROWS * small.LENGTH)


@pytest.mark.slow
def test_rows_that_lie_on_several_devices_weigh_as_whole_ones():
  made, found, *_ = trained('states sharded inside a path', True)
  assert any(dim not in (None, 0) for dim in made.specs.dims.values())
  small.assert_close(found, trained('one device, eight turns', True)[1], tolerance(made))


@pytest.mark.parametrize('name', OTHERS)
def test_agrees_with_one_device(name):
  _, modules, moments, rows, _ = trained('one device, eight turns')
  made, found, found_moments, found_rows, _ = trained(name)
  small.assert_close(found, modules, tolerance(made))
  for path in range(8):
    # Gradients are below the clipping norm 1, and first moments are averages of them.
    small.assert_close(found_moments[path], moments[path], tolerance(made))
  for kind, key in (('step', 'loss'), ('step', 'grad_norm'), ('phase', 'loss_by_path')):
    series, expected = by_path(found_rows, kind, key), by_path(rows, kind, key)
    assert series.keys() == expected.keys() == set(range(8))
    for path, values in series.items():
      # Losses of 4 nats are sums of as many terms as there are targets.
      np.testing.assert_allclose(values, expected[path], atol=4 * small.EPS * small.ROWS * small.LENGTH)


def by_path(rows, kind, key):
  """{path: values in the order of its steps}."""
  series = {}
  for row in rows:
    if row['kind'] == kind:
      for path, value in zip(row.get('paths', range(8)), row[key], strict=True):
        series.setdefault(path, []).append(value)
  return series


@pytest.mark.parametrize('name', OTHERS)
def test_statistics_of_the_outer_step_agree(name):
  expected, found = (
    [row for row in trained(n)[3] if row['kind'] == 'phase'] for n in ('one device, eight turns', name)
  )
  for row, other in zip(found, expected, strict=True):
    # Of outer gradients of norms up to 1, whose every element errs by the tolerance.
    for level, norms in row['outer_gradient_norm'].items():
      assert norms == pytest.approx(other['outer_gradient_norm'][level], rel=1e-3)
    shared = [level for level in row['cosine'] if level != 'own']
    assert shared
    np.testing.assert_allclose(
      [row['cosine'][level] for level in shared], [other['cosine'][level] for level in shared], atol=1e-3
    )


@pytest.mark.parametrize('name', slow.all_but(PLACEMENTS, 'one device, eight turns', 'a path on every device'))
def test_published_modules_are_whole_and_those_of_the_state(name):
  made, modules, _, _, workdir = trained(name)
  for path, (a, b) in enumerate(np.ndindex(4, 2)):
    params = module_store.load_path(workdir, made.layout, path)
    assert set(params) == set(made.shapes)
    at = {'ends': (), 'low': (a,), 'high': (b,), 'own': (a, b)}
    for parameter, level in made.layout.owner.items():
      np.testing.assert_array_equal(params[parameter], modules[level.name][parameter][at[level.name]])
