"""The devices that JAX has found, in words, and a warning where it fell back to the CPU.

Nothing here imports JAX before it is used.
"""

import collections
import glob
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from dipaco_jax.processes import display

GIB = 2**30
GPU_FILES, TPU_FILES = ('/dev/nvidia[0-9]*',), ('/dev/accel[0-9]*',)
NEWER_TPU_FILES = '/dev/vfio/[0-9]*'
PCI_VENDORS = '/sys/bus/pci/devices/*/vendor'
GOOGLE = '0x1ae0'
INSTALL = {'GPU': "pip install 'dipaco_jax[cuda]'", 'TPU': "pip install 'dipaco_jax[tpu]'"}


def show() -> None:
  """Shows the devices of this process in a line, and warns where JAX fell back to the CPU."""
  import jax

  devices, platforms = jax.devices(), named_platforms()
  display.STDERR.note(f'devices: {describe(devices, jax.local_devices(), platforms)}')
  if warning := explain_fallback(devices[0].platform, platforms, find_accelerator()):
    logging.warning('%s', warning)


def named_platforms() -> str:
  """Returns the platforms that JAX may use, as JAX_PLATFORMS names them; '' for any."""
  import jax

  return jax.config.values['jax_platforms'] or ''


def describe(devices: Sequence[Any], local_devices: Sequence[Any], platforms: str) -> str:
  """Describes devices, as '8 x TPU v5 lite, 16 GiB each'; `platforms` is JAX_PLATFORMS."""
  if devices[0].platform == 'cpu':
    number = f'{len(devices)} devices on the ' if len(devices) > 1 else ''
    why = f'JAX_PLATFORMS={platforms}' if platforms.startswith('cpu') else 'no GPU or TPU was found'
    return f'{number}CPU, {_machine()}: {why}'
  counts = collections.Counter(device.device_kind for device in devices)
  kinds = ', '.join(f'{number} x {kind}' for kind, number in counts.items())
  limits = [limit for device in local_devices if (limit := (device.memory_stats() or {}).get('bytes_limit'))]
  memory = f', {min(limits) / GIB:.0f} GiB each' if limits else ''
  here = f', {len(local_devices)} of them on this machine' if len(local_devices) < len(devices) else ''
  return f'{kinds}{memory}{here}'


def _machine() -> str:
  cores = len(os.sched_getaffinity(0))
  memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / GIB
  return f'{cores} core{"s" * (cores > 1)}, {memory:.0f} GiB of memory'


def find_accelerator() -> tuple[str, str]:
  """Returns ('GPU' or 'TPU', the file that shows that this machine has one); ('', '') if there is none."""
  for kind, patterns in (('GPU', GPU_FILES), ('TPU', TPU_FILES)):
    if files := sorted(file for pattern in patterns for file in glob.glob(pattern)):
      return kind, files[0]
  if (files := sorted(glob.glob(NEWER_TPU_FILES))) and any(map(_is_of_google, glob.glob(PCI_VENDORS))):
    return 'TPU', files[0]
  return '', ''


def has_tpu() -> bool:
  """Returns whether this machine may have a TPU: where no file of a device is, nobody can open one."""
  return any(glob.glob(pattern) for pattern in (*TPU_FILES, NEWER_TPU_FILES))


def hide_unused_libtpu() -> None:
  """Keeps JAX from loading libtpu on a machine without a TPU, where that prints errors and takes minutes.

  libtpu may be installed for `--compile_only`, which calls `restore_libtpu`. Call this before JAX looks for devices.
  """
  is_forced = 'JAX_FORCE_TPU_INIT' in os.environ or 'tpu' in os.environ.get('JAX_PLATFORMS', '')
  if not is_forced and not has_tpu():
    sys.modules.setdefault('libtpu', None)  # type: ignore[arg-type] # as if it were not installed


def restore_libtpu() -> None:
  """Undoes `hide_unused_libtpu`."""
  if sys.modules.get('libtpu', sys) is None:
    del sys.modules['libtpu']


def _is_of_google(vendor_file: str) -> bool:
  try:
    with open(vendor_file) as f:
      return f.read().strip() == GOOGLE
  except OSError:
    return False


def explain_fallback(platform: str, platforms: str, accelerator: tuple[str, str]) -> str:
  """Returns a warning where JAX uses the CPU although another device is present or asked for; '' otherwise."""
  first = platforms.split(',')[0]
  if platform != 'cpu' or first == 'cpu':
    return ''
  kind, file = accelerator
  if kind:
    return (
      f'JAX uses the CPU, but this machine has a {kind} ({file}): install JAX for it ({INSTALL[kind]}), or set '
      'JAX_PLATFORMS=cpu if the CPU is meant'
    )
  return f'JAX uses the CPU, but JAX_PLATFORMS={platforms} names {first} first' if first else ''
