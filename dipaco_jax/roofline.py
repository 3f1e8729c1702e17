"""How long a step takes on a TPU that is not there: between two roofs.

    FLOPs   of the program before it is optimized, in which every loop is unrolled
    bytes   of compiled programs, in which an operand counts as often as it is read: an upper bound

The best: arithmetic hides all traffic, arguments and results cross HBM once, and temporaries twice. The worst: every
byte of the compiler's bound, one after the other with arithmetic and collectives.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from dipaco_jax import grid as grid_lib
from dipaco_jax import inner, loss, mesh, metrics, model, programs
from dipaco_jax import settings as settings_lib
from dipaco_jax.topology import Topology


def flops_of_step(s: settings_lib.Settings) -> float:
  """FLOPs of one inner step of one path, from the program before it is optimized: every loop unrolled, no remat."""
  whole = s.train.batch_size * s.model.seq_len
  unrolled = dataclasses.replace(s.model, loss_chunk=whole, layers='unrolled', remat='none', attention='xla')
  made = model.make(unrolled, s.tokenizer.vocab_size)
  compute = inner.gradient(loss.path_loss(made, s.routing.prefix_tokens))
  optimizer = inner.make(s.inner, s.decay_steps, s.pretrain.steps)
  params = model.shapes(made)
  tokens = jax.ShapeDtypeStruct((s.train.batch_size, s.model.seq_len), np.int32)
  step = functools.partial(inner.step, optimizer, compute)
  state = jax.eval_shape(optimizer.init, params)
  lowered: Any = jax.jit(step).lower(params, state, tokens, tokens, jax.ShapeDtypeStruct((), np.int32))
  return lowered.cost_analysis()['flops']


def bytes_of_step(made: programs.Programs, topology: Topology) -> float:
  """HBM traffic of an inner step on a chip: that of gradients of every part of the batch, of their sum, and of AdamW.

  The compiler counts a loop once. So blocks are unrolled, and of one and of three blocks follows what N would read and
  write; of the chunks of the loss it counts one, the others are added.
  """
  s, vocab = made.settings, made.model.vocab_size
  num_rows = s.train.batch_size // made.placement.data
  rows = inner.rows_at_once(num_rows, s.train.microbatch)
  tokens, parts = rows * s.model.seq_len, num_rows // rows
  chunk = loss.chunk_size(tokens, s.model.loss_chunk)
  one, three = (bytes_of_gradient(shortened(made.model, n), topology, s.routing.prefix_tokens, rows) for n in (1, 3))
  blocks = one + (three - one) / 2 * (s.model.num_layers - 1)
  gradients = blocks + (tokens // chunk - 1) * bytes_of_chunk(s.model, vocab, topology, chunk)
  size = sum(4 * x.size for x in made.shapes.values())
  held = size / made.placement.data if s.mesh.shard_states else size
  summed = 3 * size * parts if parts > 1 else 0
  return parts * gradients + summed + 8 * held  # AdamW: four read, three written; and the norm to clip by


def shortened(whole: model.Transformer, num_layers: int) -> model.Transformer:
  """With fewer blocks, unrolled."""
  config = dataclasses.replace(whole.config, num_layers=num_layers, layers='unrolled')
  return model.Transformer(config, whole.vocab_size, whole.dtype)


def bytes_of_gradient(of: model.Transformer, topology: Topology, prefix_tokens: int, num_rows: int) -> float:
  params = {name: on_a_chip(topology, x.shape, x.dtype) for name, x in model.shapes(of).items()}
  tokens = on_a_chip(topology, (num_rows, of.config.seq_len), np.int32)
  program: Any = jax.jit(inner.summed_gradient(loss.path_loss(of, prefix_tokens))).lower(params, tokens, tokens)
  return program.compile().cost_analysis()['bytes accessed']


def bytes_of_chunk(c: settings_lib.Model, vocab: int, topology: Topology, tokens: int) -> float:
  """Of the loss of one chunk, forward and backward."""
  both = jax.value_and_grad(lambda x, head, t, w: loss.summed_nll(x, head, t, w, tokens), (0, 1))
  args = ((tokens, c.width), c.dtype), ((c.width, vocab), c.dtype), ((tokens,), np.int32), ((tokens,), np.float32)
  program: Any = jax.jit(both).lower(*(on_a_chip(topology, *arg) for arg in args)).compile()
  return program.cost_analysis()['bytes accessed']


def on_a_chip(topology: Topology, shape, dtype) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(topology.devices[0]))


def times(made: programs.Programs, steps: Any, topology: Topology, sent: dict[str, Any]) -> dict[str, Any]:
  """Seconds of a step between two roofs, model FLOPs utilization, and hours of the whole config.

  Args:
    steps: the compiled program of inner steps.
    sent: bytes of collectives on a chip, as `dry_run.traffic` finds them.
  """
  s, chip, data = made.settings, topology.chip, made.placement.data
  tokens = s.train.batch_size * s.model.seq_len // data  # of a step, on a chip
  flops = flops_of_step(s) / data
  done = flops * (4 / 3 if s.model.remat == 'full' else 1)  # the forward pass is a third of all, and done twice
  m = steps.memory_analysis()
  lower = m.argument_size_in_bytes + m.output_size_in_bytes + 2 * m.temp_size_in_bytes
  sent_s = sent['steps_collective_bytes']['data'] / (chip.ici_bytes_per_s / 2)
  best_s = max(done / chip.flops, lower / chip.hbm_bytes_per_s, sent_s)
  worst_s = done / chip.flops + bytes_of_step(made, topology) / chip.hbm_bytes_per_s + sent_s
  useful = metrics.flops_per_token(s.model, made.model.vocab_size, s.model.seq_len) * tokens
  outer_s = sent['outer_bytes_per_chip'] / (chip.ici_bytes_per_s / 2)
  hours = [whole_run_s(made, second, outer_s) / 3600 for second in (best_s, worst_s)]
  return {
    'flops_per_step': flops * data, 'step_s_low': best_s, 'step_s_high': worst_s,
    'mfu_low': useful / (worst_s * chip.flops), 'mfu_high': useful / (best_s * chip.flops),
    'tokens_per_s': tokens * made.placement.mesh.devices.size / worst_s, 'outer_s': outer_s,
    'hours_low': hours[0], 'hours': hours[1], 'chip_hours': hours[1] * made.placement.mesh.devices.size,
  }  # fmt: skip


def whole_run_s(made: programs.Programs, step_s: float, outer_s: float) -> float:
  """Pretraining, then all phases: paths in turn, and the outer step. Routing and evaluation come on top."""
  s, rows_a_chip = made.settings, made.settings.train.batch_size / made.placement.data
  alone = mesh.place(grid_lib.Grid(), s.mesh, s.batch_sizes('pretrain'), list(made.placement.mesh.devices.reshape(-1)))
  base_s = s.pretrain.steps * step_s * s.pretrain.batch_size / alone.data / rows_a_chip
  return base_s + s.train.phases * (len(made.placement.turns()) * s.train.steps_per_phase * step_s + outer_s)
