"""Small levels for which all paths wait are named."""

import pytest

from dipaco_jax.config import settings
from dipaco_jax.planning import barriers, dry_run

MODEL = dict(width=64, num_layers=2, num_heads=2, head_dim=32, mlp_dim=64, seq_len=64)
BLOCKS = ('low', 'embed|block_0', ('a',)), ('high', 'block_1', ('b',))


@pytest.mark.parametrize(
  'grid, levels, expected',
  [
    ({'a': 2, 'b': 2}, (('norm', 'final', ()), *BLOCKS), {'norm': 64}),
    ({'a': 2, 'b': 2}, (('norm', 'final', ('a',)), *BLOCKS), {}),
    ({'a': 2, 'b': 2}, (('ends', 'embed|final', ()), ('low', 'block_0', ('a',)), ('high', 'block_1', ('b',))), {}),
    ({'a': 4}, (('norm', 'final', ()), ('rest', 'embed|block', ())), {}),
    ({'a': 1, 'b': 1}, (('norm', 'final', ()), *BLOCKS), {}),
  ],
  ids=['norm', 'norm over an axis', 'embedding', 'DiLoCo', 'one path'],
)
def test_a_level_of_few_parameters_over_no_axis_is_named(grid, levels, expected):
  of_grid = dry_run.layout_and_shapes(settings.from_dict({'model': MODEL, 'grid': grid, 'levels': levels}))
  assert barriers.needless(*of_grid) == expected
  assert len(barriers.lines(*of_grid)) == len(expected)
