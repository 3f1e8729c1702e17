"""How far modules are from their base and from their siblings, along the network."""

import numpy as np
from safetensors.numpy import load_file

from dipaco_jax.algorithm import grid as grids
from dipaco_jax.pipeline import stage_records
from dipaco_jax.reports import module_drift


def test_drift_equals_that_of_numpy(runs):
  workdir = runs('grid')
  config = stage_records.read_settings(workdir)
  grid = grids.Grid(config.grid)
  levels = grids.make_levels(grid, config.levels)
  base = load_file(workdir / 'base' / 'params.safetensors')
  for slab, found in module_drift.measure(workdir, 12, grid, levels):
    files = [
      workdir / 'modules' / '12' / slab.level.name / f'{"-".join(map(str, m))}.safetensors'
      for m in grid.modules(slab.level)
    ]
    modules = np.stack([np.concatenate([load_file(f)[n].ravel() for n in slab.names]) for f in files]).astype(float)
    start = np.concatenate([base[n].ravel() for n in slab.names]).astype(float)
    norm = np.linalg.norm(start)
    np.testing.assert_allclose(found.from_base, np.linalg.norm(modules - start, axis=1) / norm, rtol=1e-9)
    expected = np.linalg.norm(modules - modules.mean(0), axis=1) / norm
    np.testing.assert_allclose(found.from_siblings, expected, rtol=1e-9)


def test_storeys_follow_the_network():
  grid = grids.Grid({'a': 2, 'b': 2})
  specs = (('middle', r'block_([1-9]|10)/\w+/', ['a']), ('ends', 'embed|block_0/|block_11/|final|head', ['a', 'b']))
  levels = grids.make_levels(grid, specs)
  names = [f'block_{i}/{part}' for i in range(12) for part in ('attention/q', 'mlp/up')]
  found = module_drift.storeys(levels, [*names, 'embed/tokens', 'final_norm/scale', 'head/kernel'])
  parts = [('ends', 'embed, block 0'), ('middle', 'blocks 1-10'), ('ends', 'block 11, final norm, head')]
  assert [(slab.level.name, slab.parts) for slab in found] == parts
  assert sorted(n for slab in found for n in slab.names) == sorted(
    [*names, 'embed/tokens', 'final_norm/scale', 'head/kernel']
  )


def test_levels_that_share_blocks_are_storeys_of_their_own():
  grid = grids.Grid({'a': 2})
  levels = grids.make_levels(grid, (('norms', 'norm', []), ('rest', 'mlp|embed', ['a'])))
  found = module_drift.storeys(levels, ['embed/tokens', 'block_0/norm', 'block_0/mlp', 'block_1/norm', 'block_1/mlp'])
  assert [(slab.level.name, slab.parts) for slab in found] == [
    ('rest', 'embed'),
    ('norms', 'blocks 0-1 (part)'),
    ('rest', 'blocks 0-1 (part)'),
  ]
