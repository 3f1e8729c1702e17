"""The registry's tables, and the statements that change them.

`lease` shows which tasks can be claimed: it is 0 if a task is ready, the end of the lease if it is running, and null if
it waits or is done. The indexes that claims read contain only ready and running tasks, so that completed tasks cost
nothing.

Tables of version 3 are updated in place, in one transaction. A process of that version that is still running continues
without harm: it claims by number and ignores holders, and the tasks that it adds or releases have no holder or count as
ready for long, so that any process may claim them. A process of that version that starts later is rejected.
"""

import functools
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from dipaco_jax.core.errors import InputError
from dipaco_jax.registry.database import Among, Now, short_name
from dipaco_jax.registry.database_errors import Damaged

VERSION = 5
LOCK = 0x6469_7061_636F  # 'dipaco': in PostgreSQL, one process at a time makes the tables
LONGEST_LEASES = 10  # a lease that ends more than this many leases from now was taken while the clock was ahead
MAX_LOCKED = 100  # rows that other claims may hold at this moment, and a claim skips: PostgreSQL's connections

TEXT = sa.Text().with_variant(sa.Text(collation='C'), 'postgresql')  # sorts by its bytes, as in SQLite
UNSCHEDULED = sa.text('NOT scheduled')
METADATA = sa.MetaData()

SCHEMA = sa.Table('dipaco_schema', METADATA, sa.Column('version', sa.Integer, nullable=False))

FACTS = sa.Table(
  'dipaco_facts',
  METADATA,
  sa.Column('kind', TEXT, primary_key=True),
  sa.Column('key', TEXT, primary_key=True),
  sa.Column('number', sa.Integer, primary_key=True),
  sa.Column('uri', sa.Text, nullable=False),
  sa.Column('sha256', sa.Text, nullable=False),
  sa.Column('meta', sa.Text, nullable=False),  # JSON
  sa.Column('scheduled', sa.Boolean, nullable=False, default=False),
  sa.Index('dipaco_facts_by_number', 'kind', 'number'),
  sa.Index('dipaco_facts_unscheduled', 'number', sqlite_where=UNSCHEDULED, postgresql_where=UNSCHEDULED),
)

OPEN = sa.text('lease IS NOT NULL')  # any comparison with `lease` implies it
UNDONE = sa.text("state <> 'done'")
IS_READY, RUNS = sa.text("state = 'ready'"), sa.text("state = 'running'")  # as text: in words that an index repeats
AGE = 'since', 'number', 'id'  # the order of claims: the longest ready first, then by number

TASKS = sa.Table(
  'dipaco_tasks',
  METADATA,
  sa.Column('id', sa.BigInteger().with_variant(sa.Integer, 'sqlite'), primary_key=True),
  sa.Column('kind', TEXT, nullable=False),
  sa.Column('key', TEXT, nullable=False),
  sa.Column('number', sa.Integer, nullable=False),
  sa.Column('state', sa.Text, nullable=False),  # ready, waiting, running, done
  sa.Column('lease', sa.Double),
  sa.Column('fence', sa.Integer, nullable=False, default=0),
  sa.Column('attempts', sa.Integer, nullable=False, default=0),
  sa.Column('wakes', sa.Integer, nullable=False, default=0),
  sa.Column('owner', sa.Text, nullable=False, default=''),
  sa.Column('error', sa.Text, nullable=False, default=''),
  sa.Column('claimed', sa.Double),  # by the database's clock, like `ended`
  sa.Column('ended', sa.Double),
  sa.Column('holder', TEXT, nullable=False, default=''),  # process with the state to continue from, if any
  sa.Column('since', sa.Double, nullable=False, default=0.0),  # when it last became ready
  sa.UniqueConstraint('kind', 'key', 'number'),
  sa.Index('dipaco_tasks_open', 'kind', 'number', 'id', sqlite_where=OPEN, postgresql_where=OPEN),
  sa.Index('dipaco_tasks_undone', 'kind', 'number', sqlite_where=UNDONE, postgresql_where=UNDONE),
  sa.Index('dipaco_tasks_held', 'kind', 'holder', *AGE, sqlite_where=IS_READY, postgresql_where=IS_READY),
  sa.Index('dipaco_tasks_ready', 'kind', *AGE, sqlite_where=IS_READY, postgresql_where=IS_READY),
  sa.Index('dipaco_tasks_running', 'kind', 'lease', sqlite_where=RUNS, postgresql_where=RUNS),
)

ROLES = sa.Table(
  'dipaco_roles',
  METADATA,
  sa.Column('name', TEXT, primary_key=True),
  sa.Column('role', TEXT, primary_key=True),
  sa.Column('about', sa.Text, nullable=False),
  sa.Column('seen', sa.Double, nullable=False),
)


def prepare(connection: sa.Connection):
  """Creates the tables if there are none. Raises InputError if they are of another version."""
  if connection.dialect.name == 'postgresql':
    if sa.inspect(connection).has_table(SCHEMA.name) and connection.scalar(sa.select(SCHEMA.c.version)) == VERSION:
      return  # without waiting for others that begin
    connection.execute(sa.select(sa.func.pg_advisory_xact_lock(LOCK)))
  METADATA.create_all(connection, [SCHEMA])
  version = connection.scalar(sa.select(SCHEMA.c.version))
  if version is None:
    METADATA.create_all(connection)
    connection.execute(sa.insert(SCHEMA), {'version': VERSION})
  else:
    check_version(connection)


def check_version(connection: sa.Connection):
  """Raises InputError if the tables are of another version, and Damaged if there are none."""
  name = short_name(connection.engine.url)
  if not sa.inspect(connection).has_table(SCHEMA.name):
    raise Damaged(f'the registry {name} has no tables (no run has begun in it, or they are lost)')
  version = connection.scalar(sa.select(SCHEMA.c.version))
  if version != VERSION:
    raise InputError(
      f'the registry {name} has tables of version {version}, this program those of version {VERSION}: finish its run '
      'with the program that began it, or give --registry a new database'
    )


def _named(table: sa.Table) -> sa.ColumnElement[bool]:
  """Matches the row of a name; the parameters are not called like columns, which an update would set."""
  return sa.and_(*(table.c[name] == sa.bindparam(f'{name}_') for name in ('kind', 'key', 'number')))


HOLDER, KEYS = (sa.bindparam(name, type_=sa.Text) for name in ('holder_', 'keys'))
LEASE_S = sa.bindparam('lease_s', type_=sa.Double)
LEASE = Now() + LEASE_S
OURS = (TASKS.c.id == sa.bindparam('task')) & (TASKS.c.fence == sa.bindparam('fenced'))
RUNNING = OURS & (TASKS.c.state == 'running')
WOKEN = TASKS.c.wakes > sa.bindparam('seen')
READY: dict[str, Any] = {'state': 'ready', 'lease': 0.0, 'since': Now()}

# How often the run has diverged, which a running role checks as often as whether it still owns its task.
DIVERGED = sa.select(sa.func.count()).where(FACTS.c.kind == 'diverged', FACTS.c.key == '').scalar_subquery()
_COUNTED = sa.select(sa.func.count()).where(FACTS.c.kind == 'withdrawn').scalar_subquery()
COUNT_WITHDRAWN = _COUNTED.label('withdrawn')  # asked for as often: a process forgets the facts that it knows
_SUSPENDED = sa.select(sa.func.count()).where(FACTS.c.kind == 'suspended').scalar_subquery()
MEMBERS = 'joined', 'began', 'left'  # kinds of the facts that say which owners take part in a run, and since when
_MEMBERS = sa.select(sa.func.count()).where(sa.or_(*(FACTS.c.kind == kind for kind in MEMBERS))).scalar_subquery()
COUNT_MEMBERS = _MEMBERS.label('members')
NEWS = DIVERGED.label('diverged'), COUNT_WITHDRAWN, _SUSPENDED.label('suspended'), COUNT_MEMBERS
HEARTBEAT = sa.update(TASKS).where(RUNNING).values(lease=LEASE).returning(*NEWS)
_NAME = sa.bindparam('name', type_=sa.Text)
OF_NAME = sa.func.substr(TASKS.c.owner + '/', 1, sa.func.length(_NAME) + 1) == _NAME + '/'  # see tasks.Claim
HEARTBEAT_OF_NAME = HEARTBEAT.where(OF_NAME)
RELEASE = sa.update(TASKS).where(RUNNING).values(error=sa.bindparam('why'), **READY)
WAIT = RELEASE.values(state=sa.case((WOKEN, 'ready'), else_='waiting'), lease=sa.case((WOKEN, 0.0)))
DONE: dict[str, Any] = {'state': 'done', 'lease': None, 'ended': Now()}
COMPLETE = sa.update(TASKS).where(RUNNING).values(**DONE)
CLOSE = sa.update(TASKS).where(UNDONE).values(**DONE)  # when a run is finished
IS_RUNNING = sa.select(*NEWS).where(RUNNING).select_from(TASKS)
IS_DONE = sa.select(TASKS.c.id).where(OURS, TASKS.c.state == 'done')
FACT = [FACTS.c[name] for name in 'kind key number uri sha256 meta'.split()]
STORED = sa.select(*FACT).where(_named(FACTS))
NEWEST = (
  sa.select(FACTS.c.key, sa.func.max(FACTS.c.number).label('number'))
  .where(FACTS.c.kind == sa.bindparam('kind_'))
  .group_by(FACTS.c.key)
)
# Unless owners have joined or left since: the process does not know all that follows from the fact.
MARK = sa.update(FACTS).where(_named(FACTS), sa.bindparam('known_members') == _MEMBERS).values(scheduled=True)
_OF_NUMBER = (TASKS.c.kind == sa.bindparam('kind_')) & (TASKS.c.number == sa.bindparam('number_'))
# In this order, or two that wake the same tasks could wait for each other.
_SLEEPERS = sa.select(TASKS.c.id).where(_OF_NUMBER, Among(TASKS.c.key, KEYS)).order_by(TASKS.c.id).with_for_update()
_AWAKE = {
  column: sa.case((TASKS.c.state == 'waiting', value), else_=TASKS.c[column]) for column, value in READY.items()
}
WAKE = sa.update(TASKS).where(TASKS.c.id.in_(_SLEEPERS)).values(wakes=TASKS.c.wakes + 1, **_AWAKE)

_ASKING = TASKS.alias()  # the task that misses something; in the same statement, or it could be lost in between
_IS_OURS = (_ASKING.c.id == sa.bindparam('task')) & (_ASKING.c.fence == sa.bindparam('fenced'))
_MISSES = sa.exists().where(_IS_OURS, _ASKING.c.state == 'running')
REOPEN = sa.update(TASKS).where(_named(TASKS), TASKS.c.state == 'done', _MISSES).values(**READY)

WITHDRAW = sa.delete(FACTS).where(_named(FACTS))
RENEW = sa.update(TASKS).where(_named(TASKS)).values(fence=TASKS.c.fence + 1, **READY)
_GIVEN = (FACTS.c[name] == sa.bindparam(f'{name}_') for name in ('uri', 'sha256'))
REVOKE = WITHDRAW.where(*_GIVEN)
REMAKE = RENEW.values(holder='')  # its holder may have made what nobody can read
_OF_KEYS = (TASKS.c.kind == sa.bindparam('kind_'), Among(TASKS.c.key, KEYS))
END = sa.update(TASKS).where(*_OF_KEYS, UNDONE).values(fence=TASKS.c.fence + 1, **DONE)
SETTLE = sa.update(TASKS).where(_named(TASKS), UNDONE).values(fence=TASKS.c.fence + 1, **DONE)
DISOWN_KIND = (
  sa.update(TASKS)
  .where(TASKS.c.kind == sa.bindparam('kind_'), TASKS.c.state == 'running')
  .values(fence=TASKS.c.fence + 1, **READY)
)
DISOWN = sa.update(TASKS).where(TASKS.c.state == 'running').values(fence=TASKS.c.fence + 1, **READY)

# One statement each: between two, a task could be completed, and its facts be seen in neither.
UNSETTLED = sa.or_(sa.exists().where(UNDONE).select_from(TASKS), sa.exists().where(UNSCHEDULED).select_from(FACTS))
_OPTIONAL = sa.and_(*_OF_KEYS)
UNSETTLED_BUT = sa.or_(  # the same, but for tasks of a kind that nobody waits for
  sa.exists().where(UNDONE, sa.not_(_OPTIONAL.self_group())).select_from(TASKS),
  sa.exists().where(UNSCHEDULED).select_from(FACTS),
)
_MINIMA = (
  sa.select(table.c.kind, sa.func.min(table.c.number).label('lowest')).where(which).group_by(table.c.kind)
  for table, which in ((TASKS, UNDONE), (FACTS, UNSCHEDULED))
)
_FOUND = sa.union_all(*_MINIMA).subquery()  # a piece is a task and a fact of one kind
LOWEST = sa.select(_FOUND.c.kind, sa.func.min(_FOUND.c.lowest).label('lowest')).group_by(_FOUND.c.kind)

CLAIMED = [TASKS.c[name] for name in 'id kind key number fence owner wakes'.split()]


_IS_FREE = TASKS.c.lease <= Now()
_CLAIM: dict[str, Any] = dict(state='running', lease=LEASE, owner=sa.bindparam('claimant'), claimed=Now())
_CLAIM |= dict(fence=TASKS.c.fence + 1, attempts=TASKS.c.attempts + 1)
# Of a clock that was ahead. In a select of its own each, or no index would be used.
_ENDS_TOO_LATE = TASKS.c.lease > Now() + LONGEST_LEASES * LEASE_S
_IS_FROM_LATER = TASKS.c.since > Now() + LEASE_S
_BY_AGE = [TASKS.c[name] for name in AGE]


def _heads(kind: str, is_held: bool, limits: Sequence[Any]) -> list[sa.Select]:
  """Selects the tasks of a kind that come first, of each sort that can be claimed: each sort has its index."""
  patience = TASKS.c.since <= Now() - LEASE_S
  held = [(IS_READY, TASKS.c.holder == HOLDER)] if is_held else []
  sorts = [(IS_READY, TASKS.c.holder == ''), (IS_READY, patience), (IS_READY, _IS_FROM_LATER)]
  sorts += [(RUNS, _IS_FREE), (RUNS, _ENDS_TOO_LATE), *held]
  return [
    sa.select(TASKS.c.id)
    .where(TASKS.c.kind == kind, *sort, *limits)
    .order_by(*([TASKS.c.lease] if sort[0] is RUNS else _BY_AGE))
    .limit(MAX_LOCKED)
    for sort in sorts
  ]


@functools.cache
def claim(kinds: tuple[str, ...], keyed: bool, is_held: bool) -> sa.Executable:
  """Claims the first task of these kinds that no other process is claiming, in one statement that uses the indexes.

  Tasks that name the holder come first. Tasks of another holder can be claimed when they have been ready for `lease_s`,
  or since a moment in the future, which a clock that was ahead has written.
  """
  limits = [Among(TASKS.c.key, KEYS)] if keyed else []
  heads = [sa.select(head.subquery()) for kind in kinds for head in _heads(kind, is_held, limits)]
  head = sa.union_all(*heads).subquery()
  order = [sa.case((TASKS.c.holder == HOLDER, 0), else_=1)] * is_held + _BY_AGE
  first = (
    sa.select(TASKS.c.id).join(head, head.c.id == TASKS.c.id).where(_IS_FREE | _ENDS_TOO_LATE).order_by(*order).limit(1)
  )
  taken = first.with_for_update(of=TASKS, skip_locked=True).scalar_subquery()
  return sa.update(TASKS).where(TASKS.c.id == taken).values(**_CLAIM).returning(*CLAIMED, *NEWS)


_IS_CHOSEN = TASKS.c.id == sa.bindparam('chosen')
CLAIM_CHOSEN = sa.update(TASKS).where(_IS_CHOSEN, _IS_FREE).values(**_CLAIM).returning(*CLAIMED, *NEWS)
