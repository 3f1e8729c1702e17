"""SQLite and PostgreSQL behind one interface: connections, the clock, sets of keys, transactions that wait.

Both take the same statements; what differs is compiled for each dialect here.
"""

import contextlib
import os
import pathlib
import re
import urllib.parse
from collections.abc import Callable
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import FunctionElement

from dipaco_jax.core.errors import Away, InputError
from dipaco_jax.processes import time_use
from dipaco_jax.registry import database_errors
from dipaco_jax.registry.conversations import Conversations
from dipaco_jax.registry.writer_turns import writer_turn
from dipaco_jax.storage import retry

T = TypeVar('T')
Row = dict[str, Any]

SQLITE = 'sqlite:///'
# PostgreSQL ends a transaction whose client is silent for this long, so that nobody waits for a stopped process.
IDLE_S = 5

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


def connect(url: str, reads_only: bool = False) -> sa.Engine:
  """Makes an engine whose write transactions begin with SQLite's lock, or READ COMMITTED in PostgreSQL.

  `reads_only`: nothing is made or written, so that a file that may only be read can be.

  Raises InputError for another URL; the message does not show it, as any part may be the password.
  """
  with contextlib.suppress(sa.exc.ArgumentError, ValueError):  # ValueError: a port that is not a number
    parsed = sa.make_url(url)
    if parsed.drivername == 'sqlite' and parsed.database:
      return _connect_sqlite(parsed, reads_only)
    if parsed.drivername == 'postgresql' and not {*'@#?'} & {*f'{parsed.host}{parsed.database}'}:
      return _connect_postgresql(parsed)
  kind = re.match(r'\w+(?=://)', url)
  raise InputError(
    f'the registry {f"{kind[0]}://... " if kind else ""}cannot be used: give sqlite:////ABSOLUTE/FILE.db or '
    'postgresql://USER:PASSWORD@HOST/DATABASE, with %40 for an @ in the password'
  )


def sqlite_file(url: str) -> pathlib.Path | None:
  """Returns the file of a registry in SQLite; None for another database."""
  return pathlib.Path(str(sa.make_url(url).database)) if url.startswith(SQLITE) else None


def short_name(url: sa.URL) -> str:
  """Returns the file, or the host and the database, for messages."""
  if url.drivername == 'sqlite':
    return str(url.database).removeprefix('file:')
  return f'postgresql://{url.host or url.query.get("host", "")}/{url.database}'


def _connect_sqlite(url: sa.URL, reads_only: bool) -> sa.Engine:
  file = str(url.database)
  if reads_only:
    url = _without_writing(url)
  else:
    pathlib.Path(file).parent.mkdir(parents=True, exist_ok=True)
  engine = sa.create_engine(url, pool_size=1, max_overflow=8)
  _guard_file(engine, file)

  @sa.event.listens_for(engine, 'connect')
  def _(connection, record):
    connection.isolation_level = None  # the driver begins nothing by itself
    for pragma in () if reads_only else ('journal_mode = WAL', 'synchronous = FULL'):
      connection.execute(f'PRAGMA {pragma}').close()

  @sa.event.listens_for(engine, 'begin')
  def _(connection):
    options = connection.get_execution_options()
    if options.get('is_snapshot'):
      connection.exec_driver_sql('BEGIN')
    elif not options.get('reads'):
      connection.exec_driver_sql('BEGIN IMMEDIATE')  # a transaction that reads first could not get the lock later

  return engine


def _guard_file(engine: sa.Engine, file: str):
  """Has each transaction raise an error where the file is no longer the one that was opened first.

  Otherwise open connections would use a file that was removed or replaced, and others the new one: two registries.
  """
  opened: list[os.stat_result] = []

  @sa.event.listens_for(engine, 'do_connect')
  @sa.event.listens_for(engine, 'checkout')
  def _(*_):
    if opened and not os.path.samestat(os.stat(file), opened[0]):
      raise database_errors.Unusable(f'the registry {file} was replaced by another file: start this process again')

  @sa.event.listens_for(engine, 'connect')
  def _(connection, record):
    opened[:] = opened or [os.stat(file)]


def _without_writing(url: sa.URL) -> sa.URL:
  """Returns the URL by which SQLite makes no file; beside a database without a log, it would make one to read it."""
  file = str(url.database)
  has_log, is_writable = os.path.exists(f'{file}-wal'), os.access(os.path.dirname(file) or '.', os.W_OK)
  mode = 'immutable=1' if not has_log and not is_writable else 'mode=rw' if is_writable else 'mode=ro'
  return sa.make_url(f'{SQLITE}file:{urllib.parse.quote(os.path.abspath(file))}?{mode}&uri=true')


def _connect_postgresql(url: sa.URL) -> sa.Engine:
  url = url.set(drivername='postgresql+psycopg', query=KEEPALIVE | dict(url.query))
  given = url.query.get('options', '')
  # With the connection, not after it: each statement is one more wait for an answer.
  url = url.update_query_dict({'options': f'{given} -c idle_in_transaction_session_timeout={IDLE_S}s'.strip()})
  # Each statement is planned again: a plan made for a small table would read all of a large one.
  alike = {'isolation_level': 'READ COMMITTED', 'connect_args': {'prepare_threshold': None}}
  try:
    engine = sa.create_engine(url, pool_size=4, max_overflow=5, **alike)  # all of them are closed in silence
  except ModuleNotFoundError as e:
    raise InputError(f"{e.name} is missing, which PostgreSQL needs: pip install 'dipaco_jax[postgres]'") from e

  @sa.event.listens_for(engine, 'handle_error')
  def _(context):
    # The next connection may lead to the server that a failover has put in this one's place.
    context.is_disconnect |= getattr(context.original_exception, 'sqlstate', None) == database_errors.STANDBY

  return engine


class Database:
  """A process's connections to the database, which its threads may share; in PostgreSQL only while it speaks."""

  def __init__(self, url: str, patience_s: float, reads_only: bool = False):
    self._engine, self._patience_s = _connect(url, reads_only), patience_s
    is_sqlite = self._engine.dialect.name == 'sqlite'
    self.name = short_name(self._engine.url)
    self.insert = sqlite.insert if is_sqlite else postgresql.insert  # has ON CONFLICT
    alone = {} if is_sqlite else {'isolation_level': 'AUTOCOMMIT'}  # no round trips to begin and to commit
    self._single = self._engine.execution_options(**alone)
    self._reads = self._engine.execution_options(reads=True, **alone)
    isolation = {} if is_sqlite else {'isolation_level': 'REPEATABLE READ'}
    self._snapshots = self._engine.execution_options(reads=True, is_snapshot=True, **isolation)
    # SQLite's connections are open files: there is nothing to save.
    self._conversations = Conversations((lambda: None) if is_sqlite else self._engine.dispose)
    self.conversation, self.linger = self._conversations.conversation, self._conversations.linger

  def close(self):
    self._conversations.close()
    self._engine.dispose()

  def transact(self, work: Callable[[sa.Connection], T]) -> T:
    """Returns work(connection), called in a transaction."""
    return self._run(self._engine, work)

  def read_snapshot(self, work: Callable[[sa.Connection], T]) -> T:
    """Returns work(connection), whose statements read the database as it is at one moment; holds up nobody."""
    return self._run(self._snapshots, work)

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

    Raises Away if it does not answer within `patience_s`, Unusable where somebody has to mend it first.
    """

    def transaction() -> T:
      with self._conversations.speaking(), self._turn(engine), engine.begin() as connection:
        return work(connection)

    longest_wait_s = self._conversations.longest_wait_s()
    try:
      with time_use.doing(time_use.DATABASE):
        is_transient = database_errors.is_transient
        return retry.call('the registry does not answer', transaction, is_transient, self._patience_s, longest_wait_s)
    except Exception as e:
      if unusable := database_errors.to_unusable(e, self.name):
        raise unusable from e
      if database_errors.is_transient(e):
        raise Away(f'the registry does not answer ({retry.first_line(e)})') from e
      raise

  def _turn(self, engine: sa.Engine) -> contextlib.AbstractContextManager[None]:
    """Returns the turn of a writer, which SQLite alone needs."""
    is_free = engine.dialect.name != 'sqlite' or engine.get_execution_options().get('reads')
    return contextlib.nullcontext() if is_free else writer_turn(str(engine.url.database))


def _connect(url: str, reads_only: bool) -> sa.Engine:
  """Makes an engine; raises Unusable if the folder of a file cannot be made."""
  try:
    return connect(url, reads_only)
  except OSError as e:
    raise database_errors.to_unusable(e, url.removeprefix(SQLITE)) or e from e


def _rows(result: sa.Result) -> list[Row]:
  return [dict(row) for row in result.mappings()]
