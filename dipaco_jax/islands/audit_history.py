"""What audits have found in a run so far, and what suspended workers have contributed since their last good audit."""

import math
from collections.abc import Sequence
from typing import Any

from dipaco_jax.islands import audit_facts, pieces, suspensions
from dipaco_jax.islands.island import Island
from dipaco_jax.registry.registry import Fact


def figures(island: Island) -> dict[str, Any]:
  """Returns the entries `audits` and `suspended` of the report; {} for a run without either."""
  suspended = [
    {'worker': name, 'why': fact.meta['why'], 'by': fact.meta['by'], 'contributions': contributions(island, name)}
    for name, fact in suspensions.current(island.registry).items()
  ]
  audits = {'audits': count(island)} if audit_facts.is_on(island) else {}
  return audits | ({'suspended': suspended} if suspended else {})


def count(island: Island) -> dict[str, Any]:
  """Counts audits by their result, and sums the seconds that they took."""
  facts = [fact for kind in audit_facts.FACT_OF.values() for fact in island.registry.facts(kind)]
  first = [fact.meta.get('equal') for fact in facts if fact.kind == audit_facts.AUDITED]
  seconds = math.fsum(fact.meta['ended'] - fact.meta['started'] for fact in facts if 'ended' in fact.meta)
  counts = {'equal': first.count(True), 'different': first.count(False), 'given_up': first.count(None)}
  return counts | {'seconds': round(seconds, 3), 'different_at': [_name(fact) for fact in facts if _differs(fact)]}


def contributions(island: Island, worker: str) -> list[dict[str, Any]]:
  """Returns what a worker has contributed since its last good audit, by path.

  Each entry has the path, its phases counted from 1, and the versions of modules that contain the contributions.
  """
  phases_by_path: dict[int, set[int]] = {}
  for fact in (fact for kind in (pieces.CHECKPOINT, pieces.PIECE) for fact in island.registry.facts(kind)):
    if fact.meta.get('worker') == worker:
      phases_by_path.setdefault(int(fact.key), set()).add(pieces.phase_of(island, fact.kind, fact.number))
  last_good = last_good_phases(island, worker)
  entries = []
  for path, phases in sorted(phases_by_path.items()):
    since = sorted(phase for phase in phases if phase > last_good.get(path, -1))
    if since:
      modules = {
        module: found for module in island.modules_of(path).values() if (found := _in(island, path, module, since))
      }
      entries.append({'path': path, 'phases': [phase + 1 for phase in since], 'modules': modules})
  return entries


def last_good_phases(island: Island, worker: str) -> dict[int, int]:
  """Returns the last phase of each path that a worker has trained and that an audit has found equal."""
  good = (fact for fact in island.registry.facts(audit_facts.AUDITED) if fact.meta.get('equal'))
  return {int(fact.key): fact.number for fact in good if fact.meta['worker'] == worker}  # the last number stays


def _in(island: Island, path: int, module: str, phases: Sequence[int]) -> list[int]:
  """Returns the versions of a module that contain what a path has sent after these phases."""
  versions = {phase + 1 for phase in phases}
  facts = island.registry.facts('module', [module], at_least=min(versions), at_most=max(versions))
  left_out = {fact.number for fact in island.registry.facts('excluded', [str(path)]) if 'executor' not in fact.meta}
  return [
    fact.number
    for fact in facts
    if fact.number in versions and str(path) not in fact.meta.get('left_out', {}) and fact.number - 1 not in left_out
  ]


def _differs(fact: Fact) -> bool:
  return fact.kind == audit_facts.AUDITED and fact.meta.get('equal') is False


def _name(fact: Fact) -> str:
  return f'path {fact.key} phase {fact.number + 1}'
