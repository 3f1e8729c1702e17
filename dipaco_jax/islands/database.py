"""SQLite and PostgreSQL behind one interface: connections, the clock, sets of keys, transactions that wait.

Both take the same statements; what differs is compiled for each dialect here.
"""

import contextlib
import errno
import fcntl
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import FunctionElement

from dipaco_jax.core.errors import Away, InputError
from dipaco_jax.islands.conversations import Conversations
from dipaco_jax.storage import backends, retry, time_use

T = TypeVar('T')
Row = dict[str, Any]

SQLITE_TRANSIENT = 5, 6, 10, 13, 14  # BUSY, LOCKED, IOERR, FULL, CANTOPEN
# The same of the files beside it: a share that is not mounted, one without its locks, a full disk.
TRANSIENT = backends.TRANSIENT | {errno.ENOENT, errno.ENOLCK, errno.ENOSPC, errno.EDQUOT}
# PostgreSQL ends a transaction whose client is silent for this long, so that nobody waits for a stopped process.
IDLE_S = 5
READ_ONLY = '25006'  # PostgreSQL's code for a change that a standby refuses

# A connection that does not answer is closed within half a minute.
KEEPALIVE = dict(
  connect_timeout='10', keepalives_idle='10', keepalives_interval='5', keepalives_count='3', tcp_user_timeout='30000'
)


class Now(FunctionElement):
  """Seconds since 1970 by the database's clock."""

  type = sa.Double()
  inherit_cache = True


class Among(FunctionElement):
  """Among(column, texts): whether the column is one of `texts`, a JSON list of any length in one parameter."""

  type = sa.types.NULLTYPE  # a Boolean would be compared with 1, for which SQLite reads every row
  inherit_cache = True


def _write(element: type[FunctionElement], dialect: str, sql: str):
  """Says how an element is written in a dialect; `sql` has {} for each of its clauses."""

  @compiles(element, dialect)
  def _(element, compiler, **kwargs):
    return sql.format(*(compiler.process(clause, **kwargs) for clause in element.clauses))


_write(Now, 'sqlite', "((julianday('now') - 2440587.5) * 86400.0)")  # unixepoch('subsec') is null before SQLite 3.42
_write(Now, 'postgresql', 'CAST(extract(epoch FROM statement_timestamp()) AS double precision)')
_write(Among, 'sqlite', '{} IN (SELECT value FROM json_each({}))')
_write(Among, 'postgresql', '{} = ANY(ARRAY(SELECT json_array_elements_text(CAST({} AS json))))')


def connect(url: str) -> sa.Engine:
  """Makes an engine whose write transactions begin with SQLite's lock, or READ COMMITTED in PostgreSQL.

  Raises InputError for another URL; the message does not show it, as any part may be the password.
  """
  with contextlib.suppress(sa.exc.ArgumentError, ValueError):  # ValueError: a port that is not a number
    parsed = sa.make_url(url)
    if parsed.drivername == 'sqlite' and parsed.database:
      return _connect_sqlite(parsed)
    if parsed.drivername == 'postgresql' and not {*'@#?'} & {*f'{parsed.host}{parsed.database}'}:
      return _connect_postgresql(parsed)
  kind = re.match(r'\w+(?=://)', url)
  raise InputError(
    f'the registry {f"{kind[0]}://... " if kind else ""}cannot be used: give sqlite:////ABSOLUTE/FILE.db or '
    'postgresql://USER:PASSWORD@HOST/DATABASE, with %40 for an @ in the password'
  )


def _connect_sqlite(url: sa.URL) -> sa.Engine:
  pathlib.Path(str(url.database)).parent.mkdir(parents=True, exist_ok=True)
  engine = sa.create_engine(url, pool_size=1, max_overflow=8)

  @sa.event.listens_for(engine, 'connect')
  def _(connection, record):
    connection.isolation_level = None  # the driver begins nothing by itself
    for pragma in ('journal_mode = WAL', 'synchronous = FULL'):
      connection.execute(f'PRAGMA {pragma}').close()

  @sa.event.listens_for(engine, 'begin')
  def _(connection):
    if not connection.get_execution_options().get('reads'):
      connection.exec_driver_sql('BEGIN IMMEDIATE')  # a transaction that reads first could not get the lock later

  return engine


def _connect_postgresql(url: sa.URL) -> sa.Engine:
  url = url.set(drivername='postgresql+psycopg', query=KEEPALIVE | dict(url.query))
  given = url.query.get('options', '')
  # With the connection, not after it: each statement is one more wait for an answer.
  url = url.update_query_dict({'options': f'{given} -c idle_in_transaction_session_timeout={IDLE_S}s'.strip()})
  # Plans are made anew for each statement: one that was made for a small table would read all of a large one.
  alike = {'isolation_level': 'READ COMMITTED', 'connect_args': {'prepare_threshold': None}}
  try:
    engine = sa.create_engine(url, pool_size=4, max_overflow=5, **alike)  # all of them are closed in silence
  except ModuleNotFoundError as e:
    raise InputError(f"{e.name} is missing, which PostgreSQL needs: pip install 'dipaco_jax[postgres]'") from e

  @sa.event.listens_for(engine, 'handle_error')
  def _(context):
    # The next connection may lead to the server that a failover has put in this one's place.
    context.is_disconnect |= getattr(context.original_exception, 'sqlstate', None) == READ_ONLY

  return engine


@contextlib.contextmanager
def _writer_turn(engine: sa.Engine) -> Iterator[None]:
  """Lets one writer at a time into SQLite, roughly first come, first served.

  SQLite's own wait favours the last to come: of 8 processes, one waits for seconds. The system grants a file's lock in
  order and frees it when its holder dies, but a process that has just released it and returns may be faster than the
  one that is woken. So there are two locks: whoever is next waits for the first while it holds the second, where all
  others wait.
  """
  if engine.dialect.name != 'sqlite' or engine.get_execution_options().get('reads'):
    yield
    return
  with open(f'{engine.url.database}.lock', 'a') as now:
    with open(f'{engine.url.database}.next', 'a') as following:
      fcntl.flock(following, fcntl.LOCK_EX)
      fcntl.flock(now, fcntl.LOCK_EX)
    yield


class Database:
  """A process's connections to the database, which its threads may share; in PostgreSQL only while it speaks."""

  def __init__(self, url: str, patience_s: float):
    self._engine, self._patience_s = connect(url), patience_s
    is_sqlite = self._engine.dialect.name == 'sqlite'
    self.insert = sqlite.insert if is_sqlite else postgresql.insert  # has ON CONFLICT
    alone = {} if is_sqlite else {'isolation_level': 'AUTOCOMMIT'}  # no round trips to begin and to commit
    self._single = self._engine.execution_options(**alone)
    self._reads = self._engine.execution_options(reads=True, **alone)
    # SQLite's connections are open files: there is nothing to save.
    self._conversations = Conversations((lambda: None) if is_sqlite else self._engine.dispose)
    self.conversation, self.linger = self._conversations.conversation, self._conversations.linger

  def close(self):
    self._conversations.close()
    self._engine.dispose()

  def transact(self, work: Callable[[sa.Connection], T]) -> T:
    """Returns work(connection), called in a transaction."""
    return self._run(self._engine, work)

  def change(self, statement: sa.Executable, parameters: Row | list[Row]) -> int:
    """Runs one statement as a transaction; returns how many rows it changed."""
    return self._run(self._single, lambda connection: connection.execute(statement, parameters).rowcount)

  def returned(self, statement: sa.Executable, parameters: Row) -> list[Row]:
    """Runs one statement as a transaction; returns the rows that it returns."""
    return self._run(self._single, lambda connection: _rows(connection.execute(statement, parameters)))

  def rows(self, query: sa.Executable, parameters: Row | None = None) -> list[Row]:
    """Runs a query; returns its rows."""
    return self._run(self._reads, lambda connection: _rows(connection.execute(query, parameters)))

  def _run(self, engine: sa.Engine, work: Callable[[sa.Connection], T]) -> T:
    """Returns work(connection), called in a transaction that is tried again while the database is busy or away.

    Raises Away where it does not answer within `patience_s`, InputError where it refuses us.
    """

    def transaction() -> T:
      with self._conversations.speaking(), _writer_turn(engine), engine.begin() as connection:
        return work(connection)

    longest_wait_s = self._conversations.longest_wait_s()
    try:
      with time_use.doing(time_use.DATABASE):
        return retry.call('the registry does not answer', transaction, is_transient, self._patience_s, longest_wait_s)
    except Exception as e:
      words = retry.first_line(e)
      if is_refused(e):
        raise InputError(f'the registry refuses us ({words}): check its user, password and database') from e
      if is_transient(e):
        raise Away(f'the registry does not answer ({words})') from e
      raise


def _rows(result: sa.Result) -> list[Row]:
  return [dict(row) for row in result.mappings()]


def is_transient(error: Exception) -> bool:
  """Returns whether the call may succeed later: the database is unreachable, starting, full, or resolved a deadlock.

  Or it has become a standby, or this process's other threads hold all connections that it may have.
  """
  if not isinstance(error, sa.exc.DBAPIError) or is_refused(error):
    return isinstance(error, sa.exc.TimeoutError) or (isinstance(error, OSError) and error.errno in TRANSIENT)
  code = getattr(error.orig, 'sqlite_errorcode', None)
  if code is not None:
    return code & 0xFF in SQLITE_TRANSIENT
  return error.connection_invalidated or isinstance(error, sa.exc.OperationalError)


def is_refused(error: Exception) -> bool:
  """Returns whether a connection was refused for its user, password or database: the error has no code, only words."""
  refusals = 'authentication failed', 'does not exist'
  return isinstance(error, sa.exc.OperationalError) and any(words in str(error.orig) for words in refusals)
