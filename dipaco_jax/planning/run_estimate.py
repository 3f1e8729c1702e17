"""The memory and the time of a run on the devices at hand, estimated before it begins. Nothing is compiled.

    states       exact: the arrays that live from step to step
    activations  what JAX keeps for the backward pass of one microbatch, before XLA optimizes it
    logits       of a chunk of tokens, three times: logits, their exponentials, and their gradients
    copies       in the memory of the host, which is a CPU's own: a checkpoint, modules to publish, the base model
    seconds      FLOPs over the speed at which this machine multiplies matrices, which `machine` measures

On CPUs the peaks of three runs, of 4.0, 11.0 and 11.8 GB, were 1.03 to 1.13 times the estimate. A run that was
estimated at 6 minutes took 12 on a machine that did other work too.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from dipaco_jax.algorithm import grid as grid_lib, inner, modules
from dipaco_jax.algorithm.grid import largest_divisor
from dipaco_jax.config import choices, dense_control, settings as settings_lib
from dipaco_jax.models import loss, transformer
from dipaco_jax.planning import dry_run
from dipaco_jax.telemetry import performance
from dipaco_jax.training import mesh, programs

PROCESS_BYTES = 800 << 20  # of Python, JAX and their libraries
EFFICIENCY = 0.4  # of training, against large matrix products
LOGITS = 3  # arrays of a chunk of tokens that exist at one time


class Memory(NamedTuple):
  """Bytes by kind: on each device, and in the host's memory. A CPU has both in one memory."""

  device: dict[str, int]
  host: dict[str, int]


def estimate_memory(s: settings_lib.Settings, devices: Sequence[jax.Device]) -> Memory:
  """Returns the memory of a run at its fullest stage: pretraining, or the paths.

  `s.tokenizer.vocab_size` has to be that of the tokenizer, given or trained. Raises InputError if the devices do not
  take the grid or a batch.
  """
  s = dataclasses.replace(s, model=transformer.for_device(s.model, devices[0].platform))
  stages = [_memory_of_stage(s, 'train', devices)]
  if s.pretrain.steps:
    stages.append(_memory_of_stage(s.dense(), 'pretrain', devices))
  return max(stages, key=lambda memory: sum(memory.device.values()))


def _memory_of_stage(s: settings_lib.Settings, stage: str, devices: Sequence[jax.Device]) -> Memory:
  stage_programs = _make_programs(s, stage, devices)
  a = dry_run.argument_shapes(stage_programs)
  rows = s.batch_sizes(stage)[f'{stage}.batch_size'] // stage_programs.placement.data
  device = dry_run.state_bytes(stage_programs) | temporary_bytes(s, inner.rows_at_once(rows, s.train.microbatch))
  everything = len(stage_programs.placement.turns()) * dry_run.bytes_on_chip(a.state)
  modules_bytes = dry_run.bytes_on_chip(a.modules)
  copies = {'checkpoint': modules_bytes + everything + dry_run.bytes_on_chip(a.outer), 'published': modules_bytes}
  copies['base'] = dry_run.bytes_on_chip(a.params)
  return Memory(device, {'process': PROCESS_BYTES} | copies)


def _make_programs(s: settings_lib.Settings, stage: str, devices: Sequence[jax.Device]) -> programs.Programs:
  model = transformer.make_model(s.model, s.tokenizer.vocab_size)
  layout = modules.make_layout(s.grid, s.levels, transformer.shapes(model))
  placement = mesh.place(layout.grid, s.mesh, s.batch_sizes(stage), devices)
  return programs.Programs(placement, layout, model, s)


def temporary_bytes(s: settings_lib.Settings, rows: int) -> dict[str, int]:
  """Returns the bytes of an inner step on a number of rows, in addition to states and gradients.

  Recomputed blocks are in memory one at a time. XLA for CPUs undoes that, unless blocks are scanned.
  """
  is_undone = s.model.layers != 'scanned' and jax.default_backend() == 'cpu'
  plain = dataclasses.replace(s, model=dataclasses.replace(s.model, remat='none'))
  activations = _residual_bytes(plain, rows)
  if s.model.remat != 'none' and not is_undone:
    activations = _residual_bytes(s, rows) + activations // s.model.num_layers
  chunk = largest_divisor(rows * s.model.seq_len, s.model.loss_chunk)
  logits = LOGITS * 4 * chunk * (s.model.vocab_chunk or s.tokenizer.vocab_size)
  return {'activations': activations, 'logits': logits}


def _residual_bytes(s: settings_lib.Settings, rows: int) -> int:
  """Returns the bytes that are kept for the backward pass, without the parameters."""
  model = transformer.make_model(s.model, s.tokenizer.vocab_size)
  tokens = jax.ShapeDtypeStruct((rows, s.model.seq_len), np.int32)
  compute = functools.partial(loss.path_loss, model, s.num_untrained_tokens)

  def residuals(params, tokens):
    return jax.vjp(lambda params: compute(params, tokens, tokens), params, has_aux=True)[1]

  params = transformer.shapes(model)
  kept = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(residuals, params, tokens)))
  return max(0, kept - sum(x.size * x.dtype.itemsize for x in params.values()))


# -- time


def count_flops(s: settings_lib.Settings) -> dict[str, float]:
  """Returns the FLOPs of a run by stage, as PaLM counts them; of evaluations roughly."""
  per_token = performance.flops_per_token(s.model, s.tokenizer.vocab_size, s.model.seq_len)
  num_paths = grid_lib.Grid(s.grid).num_paths
  steps = s.train.steps_per_phase * sum(
    int(choices.active_paths(s.train, num_paths, s.seed, phase).sum()) for phase in range(s.train.phases)
  )
  tokens = s.train.batch_size * s.model.seq_len  # of a step
  flops = {
    'pretrain': s.pretrain.steps * s.pretrain.batch_size * s.model.seq_len * per_token,
    'train': steps * tokens * per_token,
  }
  if s.evaluate.control:
    flops['control'] = s.train.phases * dense_control.steps_per_phase(s) * tokens * per_token
  return flops | {'evaluate': _evaluated_tokens(s, num_paths) * per_token / 3}  # forward only


def _evaluated_tokens(s: settings_lib.Settings, num_paths: int) -> int:
  """Returns the tokens of validation documents and hold-outs in all phases, as if the text were read once."""
  every = s.evaluate.every_phases
  times = s.train.phases // every if every else 0
  validation = s.data.max_validation_documents * (s.evaluate.seq_len or s.model.seq_len)
  rows = s.train.phases * s.train.steps_per_phase * s.train.batch_size  # of a path
  holdout_rows = math.ceil(s.data.holdout_fraction * rows)
  holdout_rows = min(holdout_rows, s.train.max_holdout_rows or holdout_rows) if s.train.early_stopping else 0
  return (times + 2) * validation + s.train.phases * num_paths * holdout_rows * s.model.seq_len


def seconds(s: settings_lib.Settings, flops_per_s: float, num_devices: int = 1) -> float:
  """Returns the seconds of a run, roughly, on devices that multiply large matrices at `flops_per_s` each."""
  return sum(count_flops(s).values()) / (EFFICIENCY * flops_per_s * num_devices)


def bound_bytes(s: settings_lib.Settings) -> int:
  """Returns more bytes than a run takes, by sizes alone: to know in no time that a run is small."""
  m, vocab_size = s.model, s.tokenizer.vocab_size
  heads = m.head_dim * (m.num_heads + (m.num_kv_heads or m.num_heads))
  mlp_dim = max(1, m.num_experts) * m.mlp_dim + m.shared_expert_dim
  parameters = m.num_layers * (2 * m.width * heads + 3 * m.width * mlp_dim + m.width * m.num_experts)
  parameters += 2 * m.width * vocab_size
  rows = max(s.train.batch_size, s.pretrain.batch_size if s.pretrain.steps else 0, s.evaluate.batch_size)
  of_token = m.num_layers * (16 * m.width + 8 * heads + 8 * mlp_dim) + 2 * m.num_heads * m.seq_len * m.num_layers
  paths = grid_lib.Grid(s.grid).num_paths
  states = 10 * paths * parameters  # modules, sums, AdamW, and a copy
  return PROCESS_BYTES // 2 + 4 * (states + rows * m.seq_len * of_token + LOGITS * m.loss_chunk * vocab_size)
