"""Looks for tasks that workers hold, in the registry's table."""

from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa

from dipaco_jax.registry.registry import Registry, Task
from dipaco_jax.registry.registry_schema import CLAIMED, OF_NAME, TASKS

Owns = Callable[[str], bool]


def by_id(registry: Registry, task_id: int, fence: int, states: Sequence[str]) -> Task | None:
  """Returns a task by its id and the fence of its newest claim, if it is in one of these states."""
  return _first(registry, [TASKS.c.id == task_id, TASKS.c.fence == fence, TASKS.c.state.in_(states)], lambda _: True)


def find(registry: Registry, kind: str, key: str, number: int, owns: Owns) -> Task | None:
  """Returns a task by its name, if it is running and its owner is one of these."""
  named = [TASKS.c.kind == kind, TASKS.c.key == key, TASKS.c.number == number]
  return _first(registry, [*named, TASKS.c.state == 'running'], owns)


def find_of_key(registry: Registry, kinds: Sequence[str], key: str, owns: Owns) -> Task | None:
  """Returns a running task of one of these kinds and a key, if its owner is one of these."""
  running = [TASKS.c.kind.in_(kinds), TASKS.c.key == key, TASKS.c.state == 'running']
  return _first(registry, running, owns)


def count(registry: Registry, name: str) -> int:
  """Returns how many running tasks workers with a token of this name hold."""
  query = sa.select(sa.func.count()).where(TASKS.c.state == 'running', OF_NAME)
  return registry.read_snapshot(lambda connection: connection.scalar(query, {'name': name})) or 0


def _first(registry: Registry, where: Sequence[Any], owns: Owns) -> Task | None:
  query = sa.select(*CLAIMED).where(*where)
  rows = registry.read_snapshot(lambda connection: connection.execute(query).mappings().all())
  return next((Task(**row) for row in rows if owns(row['owner'])), None)
