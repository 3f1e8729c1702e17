"""The device of each worker that `dipaco local` starts: one GPU, or all chips of a TPU host. Nothing here loads JAX.

JAX takes three quarters of a GPU's memory when it starts, so that two processes do not fit on one.
"""

import glob
import importlib.metadata
import importlib.util
import os
import pathlib
import pkgutil
from collections.abc import Mapping

from dipaco_jax.core.errors import InputError
from dipaco_jax.training import devices

CUDA = 'CUDA_VISIBLE_DEVICES'
ROCR = 'ROCR_VISIBLE_DEVICES'
HIP = 'HIP_VISIBLE_DEVICES'
AMD_NODES = '/sys/class/kfd/kfd/topology/nodes/*/gpu_id'
CPU = {'JAX_PLATFORMS': 'cpu'}  # of roles that train nothing
DEFAULT_WORKERS = 2  # on CPUs

Environment = dict[str, str]


def environments(named: Mapping[str, str] = os.environ) -> list[Environment]:
  """Returns, for each worker that this machine has a device for, the variables that select it; [] on CPUs.

  `named`: the environment, whose JAX_PLATFORMS and CUDA_VISIBLE_DEVICES count.
  """
  platforms, plugins = named.get('JAX_PLATFORMS', ''), ' '.join(jax_plugins())

  def is_used(*names: str) -> bool:
    return not platforms or any(name in platforms for name in names)

  if 'cuda' in plugins and is_used('cuda', 'gpu'):
    files = sorted(file for pattern in devices.GPU_FILES for file in glob.glob(pattern))
    return [{CUDA: gpu} for gpu in _selected(named.get(CUDA), len(files))]
  if 'rocm' in plugins and is_used('rocm', 'gpu'):
    variable = HIP if HIP in named else ROCR
    return [{variable: gpu} for gpu in _selected(named.get(variable), _count_amd_gpus())]
  if devices.has_tpu() and importlib.util.find_spec('libtpu') and is_used('tpu'):
    return [{}]
  return []


def _selected(visible: str | None, count: int) -> list[str]:
  """Returns the GPUs that a process may use, as its environment names them, or by number."""
  if visible is None:
    return [str(i) for i in range(count)]
  names = [name.strip() for name in visible.split(',')]
  end = next((i for i, name in enumerate(names) if name in ('', '-1')), len(names))  # CUDA ignores what follows
  return names[:end]


def _count_amd_gpus() -> int:
  return sum(pathlib.Path(file).read_text().strip() != '0' for file in glob.glob(AMD_NODES))  # 0: a CPU


def jax_plugins() -> list[str]:
  """Returns the names of the plugins by which JAX uses GPUs, as 'xla_cuda12'."""
  names = [entry.name for entry in importlib.metadata.entry_points(group='jax_plugins')]
  try:
    import jax_plugins as package
  except ImportError:
    return names
  return names + [module.name for module in pkgutil.iter_modules(package.__path__)]


def assign(workers: int | None, backups: int, available: list[Environment]) -> tuple[int, list[Environment]]:
  """Returns the number of workers, and the variables of each worker and then of each backup.

  Args:
    workers: number of workers. None means one per device that backups leave, or `DEFAULT_WORKERS` on CPUs.
    backups: number of backup workers.
    found: result of `environments`.

  Raises InputError if there are more workers than devices.
  """
  if not available:
    workers = DEFAULT_WORKERS if workers is None else workers
    return workers, [{}] * (workers + backups)
  if workers is None:
    workers = max(1, len(available) - backups)
  if workers + backups > len(available):
    asked = f'--workers={workers}' + (f' and --backups={backups}' if backups else '')
    has = (
      f'{len(available)} GPU{"s" * (len(available) > 1)}'
      if available[0]
      else 'one TPU, of which a worker takes all chips'
    )
    raise InputError(
      f'{asked}: each worker needs a device of its own, and this machine has {has}; lower them, or set '
      'JAX_PLATFORMS=cpu to train on the CPU. A run without islands (dipaco train) lets paths take turns on a GPU'
    )
  return workers, available[: workers + backups]
