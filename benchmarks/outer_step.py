"""What an outer round costs beside the inner steps of its phase, on a 4x4 grid with several levels and own ends.

    python benchmarks/outer_step.py [--grid=4,4 --width=256 ...]

The round is all that a phase does besides inner steps: a copy of its modules for every path, every path's part of the
outer gradient, the outer step. `inner_s` is a phase's steps, `inner_150_s` those of one turn of paths, from the median
of some. Prints a table and, as the last line, one JSON object.
"""

import math

import common
import jax
import numpy as np
from absl import app, flags

from dipaco_jax.algorithm import outer
from dipaco_jax.models import transformer
from dipaco_jax.training import programs

common.define_sizes(width=256, num_layers=4, num_heads=4, mlp_dim=688, vocab_size=8192, seq_len=256, batch_size=16)
GRID = flags.DEFINE_list('grid', ['4', '4'], 'sizes of the two axes')
TAU = flags.DEFINE_integer('steps_per_phase', 150, 'tau')
STEPS = flags.DEFINE_integer('steps_per_dispatch', 6, 'k; 6 is what the default makes of phases of 150')
ROUNDS = flags.DEFINE_integer('rounds', 5, 'dispatches and outer rounds; medians are reported')


class Run:
  """The arrays of a run, and the parts of a phase that go on from them."""

  def __init__(self, made: programs.Programs):
    self.made, self.turns = made, [np.array(turn, np.int32) for turn in made.placement.turns()]
    self.weights = np.ones(made.layout.grid.shape, np.float32)
    self.modules, _, *self.rest = made.start(transformer.init(made.model, jax.random.key(0)))
    self.rows = common.in_flight(made, common.random_rows(made.settings, STEPS.value))
    self.params = made.gather_path(self.modules, self.turns[0])
    self.state = made.fresh_state(self.params)

  def steps(self):
    self.params, self.state, found = self.made.steps(
      self.params, self.state, *self.rows, np.int32(0), self.weights, self.turns[0]
    )
    return found

  def begin(self):
    for turn in self.turns:
      params = jax.block_until_ready(self.made.gather_path(self.modules, turn))
    return params

  def finish(self):
    outer_state, gathered = self.rest
    usual, limits = programs.usual(outer_state), 10 * self.weights
    steps = np.int32(TAU.value), dict.fromkeys(self.made.levels, np.int32(TAU.value))
    for turn in self.turns:
      gathered, _ = self.made.program('accumulate')(
        gathered, {}, self.modules, usual, self.params, self.state, self.weights, limits, *steps, turn
      )
    self.rest = [outer_state, gathered]
    return gathered

  def outer(self):
    outer_state, gathered = self.rest
    self.modules, _, outer_state, found = self.made.program('outer')(
      self.modules, {}, outer_state, gathered, self.weights
    )
    self.rest = [outer_state, self.made.program('zero_sums')(gathered)]
    return self.modules, self.rest, found


def measure() -> dict:
  grid = dict(zip('ab', map(int, GRID.value), strict=True))
  made = common.make_programs(common.make_settings(grid, common.LEVELS), jax.devices())
  run = Run(made)
  parts = (run.steps, run.begin, run.finish, run.outer)
  common.in_turns(parts, 2)  # compiles, and takes the memory that it then keeps
  dispatch_s, begin_s, finish_s, update_s = common.in_turns(parts, ROUNDS.value)
  round_s = begin_s + finish_s + update_s
  inner_150_s = dispatch_s / STEPS.value * 150
  inner_s = dispatch_s / STEPS.value * TAU.value * len(run.turns)
  parameters = sum(shape.size for shape in made.shapes.values())
  return {
    'outer_s': round_s,
    'begin_s': begin_s,
    'finish_s': finish_s,
    'update_s': update_s,
    'inner_150_s': inner_150_s,
    'inner_s': inner_s,
    'fraction': round_s / inner_s,
    'fraction_of_inner_150': round_s / inner_150_s,
    'bytes': outer.exchanged_bytes(made.layout, made.shapes, made.layout.grid.num_paths),
    'synchronous_bytes': 2 * 4 * parameters * made.layout.grid.num_paths * TAU.value,
    'path_parameters': parameters,
    'total_parameters': made.layout.num_parameters(made.shapes),
    'paths': made.layout.grid.num_paths,
    'devices': math.prod(made.placement.mesh.devices.shape),
    'device': jax.devices()[0].device_kind,
  }


def main(_):
  f = flags.FLAGS
  title = f'grid {" x ".join(GRID.value)}; {f.width} x {f.num_layers}, vocabulary {f.vocab_size}, '
  common.report(title + f'{f.batch_size} rows of {f.seq_len}, {f.dtype}', measure())


if __name__ == '__main__':
  app.run(main)
