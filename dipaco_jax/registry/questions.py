"""Questions about tasks and roles, for status, estimates and reports; none of them changes anything."""

import collections
import json
from collections.abc import Callable, Sequence
from typing import TypeVar

import sqlalchemy as sa

from dipaco_jax.registry import registry_schema as schema
from dipaco_jax.registry.database import Among, Database, Now, Row
from dipaco_jax.registry.registry_schema import ROLES, TASKS

SILENT_S = 60  # a role that gives no sign of life for longer counts as gone

T = TypeVar('T')


class Questions:
  """The part of a registry that says how far a run is, and who works on it."""

  _db: Database

  @property
  def name(self) -> str:
    """The file or the URL, without a password, for messages."""
    return self._db.name

  def read_snapshot(self, work: Callable[[sa.Connection], T]) -> T:
    """Returns work(connection), whose statements read the registry as it is at one moment."""
    return self._db.read_snapshot(work)

  def counts(self) -> dict[str, dict[str, int]]:
    """Counts the tasks of each kind in each state."""
    counts, names = collections.defaultdict[str, dict[str, int]](dict), (TASKS.c.kind, TASKS.c.state)
    for row in self._db.rows(sa.select(*names, sa.func.count().label('tasks')).group_by(*names)):
      counts[row['kind']][row['state']] = row['tasks']
    return dict(counts)

  def ready_kinds(self) -> set[str]:
    """Returns the kinds of tasks that are ready; reads none that are done."""
    query = sa.select(TASKS.c.kind).where(schema.OPEN, TASKS.c.state == 'ready').distinct()
    return {row['kind'] for row in self._db.rows(query)}

  def is_done(self, kind: str, key: str, number: int) -> bool:
    """Returns whether a task is done."""
    named = (TASKS.c.kind == kind, TASKS.c.key == key, TASKS.c.number == number)
    return bool(self._db.rows(sa.select(TASKS.c.id).where(*named, TASKS.c.state == 'done')))

  def lowest_open(self) -> dict[str, int]:
    """Returns by kind the lowest number of tasks that are not done, and of facts that may lack their consequences."""
    return {row['kind']: row['lowest'] for row in self._db.rows(schema.LOWEST)}

  def tasks(
    self, state: str | None = None, kind: str | None = None, limit: int | None = None, failed: bool = False,
  ) -> list[Row]:  # fmt: skip
    """Returns tasks with all their columns; `lease_left_s` of those that run is negative once the lease has run out.

    In the order of their kinds, numbers and ids, `limit` of them at most; `failed`: only those with an error.
    """
    left = sa.case((TASKS.c.state == 'running', TASKS.c.lease - Now())).label('lease_left_s')
    query = sa.select(TASKS, left).order_by(TASKS.c.kind, TASKS.c.number, TASKS.c.id).limit(limit)
    if state is not None:
      query = query.where(TASKS.c.state == state)
    if state in ('ready', 'running', 'waiting'):  # by an index, without reading all that are done
      query = query.where(schema.UNDONE if state == 'waiting' else schema.OPEN)
    if kind is not None:
      query = query.where(TASKS.c.kind == kind)
    if failed:
      query = query.where(TASKS.c.error != '')
    return self._db.rows(query)

  def durations(self, kind: str, limit: int) -> list[float]:
    """Returns the seconds from the last claim to the end, of the newest tasks of a kind that are done."""
    seconds = (TASKS.c.ended - TASKS.c.claimed).label('seconds')
    # A task that ended before it was claimed did so because the clock was set back meanwhile.
    query = sa.select(seconds).where(TASKS.c.kind == kind, TASKS.c.state == 'done', TASKS.c.ended >= TASKS.c.claimed)
    return [row['seconds'] for row in self._db.rows(query.order_by(TASKS.c.id.desc()).limit(limit))]

  def seconds_since_end(self, kind: str, keys: Sequence[str], number: int) -> list[float]:
    """Returns the seconds since each of these tasks ended, of those that are done, by the database's clock."""
    return self._seconds_since(TASKS.c.ended, TASKS.c.state == 'done', kind, keys, number)

  def seconds_since_claim(self, kind: str, keys: Sequence[str], number: int) -> list[float]:
    """Returns the seconds since the last claim of each of these tasks, of those that are done or held by a process."""
    is_held = (TASKS.c.state == 'running') & (TASKS.c.lease > Now())
    return self._seconds_since(TASKS.c.claimed, is_held | (TASKS.c.state == 'done'), kind, keys, number)

  def _seconds_since(
    self, moment: sa.ColumnElement[float], which: sa.ColumnElement[bool], kind: str, keys: Sequence[str], number: int
  ) -> list[float]:
    query = sa.select((Now() - moment).label('seconds')).where(
      which, moment.is_not(None), TASKS.c.kind == kind, TASKS.c.number == number, Among(TASKS.c.key, schema.KEYS)
    )
    return [row['seconds'] for row in self._db.rows(query, {'keys': json.dumps(list(keys))})]

  def roles(self) -> list[Row]:
    """Returns name, role and about of every role, and `silent_s`, the seconds since its last sign of life.

    A sign of life from the future was given while the clock was ahead: its distance counts, as it is as old or older.
    """
    names = ROLES.c.name, ROLES.c.role
    query = sa.select(*names, ROLES.c.about, sa.func.abs(Now() - ROLES.c.seen).label('silent_s')).order_by(*names)
    return [row | {'about': json.loads(row['about'])} for row in self._db.rows(query)]

  def workers(self) -> list[Row]:
    """Returns what `roles` does, of the workers that were heard a short while ago."""
    return [role for role in self.roles() if role['role'] == 'worker' and role['silent_s'] < SILENT_S]
