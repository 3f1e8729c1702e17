"""The registry's tables, and the statements that change them.

`lease` tells what can be claimed: it is 0 where a task is ready, the end of the lease where it runs, and null where it
waits or is done. So one index holds all that can be claimed, and tasks that are done cost nothing.
"""

import functools

import sqlalchemy as sa

from dipaco_jax.core.errors import InputError
from dipaco_jax.islands.database import Among, Now

VERSION = 3
LOCK = 0x6469_7061_636F  # 'dipaco': in PostgreSQL, one process at a time makes the tables
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
  sa.Column('progress', sa.Text),
  sa.Column('error', sa.Text, nullable=False, default=''),
  sa.Column('claimed', sa.Double),  # by the database's clock, like `ended`
  sa.Column('ended', sa.Double),
  sa.UniqueConstraint('kind', 'key', 'number'),
  sa.Index('dipaco_tasks_open', 'kind', 'number', 'id', sqlite_where=OPEN, postgresql_where=OPEN),
  sa.Index('dipaco_tasks_undone', 'kind', 'number', sqlite_where=UNDONE, postgresql_where=UNDONE),
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
  """Makes the tables where there are none; raises InputError where there are those of another version."""
  if connection.dialect.name == 'postgresql':
    connection.execute(sa.select(sa.func.pg_advisory_xact_lock(LOCK)))
  METADATA.create_all(connection, [SCHEMA])
  version = connection.scalar(sa.select(SCHEMA.c.version))
  if version is None:
    METADATA.create_all(connection)
    connection.execute(sa.insert(SCHEMA), {'version': VERSION})
  elif version != VERSION:
    raise InputError(
      f'the registry {connection.engine.url.render_as_string()} has tables of version {version}, this program those '
      f'of version {VERSION}: finish its run with the program that began it, or give --registry a new database'
    )


def _named(table: sa.Table) -> sa.ColumnElement[bool]:
  """Matches the row of a name; the parameters are not called like columns, which an update would set."""
  return sa.and_(*(table.c[name] == sa.bindparam(f'{name}_') for name in ('kind', 'key', 'number')))


KEYS = sa.bindparam('keys', type_=sa.Text)
LEASE = Now() + sa.bindparam('lease_s', type_=sa.Double)
OURS = (TASKS.c.id == sa.bindparam('task')) & (TASKS.c.fence == sa.bindparam('fenced'))
RUNNING = OURS & (TASKS.c.state == 'running')
WOKEN = TASKS.c.wakes > sa.bindparam('seen')

HEARTBEAT = sa.update(TASKS).where(RUNNING).values(lease=LEASE)
PROGRESS = HEARTBEAT.values(progress=sa.bindparam('noted'))
RELEASE = sa.update(TASKS).where(RUNNING).values(state='ready', lease=0.0, error=sa.bindparam('why'))
WAIT = RELEASE.values(state=sa.case((WOKEN, 'ready'), else_='waiting'), lease=sa.case((WOKEN, 0.0)))
COMPLETE = sa.update(TASKS).where(RUNNING).values(state='done', lease=None, progress=None, ended=Now())
IS_RUNNING = sa.select(TASKS.c.id).where(RUNNING)
IS_DONE = sa.select(TASKS.c.id).where(OURS, TASKS.c.state == 'done')
FACT = [FACTS.c[name] for name in 'kind key number uri sha256 meta'.split()]
CONTENT = sa.select(FACTS.c.uri, FACTS.c.sha256).where(_named(FACTS))
MARK = sa.update(FACTS).where(_named(FACTS)).values(scheduled=True)
WAKE = (
  sa.update(TASKS)
  .where(
    TASKS.c.id.in_(
      sa.select(TASKS.c.id)
      .where(TASKS.c.kind == sa.bindparam('kind_'), TASKS.c.number == sa.bindparam('number_'), Among(TASKS.c.key, KEYS))
      .order_by(TASKS.c.id)  # or two that wake the same tasks could wait for each other
      .with_for_update()
    )
  )
  .values(
    wakes=TASKS.c.wakes + 1,
    state=sa.case((TASKS.c.state == 'waiting', 'ready'), else_=TASKS.c.state),
    lease=sa.case((TASKS.c.state == 'waiting', 0.0), else_=TASKS.c.lease),
  )
)


_ASKING = TASKS.alias()  # the task that misses something; in the same statement, or it could be lost in between
REOPEN = (
  sa.update(TASKS)
  .where(
    _named(TASKS),
    TASKS.c.state == 'done',
    sa.exists().where(
      _ASKING.c.id == sa.bindparam('task'), _ASKING.c.fence == sa.bindparam('fenced'), _ASKING.c.state == 'running'
    ),
  )
  .values(state='ready', lease=0.0)
)

WITHDRAW = sa.delete(FACTS).where(_named(FACTS))
RENEW = sa.update(TASKS).where(_named(TASKS)).values(state='ready', lease=0.0, progress=None, fence=TASKS.c.fence + 1)
DISOWN = sa.update(TASKS).where(TASKS.c.state == 'running').values(state='ready', lease=0.0, fence=TASKS.c.fence + 1)

# One statement each: between two, a task could be completed, and its facts be seen in neither.
UNSETTLED = sa.or_(sa.exists().where(UNDONE).select_from(TASKS), sa.exists().where(UNSCHEDULED).select_from(FACTS))
LOWEST = sa.union_all(
  *(
    sa.select(table.c.kind, sa.func.min(table.c.number).label('lowest')).where(which).group_by(table.c.kind)
    for table, which in ((TASKS, UNDONE), (FACTS, UNSCHEDULED))
  )
)


CLAIMED = [TASKS.c[name] for name in 'id kind key number fence owner wakes progress'.split()]


@functools.cache
def claim(kinds: tuple[str, ...], keyed: bool) -> sa.Executable:
  """Claims the first task of these kinds that nobody else is claiming, in one statement that uses the index."""
  order = TASKS.c.number, TASKS.c.id
  free = [TASKS.c.lease <= Now()]
  mine = [Among(TASKS.c.key, KEYS)] if keyed else []
  heads = [
    sa.select(*order).where(TASKS.c.kind == kind, *free, *mine).order_by(*order).limit(MAX_LOCKED) for kind in kinds
  ]
  head = sa.union_all(*(sa.select(each.subquery()) for each in heads)).subquery()
  first = sa.select(TASKS.c.id).join(head, head.c.id == TASKS.c.id).where(*free).order_by(*order).limit(1)
  return (
    sa.update(TASKS)
    .where(TASKS.c.id == first.with_for_update(of=TASKS, skip_locked=True).scalar_subquery())
    .values(
      state='running',
      lease=LEASE,
      fence=TASKS.c.fence + 1,
      attempts=TASKS.c.attempts + 1,
      owner=sa.bindparam('claimant'),
      claimed=Now(),
    )
    .returning(*CLAIMED)
  )
