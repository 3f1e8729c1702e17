"""What the library costs: a phase of one path through `algorithm.train_path` and by a bare scan, in turns.

    python benchmarks/library.py

The training step is that of examples/library_jax.py. Prints the median of the ratios of neighbours and the seconds.
"""

import pathlib
import statistics
import sys
import time

import jax
import numpy as np

from dipaco_jax import algorithm

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / 'examples'))
import chars
import library_jax

TAU, REPEATS = 20, 15


def bare_phase(params, state, batches):
  """Trains without the library."""

  def step(carry, batch):
    params, state = carry
    params, state, value = library_jax.train_step(params, state, batch)
    return (params, state), value

  (params, state), losses = jax.lax.scan(step, (params, state), batches)
  return params, state, losses


def seconds(phase, *arguments) -> float:
  """Times one phase."""
  begin = time.perf_counter()
  jax.block_until_ready(phase(*arguments))
  return time.perf_counter() - begin


def main():
  """Compares phases of one path, and of four paths in turn with four bare phases."""
  params = library_jax.init(jax.random.key(0))
  levels = algorithm.Levels(
    algorithm.Grid(a=2, b=2), params, low=('block_0', 'a'), high=('block_1', 'b'), ends=('embed|head', ())
  )
  shards, _ = chars.load_shards()
  one = params, library_jax.optimizer.init(params), chars.draw(shards, TAU, np.random.default_rng(0))
  four = levels.paths(levels.start(params)), levels.per_path(one[1]), np.stack([one[2]] * 4)
  bare, of_path = jax.jit(bare_phase), jax.jit(lambda *a: algorithm.train_path(library_jax.train_step, *a))
  of_all = jax.jit(lambda *a: algorithm.train_phase(library_jax.train_step, *a, in_turn=True))
  for phase, arguments in ((bare, one), (of_path, one), (of_all, four)):
    seconds(phase, *arguments)  # compiles
  times = [[seconds(bare, *one), seconds(of_path, *one), seconds(of_all, *four) / 4] for _ in range(REPEATS)]
  for name, column in (('one path', 1), ('four paths in turn, each', 2)):
    ratio = statistics.median(row[column] / row[0] for row in times)
    print(f'{name}: {statistics.median(row[column] for row in times):.3f} s a phase, {ratio - 1:+.1%} of the bare loop')


if __name__ == '__main__':
  main()
