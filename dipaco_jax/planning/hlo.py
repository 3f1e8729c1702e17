"""Traffic of a compiled program, between chips and with HBM, parsed from any form of its HLO."""

import math
import re
from typing import NamedTuple

import numpy as np

KINDS = 'all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|ragged-all-to-all'
BYTES = {'pred': 1, 's8': 1, 'u8': 1, 'bf16': 2, 'f16': 2, 's32': 4, 'u32': 4, 'f32': 4, 's64': 8, 'u64': 8, 'f64': 8}


class Collective(NamedTuple):
  kind: str
  size: int  # bytes of the result on a device
  groups: list[list[int]]  # places in the program's order of devices, or [] if all are one group

  def sent(self, num_devices: int) -> float:
    """Returns the bytes that each of `num_devices` devices sends, in a ring."""
    n = len(self.groups[0]) if self.groups else num_devices
    parts = {'all-gather': (n - 1) / n, 'reduce-scatter': n - 1, 'all-reduce': 2 * (n - 1) / n}
    return self.size * parts.get(self.kind, 1)


def collectives(text: str) -> list[Collective]:
  """Lists the collectives in a compiled program's HLO, those in the body of a loop once.

  Between slices of TPUs the compiler has each device send its part to its host and receive the sum: a `recv`.
  """
  instructions = []
  for line in re.sub(r'/\*.*?\*/', '', text).splitlines():
    if match := re.search(rf' = (.*?)\s({KINDS})(-start)?\(', line):
      shapes = shapes_in(match[1])
      if match[3] and match[2] in ('all-gather', 'collective-permute'):  # (operands, results, contexts)
        shapes = [shape for shape in shapes if shape != ('u32', '')]
        shapes = shapes[len(shapes) // 2 :]
      instructions.append(Collective(match[2], bytes_of(shapes), replica_groups(line)))
    elif match := re.search(r' = \((\w+\[[\d,]*\]).*? recv\(.*xla_megascale', line):
      instructions.append(Collective('recv', bytes_of(shapes_in(match[1])), []))
  return instructions


def shapes_in(text: str) -> list[tuple[str, str]]:
  """Lists (type, dimensions) of the arrays that a text names."""
  return re.findall(r'\b([a-z]+\d*)\[([\d,]*)\]', text)


def bytes_of(shapes: list[tuple[str, str]]) -> int:
  """Returns the bytes of arrays, given (type, dimensions) of each."""
  return sum(BYTES.get(kind, 4) * math.prod(map(int, filter(None, dims.split(',')))) for kind, dims in shapes)


def device_order(text: str) -> np.ndarray:
  """Returns the devices in the order that a text such as '[4,2]T(1,0)' denotes."""
  match = re.fullmatch(r'\[([\d,]+)\](?:T\(([\d,]+)\))?', text)
  assert match, text
  dims = [int(i) for i in match[1].split(',')]
  order = [int(i) for i in match[2].split(',')] if match[2] else None
  return np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(-1)


def replica_groups(line: str) -> list[list[int]]:
  """Lists the groups of devices that a collective connects. Raises ValueError at an unknown spelling."""
  if match := re.search(r'(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}', line):
    return [[int(i) for i in group.split(',')] for group in re.findall(r'\{([\d,]+)\}', match[1])]
  if match := re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?\)?)\))? ?\{(('\w+',?)*)\}", line):
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
    devices = device_order(match[2] or f'[{math.prod(sizes.values())}]').reshape(*sizes.values())
    inside = [i for i, name in enumerate(sizes) if name in re.findall(r"'(\w+)'", match[3])]
    moved = np.moveaxis(devices, inside, range(-len(inside), 0))
    return moved.reshape(-1, math.prod(devices.shape[i] for i in inside)).tolist()
  if match := re.search(r'replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)', line):
    return device_order(match[2]).reshape(*map(int, match[1].split(','))).tolist()
  raise ValueError(f'unknown spelling of replica groups: {line}')


# -- traffic with HBM

NAME = r'%?([\w.\-]+)'
FREE = {'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'after-all', 'opt-barrier', 'partition-id'}
NOT_READ = 'AllocateBuffer', 'ConcatBitcast'  # custom calls that only name memory


class Instruction(NamedTuple):
  name: str
  shape: str  # with layout and memory space
  op: str
  operands: list[str]
  line: str  # its whole text


def computations(text: str) -> dict[str, list[Instruction]]:
  """Parses instructions, by computation; that of the program itself is also under ''."""
  instructions_by_name: dict[str, list[Instruction]] = {}
  body: list[Instruction] = []
  for line in re.sub(r'/\*.*?\*/', '', text).splitlines():
    if match := re.match(rf'(ENTRY )?{NAME} (?:\(.*)?\{{$', line):
      body = instructions_by_name[match[2]] = []
      if match[1]:
        instructions_by_name[''] = body
    elif match := re.match(rf'\s+(?:ROOT )?{NAME} = (.+?) ([a-z][\w\-]*)\((.*)', line):
      operands = re.findall(r'%([\w.\-]+)', re.split(r'\)(?:,|$)', match[4])[0])
      body.append(Instruction(match[1], match[2], match[3], operands, line))
  return instructions_by_name


def array_bytes(shape: str) -> list[int]:
  """Lists the bytes of each array of a shape in HBM, padded to whole tiles; 0 for arrays that are elsewhere."""
  part_bytes = []
  for kind, dims, layout in re.findall(r'\b([a-z]+\d*)\[([\d,]*)\](?:\{([^}]*)\})?', shape):
    sizes = [int(size) for size in dims.split(',') if size]
    order, _, tiles = layout.partition(':')
    if tile := re.match(r'T\(([\d,]+)\)', tiles):
      minor = [int(i) for i in order.split(',') if i]
      for i, size in zip(minor, reversed(tile[1].split(',')), strict=False):
        sizes[i] = -(-sizes[i] // int(size)) * int(size)
    part_bytes.append(0 if re.search(r'S\([1-9]', tiles) else BYTES.get(kind, 4) * math.prod(sizes))
  return part_bytes


def in_hbm(shape: str) -> str:
  return re.sub(r'S\(\d+\)', '', shape)


class Traffic:
  """Bytes that a compiled program reads from HBM and writes to it: an upper bound.

  Every instruction reads each operand once and writes its results once; a slice counts as its own size, not its
  operand's. Loops count once per iteration. Arrays in a chip's vector memory cost nothing.
  """

  def __init__(self, text: str):
    self.bodies = computations(text)
    self.shapes = {name: {i.name: i.shape for i in body} for name, body in self.bodies.items()}

  def computation_bytes(self, computation: str = '') -> int:
    """Returns the bytes of a computation, '' for the program."""
    return sum(self.instruction_bytes(computation, i) for i in self.bodies[computation])

  def instruction_bytes(self, where: str, i: Instruction) -> int:
    """Returns the bytes that one instruction moves; for a call, loop or branch, those of its computation."""
    if i.op in FREE or i.op.endswith('-done') or any(f'"{name}"' in i.line for name in NOT_READ):
      return 0
    if i.op == 'while':
      return self.trips(i) * self.computation_bytes(called(i, 'body'))
    if i.op == 'conditional':
      branches = re.search(r'branch_computations=\{(.*?)\}', i.line)
      names = re.findall(NAME, branches[1]) if branches else [called(i, f'{x}_computation') for x in ('true', 'false')]
      return max(self.computation_bytes(name) for name in names)
    if i.op in ('call', 'async-start'):
      return self.computation_bytes(called(i, 'to_apply' if i.op == 'call' else 'calls'))
    if i.op in ('copy-start', 'slice-start'):  # (target, source, context); ((source,), target, context)
      at = int(i.op == 'slice-start')
      moved = array_bytes(in_hbm(i.shape))[at]
      return moved * (array_bytes(self.shapes[where][i.operands[0]])[0] > 0) + array_bytes(i.shape)[at]
    return sum(self.read(where, i, k) for k in range(len(i.operands))) + self.written(where, i)

  def trips(self, loop: Instruction) -> int:
    """Returns how often a loop runs: as the compiler tells, or what its counter is compared with."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.line):
      return int(known[1])
    condition = self.bodies[called(loop, 'condition')]
    return max((int(n) for i in condition for n in re.findall(r'constant\((\d+)\)', i.line)), default=1)

  def read(self, where: str, i: Instruction, operand: int) -> int:
    """Returns the bytes that an instruction reads of one operand."""
    size = sum(array_bytes(self.shapes[where].get(i.operands[operand], '')))
    if i.op in ('dynamic-slice', 'gather', 'slice') and operand == 0:
      return min(size, sum(array_bytes(in_hbm(i.shape))))
    if i.op == 'dynamic-update-slice' and operand == 0:
      return 0
    return min(size, self.used(called(i, 'calls'), operand)) if i.op == 'fusion' else size

  def used(self, computation: str, number: int) -> int:
    """Returns the bytes that a fused computation reads of a parameter."""
    body = self.bodies[computation]
    names = {i.name for i in body if i.op == 'parameter' and f'parameter({number})' in i.line}
    size = 0
    for i in body:
      if names.intersection(i.operands):
        if self.renames(i):
          names.add(i.name)
        else:
          plain = i._replace(shape=in_hbm(i.shape))
          size += max(self.read(computation, plain, k) for k, name in enumerate(i.operands) if name in names)
    return size

  def renames(self, i: Instruction) -> bool:
    """Returns whether an instruction is its operand under another name: a bitcast, or a fusion of nothing else."""
    if i.op != 'fusion':
      return i.op == 'bitcast'
    return all(x.op == 'parameter' or self.renames(x) for x in self.bodies[called(i, 'calls')])

  def written(self, where: str, i: Instruction) -> int:
    """Returns the bytes that an instruction writes: its results, or the update of an array that is updated in place."""
    if i.op == 'dynamic-update-slice':
      return sum(array_bytes(self.shapes[where][i.operands[1]]))
    if i.op != 'fusion':
      return sum(array_bytes(i.shape))
    name = called(i, 'calls')
    by_name = {x.name: x for x in self.bodies[name]}
    root = next(x for x in self.bodies[name] if x.line.lstrip().startswith('ROOT'))
    parts = [by_name[x] for x in root.operands] if root.op == 'tuple' else [root]
    updates = {k: x for k, x in enumerate(parts) if x.op == 'dynamic-update-slice'}
    result_bytes = array_bytes(i.shape)
    return sum(
      min(size, self.written(name, updates[k])) if k in updates else size for k, size in enumerate(result_bytes)
    )


def called(i: Instruction, how: str) -> str:
  match = re.search(rf'\b{how}={NAME}', i.line)
  assert match, i.line
  return match[1]
