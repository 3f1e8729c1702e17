"""Traffic and time use of a process, which its facts note for the report (run_costs.py).

A fact notes the costs since the last fact of its process: bytes, the seconds of their transfer, and in `seconds` the
time of the role's loop by cause (processes/time_use.py), up to the moment `until`. Together they cover the time of a
process from its start to its last fact; the time of a killed process after its last fact is not known.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from dipaco_jax.islands.island import Island
from dipaco_jax.islands.lease import moved
from dipaco_jax.processes import time_use
from dipaco_jax.registry.registry import Fact


class RoleCosts:
  """Bytes and seconds of one process, of the thread that makes this, since its last fact."""

  def __init__(self, island: Island, role: str):
    self.island = island
    self.role = role
    self.clock = time_use.begin()
    self.settled: tuple[Mapping[str, float], ...] = moved(island), dict.fromkeys(time_use.CAUSES, 0.0)
    self.noted = self.settled

  def note(self, facts: Sequence[Fact]) -> list[Fact]:
    """Returns the facts; the first notes what came since those that were last told, for sums that continue too."""
    self.noted = moved(self.island), self.clock.read()
    since, spent = map(_difference, self.settled, self.noted)
    seconds = {cause: round(s, 4) for cause, s in spent.items() if s}
    noted: dict[str, Any] = since | {'role': self.role, 'seconds': seconds, 'until': time.time()}
    return [facts[0]._replace(meta=facts[0].meta | noted), *facts[1:]]

  def settle(self):
    """Counts from the last `note` on, whose facts are in the registry."""
    self.settled = self.noted


def _difference(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
  return {name: value - before[name] for name, value in now.items()}
