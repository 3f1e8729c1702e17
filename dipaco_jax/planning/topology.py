"""TPU topologies by name: their devices as the TPU compiler knows them, without the machine.

A name is `KIND:SHAPE`, such as `v5e:16x16` or `v5p:4x4x4`; `v5e:8x8*4` is four slices, joined by the data-center
network. Needs the compiler, `pip install "dipaco_jax[tpu]"`, and no TPU.
"""

import os
import re
from typing import Any, NamedTuple

from dipaco_jax.core.errors import InputError
from dipaco_jax.telemetry import performance
from dipaco_jax.training import devices

DCN_BYTES_PER_S = 25e9 / 8  # of a chip, between slices: assumed, as Google publishes it by pod
# Options that the TPU compiler requires, by kind or by shape.
OPTIONS: dict[str, dict[str, Any]] = {
  'v4': {'chip_config_name': 'megacore'},  # a chip's two cores as one device
  '1x1': {'chips_per_host_bounds': (1, 1, 1)},
}

SHAPES = {
  'v4': '2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x12 8x8x16 8x16x16',
  'v5e': '1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16',
  'v5p': '2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16 16x16x24',
  'v6e': '1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16',
}
# Otherwise the compiler asks the network which TPU this machine has, and refuses to be loaded twice.
ENVIRONMENT = {'TPU_SKIP_MDS_QUERY': '1', 'TPU_WORKER_HOSTNAMES': 'localhost', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1'}


class Topology(NamedTuple):
  name: str
  chip: performance.Chip
  devices: list[Any]  # jax.Device, slice by slice
  slices: int


def find_topology(name: str) -> Topology:
  """Returns the topology of a name. Raises InputError if there is none, or the TPU compiler is not installed."""
  match = re.fullmatch(r'(\w+):([\dx]+)(?:\*(\d+))?', name)
  kind, shape = (match[1], match[2]) if match else ('', '')
  if shape not in SHAPES.get(kind, '').split():
    form = f'{kind}:SHAPE or {kind}:SHAPE*SLICES with a shape of {SHAPES.get(kind, "").replace(" ", ", ")}'
    kinds = f'KIND:SHAPE or KIND:SHAPE*SLICES, as v5e:4x4; kinds are {", ".join(SHAPES)}'
    raise InputError(f'--topology={name} is not known: write {form if kind in SHAPES else kinds}')
  slices = int(match[3] or 1) if match else 1
  os.environ.update(ENVIRONMENT | os.environ)
  devices.restore_libtpu()
  from jax.experimental import topologies

  options = {'num_slices': slices} | OPTIONS.get(kind, {}) | OPTIONS.get(shape, {})
  try:
    description: Any = topologies.get_topology_desc(platform='tpu', topology_name=name.split('*')[0], **options)
  except RuntimeError as e:
    raise InputError(f'--topology={name}: {e}. The compiler comes with: pip install "dipaco_jax[tpu]"') from e
  in_order = sorted(description.devices, key=lambda d: (getattr(d, 'slice_index', 0) or 0, d.id))
  return Topology(name, performance.CHIPS[kind], in_order, slices)
