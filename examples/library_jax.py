"""DiPaCo around a training step of your own, in plain JAX: one dense model becomes 2x2 paths.

    python examples/library_jax.py                      some minutes on a laptop; writes library_jax.png

A small model of bytes is pretrained on four kinds of text. Then it trains on in three ways, each path for as many
steps: one dense model; DiLoCo, four replicas that are averaged; DiPaCo, four paths of 2x2 modules, each path on one
kind of text. Dense trains on a quarter of the text of the others; at equal steps it costs a quarter.
"""

import argparse
import functools

import chars
import jax
import jax.numpy as jnp
import numpy as np
import optax

from dipaco_jax import algorithm

VOCAB, WIDTH, KERNEL = 128, 64, 8


def init(key: jax.Array) -> dict:
  """Returns the parameters of the model: an embedding, two blocks and a head."""
  keys = iter(jax.random.split(key, 8))

  def draw(*shape: int) -> jax.Array:
    return jax.random.normal(next(keys), shape) / np.sqrt(np.prod(shape[:-1]))

  def block() -> dict:
    return {'mix': draw(KERNEL * WIDTH, WIDTH), 'up': draw(WIDTH, 4 * WIDTH), 'down': draw(4 * WIDTH, WIDTH)}

  return {'embed': draw(VOCAB, WIDTH) * 8, 'block_0': block(), 'block_1': block(), 'head': draw(WIDTH, VOCAB)}


def logits(params: dict, tokens_BL: jax.Array) -> jax.Array:
  """Predicts each next byte from the 15 bytes before it: causal convolutions and MLPs."""
  x = params['embed'][tokens_BL]
  for block in (params['block_0'], params['block_1']):
    h = chars.windows(x, KERNEL) @ block['mix']
    x = x + jax.nn.gelu(h / (1e-6 + jnp.std(h, -1, keepdims=True)) @ block['up']) @ block['down']
  return x @ params['head']


def loss(params: dict, tokens: jax.Array) -> jax.Array:
  """Returns the mean loss in nats per byte."""
  return optax.losses.softmax_cross_entropy_with_integer_labels(logits(params, tokens[:, :-1]), tokens[:, 1:]).mean()


optimizer = optax.adamw(3e-3)


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
    batches = np.stack([chars.draw(shards, tau, rng) for shards in shards_of_path])
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
  params, state = init(jax.random.key(0)), optimizer.init(init(jax.random.key(0)))
  tokens = chars.draw(shards, args.pretrain, np.random.default_rng(1))
  params, _, _ = jax.jit(functools.partial(algorithm.train_path, train_step))(params, state, tokens)

  one_model = {'all': ('', ())}
  paths = {'low': ('block_0', 'a'), 'high': ('block_1', 'b'), 'ends': ('embed|head', ())}
  each_alone = [[shard] for shard in shards]
  curves = {
    name: train(params, grid, levels, shards_of_path, held_out, args.tau, args.phases)
    for name, grid, levels, shards_of_path in (
      ('dense', algorithm.Grid(), one_model, [shards]),
      ('DiLoCo', algorithm.Grid(replica=4), one_model, [shards] * 4),
      ('DiPaCo', algorithm.Grid(a=2, b=2), paths, each_alone),
    )
  }
  chars.print_table(curves, args.tau * args.phases)
  chars.save_picture(curves, args.tau, 'library_jax.png')


if __name__ == '__main__':
  main()
