"""Bounds of the time that a step takes on a TPU that is not there.

    FLOPs   of the program before it is optimized, with every loop unrolled; of splash attention by its blocks
    bytes   of the compiled program, an upper bound, see `hlo.Traffic`

In the best case arithmetic hides all traffic, arguments and results cross HBM once, and temporaries twice. In the worst
case every byte of the bound, arithmetic and collectives follow one another; but splash reads keys and values more than
once. MFU counts attention as PaLM does, as if it were not causal, and can be above 100%.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from dipaco_jax.algorithm import inner
from dipaco_jax.config import choices, settings as settings_lib
from dipaco_jax.models import attention, layers, loss, transformer
from dipaco_jax.planning import hlo
from dipaco_jax.planning.topology import DCN_BYTES_PER_S, Topology
from dipaco_jax.telemetry import performance
from dipaco_jax.training import programs


def flops_of_step(s: settings_lib.Settings) -> float:
  """Returns the FLOPs of one inner step of one path, from the program before it is optimized, with loops unrolled."""
  rows = s.train.batch_size * s.model.seq_len
  plain = dataclasses.replace(s.model, loss_chunk=rows, vocab_chunk=0, layers='unrolled', attention='xla')
  if plain.num_experts:  # one MLP does as much
    width = plain.experts_per_token * plain.mlp_dim + plain.shared_expert_dim
    plain = dataclasses.replace(plain, mlp_dim=width, num_experts=0)
  model = transformer.make_model(plain, s.tokenizer.vocab_size)
  of_all = functools.partial(loss.path_loss, model, s.num_untrained_tokens)
  compute = functools.partial(inner.gradient, inner.without_gradients(of_all, s.inner.frozen), 0)
  optimizer = choices.make_inner_of_run(s)
  params = transformer.shapes(model)
  tokens = jax.ShapeDtypeStruct((s.train.batch_size, s.model.seq_len), np.int32)
  step = functools.partial(inner.step, optimizer, compute)
  state = jax.eval_shape(optimizer.init, params)
  lowered: Any = jax.jit(step).lower(params, state, (tokens, tokens), jax.ShapeDtypeStruct((), np.int32))
  router = 6 * tokens.size * s.model.num_layers * s.model.width * s.model.num_experts
  return lowered.cost_analysis()['flops'] + router + tokens.size * extra_splash_flops(s.model)


# Number of products of the size of queries with keys, per token: forward, backward, and recomputed.
PRODUCTS = {'xla': {'none': 6, 'dots': 8, 'full': 8}, 'splash': {'none': 7, 'dots': 7, 'full': 9}}


def extra_splash_flops(config: settings_lib.Model) -> float:
  """Returns the FLOPs per token that splash attention needs beyond 'xla', less than 0 where it skips most blocks.

  Of a user-defined block nothing is known: 0.
  """
  length, kernel = config.seq_len, config.attention
  if kernel != 'splash' or length % attention.LANES or config.block:
    return 0
  done = PRODUCTS['splash'][config.remat] * _share_of_blocks(config) - PRODUCTS['xla'][config.remat]
  return 2 * config.num_layers * length * config.num_heads * config.head_dim * done


def _share_of_blocks(config: settings_lib.Model) -> float:
  """Returns the share of [L, L] that splash computes, on average over the model's blocks, with their windows."""
  size = attention.block_size(config.seq_len)
  rows = range(config.seq_len // size)
  windows = [layers.layer(config, n).window or config.seq_len for n in range(config.num_layers)]
  done = sum(row + 1 - max(0, row * size - window + 1) // size for window in windows for row in rows)
  return done / (len(windows) * len(rows) ** 2)


def estimate_times(
  run_programs: programs.Programs, steps: Any, topology: Topology, sent: dict[str, Any]
) -> dict[str, Any]:
  """Returns bounds of the seconds of a step, and model FLOPs utilization.

  `steps` is the compiled program of inner steps; `sent` are the bytes of collectives on a chip, by `dry_run.traffic`.
  """
  s = run_programs.settings
  chip = topology.chip
  data = run_programs.placement.data
  tokens = s.train.batch_size * s.model.seq_len // data  # of a step, on a chip
  flops = flops_of_step(s) / data
  m = steps.memory_analysis()
  lower = m.argument_size_in_bytes + m.output_size_in_bytes + 2 * m.temp_size_in_bytes
  upper = hlo.Traffic(steps.as_text()).computation_bytes() / run_programs.timetable.unit  # as `dry_run` compiles them
  nothing = {'data': 0.0, 'grid': 0.0, 'dcn': 0.0}  # without an outer step
  moved = (sent.get(f'{name}_collective_bytes', nothing) for name in ('steps', 'outer'))  # half of a chip's links send
  sent_s, outer_s = (2 * (x['data'] + x['grid']) / chip.ici_bytes_per_s + x['dcn'] / DCN_BYTES_PER_S for x in moved)
  best_s = max(flops / chip.flops, lower / chip.hbm_bytes_per_s, sent_s)
  worst_s = flops / chip.flops + upper / chip.hbm_bytes_per_s + sent_s
  useful = performance.flops_per_token(s.model, run_programs.model.vocab_size, s.model.seq_len) * tokens
  return {
    'flops_per_step': flops * data, 'traffic_bytes_per_step': upper, 'step_s_low': best_s, 'step_s_high': worst_s,
    'mfu_low': useful / (worst_s * chip.flops), 'mfu_high': useful / (best_s * chip.flops),
    'tokens_per_s': tokens * run_programs.placement.mesh.devices.size / worst_s, 'outer_s': outer_s,
  }  # fmt: skip


def whole_run(run_programs: programs.Programs, figures: dict[str, Any]) -> dict[str, float]:
  """Returns bounds of the hours of the whole run, from its figures and those of its pretraining."""
  base, chips = figures.get('pretrain', {}), run_programs.placement.mesh.devices.size
  hours = {}
  for name, bound in (('hours_low', 'low'), ('hours', 'high')):
    pretrain_s = run_programs.settings.pretrain.steps * base.get(f'step_s_{bound}', 0.0)
    hours[name] = (pretrain_s + phases_s(run_programs, figures[f'step_s_{bound}'], figures['outer_s'])) / 3600
  return hours | {'chip_hours': hours['hours'] * chips}


def phases_s(run_programs: programs.Programs, step_s: float, outer_s: float) -> float:
  """Returns the seconds of all phases: paths in turn, and the outer step; nothing else."""
  s = run_programs.settings
  turns = [run_programs.placement.paths(turn) for turn in run_programs.placement.turns()]
  active = [
    choices.active_paths(s.train, run_programs.placement.grid.num_paths, s.seed, n) for n in range(s.train.phases)
  ]
  num_turns = sum(bool(of_phase[paths].any()) for of_phase in active for paths in turns)
  return num_turns * s.train.steps_per_phase * step_s + s.train.phases * outer_s
