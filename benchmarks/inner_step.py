"""How fast inner steps are, against loops written straight in JAX and Optax (bare.py) and in PyTorch (torch_loop.py).

    python benchmarks/inner_step.py [--width=256 --batch_size=16 --steps_per_dispatch=6 --torch=compiled,eager ...]
    python benchmarks/inner_step.py --family=qwen3

The loops take turns in one process: the product's program of k steps, the bare loop with k steps in a scan, the bare
loop with one step per dispatch (--bare=many leaves it out), and PyTorch's. All must find the same losses. Prints a
table and, as the last line, one JSON object; the ratios are of tokens per second, product over the other. `mfu` counts
attention in full, `mfu_causal` half of it; they are null where the device's peak isn't known.
"""

import bare
import common
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from dipaco_jax.core.errors import InputError
from dipaco_jax.models import transformer
from dipaco_jax.telemetry import performance
from dipaco_jax.training import programs

common.define_sizes(width=256, num_layers=4, num_heads=4, mlp_dim=688, vocab_size=8192, seq_len=256, batch_size=16)
STEPS = flags.DEFINE_integer('steps_per_dispatch', 6, 'k; 6 is what the default makes of phases of 150')
BARE = flags.DEFINE_list('bare', ['many', 'one'], 'loops in JAX: k steps in a scan, one step per dispatch')
TORCH = flags.DEFINE_list('torch', [], 'loops in PyTorch: compiled, eager')
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


def bare_config(made: programs.Programs) -> bare.Config:
  m = made.settings.model
  flash = 'cudnn' if jax.default_backend() == 'gpu' and m.dtype == 'bfloat16' else None
  return bare.config_of(m, made.settings.routing.prefix_tokens, flash)


def bare_loops(made: programs.Programs, params, rows) -> dict[str, Loop]:
  """The bare loop with k steps per dispatch, and with one."""
  inner = made.settings.inner
  transformation = bare.optimizer(
    made.specs.inner.learning_rate, inner.b1, inner.b2, inner.epsilon, inner.weight_decay, inner.clip_norm
  )
  one, many = bare.make(bare_config(made), transformation)
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

  steps = {'many': lambda p, s: many(p, s, *rows), 'one': each}
  return {f'bare_{name}': Loop(steps[name], *fresh()) for name in BARE.value}


def torch_loops(made: programs.Programs, params, rows) -> dict:
  """The loops in PyTorch, where they are asked for."""
  if not TORCH.value:
    return {}
  if flags.FLAGS.family != 'llama2':
    raise InputError(f'--torch={",".join(TORCH.value)} is for --family=llama2: leave out one of them')
  import torch_loop

  rates = np.asarray(jax.vmap(made.specs.inner.learning_rate)(jnp.arange(STEPS.value * (ROUNDS.value + 2))))
  given = bare_config(made), made.settings.inner, rates, params, rows
  return {f'torch_{name}': torch_loop.Loop(*given, name == 'compiled') for name in TORCH.value}


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
  loops: dict = {'ours': ours(made, params, common.in_flight(made, rows))}
  losses = [np.asarray(loops['ours'].run())]
  peak = peak_bytes()  # before the other loops take theirs
  loops |= bare_loops(made, params, jax.device_put(rows, device)) | torch_loops(made, params, rows)
  losses += [np.asarray(loop.run()) for loop in list(loops.values())[1:]]
  check(losses)
  common.in_turns([loop.run for loop in loops.values()], 1)  # nothing compiles or grows after this
  seconds = dict(zip(loops, common.in_turns([loop.run for loop in loops.values()], ROUNDS.value), strict=True))
  tokens = STEPS.value * s.train.batch_size * s.model.seq_len
  per_s = {name: tokens / x for name, x in seconds.items()}
  full, causal = (
    performance.flops_per_token(s.model, flags.FLAGS.vocab_size, length) * per_s['ours']
    for length in (s.model.seq_len, s.model.seq_len // 2)
  )
  return {
    'tokens_per_s': per_s['ours'],
    **{f'tokens_per_s_{name}': x for name, x in per_s.items() if name != 'ours'},
    **{f'ratio_{name}': per_s['ours'] / x for name, x in per_s.items() if name != 'ours'},
    'mfu': performance.mfu(full, device.device_kind, made.model.config.dtype, 1),
    'mfu_causal': performance.mfu(causal, device.device_kind, made.model.config.dtype, 1),
    'model_gflops_per_s': full / 1e9,
    'peak_memory_bytes': peak,
    'compilations': sum(compilations[name] for name in programs.NAMES),
    'losses': [float(x) for x in losses[0]],
    'device': device.device_kind,
  }


def main(_):
  f = flags.FLAGS
  title = f'{f.family}, {f.width} x {f.num_layers}, vocabulary {f.vocab_size}, {f.batch_size} rows of {f.seq_len}, '
  common.report(f'{title}{f.dtype}, {STEPS.value} steps per dispatch', measure())


if __name__ == '__main__':
  app.run(main)
