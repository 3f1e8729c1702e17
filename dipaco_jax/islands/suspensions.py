"""Suspension of workers: a suspended worker ends, and what it has sent counts for no further version of a module.

    suspended (NAME, n)     why, by whom, and the phase of a path that an audit found wrong, if any
    reinstated (NAME, n)    the n-th suspension of this worker is over

A worker is suspended as long as it has more facts of the first kind than of the second. Its process ends with status 2
at its next claim or heartbeat, also after a restart under the same name. An outer executor leaves its contributions out
of the versions that it makes from then on: the module's fact notes them in `left_out`, as those of paths that are not
plausible (screening_facts.py), so that replays agree. Versions that contain its contributions stay.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from dipaco_jax.core.errors import InputError
from dipaco_jax.islands.island import Island
from dipaco_jax.registry.registry import Fact, Registry

SUSPENDED, REINSTATED = 'suspended', 'reinstated'
BY_HAND = 'a person'


class Suspended(InputError):
  """This worker is suspended; its process ends with status 2."""


def current(registry: Registry, names: Iterable[str] | None = None) -> dict[str, Fact]:
  """Returns the suspensions that are in force, by worker; `names` limits them to these workers."""
  keys = None if names is None else sorted(names)
  facts = registry.facts(SUSPENDED, keys)
  ended = {fact[1:3] for fact in registry.facts(REINSTATED, keys)} if facts else set()
  return {fact.key: fact for fact in facts if fact[1:3] not in ended}


def suspend(registry: Registry, name: str, why: str, by: str, about: Mapping[str, Any] | None = None) -> bool:
  """Suspends a worker; returns False if it is suspended already."""
  if current(registry, [name]):
    return False
  number = len(registry.facts(REINSTATED, [name]))
  suspension = Fact(SUSPENDED, name, number, '', '', {'why': why, 'by': by, **(about or {})})
  registry.put([suspension])
  registry.mark_scheduled([suspension])  # no task follows from it
  return True


def resume(registry: Registry, name: str, by: str = BY_HAND) -> bool:
  """Ends the suspension of a worker; returns False if it is not suspended."""
  for suspension in current(registry, [name]).values():
    reinstatement = Fact(REINSTATED, name, suspension.number, '', '', {'by': by})
    registry.put([reinstatement])
    registry.mark_scheduled([reinstatement])
    return True
  return False


def heed(island: Island):
  """Raises Suspended if the worker of this process is suspended."""
  for suspension in current(island.registry, [island.name]).values():
    advice = f'`python -m dipaco_jax.owners resume {island.name}` ends the suspension'
    raise Suspended(f'{island.name} is suspended: {suspension.meta["why"]}; {advice}')


def why_left_out(island: Island, sent: Mapping[str, Fact]) -> dict[str, str]:
  """Returns why contributions of suspended workers are left out, by path; `sent` has the facts of contributions."""
  if not island.registry.suspended:  # as the last claim has told
    return {}
  suspended = current(island.registry)
  by_path = {path: fact.meta.get('worker') for path, fact in sent.items()}
  return {path: f'its worker {name} is suspended' for path, name in by_path.items() if name in suspended}
