"""A short table of a trace of `jax.profiler`: operations by their share of the devices' time, transfers, idle time."""

import collections
import math
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

ROWS = 20
# That run others, whose time is theirs.
CONTAINERS = re.compile(r'(while|call|conditional)$')
TRANSFERS = re.compile(r'memcpy|memset|copy|infeed|outfeed|transpose_?host|h2d|d2h|d2d', re.IGNORECASE)
EXCHANGE = re.compile(r'all.?reduce|all.?gather|reduce.?scatter|all.?to.?all|collective|nccl|send|recv', re.IGNORECASE)
NUMBER = re.compile(r'([._]\d+)+$')  # of the instance


class Operation(NamedTuple):
  """One run of an operation on a device."""

  device: str
  name: str
  begin_ns: float
  end_ns: float


class Table(NamedTuple):
  """What the devices did from the first operation to the last."""

  devices: int
  span_s: float
  busy: float  # share of the devices' time
  rows: list[tuple[str, float, int]]  # name, seconds of all devices, calls; the longest first


def operations(trace: Any) -> Iterator[Operation]:
  """Yields the operations of `jax.profiler.ProfileData`: of accelerators, or of XLA on the CPU."""
  for plane in trace.planes:
    if plane.name.startswith('/device:') and 'CUSTOM' not in plane.name:
      lines = list(plane.lines)
      named = [line for line in lines if line.name == 'XLA Ops'] or [x for x in lines if x.name.startswith('Stream')]
      for event in (event for line in named for event in line.events):
        yield _operation(plane.name, event)
    elif plane.name == '/host:CPU':
      for event in (event for line in plane.lines for event in line.events):
        stats = dict(event.stats)
        if 'hlo_op' in stats and not event.name.startswith('end: '):
          yield _operation(f'cpu {stats.get("device_ordinal", 0)}', event)


def _operation(device: str, event: Any) -> Operation:
  return Operation(device, group(event.name), event.start_ns, event.start_ns + event.duration_ns)


def group(name: str) -> str:
  """Returns what instances of an operation have in common: 'fusion' of '%fusion.12 = f32[8] fusion(...)'."""
  return NUMBER.sub('', name.split(' = ')[0].lstrip('%')) or name


def summarize(executed: Iterable[Operation]) -> Table | None:
  """Sums up, or None if nothing ran."""
  leaves = [one for one in executed if not CONTAINERS.match(one.name)]
  if not leaves:
    return None
  seconds, calls = collections.defaultdict[str, float](float), collections.Counter(one.name for one in leaves)
  by_device = collections.defaultdict[str, list[tuple[float, float]]](list)
  for one in leaves:
    seconds[one.name] += (one.end_ns - one.begin_ns) / 1e9
    by_device[one.device].append((one.begin_ns, one.end_ns))
  span_s = (max(one.end_ns for one in leaves) - min(one.begin_ns for one in leaves)) / 1e9
  busy_s = sum(union_ns(spans) for spans in by_device.values()) / 1e9
  whole_s = max(span_s * len(by_device), 1e-12)
  rows = [(name, s, calls[name]) for name, s in sorted(seconds.items(), key=lambda item: -item[1])]
  return Table(len(by_device), span_s, busy_s / whole_s, rows)


def union_ns(spans: Sequence[tuple[float, float]]) -> float:
  """Returns the total length that at least one of the spans covers."""
  covered, until = 0.0, -math.inf
  for begin, end in sorted(spans):
    covered += max(0.0, end - max(begin, until))
    until = max(until, end)
  return covered


def lines(file: pathlib.Path) -> list[str]:
  """Returns the table of a trace, an .xplane.pb, as text."""
  from jax.profiler import ProfileData

  return to_text(summarize(operations(ProfileData.from_file(str(file)))))


def to_text(table: Table | None) -> list[str]:
  """Formats a table: shares are of the time of all devices, from the first operation to the last."""
  if table is None:
    return ['the trace has no operation of a device']
  total_s = max(table.span_s * table.devices, 1e-12)

  def share_of(pattern: re.Pattern) -> str:
    return f'{sum(s for name, s, _ in table.rows if pattern.search(name)) / total_s:.1%}'

  several = f'{table.devices} devices' if table.devices > 1 else '1 device'
  head = f'{several}, {table.span_s:.3f} s from the first operation to the last: {1 - table.busy:.1%} idle, '
  head += f'{share_of(TRANSFERS)} transfers and copies, {share_of(EXCHANGE)} exchange between devices'
  rows = [f'{s / total_s:>7.1%} {s:>10.4f} {n:>8,}  {name[:80]}' for name, s, n in table.rows[:ROWS]]
  rest = table.rows[ROWS:]
  if rest:
    s = sum(s for _, s, _ in rest)
    rows.append(f'{s / total_s:>7.1%} {s:>10.4f} {sum(n for *_, n in rest):>8,}  {len(rest)} others')
  return [head, f'{"share":>7} {"seconds":>10} {"calls":>8}  operation', *rows]
