"""Attention's kernels apart, on packed rows: forward, and forward with backward, against each other.

    python benchmarks/attention.py [--rows=16 --seq_len=1024 --num_heads=16 --head_dim=64 --kernels=xla,cudnn,flash]

Every row holds documents of 33 to 700 tokens. `error` is the relative error of the output and of the gradients of q, k
and v against float32, ||x - y|| / ||y||, the largest of the four. FLOP/s count the causal half of a whole row, once
forward and 2.5 times backward, whatever a kernel leaves out. Prints a table and, as the last line, one JSON object.
"""

import common
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from dipaco_jax.models import attention

ROWS = flags.DEFINE_integer('rows', 16, 'B')
LENGTH = flags.DEFINE_integer('seq_len', 1024, 'L, tokens in a row')
HEADS = flags.DEFINE_integer('num_heads', 16, 'H')
SIZE = flags.DEFINE_integer('head_dim', 64, 'K')
KERNELS = flags.DEFINE_list('kernels', ['xla', 'cudnn', 'flash'], 'of config.model.attention')
REPEATS = flags.DEFINE_integer('repeats', 9, 'rounds of 10 calls each; medians are reported')


def packed_segments(rng: np.random.Generator) -> np.ndarray:
  """Documents of 33 to 700 tokens, each row's last one cut at its end."""
  return np.stack(
    [np.repeat(np.arange(1, 100), rng.integers(33, 701, 99))[: LENGTH.value] for _ in range(ROWS.value)]
  ).astype(np.int32)


def programs(kernel: str, dtype) -> tuple:
  """`forward(q, k, v, segments, do)`, and with the gradients."""

  def forward(q, k, v, segments, do):
    return attention.attend(q.astype(dtype), k.astype(dtype), v.astype(dtype), segments, kernel)

  def both(q, k, v, segments, do):
    out, back = jax.vjp(lambda q, k, v: forward(q, k, v, segments, do), q, k, v)
    return out, *back(do.astype(out.dtype))

  return jax.jit(forward), jax.jit(both)


def error(found, expected) -> float:
  pairs = [[np.asarray(x, np.float64) for x in pair] for pair in zip(found, expected, strict=True)]
  return max(float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in pairs)


def measure() -> dict:
  rng = np.random.default_rng(0)
  shape = ROWS.value, LENGTH.value, HEADS.value, SIZE.value
  q, k, v, do = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for _ in range(4))
  arguments = q, k, v, jnp.asarray(packed_segments(rng)), do
  few = [x[:2] for x in arguments]
  with jax.default_matmul_precision('highest'):
    expected = programs('xla', jnp.float32)[1](*few)
  made = {kernel: programs(kernel, jnp.bfloat16) for kernel in KERNELS.value}
  errors = {kernel: error(both(*few), expected) for kernel, (_, both) in made.items()}
  calls = [lambda f=f: [f(*arguments) for _ in range(10)] for pair in made.values() for f in pair]
  common.in_turns(calls, 1)  # compiles
  seconds = [s / 10 for s in common.in_turns(calls, REPEATS.value)]
  flops = 2 * ROWS.value * HEADS.value * LENGTH.value**2 * SIZE.value
  results = {'device': jax.devices()[0].device_kind}
  for kernel, forward_s, both_s in zip(made, seconds[::2], seconds[1::2], strict=True):
    results |= {f'{kernel}_error': errors[kernel], f'{kernel}_forward_ms': 1e3 * forward_s}
    results |= {f'{kernel}_both_ms': 1e3 * both_s, f'{kernel}_both_tflops_per_s': 3.5 * flops / both_s / 1e12}
  return results


def main(_):
  common.report(f'{ROWS.value} rows of {LENGTH.value}, {HEADS.value} heads of {SIZE.value}, bfloat16', measure())


if __name__ == '__main__':
  app.run(main)
