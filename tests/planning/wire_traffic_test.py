"""What islands exchange in bytes, against arrays that are really made."""

import dataclasses

import jax
import numpy as np
import pytest
import slow
import small

from dipaco_jax.algorithm import compression, modules
from dipaco_jax.config import choices
from dipaco_jax.planning import wire_traffic


def made(**outer_fields):
  """Settings, shapes, and layout of a 2x2 grid with modules of all kinds."""
  s = small.on_2x2(outer=outer_fields, checkpoint=dict(state_every_phases=4), train=dict(steps_per_phase=40))
  shapes = small.make_programs(s).shapes
  return s, shapes, modules.make_layout(s.grid, s.levels, shapes)


@pytest.mark.slow
@pytest.mark.parametrize('kind', slow.all_but(compression.KINDS, 'int8'))
def test_bytes_are_those_of_arrays(kind):
  s, shapes, layout = made(compress=kind, stream='on')
  found, base = wire_traffic.make_traffic(s, shapes), small.base(small.make_programs(s).model)

  def packed(x, kind):
    return x if kind == 'none' else compression.encode(x, kind)

  sent, read = (
    {
      level.name: sum(x.nbytes for n in layout.names(level) for x in jax.tree.leaves(packed(base[n], of)))
      for level in layout.levels
      if level.name != 'own'
    }
    for of in (kind, 'int3' if kind == 'int2' else kind)
  )
  assert found.message == sent and found.version == read
  own = {n: x for n, x in base.items() if layout.owner[n].name == 'own'}
  shared = {n: x for n, x in base.items() if n not in own}
  adamw = choices.make_inner_of_run(s).init(base)
  residual = {} if kind == 'none' else compression.first_residual(shared)
  chosen = own if s.train.early_stopping else {}
  state = adamw, residual, own, chosen, choices.make_outer_optimizer(s.outer).init(own)
  assert found.state == sum(np.asarray(x).nbytes for x in jax.tree.leaves(state))
  [low] = (level for level in layout.levels if level.name == 'low')
  there = 4 * sum(base[n].size for n in layout.names(low))  # M; as many of momentum, and of m where it is another
  copies = 2 * 2 * there if kind == 'none' else 2 * 3 * there + read['low']
  assert found.outer['low'] == 2 * sent['low'] + copies  # from the two paths that share it


def test_paths_and_places_are_those_of_training():
  s, shapes, layout = made(wire='thin')
  found = wire_traffic.make_traffic(s, shapes)
  assert found.table == small.make_programs(s).timetable and found.state_every == 4 and found.table.closed_every == 16
  assert found.groups == {'ends': ((0, 1, 2, 3),), 'low': ((0, 1), (2, 3)), 'high': ((0, 2), (1, 3))}
  assert found.num_paths == layout.grid.num_paths
  up, down = found.bytes_per_phase
  assert down == sum(found.version.values()) and up == down + found.state / 16, 'only after closed phases'
  plain = wire_traffic.make_traffic(dataclasses.replace(s, outer=dataclasses.replace(s.outer, wire='lan')), shapes)
  assert plain.bytes_per_phase[0] == plain.bytes_per_phase[1] + plain.state / 4


@pytest.mark.parametrize('wire, most', [('lan', 9.0), ('thin', 1.8)])
def test_a_parameter_takes_few_bytes_a_phase(wire, most):
  s = small.settings({'worker': 8}, outer=dict(wire=wire), model=dict(width=64, mlp_dim=256, num_heads=8))
  shapes = small.make_programs(s).shapes
  moved = sum(wire_traffic.make_traffic(s, shapes).bytes_per_phase) / sum(x.size for x in shapes.values())
  assert 0.9 * most < moved < most


def test_without_adamw_state_there_is_none_of_it():
  s = small.settings({'worker': 8}, inner=dict(keep_state=False))
  assert wire_traffic.make_traffic(s, small.make_programs(s).shapes).state == 0
