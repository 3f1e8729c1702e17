"""What an islands run has cost, by the facts (role_costs.py): bytes by phase, and what workers spent their time on."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dipaco_jax.islands import audit_facts, pieces
from dipaco_jax.islands.island import Island
from dipaco_jax.pipeline import jobs
from dipaco_jax.processes import time_use
from dipaco_jax.registry.registry import Fact

WORKERS_FACTS = 'prepared', 'round', 'checkpoint', pieces.PIECE, audit_facts.AUDITED, audit_facts.CONFIRMED
KINDS = (*WORKERS_FACTS, 'module', 'evaluation')  # of facts that note what their process has moved
STRETCHES = 60  # maximum number of intervals with a goodput
SHARED = time_use.STAGES  # is no part of training: text, base model, shards


class Spell(NamedTuple):
  """The time of a worker between two of its facts."""

  end: float  # seconds since 1970
  seconds: dict[str, float]  # by cause

  @property
  def begin(self) -> float:
    return self.end - math.fsum(self.seconds.values())


def figures(island: Island) -> dict[str, Any]:
  """Returns the costs of the run for the report, None for costs that its facts do not have."""
  facts = {kind: island.registry.facts(kind) for kind in KINDS}
  s, n = island.run.settings, sum(math.prod(x.shape) for x in island.shapes.values())
  taking_part = sum(int(island.active_paths(phase).sum()) for phase in range(s.train.phases)) / s.train.phases
  spells = read_spells([fact for kind in WORKERS_FACTS for fact in facts[kind]])
  return {
    'island_bytes': sum_by_role(fact for of_kind in facts.values() for fact in of_kind),
    'island_bytes_by_phase': bytes_by_phase(island, facts),
    'diloco_bytes_per_phase': round(2 * 4 * n * taking_part),  # float32, up and down
    'island_mbits': speeds(fact for of_kind in facts.values() for fact in of_kind),
    'seconds': {'train': by_cause} if (by_cause := sum_by_cause(spells)) else None,
    'seconds_by_path': sum_by_path(island, facts) if spells else None,
    'goodput_over_time': goodput_over_time(spells),
  }


# -- bytes


def sum_by_role(facts: Iterable[Fact]) -> dict[str, dict[str, int]]:
  """Returns the bytes read from and written to storage, {role: {'in', 'out'}}, as facts have them.

  A killed process counts up to its last fact. Traffic with the database is not included.
  """
  sums_by_role: dict[str, dict[str, int]] = {}
  for meta in (fact.meta for fact in facts if 'role' in fact.meta):
    sums = sums_by_role.setdefault(meta['role'], {'in': 0, 'out': 0})
    sums['in'], sums['out'] = sums['in'] + meta['bytes_in'], sums['out'] + meta['bytes_out']
  return sums_by_role


def bytes_by_phase(island: Island, facts: dict[str, list[Fact]]) -> list[dict[str, dict[str, int]]]:
  """Returns `sum_by_role` of each phase of training: of its paths, and of the outer steps and evaluations after it."""
  by_phase: list[list[Fact]] = [[] for _ in range(island.run.settings.train.phases)]
  for fact in (fact for of_kind in facts.values() for fact in of_kind):
    if (phase := phase_of(island, fact)) is not None:
      by_phase[phase].append(fact)
  return [sum_by_role(phase_facts) for phase_facts in by_phase]


def phase_of(island: Island, fact: Fact) -> int | None:
  """Returns the phase whose bytes a fact notes; None for the run's preparation."""
  if fact.kind in ('checkpoint', pieces.PIECE):
    return pieces.phase_of(island, fact.kind, fact.number)
  if fact.kind == 'round':
    return jobs.round_end(island.run.settings, fact.number - 1) - 1
  return fact.number - 1 if fact.kind in ('module', 'evaluation') and fact.number else None


def speeds(facts: Iterable[Fact]) -> dict[str, dict[str, float | None]]:
  """Returns {role: {'in', 'out'}}: Mbit/s of a process while it read and wrote, None if not noted."""
  sums: dict[str, dict[str, list[float]]] = {}
  for meta in (fact.meta for fact in facts if 'reading_s' in fact.meta):
    of_role = sums.setdefault(meta['role'], {'in': [0.0, 0.0], 'out': [0.0, 0.0]})
    for way, seconds in (('in', 'reading_s'), ('out', 'writing_s')):
      of_role[way][0] += meta[f'bytes_{way}']
      of_role[way][1] += meta[seconds]
  return {role: {way: mbits(*moved) for way, moved in of_role.items()} for role, of_role in sums.items()}


def mbits(num_bytes: float, seconds: float) -> float | None:
  """Returns Mbit/s, or None if nothing was transferred."""
  return num_bytes * 8 / 1e6 / seconds if num_bytes and seconds else None


# -- time


def read_spells(facts: Iterable[Fact]) -> list[Spell]:
  """Returns the spells of all workers."""
  return [Spell(fact.meta['until'], fact.meta['seconds']) for fact in facts if 'seconds' in fact.meta]


def sum_by_cause(spells: Sequence[Spell]) -> dict[str, float] | None:
  """Returns the seconds of all workers together, by cause; None without spells."""
  totals = {c: math.fsum(spell.seconds.get(c, 0.0) for spell in spells) for c in time_use.CAUSES}
  return {cause: round(s, 3) for cause, s in totals.items() if s} if spells else None


def seconds(island: Island) -> dict[str, dict[str, float]]:
  """Returns the seconds of all workers so far, by stage and cause, or {} if that is not told."""
  by_cause = sum_by_cause(read_spells(fact for kind in WORKERS_FACTS for fact in island.registry.facts(kind)))
  return {'train': by_cause} if by_cause else {}


def sum_by_path(island: Island, facts: Mapping[str, list[Fact]]) -> list[dict[str, float]]:
  """Returns the seconds by cause that came before the checkpoints of each path, and for them."""
  by_path: list[list[Spell]] = [[] for _ in range(island.run.settings.num_paths)]
  for fact in (fact for kind in (pieces.CHECKPOINT, pieces.PIECE) for fact in facts[kind]):
    by_path[int(fact.key)] += read_spells([fact])
  return [sum_by_cause(spells) or {} for spells in by_path]


def goodput_over_time(spells: Sequence[Spell]) -> list[tuple[float, float]] | None:
  """Returns `time_use.goodput` of stretches of time: (seconds at the end, since training began; share).

  A spell's start, and the stages that all share, are taken to come first in it; steps are spread over the rest.
  """
  parts = [(_training_from(spell), spell) for spell in spells if spell.seconds.get(time_use.INNER)]
  if not parts:
    return None
  begin, end = min(start for start, _ in parts), max(spell.end for _, spell in parts)
  longest = max(spell.end - start for start, spell in parts)
  count = max(1, min(STRETCHES, int((end - begin) / max(longest, 1e-9))))  # none shorter than a spell
  width = (end - begin) / count
  inner = [0.0] * count
  present_s = [0.0] * count
  for spell in spells:
    start = _training_from(spell)
    share = math.fsum(spell.seconds.get(cause, 0.0) for cause in time_use.STEPS) / max(spell.end - start, 1e-9)
    present = spell.begin + spell.seconds.get(SHARED, 0.0)
    for i in range(count):
      left, right = begin + i * width, begin + (i + 1) * width
      inner[i] += share * max(0.0, min(right, spell.end) - max(left, start))
      present_s[i] += max(0.0, min(right, spell.end) - max(left, present))
  times = ((i + 1) * width for i in range(count))
  return [(round(t, 3), round(a / b, 4)) for t, a, b in zip(times, inner, present_s, strict=True) if b]


def _training_from(spell: Spell) -> float:
  return spell.begin + math.fsum(spell.seconds.get(cause, 0.0) for cause in (SHARED, time_use.START, time_use.COMPILE))
