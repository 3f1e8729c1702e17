"""The bytes that islands of a config exchange, and the line to the storage that each worker needs. Nothing is run.

The formula assumes that all steps take equally long, that storage and outer steps take no time, and that no call to
database or storage has latency. benchmarks/wire_simulation.py simulates the rest.
"""

import collections
from collections.abc import Iterable
from typing import Any

from dipaco_jax.config import settings as settings_lib
from dipaco_jax.models import transformer
from dipaco_jax.planning import wire_traffic
from dipaco_jax.planning.wire_traffic import Traffic

TARGET = 0.95  # share of the time in inner steps


def make_traffic(s: settings_lib.Settings) -> Traffic:
  """Returns the traffic of a config."""
  return wire_traffic.make_traffic(s, transformer.shapes(transformer.make_model(s.model, s.tokenizer.vocab_size)))


def bytes_of_phase(traffic: Traffic) -> dict[str, float]:
  """Returns the bytes of a path in a phase, by kind. States are averaged, because not every phase sends one."""
  every = traffic.state_period
  return {
    'sent': float(sum(traffic.message.values())),
    'state': traffic.state / every if every else 0.0,
    'read': float(sum(traffic.version.values())),
  }


def line_bytes_per_s(traffic: Traffic, step_s: float, paths_per_worker: int = 1) -> float:
  """Returns the slowest line of a worker, each way, with which TARGET of its time is inner steps.

  With T the seconds of all steps of a phase, b_i the bytes of the i-th exchange of a path and h_i the seconds of steps
  that overlap with it, over a period of n phases,

      sum_i max(0, b_i / line - h_i) <= (1 / TARGET - 1) n T    and    bytes of a phase / line <= T / TARGET

  For one path per worker, the simulation finds the same. Several may wait for each other, or train while one waits,
  so that the line they need may be half or twice as fast.
  """
  phase_s = traffic.table.tau * step_s * paths_per_worker
  exchanges, phases = _exchanges(traffic)
  line = max(traffic.bytes_per_phase) * paths_per_worker * TARGET / phase_s
  num_bytes, seconds = 0.0, (1 / TARGET - 1) * phase_s * phases
  for exchange, hidden_steps in sorted(exchanges, key=lambda pair: pair[1] / pair[0]):  # the first wait the longest
    num_bytes += exchange
    seconds += hidden_steps * step_s * paths_per_worker
    line = max(line, num_bytes / seconds)
  return line


def _exchanges(traffic: Traffic) -> tuple[list[tuple[int, int]], int]:
  """Returns the exchanges of a path, (bytes, steps that overlap), in a period, and the phases of one.

  With streaming, the last phase of a period is closed: all levels are exchanged at its end, and no step overlaps.
  """
  table = traffic.table
  phases = (table.stream and table.closed_every) or 1
  by_place: collections.Counter[tuple[int, int]] = collections.Counter()
  for level in traffic.groups:
    by_place[table.places[level], table.overlaps[level]] += traffic.message[level] + traffic.version[level]
  of_open_phase = [(num_bytes, overlap) for (_, overlap), num_bytes in by_place.items()]
  at_end = [(by_place.total(), 0)] if by_place else []
  return at_end + of_open_phase * (phases - 1), phases


def estimate(s: settings_lib.Settings, steps_s: Iterable[float]) -> dict[str, Any]:
  """Returns the figures for --compile_only, a line for each of the times that a step may take, or {} if none applies.

  Of one path there is nothing to exchange, and islands reject `outer.lost`.
  """
  traffic = make_traffic(s)
  if not traffic.groups or s.outer.lost:
    return {}
  figures: dict[str, Any] = {f'island_{name}_bytes_per_phase': size for name, size in bytes_of_phase(traffic).items()}
  return figures | {'island_line_mbits': [line_bytes_per_s(traffic, step_s) * 8 / 1e6 for step_s in steps_s]}


def speed(mbits: float) -> str:
  """Returns '12.3 Mbit/s' or '1.23 Gbit/s'."""
  return f'{mbits:,.3g} Mbit/s' if mbits < 999.5 else f'{mbits / 1000:,.3g} Gbit/s'


def to_text(figures: dict[str, Any]) -> list[str]:
  """Returns lines for people of what `estimate` has found, or [] if that is nothing."""
  if 'island_line_mbits' not in figures:
    return []
  sent, state, read = (figures[f'island_{name}_bytes_per_phase'] / 1e6 for name in ('sent', 'state', 'read'))
  states = f', and {state:,.1f} MB of its state on average' if state else ''
  lines = [f'as islands     a path sends {sent:,.1f} MB a phase{states}; it reads {read:,.1f} MB']
  if mbits := figures['island_line_mbits']:
    speeds, chips = ' to '.join(map(speed, reversed(mbits))), figures['chips_per_path']
    lines += [
      f'  line needed  {speeds} each way for {TARGET:.0%} of the time in inner steps, if each path has a worker of',
      f'               {chips} chip{"s" * (chips > 1)}, and neither storage nor latency delays it',
    ]
  return lines
