"""How fast inner steps are, against a bare loop written straight in JAX and Optax (bare.py) on the same model.

    python benchmarks/inner_step.py [--width=256 --batch_size=16 --steps_per_dispatch=6 ...]

Three loops take turns in one process: the product's program of k steps, the bare loop with k steps in a scan, and the
bare loop with one step per dispatch. All three must find the same losses. Prints a table and, as the last line, one
JSON object; the ratios are of tokens per second, product over bare. `mfu` is null where the device's peak isn't known.
"""

import bare
import common
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from dipaco_jax.core.errors import InputError
from dipaco_jax.models import transformer
from dipaco_jax.training import performance, programs

common.define_sizes(width=256, num_layers=4, num_heads=4, mlp_dim=688, vocab_size=8192, seq_len=256, batch_size=16)
STEPS = flags.DEFINE_integer('steps_per_dispatch', 6, 'k; 6 is what the default makes of phases of 150')
ROUNDS = flags.DEFINE_integer('rounds', 9, 'turns of each loop; medians are reported')


class Loop:
  """A loop's parameters and state, with a `run` that goes on from there and returns k losses."""

  def __init__(self, step, params, state):
    self.step, self.carry = step, (params, state)

  def run(self, *rows):
    *self.carry, losses = self.step(*self.carry, *rows)
    return losses


def ours(made: programs.Programs, params, rows) -> Loop:
  """The product's program, as its training loop calls it."""
  grid_axes = made.layout.grid.shape
  weights, turn, first = np.ones(grid_axes, np.float32), np.zeros(len(grid_axes), np.int32), np.int32(0)
  in_flight = made.gather_path(made.start(params)[0], turn)

  def step(params, state):
    nonlocal first
    params, state, found = made.steps(params, state, *rows, first, weights, turn)
    first += STEPS.value
    return params, state, found['loss'].reshape(-1)

  return Loop(step, in_flight, made.fresh_state(in_flight))


def bare_loops(made: programs.Programs, params, rows) -> tuple[Loop, Loop]:
  """The bare loop with k steps per dispatch, and with one."""
  s, inner = made.settings, made.settings.inner
  config = bare.Config(
    jnp.dtype(s.model.dtype), s.model.rope_base, s.model.norm_epsilon, s.routing.prefix_tokens, s.model.remat != 'none'
  )
  transformation = bare.optimizer(
    made.inner.learning_rate, inner.b1, inner.b2, inner.epsilon, inner.weight_decay, inner.clip_norm
  )
  one, many = bare.make(config, transformation)
  by_step = list(zip(*rows, strict=True))

  def each(params, state):
    losses = []
    for tokens, segments in by_step:
      params, state, loss = one(params, state, tokens, segments)
      losses.append(loss)
    return params, state, losses

  def fresh():
    nested = jax.tree.map(jnp.copy, bare.from_flat(params))  # each loop donates its own
    return jax.device_put((nested, transformation.init(nested)), rows[0].sharding)

  return Loop(lambda p, s: many(p, s, *rows), *fresh()), Loop(each, *fresh())


def peak_bytes() -> int:
  """Of the device, or of the process where the device doesn't tell."""
  return performance.device_peak_bytes(jax.devices()[:1]) or performance.process_peak_bytes()


def check(losses: list[np.ndarray]):
  """The first k losses agree: to float32's rounding through some updates, to bfloat16's where that is computed in."""
  tolerance = 1e-4 if flags.FLAGS.dtype == 'float32' else 2e-2
  for other in losses[1:]:
    if not np.allclose(losses[0], other, rtol=tolerance):
      raise InputError(f'the loops find different losses: {losses}')


def measure() -> dict:
  device = jax.devices()[0]
  compilations = performance.count_compilations()
  s = common.make_settings({'a': 1}, [('all', '.*', ())])
  made = common.make_programs(s, [device])
  params = transformer.init(made.model, jax.random.key(0))
  rows = common.random_rows(s, STEPS.value)
  product = ours(made, params, common.in_flight(made, rows))
  losses = [np.asarray(product.run())]
  peak = peak_bytes()  # before the bare loops take theirs
  loops = (product, *bare_loops(made, params, jax.device_put(rows, device)))
  losses += [np.asarray(loop.run()) for loop in loops[1:]]
  check(losses)
  common.in_turns([loop.run for loop in loops], 1)  # nothing compiles or grows after this
  ours_s, bare_s, one_s = common.in_turns([loop.run for loop in loops], ROUNDS.value)
  tokens_per_s = STEPS.value * s.train.batch_size * s.model.seq_len / ours_s
  flops = performance.flops_per_token(s.model, flags.FLAGS.vocab_size, s.model.seq_len) * tokens_per_s
  return {
    'ratio': bare_s / ours_s,
    'ratio_one_step_per_dispatch': one_s / ours_s,
    'tokens_per_s': tokens_per_s,
    'bare_tokens_per_s': tokens_per_s * ours_s / bare_s,
    'bare_one_step_tokens_per_s': tokens_per_s * ours_s / one_s,
    'mfu': performance.mfu(flops, device.device_kind, s.model.dtype, 1),
    'model_gflops_per_s': flops / 1e9,
    'peak_memory_bytes': peak,
    'compilations': sum(compilations[name] for name in programs.NAMES),
    'losses': [float(x) for x in losses[0]],
    'device': device.device_kind,
  }


def main(_):
  f = flags.FLAGS
  title = f'{f.width} x {f.num_layers}, vocabulary {f.vocab_size}, {f.batch_size} rows of {f.seq_len}, {f.dtype}, '
  common.report(title + f'{STEPS.value} steps per dispatch', measure())


if __name__ == '__main__':
  app.run(main)
