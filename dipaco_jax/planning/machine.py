"""The machine at hand: its memory, and the speed at which its devices multiply matrices."""

import functools
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

MEMORY_LIMITS = '/sys/fs/cgroup/memory.max', '/sys/fs/cgroup/memory/memory.limit_in_bytes'  # of a container
SIZES = {'cpu': 1024}  # of the matrices that are multiplied, by platform
LARGE = 4096  # on accelerators
REPEATS = 3


class Machine(NamedTuple):
  """What a run has at hand."""

  devices: Sequence[jax.Device]
  num_local: int  # devices of this process
  device_bytes: int  # memory of a device; 0: not known. On a CPU its memory is that of the host.
  host_bytes: int  # memory of the host, with swap; 0: not known
  host_free_bytes: int
  flops_per_s: float  # of a device, of large products

  @property
  def is_cpu(self) -> bool:
    return self.devices[0].platform == 'cpu'


def look(dtype: str = 'float32') -> Machine:
  """Returns this machine. `dtype` is the dtype of matrix products."""
  devices = jax.devices()
  memory = (jax.local_devices()[0].memory_stats() or {}).get('bytes_limit', 0)
  total, free = host_memory()
  return Machine(devices, jax.local_device_count(), memory, total, free, measure_flops_per_s(dtype))


def host_memory() -> tuple[int, int]:
  """Returns the bytes of the host's memory that this process may use, swap included, and those that are free."""
  try:
    with open('/proc/meminfo') as file:
      fields = {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(':') for line in file)}
    total = fields['MemTotal'] + fields.get('SwapTotal', 0)
    free = fields['MemAvailable'] + fields.get('SwapFree', 0)
  except (OSError, KeyError, ValueError, IndexError):  # another system than Linux
    total = free = _physical_bytes()
  limit = min([total, *map(_read_limit, MEMORY_LIMITS)], key=lambda size: size or total)
  return limit, min(free, limit)


def _physical_bytes() -> int:
  try:
    return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
  except (ValueError, OSError, AttributeError):
    return 0


def _read_limit(file: str) -> int:
  """Returns the limit that a file states, 0 if it states none."""
  try:
    with open(file) as opened:
      return int(opened.read())
  except (OSError, ValueError):  # 'max'
    return 0


@functools.cache
def measure_flops_per_s(dtype: str) -> float:
  """Returns the FLOP/s of one device in a large matrix product, the fastest of a few."""
  device = jax.local_devices()[0]
  size = SIZES.get(device.platform, LARGE)
  x = jax.device_put(jnp.ones((size, size), dtype), device)
  multiply = jax.jit(lambda x: x @ x)
  multiply(x).block_until_ready()
  times = []
  for _ in range(REPEATS):
    start = time.perf_counter()
    multiply(x).block_until_ready()
    times.append(time.perf_counter() - start)
  return 2 * size**3 / min(times)
