"""DiPaCo around a training step written in Flax NNX: one dense model becomes 2x2 paths.

    python examples/library_nnx.py                      some minutes on a laptop

The comparison of library_jax.py. NNX modules are split into a graph, which all paths share, and their parameters,
which are the pytree that levels are made of.
"""

import argparse
import functools

import chars
import jax
import numpy as np
import optax
from flax import nnx
from jax import numpy as jnp

from dipaco_jax import algorithm

VOCAB, WIDTH, KERNEL = 128, 64, 8


class Block(nnx.Module):
  """A causal convolution, as a product with windows, and an MLP."""

  def __init__(self, rngs: nnx.Rngs):
    self.mix = nnx.Linear(KERNEL * WIDTH, WIDTH, rngs=rngs)
    self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
    self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
    self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

  def __call__(self, x):
    return x + self.down(nnx.gelu(self.up(self.norm(self.mix(chars.windows(x, KERNEL))))))


class Model(nnx.Module):
  """Predicts each next byte."""

  def __init__(self, rngs: nnx.Rngs):
    self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
    self.block_0, self.block_1 = Block(rngs), Block(rngs)
    self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

  def __call__(self, tokens):
    return self.head(self.block_1(self.block_0(self.embed(tokens))))


GRAPH, START = nnx.split(Model(nnx.Rngs(0)))
optimizer = optax.adamw(3e-3)


def loss(params, tokens) -> jax.Array:
  """Returns the mean loss in nats per byte."""
  logits = nnx.merge(GRAPH, params)(tokens[:, :-1])
  return optax.losses.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_step(params, state, tokens):
  """Makes one step: nothing here knows of paths."""
  value, grads = jax.value_and_grad(loss)(params, tokens)
  updates, state = optimizer.update(grads, state, params)
  return optax.apply_updates(params, updates), state, value


def train(params, grid, levels, shards_of_path, held_out, tau, phases):
  """Trains all paths of a grid, and returns the perplexity before each phase and after the last."""
  levels = algorithm.Levels(grid, params, **levels)
  outer = algorithm.OuterStep(levels, optax.sgd(1.0))  # plain averages
  modules, inner_states = levels.start(params), levels.per_path(optimizer.init(params))
  outer_state, rng = outer.init(modules), np.random.default_rng(0)
  run_phase = jax.jit(functools.partial(algorithm.train_phase, train_step))
  make_outer_step, held_out_loss = jax.jit(outer.step), jax.jit(loss)

  def measure() -> float:
    """Perplexity, each kind of text by its path."""
    return chars.perplexity(lambda kind, x: held_out_loss(levels.path(modules, kind % grid.num_paths), x), held_out)

  curve = [measure()]
  for _ in range(phases):
    batches = jnp.stack([chars.draw(shards, tau, rng) for shards in shards_of_path])
    paths, inner_states, _ = run_phase(levels.paths(modules), inner_states, batches)
    modules, outer_state, _ = make_outer_step(modules, outer_state, paths)
    curve.append(measure())
  return curve


def main():
  """Compares the three ways."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--pretrain', type=int, default=300, help='Steps of the dense model before it becomes paths.')
  parser.add_argument('--tau', type=int, default=25, help='Inner steps in a phase.')
  parser.add_argument('--phases', type=int, default=16, help='Number of phases.')
  args = parser.parse_args()
  shards, held_out = chars.load_shards()
  tokens = chars.draw(shards, args.pretrain, np.random.default_rng(1))
  params, _, _ = jax.jit(functools.partial(algorithm.train_path, train_step))(START, optimizer.init(START), tokens)

  one_model = {'all': ('', ())}
  paths = {'low': ('block_0', 'a'), 'high': ('block_1', 'b'), 'ends': ('embed|head', ())}
  curves = {
    'dense': train(params, algorithm.Grid(), one_model, [shards], held_out, args.tau, args.phases),
    'DiLoCo': train(params, algorithm.Grid(replica=4), one_model, [shards] * 4, held_out, args.tau, args.phases),
    'DiPaCo': train(params, algorithm.Grid(a=2, b=2), paths, [[s] for s in shards], held_out, args.tau, args.phases),
  }
  chars.print_table(curves, args.tau * args.phases)


if __name__ == '__main__':
  main()
