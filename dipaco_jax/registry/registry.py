"""The registry of islands [3]: facts, which are the only authority, and tasks, which merely coordinate.

A fact is an immutable row that is inserted once: a path's checkpoint of a phase, a module's version, an evaluation. A
task (tasks.py) makes facts, and could be derived from them again. Both are named by (kind, key, number). Facts are
withdrawn in two cases: when a run that has diverged is resumed, and when they can no longer be read (withdrawals.py).
In the second case, a fact `withdrawn` ('KIND KEY N', number) is inserted, where N counts withdrawals of the same name.
Publication is idempotent: the same facts are accepted again, but never different facts under the same names.

Calls wait for a database that restarts or is unreachable. A call that is repeated because its acknowledgement was lost
does no harm: a task that was claimed unknowingly is ready again when its lease expires, a second wake finds nothing to
do, and a completion finds its own facts.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence

import sqlalchemy as sa

from dipaco_jax.registry import decisions, fact_rows, questions, registry_schema as schema, renewals
from dipaco_jax.registry.database import Among, Database, Now, Row
from dipaco_jax.registry.fact_names import FactNames
from dipaco_jax.registry.fact_rows import Conflict as Conflict, Fact, Newest, Withdrawal
from dipaco_jax.registry.known_facts import KnownFacts
from dipaco_jax.registry.questions import SILENT_S as SILENT_S
from dipaco_jax.registry.registry_schema import FACTS, ROLES, TASKS
from dipaco_jax.registry.tasks import TASK_NAMES as TASK_NAMES, Claim, Lost as Lost, NewTask as NewTask, Task as Task
from dipaco_jax.storage import retry

FINISHED = 'finished'  # kind of a run's last fact
RESUMED = 'resumed'  # key of the fact 'diverged' that a run was resumed after it had diverged
STOPPED = 'stopped'  # key in the last message of a role that ends
CHUNK = 2_000  # tasks in one transaction, while others wait for SQLite's lock


class Registry(questions.Questions):
  """One process's access to a run's registry; its threads may share it."""

  sees_others = True

  def __init__(self, url: str, lease_s: float = 30, patience_s: float = 600, reads_only: bool = False):
    """Creates the tables if there are none, unless it `reads_only`.

    Args:
      url: sqlite:////absolute/file.db, or postgresql://user:password@host/database; raises InputError for others, and
        if the tables are of another version.
      lease_s: seconds that a claim lasts without a heartbeat.
      patience_s: seconds that a call waits for an unreachable database before it raises its error.
    """
    self.lease_s, self._db = lease_s, Database(url, patience_s, reads_only)
    self._known = KnownFacts()
    self.names = FactNames()  # names that facts may have; an island knows those of its run
    self.diverged = 0  # how often the run has diverged, as the last claim told
    self.suspended = 0  # how many suspensions of workers there have been, as the same answers say
    self.members = 0  # how many facts say that owners joined or left, as the last claim told
    self.known_members = 0  # the same, as far as this process's island knows; nothing is noted as scheduled by fewer
    self.withdrawn = 0  # how many facts were withdrawn, as the database's last answer to a claim or heartbeat says
    self._new_fact = self._db.insert(FACTS).on_conflict_do_nothing().execution_options(preserve_rowcount=True)
    try:
      if reads_only:
        self._db.read_snapshot(schema.check_version)
      else:
        self._db.transact(schema.prepare)
    except BaseException:
      self.close()
      raise

  def close(self):
    self._db.close()

  def conversation(self, is_urgent: bool = False) -> contextlib.AbstractContextManager[None]:
    """Makes this thread's calls in the block one conversation, after which the process may hold no connection.

    While the database is away, attempts are at most a tenth of a lease apart where they are urgent.
    """
    return self._db.conversation(self.lease_s / 10 if is_urgent else retry.LONGEST_WAIT_S)

  def add_tasks(self, tasks: Iterable[NewTask]):
    """Inserts those that are not there yet; the others stay as they are."""
    insert = self._db.insert(TASKS).values(since=Now()).on_conflict_do_nothing()
    rows = [task._asdict() | {'lease': {'ready': 0.0, 'waiting': None}[task.state]} for task in tasks]
    for start in range(0, len(rows), CHUNK):
      self._db.change(insert, rows[start : start + CHUNK])

  def wake(self, kind: str, keys: Sequence[str], number: int):
    """Makes waiting tasks ready; one that runs becomes ready if its owner releases it to wait."""
    self._db.change(schema.WAKE, {'kind_': kind, 'keys': json.dumps(list(keys)), 'number_': number})

  def claim(self, owner: str, kinds: Sequence[str], keys: Sequence[str] | None = None, holder: str = '') -> Task | None:
    """Claims a task of these kinds, and of these keys if given, that is ready or has an expired lease.

    Tasks that name this holder come first. Of the tasks that name no holder, that have been ready for longer than
    `lease_s`, or that have an expired lease, the one that has been ready for longest comes first, by the database's
    clock. Number and id only order tasks that became ready at the same moment. A task that comes back goes to the end,
    so that no task waits for ever behind lower numbers. Paths progress about equally, because tasks of paths that are
    behind became ready earlier.
    """
    parameters = {'claimant': owner, 'lease_s': self.lease_s}
    among = {} if keys is None else {'keys': json.dumps(list(keys))}
    held = {'holder_': holder} if holder else {}
    statement = schema.claim(tuple(kinds), keys is not None, bool(holder))
    return self._claim(statement, parameters | among | held)

  def claim_chosen(self, owner: str, task: Row) -> Task | None:
    """Claims a task that `tasks` has listed, unless another process holds it."""
    return self._claim(schema.CLAIM_CHOSEN, {'claimant': owner, 'lease_s': self.lease_s, 'chosen': task['id']})

  def _claim(self, statement: sa.Executable, parameters: Row) -> Task | None:
    with self.conversation():
      rows = self._db.returned(statement, parameters)
      if not rows:
        return None
      self._db.linger()
    self.members = max(self.members, rows[0].pop('members'))  # another thread may have been told a later number
    self.diverged = self._told({name: rows[0].pop(name) for name in ('diverged', 'withdrawn', 'suspended')})
    return Task(**rows[0])

  def heartbeat(self, task: Task) -> int:
    """Renews the lease from now; raises Lost.

    Returns how often the run has diverged, as this is asked for as often, and an answer of its own costs as much.
    """
    rows = self._db.returned(schema.HEARTBEAT, _claimed(task) | {'lease_s': self.lease_s})
    if not rows:
      raise Lost(f'{task} is no longer owned by this process')
    return self._told(rows[0])

  def heartbeats(self, claims: Sequence[Claim]) -> list[int | None]:
    """Renews leases in one transaction. Returns for each claim what `heartbeat` returns, or None if it is lost."""
    rows = self._db.transact(lambda connection: renewals.renew(connection, claims, self.lease_s))
    return [self._told(row) if row else None for row in rows]

  def _told(self, news: Mapping[str, int]) -> int:
    """Notes what the answer to a claim or heartbeat tells; returns how often the run has diverged."""
    self.suspended = news['suspended']
    self._note_withdrawn(news['withdrawn'])
    return news['diverged']

  def _note_withdrawn(self, count: int):
    """Forgets the facts that are known here if others were withdrawn since the last answer."""
    if count != self.withdrawn:
      self._known.clear()
      self.withdrawn = count

  def watch(self, task: Task) -> int:
    """Raises Lost, or returns, what `heartbeat` would, without renewing the lease."""
    rows = self._db.rows(schema.IS_RUNNING, _claimed(task))
    if not rows:
      raise Lost(f'{task} no longer runs')
    return self._told(rows[0])

  def release(self, task: Task, waiting: bool = False, error: str = ''):
    """Hands the task back at once, with what went wrong, for people; does nothing where it is lost.

    A `waiting` one is not ready until it is woken; a wake since the claim counts, as we may not have seen its cause.
    """
    why = error.replace('\0', '').encode(errors='backslashreplace').decode()  # what PostgreSQL can hold
    seen = {'seen': task.wakes} if waiting else {}
    self._db.change(schema.WAIT if waiting else schema.RELEASE, _claimed(task) | seen | {'why': why})

  def complete(self, task: Task, facts: Sequence[Fact], withdrawal: Withdrawal | None = None):
    """Inserts the facts and marks the task as done, in one transaction, which begins with the withdrawal, if any.

    The fact that the run is finished marks all other tasks as done.

    If another process owns the task, identical facts in the registry suffice: another owner, or an earlier attempt of
    this call, has inserted them. Otherwise raises Lost, or Conflict for other facts of these names; writes nothing.
    """

    def work(connection: sa.Connection) -> bool:
      if connection.execute(schema.COMPLETE, _claimed(task)).rowcount:
        if any(fact.kind == FINISHED for fact in facts):
          connection.execute(schema.CLOSE)
        return self._replace(connection, facts, withdrawal)
      if facts:
        if not all(fact_rows.is_same(fact_rows.read_stored(connection, fact), fact) for fact in facts):
          raise Lost(f'{task} is no longer owned by this process, and its facts are missing')
      elif connection.execute(schema.IS_DONE, _claimed(task)).one_or_none() is None:
        raise Lost(f'{task} is no longer owned by this process')
      return False

    self._insert(work, facts, withdrawal)

  def _insert(self, work: Callable[[sa.Connection], bool], facts: Sequence[Fact], withdrawal: Withdrawal | None):
    """Runs a transaction that inserts facts, and knows them from then on if all were new."""
    generation = self._known.generation
    are_new = self._db.transact(work)
    if withdrawal:
      self._known.clear()
    elif are_new:
      self._known.add(facts, generation)

  def settle(self, task: NewTask, facts: Sequence[Fact]) -> bool:
    """Marks a task as done without its owner, who loses it, and inserts the facts, in one transaction.

    A task that does not exist yet will not exist. Returns False, and changes nothing, if the task is done. Raises
    Conflict for other facts of these names.
    """
    insert = self._db.insert(TASKS).values(since=Now(), ended=Now()).on_conflict_do_nothing()
    insert = insert.execution_options(preserve_rowcount=True)
    row = task._asdict() | {'state': 'done', 'lease': None}

    def work(connection: sa.Connection) -> bool:
      is_new = connection.execute(insert, row).rowcount > 0
      if not is_new and not connection.execute(schema.SETTLE, fact_rows.name(task)).rowcount:
        return False
      fact_rows.insert(connection, self._new_fact, facts)
      return True

    return self._db.transact(work)

  def reopen(self, task: Task, kind: str, key: str, number: int):
    """Makes a completed task ready again, because `task` misses one of its objects. Its facts stay.

    Does nothing if `task` is lost, because the object may have been deleted on purpose.
    """
    self._db.change(schema.REOPEN, _claimed(task) | {'kind_': kind, 'key_': key, 'number_': number})

  def put(self, facts: Sequence[Fact], withdrawal: Withdrawal | None = None):
    """Inserts facts without a task. Raises Conflict and inserts none if other facts of these names exist."""
    self._insert(lambda connection: self._replace(connection, facts, withdrawal), facts, withdrawal)

  def _replace(self, connection: sa.Connection, facts: Sequence[Fact], withdrawal: Withdrawal | None) -> bool:
    """Inserts facts after a withdrawal, if any; returns whether all were new."""
    if withdrawal:
      fact_rows.withdraw(connection, self._new_fact, withdrawal)
    return fact_rows.insert(connection, self._new_fact, facts)

  def revoke(self, withdrawal: Withdrawal, tasks: Iterable[NewTask] = ()) -> bool:
    """Withdraws facts that nothing replaces yet, and opens the tasks that make them again, for any process.

    Returns False, and changes nothing, where the first of the facts is no longer there.
    """

    def work(connection: sa.Connection) -> bool:
      if not fact_rows.withdraw(connection, self._new_fact, withdrawal):
        return False
      for task in tasks:
        connection.execute(schema.REMAKE, fact_rows.name(task))
      return True

    is_done = self._db.transact(work)
    self._known.clear()
    return is_done

  def withdraw(self, mark: Fact, facts: Sequence[Fact], tasks: Iterable[NewTask]) -> bool:
    """Deletes facts and makes completed tasks ready again, once. The owners of running tasks lose them.

    Inserts `mark` in the same transaction. Does nothing and returns False if `mark` already exists.
    """

    def work(connection: sa.Connection) -> bool:
      if not connection.execute(self._new_fact, fact_rows.to_row(mark)).rowcount:
        return False
      for fact in facts:
        connection.execute(schema.WITHDRAW, fact_rows.name(fact))
      for task in tasks:
        connection.execute(schema.RENEW, fact_rows.name(task))
      connection.execute(schema.DISOWN)
      return True

    is_done = self._db.transact(work)
    self._known.clear()
    return is_done

  def decide(
    self, facts: Callable[[Newest], Sequence[Fact]], fenced: str, ended: decisions.Ended = ()
  ) -> bool:  # fmt: skip
    """Decides something from what is there, once, and inserts the facts that say so, in one transaction.

    Args:
      facts: returns the facts, given `newest(kind)`, which returns the highest number of that kind's facts by key.
      fenced: kind of the tasks whose owners lose them, so that they begin again and know the facts.
      ended: tasks, as kinds and keys, that nobody shall do any longer.

    Returns False, and changes nothing, where the first of the facts exists.
    """
    try:
      self._db.transact(lambda connection: decisions.insert(connection, self._new_fact, facts, fenced, ended))
    except Conflict:
      return False
    return True

  def count_members(self) -> int:
    """Returns how many facts say that owners joined or left."""
    return self._db.rows(sa.select(schema.COUNT_MEMBERS))[0]['members']

  def end_tasks(self, tasks: decisions.Ended):
    """Ends tasks, by kind and keys, that nobody shall do any longer."""
    for kind, keys in tasks:
      self._db.change(schema.END, {'kind_': kind, 'keys': json.dumps(list(keys))})

  def facts(
    self, kind: str, keys: Sequence[str] | None = None, number: int | None = None, at_least: int = 0,
    at_most: int | None = None,
  ) -> list[Fact]:  # fmt: skip
    """Returns the facts of a kind, by number, then key; only those with these keys and numbers, if given."""
    ask = functools.partial(self._ask, kind, number, at_least, at_most)
    return self._known.read(kind, keys, number, ask)

  def _ask(
    self, kind: str, number: int | None, at_least: int, at_most: int | None, keys: Sequence[str] | None
  ) -> list[Fact]:  # fmt: skip
    """Returns facts from the database, by number, then key."""
    query, parameters = sa.select(*schema.FACT).where(FACTS.c.kind == kind), {}
    if keys is not None:
      query, parameters = query.where(Among(FACTS.c.key, schema.KEYS)), {'keys': json.dumps(list(keys))}
    if number is not None:
      query = query.where(FACTS.c.number == number)
    if at_least:
      query = query.where(FACTS.c.number >= at_least)
    if at_most is not None:
      query = query.where(FACTS.c.number <= at_most)
    return self._sound(self._db.rows(query.order_by(FACTS.c.number, FACTS.c.key), parameters))

  def _sound(self, rows: Iterable[Row]) -> list[Fact]:
    """Returns the facts of rows without those that are malformed."""
    facts = map(fact_rows.from_row, rows)
    return [fact for fact in facts if self.names.is_sound(fact.kind, fact.key, fact.number, fact.meta)]

  def newest(self, kind: str, below: int | None = None, keys: Sequence[str] | None = None) -> dict[str, int]:
    """Returns the highest number of the facts of a kind, by key; maybe only of numbers below one, or of these keys."""
    query = sa.select(FACTS.c.key, sa.func.max(FACTS.c.number).label('number')).where(FACTS.c.kind == kind)
    query = query.where(FACTS.c.number.between(0, self.names.largest(kind)))
    query = query if below is None else query.where(FACTS.c.number < below)
    query = query if keys is None else query.where(Among(FACTS.c.key, schema.KEYS))
    parameters = None if keys is None else {'keys': json.dumps(list(keys))}
    rows = self._db.rows(query.group_by(FACTS.c.key), parameters)
    return {row['key']: row['number'] for row in rows if self.names.is_sound(kind, row['key'], row['number'], {})}

  def unscheduled(self, limit: int = 100) -> list[Fact]:
    """Returns facts whose consequences may not be there as tasks yet, the lowest numbers first.

    A malformed one has none.
    """
    rows = self._db.rows(sa.select(*schema.FACT).where(schema.UNSCHEDULED).order_by(FACTS.c.number).limit(limit))
    sound = self._sound(rows)
    names = {fact[:3] for fact in sound}
    self.mark_scheduled([fact for fact in map(fact_rows.from_row, rows) if fact[:3] not in names])
    return sound

  def mark_scheduled(self, facts: Sequence[Fact]):
    """Notes that the facts have had their consequences, unless owners that are not known here have joined or left."""
    if facts:
      known = {'known_members': self.known_members}
      self._db.change(schema.MARK, [fact_rows.name(fact) | known for fact in facts])

  def is_idle(self, optional: tuple[str, Sequence[str]] | None = None) -> bool:
    """Returns whether, at one moment, all tasks are done and every fact has had its consequences.

    `optional`: kind and keys of tasks that nobody waits for.
    """
    unsettled = schema.UNSETTLED_BUT if optional else schema.UNSETTLED
    parameters = {'kind_': optional[0], 'keys': json.dumps(list(optional[1]))} if optional else None
    [row] = self._db.rows(sa.select(unsettled.label('unsettled'), schema.COUNT_WITHDRAWN), parameters)
    self._note_withdrawn(row['withdrawn'])
    return not row['unsettled']

  def beat(self, name: str, role: str, about: dict):
    """Records a sign of life of the role of that name."""
    row = {'name': name, 'role': role, 'about': fact_rows.to_json(about)}
    insert = self._db.insert(ROLES).values(seen=Now())
    news = {column: insert.excluded[column] for column in ('about', 'seen')}
    self._db.change(insert.on_conflict_do_update(index_elements=['name', 'role'], set_=news), row)


def _claimed(task: Task) -> Row:
  return {'task': task.id, 'fenced': task.fence}
