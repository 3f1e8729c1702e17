"""What a compiled program sends: the collectives in its HLO text, in any of its spellings."""

import math
import re
from typing import NamedTuple

import numpy as np

KINDS = 'all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|ragged-all-to-all'
BYTES = {'pred': 1, 's8': 1, 'u8': 1, 'bf16': 2, 'f16': 2, 's32': 4, 'u32': 4, 'f32': 4, 's64': 8, 'u64': 8, 'f64': 8}


class Collective(NamedTuple):
  kind: str
  size: int  # bytes of the result on a device
  groups: list[list[int]]  # places in the program's order of devices; [] where all are one group


def collectives(text: str) -> list[Collective]:
  """Of a compiled program's HLO, those in the bodies of its loops once."""
  found = []
  for line in re.sub(r'/\*.*?\*/', '', text).splitlines():
    if match := re.search(rf' = (.*?)\s({KINDS})(-start)?\(', line):
      shapes = re.findall(r'\b([a-z]+\d*)\[([\d,]*)\]', match[1])
      size = sum(BYTES.get(kind, 4) * math.prod(map(int, filter(None, dims.split(',')))) for kind, dims in shapes)
      found.append(Collective(match[2], size, groups(line)))
  return found


def permuted(text: str) -> np.ndarray:
  """Devices in the order that '[4,2]T(1,0)' says."""
  match = re.fullmatch(r'\[([\d,]+)\](?:T\(([\d,]+)\))?', text)
  assert match, text
  dims = [int(i) for i in match[1].split(',')]
  order = [int(i) for i in match[2].split(',')] if match[2] else None
  return np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(-1)


def groups(line: str) -> list[list[int]]:
  """Devices that a collective connects. Raises ValueError at a spelling that this does not know."""
  if match := re.search(r'(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}', line):
    return [[int(i) for i in group.split(',')] for group in re.findall(r'\{([\d,]+)\}', match[1])]
  if match := re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?\)?)\))? ?\{(('\w+',?)*)\}", line):
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
    devices = permuted(match[2] or f'[{math.prod(sizes.values())}]').reshape(*sizes.values())
    inside = [i for i, name in enumerate(sizes) if name in re.findall(r"'(\w+)'", match[3])]
    moved = np.moveaxis(devices, inside, range(-len(inside), 0))
    return moved.reshape(-1, math.prod(devices.shape[i] for i in inside)).tolist()
  if match := re.search(r'replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)', line):
    return permuted(match[2]).reshape(*map(int, match[1].split(','))).tolist()
  raise ValueError(f'a spelling of replica groups that is not known: {line}')
