"""What a run will take of the machine at hand, stated before it begins; a run that cannot fit is rejected."""

import dataclasses
import logging
from collections.abc import Callable, Sequence

import jax

from dipaco_jax.algorithm import grid as grid_lib
from dipaco_jax.config import settings as settings_lib
from dipaco_jax.core.errors import InputError
from dipaco_jax.models import transformer
from dipaco_jax.planning import dry_run, machine as machine_lib, run_estimate
from dipaco_jax.planning.machine import Machine

GB = 10**9
SMALL_BYTES = GB  # less is not worth a closer look, which takes seconds
SMALL_FLOPS = 3e11  # a minute of a slow core
ACCURACY = 1.1  # an estimate of a step's memory is this many times too high at most
LARGEST = 4  # parts of the memory that are named


def check(
  s: settings_lib.Settings,
  say: Callable[[str], object],
  machine: Machine | None = None,
  is_whole_run: bool = True,
) -> None:
  """Reports the memory and time that a run needs.

  Args:
    s: settings of the run, with the `tokenizer.vocab_size` of the given or trained tokenizer.
    say: called with each line.
    machine: the machine of the run, by default this one.
    is_whole_run: whether this process does the whole run; otherwise time is not reported.

  Raises InputError if one inner step does not fit the machine's memory; logs a warning where the whole run may not
  fit what is free.
  """
  if machine is None and _is_small(s):
    time = ', and less than a minute besides compilation' if is_whole_run else ''
    say(f'the run takes less than 1 GB of memory{time}')
    return
  machine = machine or machine_lib.look(transformer.for_device(s.model, jax.default_backend()).dtype)
  memory = run_estimate.estimate_memory(s, machine.devices)
  message = describe_memory(memory, machine)
  if certainly_missing(memory, machine) > 0:
    raise InputError(f'{message}, which is more than is available: {_advice(s, machine)}')
  say(message)
  if is_whole_run:
    say(describe_time(s, machine))
  if bytes_missing(memory, machine) > 0:
    logging.warning('the run may need more memory than is free: %s', _advice(s, machine))


def _is_small(s: settings_lib.Settings) -> bool:
  """Returns whether a run is too small for a closer look, which takes seconds."""
  flops = sum(run_estimate.count_flops(s).values()) if not s.model.block else SMALL_FLOPS
  return flops < SMALL_FLOPS and run_estimate.bound_bytes(s) < SMALL_BYTES


def certainly_missing(memory: run_estimate.Memory, machine: Machine) -> float:
  """Returns the bytes that the machine's memory lacks for a step alone, at the least; 0 or below where it fits."""
  of_step = sum(memory.device.values()) / ACCURACY
  if machine.is_cpu:
    return machine.num_local * of_step - machine.host_bytes if machine.host_bytes else 0
  return of_step - machine.device_bytes if machine.device_bytes else 0


def bytes_missing(memory: run_estimate.Memory, machine: Machine) -> float:
  """Returns the bytes that the machine's free memory lacks for all that a run is expected to need."""
  if machine.is_cpu:
    return _needed(memory, machine) - machine.host_free_bytes if machine.host_bytes else 0
  return _needed(memory, machine) - dry_run.USABLE * machine.device_bytes if machine.device_bytes else 0


def _needed(memory: run_estimate.Memory, machine: Machine) -> int:
  """Returns the bytes that a run needs of the limiting memory: that of a device, or of a host with CPUs."""
  of_device = sum(memory.device.values())
  return machine.num_local * of_device + sum(memory.host.values()) if machine.is_cpu else of_device


def describe_memory(memory: run_estimate.Memory, machine: Machine) -> str:
  """Returns a line with the memory that a run needs and the machine has, and the largest parts."""
  if machine.is_cpu:
    kinds = {kind: machine.num_local * size for kind, size in memory.device.items()} | memory.host
    has = f' of {machine.host_bytes / GB:.1f} GB, {machine.host_free_bytes / GB:.1f} GB of them free'
  else:
    kinds, has = memory.device, f' on each device, of {machine.device_bytes / GB:.1f} GB'
  has = has if machine.host_bytes or not machine.is_cpu else ''
  largest = sorted(kinds.items(), key=lambda item: -item[1])[:LARGEST]
  parts = ', '.join(f'{kind} {size / GB:.1f}' for kind, size in largest)
  return f'the run needs about {_needed(memory, machine) / GB:.1f} GB of memory{has} ({parts})'


def describe_time(s: settings_lib.Settings, machine: Machine) -> str:
  """Returns a line on the time of the whole run."""
  flops = sum(run_estimate.count_flops(s).values())
  took = _duration(run_estimate.seconds(s, machine.flops_per_s, len(machine.devices)))
  speed = f'{flops:.2g} FLOPs, where a device multiplies matrices at {machine.flops_per_s / 1e9:,.0f} GFLOP/s'
  return f'the whole run takes roughly {took} ({speed}); the ETA after the first steps is measured'


def _duration(seconds: float) -> str:
  if seconds < 3600:
    return f'{max(1, round(seconds / 60))} min'
  return f'{seconds / 3600:.1f} hours' if seconds < 48 * 3600 else f'{seconds / 86400:.1f} days'


def _advice(s: settings_lib.Settings, machine: Machine) -> str:
  """Returns the mildest options with which the run fits, and the memory that it then needs."""
  advice = []
  for change, changed in _smaller(s, machine):
    memory = run_estimate.estimate_memory(changed, machine.devices)
    advice.append(f'{change} ({_needed(memory, machine) / GB:.1f} GB)')
    if bytes_missing(memory, machine) <= 0:
      return f'it fits with {advice[-1]}'
  less = f'; {advice[-1]} needs least' if advice else ''
  return f'use a machine with more memory, or a smaller model{less}'


def _smaller(s: settings_lib.Settings, machine: Machine) -> Sequence[tuple[str, settings_lib.Settings]]:
  """Returns runs that need less, with the options that make them: the mildest first."""
  smaller, change = [], ''
  rows = s.train.microbatch or s.train.batch_size
  if rows > 1:
    s, change = dataclasses.replace(s, train=dataclasses.replace(s.train, microbatch=1)), '--config.train.microbatch=1'
    smaller.append((change, s))
  if s.model.remat == 'none':
    layers = 'scanned' if machine.is_cpu else s.model.layers  # without, XLA for CPUs undoes it
    s = dataclasses.replace(s, model=dataclasses.replace(s.model, remat='full', layers=layers))
    change += ' --config.model.remat=full' + (' --config.model.layers=scanned' if machine.is_cpu else '')
    smaller.append((change.strip(), s))
  if not machine.is_cpu and not s.train.offload:
    s, change = (
      dataclasses.replace(s, train=dataclasses.replace(s.train, offload=True)),
      f'{change} --config.train.offload',
    )
    smaller.append((change.strip(), s))
  while max((sizes := grid_lib.Grid(s.grid).sizes).values(), default=1) > 2 and s.num_paths > 4:
    sizes = {name: max(2, size // 2) if size > 2 else size for name, size in sizes.items()}
    s = dataclasses.replace(s, grid=tuple(sizes.items()))
    grid = ' '.join(f'--config.grid.{name}={size}' for name, size in sizes.items())
    smaller.append((f'{change} {grid}'.strip(), s))
  return smaller
