"""Invariant 5: the compiled inner phase has no collective across the grid's axes, and the outer step's are minimal.

With each path on a device, an outer step sums over the paths of a module: every device contributes its copy of each
shared module and receives the sum.
"""

import math

import jax
import numpy as np
import pytest
import slow
import small

from dipaco_jax.algorithm import outer
from dipaco_jax.planning.hlo import collectives
from dipaco_jax.training import programs

GRID = {'a': 4, 'b': 2}


def compiled(name, data, shard_states=False, devices=8):
  """HLO of a program of the whole grid, and the programs."""
  s = small.settings(GRID, small.MIXED_LEVELS, mesh=dict(data=data, shard_states=shard_states))
  made = small.make_programs(s, devices)
  stacked = jax.eval_shape(made.start, made.shapes)
  turn = np.zeros(2, np.int32)
  params = jax.eval_shape(made.gather_path, stacked[0], turn)
  state = jax.eval_shape(made.fresh_state, params)
  rows = jax.ShapeDtypeStruct((2, *made.placement.positions, small.ROWS, small.LENGTH), np.int32)
  weights = jax.ShapeDtypeStruct((4, 2), np.float32)
  arguments = {
    'gather_path': (stacked[0], turn),
    'steps': (params, state, rows, rows, np.int32(0), weights, turn),
    'accumulate': (
      stacked[3],
      {},
      stacked[0],
      programs.usual(stacked[2]),
      params,
      state,
      weights,
      weights,
      np.int32(2),
      dict.fromkeys(made.levels, np.int32(2)),
      turn,
    ),
    'outer': (*stacked, weights),
  }[name]
  return made.program(name).lower(*arguments).compile().as_text(), made


@pytest.mark.parametrize('name', ['gather_path', 'steps', 'accumulate'])
def test_a_path_on_one_device_is_alone_until_the_outer_step(name):
  text, made = compiled(name, data=1)
  assert made.placement.positions == (4, 2)
  assert 'HloModule' in text and not collectives(text)


@pytest.mark.parametrize('shard_states', slow.but([False, True], False))
def test_devices_inside_a_path_talk_among_themselves_only(shard_states):
  text, made = compiled('steps', data=2, shard_states=shard_states)
  inside = {frozenset(d.id for d in slice_) for slice_ in made.placement.mesh.devices.reshape(-1, 2)}
  assert len(inside) == 4
  found = collectives(text)
  kinds = {kind for kind, _, _ in found}
  # XLA's CPU compiler writes a reduce-scatter as an all-reduce or leaves it.
  assert 'all-gather' in kinds if shard_states else kinds == {'all-reduce'}
  order = [d.id for d in made.placement.mesh.devices.reshape(-1)]
  for kind, _, devices in found:
    assert devices, kind
    assert all(frozenset(order[i] for i in group) in inside for group in devices), (kind, devices)


def test_outer_step_moves_what_arithmetic_says():
  text, made = compiled('outer', data=1)
  shared = sum(
    4 * math.prod(made.shapes[name].shape)
    for name, level in made.layout.owner.items()
    if made.layout.grid.paths_through(level) > 1
  )
  assert 0 < shared < sum(4 * math.prod(x.shape) for x in made.shapes.values())
  assert outer.exchanged_bytes(made.layout, made.shapes, 8) == 2 * shared * 8
  found = collectives(text)
  reduced = sum(size for kind, size, _ in found if kind == 'all-reduce')
  rest = sum(size for kind, size, _ in found if kind != 'all-reduce')
  # Beside the modules go the statistics: a few numbers per module and path.
  numbers = 4 * (8 + sum(made.layout.grid.num_modules(level) for level in made.layout.levels))
  assert shared <= reduced + rest <= shared + 8 * numbers
  assert reduced >= shared


def test_an_outer_step_of_one_path_to_a_module_moves_no_parameters():
  s = small.settings(GRID, (('all', '.*', ('a', 'b')),))
  made = small.make_programs(s, 8)
  weights = jax.ShapeDtypeStruct((4, 2), np.float32)
  text = made.program('outer').lower(*jax.eval_shape(made.start, made.shapes), weights).compile().as_text()
  assert sum(size for _, size, _ in collectives(text)) <= 8 * 4 * (8 + 8)
  assert outer.exchanged_bytes(made.layout, made.shapes, 8) == 0


HLO = """
  %all-reduce.1 = (f32[64,16]{1,0}, f32[2,8]{1,0}, /*index=5*/f32[]) all-reduce(%a, %b, /*index=2*/%c), channel_id=1, \
replica_groups={{0,1},{2,3}}, use_global_device_ids=true, to_apply=%add
  ROOT %g = bf16[8]{0} all-gather(%x), replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}
  %m = f32[1,2]{0,1} all-gather(%x), replica_groups=mesh['axis_0'=2,'axis_1'=2] {'axis_0'}, dimensions={1}
  %t = f32[2]{0} all-gather(%x), replica_groups=mesh['axis_0'=2,'axis_1'=3], device_ids=([3,2]T(1,0)) {'axis_0'}
  %p = f32[3]{0} collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %call = f32[4]{0} call(%x), to_apply=%all-reduce-body
"""


def test_collectives_are_found_in_every_spelling():
  assert collectives(HLO) == [
    ('all-reduce', 4 * (64 * 16 + 16 + 1), [[0, 1], [2, 3]]),
    ('all-gather', 16, [[0, 2], [1, 3]]),
    ('all-gather', 8, [[0, 2], [1, 3]]),
    ('all-gather', 8, [[0, 1], [2, 3], [4, 5]]),
    ('collective-permute', 12, [[0, 1], [1, 0]]),
  ]
