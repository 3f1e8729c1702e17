"""Invariant 3: the SPMD program is the naive twin, a loop over paths and modules that is Algorithm 1 line by line."""

import dataclasses

import numpy as np
import optax
import pytest
import slow
import small
import twin

from dipaco_jax.algorithm import inner as inner_lib, outer
from dipaco_jax.config import choices, fields, settings

AB, ABC = {'a': 2, 'b': 2}, {'a': 2, 'b': 1, 'c': 2}
FLAT = (('all', '.*', ('a', 'b')),)
CROSSED = (('ends', 'embed|final', ()), ('low', 'block_0', ('a', 'b')), ('high', 'block_1', ('c',)))
BY_ROW = dict(row_weights=True, rescale=False)

CASES = {
  'dense': ((), small.ONE_LEVEL, {}),
  'diloco': ({'a': 3}, small.ONE_LEVEL, {}),
  'flat moe': (AB, FLAT, {}),
  'mixed levels': (AB, small.MIXED_LEVELS, {}),
  'three axes': (ABC, CROSSED, {}),
  'a replica axis': ({'a': 2, 'replica': 2}, (('ends', 'embed|final', ()), ('blocks', 'block', ('a',))), {}),
  'neither weights nor rescale': (AB, small.MIXED_LEVELS, {'outer': dict(rescale=False, reweigh=False)}),
  'a cap on weights': (AB, small.MIXED_LEVELS, {'outer': dict(max_weight=0.35)}),
  'a cap on owners': ({'a': ('x', 'y'), 'b': 2}, small.MIXED_LEVELS, {'outer': dict(max_weight=0.6)}),
  'a cap on weights, sampled': (
    ABC,
    CROSSED,
    {'outer': BY_ROW | dict(max_weight=0.4), 'train': dict(paths_per_phase=3)},
  ),
  'row weights': (AB, small.MIXED_LEVELS, {'outer': BY_ROW}),
  'row weights, sampled': (ABC, CROSSED, {'outer': BY_ROW, 'train': dict(paths_per_phase=3, phases=4)}),
  'fresh states': (AB, small.MIXED_LEVELS, {'inner': dict(keep_state=False)}),
  'momentum': (AB, small.MIXED_LEVELS, {'outer': dict(optimizer='momentum')}),
  'adam': (AB, small.MIXED_LEVELS, {'outer': dict(optimizer='adam', learning_rate=0.1)}),
  'sgd': (AB, small.MIXED_LEVELS, {'outer': dict(optimizer='sgd', learning_rate=1.0)}),
  'muon': (AB, small.MIXED_LEVELS, {'inner': dict(optimizer='muon')}),
  'sampled': (AB, small.MIXED_LEVELS, {'train': dict(paths_per_phase=2, phases=4)}),
  'schedule': (AB, small.MIXED_LEVELS, {'train': dict(schedule=((0, (0,)), (1, (0, 1)), (2, (0, 1, 2, 3))))}),
  'lost': (AB, small.MIXED_LEVELS, {'outer': dict(lost=0.5), 'train': dict(phases=4)}),
  'loss on the prefix': (AB, small.MIXED_LEVELS, {'train': dict(loss_on_prefix=True)}),
  'inherited': (AB, small.MIXED_LEVELS, {'pretrain': dict(steps=5), 'inner': dict(rewarm_steps=3)}),
  'inherited once': (AB, small.MIXED_LEVELS, {'pretrain': dict(steps=5), 'inner': dict(keep_state=False)}),
}


def test_every_outer_optimizer_has_a_case():
  used = {sections.get('outer', {}).get('optimizer', 'nesterov') for _, _, sections in CASES.values()}
  assert used == set(dict(fields.fields(settings.Outer))['optimizer'].choices)


def count_of(state):
  """The updates that an inner state is of; Muon's has two counts, which are the same."""
  [(_, first), *others] = optax.tree.get_all_with_path(state.optimizer, 'count')
  assert all((first == other).all() for _, other in others)
  return first


def base_state(params):
  """AdamW's as five steps of pretraining might leave it: (of the twin, of the product)."""
  rng = np.random.default_rng(5)
  m = {name: rng.normal(0, 0.01, x.shape).astype('f') for name, x in params.items()}
  v = {name: rng.uniform(0, 0.001, x.shape).astype('f') for name, x in params.items()}
  theirs = (optax.ScaleByAdamState(np.int32(5), m, v), optax.MaskedState(optax.EmptyState()))
  return {'m': m, 'v': v, 't': 5}, inner_lib.InnerState(theirs, np.int32(0))


ALL = [
  *((case, 1) for case in CASES),
  ('row weights', 4),
  ('a cap on owners', 4),
  ('three axes', 4),
  ('sampled', 4),
  ('lost', 4),
]
QUICK = [('mixed levels', 1), ('sampled', 4)]


@pytest.mark.parametrize('case, devices', slow.all_but(ALL, *QUICK))
def test_twin(case, devices, tmp_path):
  grid, levels, changes = CASES[case]
  s = small.settings(grid, levels, **changes)
  made = small.make_programs(s, devices)
  job = small.make_job(made)
  ours, theirs = base_state(job.base) if s.pretrain.steps else (None, None)
  state = small.train(dataclasses.replace(job, base_state=theirs), tmp_path)

  layout, paths = made.layout, made.layout.grid.num_paths
  active = [
    np.flatnonzero(choices.active_paths(s.train, paths, s.seed, phase)).tolist() for phase in range(s.train.phases)
  ]
  modules, _, states, history = twin.train(
    job.base, ours, small.batch, active, [1.0 + path for path in range(paths)], layout.grid, layout.levels,
    layout.owner, small.mean_loss(made.model, 0 if s.train.loss_on_prefix else 8), s, 16,
    lambda phase: np.flatnonzero(outer.lost_paths(s.outer.lost, (paths,), s.seed, phase)).tolist(),
  )  # fmt: skip
  # A step errs by the rounding of a parameter (below 2), and of a direction that is a sum over the rows' targets;
  # an outer step hands the errors on, times 0.7 * 1.9 * sqrt(P_{l,e}).
  steps, targets = s.train.phases * s.train.steps_per_phase, small.ROWS * small.LENGTH
  tolerance = 1.33 * paths**0.5 * steps * small.EPS * (2 + s.inner.learning_rate * targets)
  found = small.fetched(state.modules)
  for (level, module), params in modules.items():
    for name, expected in params.items():
      where = f'{level} {module} {name}'
      np.testing.assert_allclose(found[level][name][module], expected, rtol=0, atol=tolerance, err_msg=where)
  rows = [row['loss_by_path'] for row in small.metrics_log.read_rows(tmp_path) if row['kind'] == 'phase']
  for row, losses in zip(rows, history, strict=True):
    expected = [np.mean(losses[path]) if path in losses else np.nan for path in range(paths)]
    # Of losses near 4 nats, sums over the rows' targets.
    np.testing.assert_allclose(np.array(row, float), expected, atol=4 * targets * small.EPS)
  if s.inner.keep_state:
    counts = {}
    for turn, inner in state.inner.items():
      where = made.placement.paths(made.placement.turns()[turn])
      counts |= dict(zip(where, np.ravel(count_of(inner)).tolist(), strict=True))
    assert counts == {path: (states[path] or {'t': 0})['t'] for path in counts}
    assert all(path in counts for path in np.unique(np.concatenate(active)))
  moved = max(np.abs(x - job.base[name]).max() for params in modules.values() for name, x in params.items())
  assert moved > 1000 * tolerance
