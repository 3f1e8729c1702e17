"""The bytes that islands of a config exchange, and the line to the storage that each worker needs. Nothing is run.

Assumed: each worker trains the same number of paths, one after another, all steps take equally long, the storage is
never slow, outer steps take no time, and no call to database or storage has latency. Workers are then all alike, so the
paths of one of them tell what `wire_simulation` would tell with all.
"""

import math
from collections.abc import Iterable
from typing import Any

from dipaco_jax.core import settings as settings_lib
from dipaco_jax.models import transformer
from dipaco_jax.planning import wire_simulation, wire_traffic
from dipaco_jax.planning.wire_simulation import Conditions
from dipaco_jax.planning.wire_traffic import Traffic

TARGET = 0.95  # share of the time in inner steps
MOST_PATHS = 16  # of a worker that are simulated: with more, the line is no longer waited for, but full


def make_traffic(s: settings_lib.Settings) -> Traffic:
  """Returns the traffic of a config."""
  return wire_traffic.make_traffic(s, transformer.shapes(transformer.make_model(s.model, s.tokenizer.vocab_size)))


def bytes_of_phase(traffic: Traffic) -> dict[str, float]:
  """Returns the bytes of a path in a phase, by what they are; of states the average, as not each phase sends one."""
  every = traffic.state_period
  return {
    'sent': float(sum(traffic.message.values())),
    'state': traffic.state / every if every else 0.0,
    'read': float(sum(traffic.version.values())),
  }


def line_bytes_per_s(traffic: Traffic, step_s: float, paths_per_worker: int = 1) -> float:
  """Returns the slowest line of a worker, each way, with which TARGET of its time is inner steps; infinity if none."""
  if not sum(traffic.bytes_per_phase):
    return 0.0
  few = min(paths_per_worker, MOST_PATHS)
  conditions = Conditions((step_s,), paths_per_worker=few)
  return wire_simulation.find_lines(of_one_worker(traffic, range(few)), conditions, [TARGET])[TARGET]


def of_one_worker(traffic: Traffic, paths: Iterable[int]) -> Traffic:
  """Returns the traffic of one worker's paths, whose modules wait for nobody else's."""
  mine = list(paths)
  groups = {
    level: tuple(here for group in of_level if (here := tuple(mine.index(path) for path in group if path in mine)))
    for level, of_level in traffic.groups.items()
  }
  return traffic._replace(num_paths=len(mine), groups=groups)


def estimate(s: settings_lib.Settings, steps_s: Iterable[float]) -> dict[str, Any]:
  """Returns the figures for --compile_only, a line for each of the times that a step may take; {} where none applies.

  Of one path there is nothing to exchange, and islands reject `outer.lost`.
  """
  traffic = make_traffic(s)
  if not traffic.groups or s.outer.lost:
    return {}
  lines = [line_bytes_per_s(traffic, step_s) * 8 / 1e6 for step_s in steps_s]
  found = {f'island_{name}_bytes_per_phase': size for name, size in bytes_of_phase(traffic).items()}
  return found | {'island_line_mbits': [x if math.isfinite(x) else None for x in lines]}


def speed(mbits: float | None) -> str:
  """Returns '12.3 Mbit/s' or '1.23 Gbit/s'; None is infinity."""
  if mbits is None or math.isinf(mbits):
    return 'more than any line has'
  return f'{mbits:,.3g} Mbit/s' if mbits < 999.5 else f'{mbits / 1000:,.3g} Gbit/s'


def to_text(found: dict[str, Any]) -> list[str]:
  """Returns lines for people of what `estimate` has found; [] where that is nothing."""
  if 'island_line_mbits' not in found:
    return []
  sent, state, read = (found[f'island_{name}_bytes_per_phase'] / 1e6 for name in ('sent', 'state', 'read'))
  states = f', and {state:,.1f} MB of its state on average' if state else ''
  lines = [f'as islands     a path sends {sent:,.1f} MB a phase{states}; it reads {read:,.1f} MB']
  if mbits := found['island_line_mbits']:
    words, chips = ' to '.join(map(speed, reversed(mbits))), found['chips_per_path']
    lines += [
      f'  line needed  {words} each way for {TARGET:.0%} of the time in inner steps, if each path has a worker of',
      f'               {chips} chip{"s" * (chips > 1)}, and neither storage nor latency delays it',
    ]
  return lines
