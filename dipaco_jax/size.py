"""Suggests a size of model, a grid and a number of steps for a text, a machine and a time, and the command to use.

    python -m dipaco_jax.size --data='books/*.txt' --hours=2
    python -m dipaco_jax.size --data='c4/*.json.gz' --hours=24 --device=v5e-8

Reads the sizes of the files, not their text, and trains nothing. On a CPU it measures how fast the cores multiply
matrices; for other devices it takes their peak, and a part of it. Hours are those of a machine on which nothing else
runs, good to a factor of two on CPUs and not checked on accelerators. docs/own_text.md has the rules and their reasons.
"""

import functools
import os
import re
import shlex
import subprocess
import sys
from typing import NamedTuple

from absl import flags

from dipaco_jax.command_line import command, config_file
from dipaco_jax.config import fields, settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.planning import sizing

COMPRESSED, RATIO = ('.gz', '.zst', '.zstd', '.bz2', '.xz', '.parquet'), 3  # bytes of text in one of a file
CPU_EFFICIENCY = 0.12  # of measured products, for a whole run of text:small; see docs/own_text.md
PROCESS_BYTES = 0.6e9  # of Python, JAX and their libraries
PRODUCT = """
import time
import numpy as np
x, seconds = np.ones((1024, 1024), np.float32), []
for _ in range(6):
  start = time.process_time()
  x @ x
  seconds.append(time.process_time() - start)
print(2 * 1024**3 / min(seconds))
"""


class Hardware(NamedTuple):
  name: str
  num_devices: int
  flops_per_s: float  # of all of them, that inner steps are expected to reach
  memory_bytes: float  # of one device
  about: str


def measure_text(globs: tuple[str, ...]) -> tuple[int, float]:
  """Returns the number of files and the bytes of text in them. Raises InputError if there are none."""
  from dipaco_jax.data import source_files

  listed = source_files.listing(settings.Data(source='files', train=globs))
  sizes = [size * (RATIO if name.endswith(COMPRESSED) else 1) for name, size in listed]
  if not all(sizes):
    raise InputError('--data names files in a bucket, whose sizes are not read: give the text by --text_bytes as well')
  return len(sizes), float(sum(sizes))


def find_hardware(device: str, parameters: int) -> Hardware:
  """Returns the FLOP/s that a device ('cpu', 'h100', 'v5e-8') should reach on paths with this number of parameters."""
  name, _, count = device.lower().partition('-')
  from dipaco_jax.telemetry import performance

  accelerators = sizing.GPUS | {k: sizing.Device(c.flops, c.hbm_bytes) for k, c in performance.CHIPS.items()}
  if not re.fullmatch(r'[1-9]\d*|', count) or name not in ('cpu', *accelerators):
    known = ', '.join(('cpu', *accelerators))
    raise InputError(f'--device={device} is not known: write one of {known}, with a number of devices as v5e-8')
  if name == 'cpu':
    if count:
      raise InputError(f'--device={device}: write cpu, which is this machine with all of its cores')
    has_affinity = hasattr(os, 'sched_getaffinity')  # not on macOS
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    measured = measure_core()
    about = f'this machine: {cores} cores of {measured / 1e9:,.0f} GFLOP/s in matrix products'
    memory = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    return Hardware('cpu', 1, cores * measured * CPU_EFFICIENCY, memory, about)
  chip = accelerators[name]
  part = sizing.efficiency(parameters)
  number = int(count or 1)
  about = f'{number} of {name}, {part:.0%} of {chip.flops_per_s / 1e12:,.0f} TFLOP/s each'
  return Hardware(name, number, number * part * chip.flops_per_s, chip.memory_bytes, about)


@functools.cache
def measure_core() -> float:
  """Returns the FLOP/s of one core in a matrix product in float32, even if the machine is busy."""
  one_thread = dict.fromkeys(
    ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS', 'VECLIB_MAXIMUM_THREADS'), '1'
  )
  done = subprocess.run([sys.executable, '-c', PRODUCT], env=os.environ | one_thread, capture_output=True, check=True)
  return float(done.stdout)


def choose(text_tokens: float, device: str, hours: float) -> tuple[sizing.Plan, Hardware]:
  """Returns the plan that fits the hours, and the hardware as it is expected to run that plan."""
  seconds = 3600 * hours
  for size in reversed(sizing.SIZES):
    hardware = find_hardware(device, size.parameters)
    plan = sizing.make_plan(text_tokens, seconds * hardware.flops_per_s)
    if plan.size.parameters >= size.parameters:  # it was planned with no more than the speed of this size
      return plan, hardware
  return plan, hardware


def estimate_bytes(plan: sizing.Plan, num_devices: int) -> float:
  """Returns the memory that a device needs: states of its paths, all modules, and one inner step."""
  z, on_device = plan.size, -(-plan.num_paths // num_devices)
  states = (8 + 8 * on_device) * z.parameters  # parameters and gradients of one path; AdamW's state of every path
  others = plan.parameters_total - plan.parameters_shared
  modules = 8 * (plan.parameters_shared + others / min(num_devices, plan.num_paths))  # and sums for the next ones
  tokens_at_once = (z.microbatch or z.rows) * z.seq_len
  activations = 4 * tokens_at_once * z.num_layers * (10 * z.width + 4 * z.mlp_dim)
  logits = 3 * 4 * min(1024, z.step_tokens) * z.vocab_size
  return PROCESS_BYTES + states + modules + activations + logits


def command_line(plan: sizing.Plan, data: str) -> str:
  """Returns the command that runs the plan: the nearest config, and the fields that differ from it."""
  config = 'text:small' if plan.size is sizing.SIZES[0] else 'text'
  values = config_file.read(config)
  usual = fields.flatten(values) | {'grid': values['grid']}
  changed = {name: value for name, value in plan.fields().items() if usual[name] != value}
  options = [f'--config.{name}={value}' for name, value in {'data.train': data, **changed}.items()]
  return ' '.join(['dipaco train', f'--config={config}', '--workdir=runs/mine', *map(quote, options)])


def quote(option: str) -> str:
  """Returns an option as a shell takes it, in double quotes where it has single ones."""
  quoted = shlex.quote(option)
  return f'"{option}"' if "'" in option and not re.search(r'[$`"\\!]', option) else quoted


def describe(plan: sizing.Plan, hardware: Hardware, num_files: int, text_bytes: float) -> list[tuple[str, str]]:
  """Returns the rows of the table."""
  z, tokens = plan.size, text_bytes / sizing.BYTES_PER_TOKEN
  hours = plan.flops / hardware.flops_per_s / 3600
  per_parameter = plan.trained_tokens / z.parameters
  passes = plan.path_steps * z.step_tokens * plan.num_paths / tokens
  needed, side = estimate_bytes(plan, hardware.num_devices), round(plan.num_paths**0.5)
  files = f' in {num_files} files' if num_files else ''
  shape = f'width {z.width}, {z.num_layers} blocks, rows of {z.seq_len} tokens'
  phases = f'{plan.phases:,} phases of {z.tau} for each path'
  return [
    ('text', f'{text_bytes / 1e6:,.1f} MB{files}, about {tokens / 1e6:,.1f} million tokens'),
    ('device', hardware.about),
    ('path', f'{z.parameters / 1e6:,.1f}M parameters: {shape}'),
    ('grid', f'{side}x{side} paths, {plan.parameters_total / 1e6:,.1f}M parameters in all'),
    ('steps', f'{plan.base_steps:,} of the base, then {phases}; {z.rows} rows a step'),
    ('tokens', f'{per_parameter:,.1f} for each parameter of a path; paths read their text {passes:,.1f} times'),
    ('hours', f'{hours:,.2f}, with the dense control'),
    ('memory', f'{needed / 1e9:,.1f} of {hardware.memory_bytes / 1e9:,.1f} GB on a device'),
  ]


def warnings(plan: sizing.Plan, hardware: Hardware) -> list[str]:
  """Returns what speaks against the plan, a sentence each."""
  reasons = []
  if not plan.has_enough_tokens:
    least = sizing.ENOUGH * sizing.TOKENS_PER_PARAMETER
    reasons.append(
      f'fewer than {least:.0f} tokens for each parameter: more text or more hours would help more than more paths, and '
      'paths may not be ahead of the dense control'
    )
  if estimate_bytes(plan, hardware.num_devices) > 0.9 * hardware.memory_bytes:
    reasons.append(
      'memory is short: set --config.train.offload=True or a smaller --config.train.microbatch, or use more devices'
    )
  return reasons


def main():
  f = flags.FLAGS
  if not f.data and not f.text_bytes:
    raise InputError("name the text, as --data='books/*.txt', or its size, as --text_bytes=2e9")
  if not f.hours > 0:
    raise InputError(f'--hours={f.hours} should be above 0')
  num_files, text_bytes = measure_text(tuple(filter(None, (f.data or '').split(',')))) if not f.text_bytes else (0, 0)
  text_bytes = f.text_bytes or text_bytes
  plan, hardware = choose(text_bytes / sizing.BYTES_PER_TOKEN, f.device, f.hours)
  rows = describe(plan, hardware, num_files, text_bytes)
  print('\n'.join(f'{name:8}{value}' for name, value in rows))
  print('\n'.join(['', *warnings(plan, hardware), command_line(plan, f.data or 'text/*.txt')]))


if __name__ == '__main__':
  flags.DEFINE_string('data', None, 'Text to train on: globs of files, as for --config.data.train.')
  flags.DEFINE_float(
    'text_bytes',
    0.0,
    'Size of the text in bytes, if its files are neither on this machine nor in a bucket.',
    lower_bound=0,
  )
  flags.DEFINE_float('hours', 1.0, 'Time that the run may take, in hours.')
  flags.DEFINE_string(
    'device',
    'cpu',
    'Device to train on: cpu for this machine, or a100, h100, h200, v4, v5e, v5p or v6e; v5e-8 means 8 of them.',
  )
  command.run(main)
