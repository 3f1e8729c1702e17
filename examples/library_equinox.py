"""DiPaCo around a training step written in Equinox, on eight devices: one dense model becomes 2x4 paths.

    python examples/library_equinox.py                  some minutes on a laptop, whose CPU plays eight devices

Each device trains one path, and nothing is exchanged before the outer step. Equinox models are pytrees that hold
functions too: `eqx.partition` takes their floating-point arrays, of which levels are made.
"""

import argparse
import functools
import os

os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count=8'

import chars
import equinox as eqx
import jax
import numpy as np
import optax

from dipaco_jax import algorithm

VOCAB, WIDTH, KERNEL = 128, 64, 8


class Block(eqx.Module):
  """A causal convolution, as a product with windows, and an MLP."""

  mix: eqx.nn.Linear
  norm: eqx.nn.RMSNorm
  mlp: eqx.nn.MLP

  def __init__(self, key: jax.Array):
    keys = jax.random.split(key)
    self.mix = eqx.nn.Linear(KERNEL * WIDTH, WIDTH, key=keys[0])
    self.norm = eqx.nn.RMSNorm(WIDTH)
    self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=keys[1])

  def __call__(self, x_LD: jax.Array) -> jax.Array:
    return x_LD + jax.vmap(lambda window: self.mlp(self.norm(self.mix(window))))(chars.windows(x_LD, KERNEL))


class Model(eqx.Module):
  """Predicts each next byte of a text [L]."""

  embed: eqx.nn.Embedding
  block_0: Block
  block_1: Block
  head: eqx.nn.Linear

  def __init__(self, key: jax.Array):
    keys = jax.random.split(key, 4)
    self.embed, self.head = eqx.nn.Embedding(VOCAB, WIDTH, key=keys[0]), eqx.nn.Linear(WIDTH, VOCAB, key=keys[1])
    self.block_0, self.block_1 = Block(keys[2]), Block(keys[3])

  def __call__(self, tokens_L: jax.Array) -> jax.Array:
    return jax.vmap(self.head)(self.block_1(self.block_0(jax.vmap(self.embed)(tokens_L))))


START, STATIC = eqx.partition(Model(jax.random.key(0)), eqx.is_inexact_array)
optimizer = optax.adamw(3e-3)


def loss(params, tokens) -> jax.Array:
  """Returns the mean loss in nats per byte."""
  logits = jax.vmap(eqx.combine(params, STATIC))(tokens[:, :-1])
  return optax.losses.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_step(params, state, tokens):
  """Makes one step: nothing here knows of paths."""
  value, grads = jax.value_and_grad(loss)(params, tokens)
  updates, state = optimizer.update(grads, state, params)
  return optax.apply_updates(params, updates), state, value


def train(params, grid, levels, shards_of_path, held_out, tau, phases):
  """Trains all paths of a grid, one on each device, and returns the perplexity after the last phase."""
  mesh = jax.make_mesh((grid.num_paths,), ('path',), devices=jax.devices()[: grid.num_paths])
  levels = algorithm.Levels(grid, params, **levels)
  outer = algorithm.OuterStep(levels, optax.sgd(1.0))  # plain averages
  modules, inner_states = levels.start(params), algorithm.spread(levels.per_path(optimizer.init(params)), mesh)
  outer_state, rng = outer.init(modules), np.random.default_rng(0)
  run_phase = jax.jit(functools.partial(algorithm.train_phase, train_step, mesh=mesh))
  make_outer_step, held_out_loss = jax.jit(outer.step), jax.jit(loss)
  for _ in range(phases):
    batches = np.stack([chars.draw(shards, tau, rng) for shards in shards_of_path])
    paths, inner_states, _ = run_phase(*algorithm.spread((levels.paths(modules), inner_states, batches), mesh))
    modules, outer_state, _ = make_outer_step(modules, outer_state, paths)
  return chars.perplexity(lambda kind, x: held_out_loss(levels.path(modules, kind % grid.num_paths), x), held_out)


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

  run = functools.partial(train, params, held_out=held_out, tau=args.tau, phases=args.phases)
  one_model, paths = {'all': ('', ())}, {'low': ('block_0', 'b'), 'high': ('block_1', 'a'), 'ends': ('embed|head', ())}
  perplexities = {
    'dense': run(algorithm.Grid(), one_model, [shards]),
    'DiLoCo': run(algorithm.Grid(replica=8), one_model, [shards] * 8),
    'DiPaCo': run(algorithm.Grid(a=2, b=4), paths, [[shards[path % 4]] for path in range(8)]),
  }
  chars.print_table({name: [value] for name, value in perplexities.items()}, args.tau * args.phases)


if __name__ == '__main__':
  main()
