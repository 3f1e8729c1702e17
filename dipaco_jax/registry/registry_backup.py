"""Backups of a registry, stored with the objects of its run: the monitor writes and `dipaco registry` reads them.

A backup has the rows of all tables at one moment, without heartbeats. A registry that is restored from it has the state
of that moment, and later results are computed again, under the same names. No object that it needs has been deleted,
because the monitor writes a backup before it deletes anything.

    registry_backups/<number>-<sha256>.jsonl.gz
    {"schema": 4, "id": "0f3a...", "time": 1764187071.3}
    ["dipaco_facts", {"kind": "config", "key": "", ...}]
    ...
    {"rows": 1234}
"""

import collections
import contextlib
import gzip
import hashlib
import io
import itertools
import json
import logging
import os
import pathlib
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import sqlalchemy as sa

from dipaco_jax.core.errors import InputError
from dipaco_jax.registry import database, registry_schema as schema
from dipaco_jax.registry.database import Database
from dipaco_jax.registry.database_errors import Damaged
from dipaco_jax.registry.registry import Registry
from dipaco_jax.storage.object_store import Corrupt, Missing, Storage
from dipaco_jax.storage.remedies import ISLANDS_MARK

FOLDER = 'registry_backups'
KEPT = 2  # the newest may be damaged
CHUNK = 1_000  # rows that are read or written at once
FENCES = 1_000  # a task is claimed less often than so after a backup: no claim of before counts after a rebuild
PATIENCE_S = 10.0  # for a database that does not answer, in a command

TABLES = {table.name: table for table in schema.METADATA.sorted_tables if table not in (schema.SCHEMA, schema.ROLES)}


class NotWritten(Exception):
  """The file of a backup could not be written; no error of the database, which would be tried again."""


class Backup(NamedTuple):
  """A backup that is as it was written."""

  name: str
  about: dict[str, Any]
  data: bytes

  def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the table and the columns of each row."""
    with gzip.open(io.BytesIO(self.data), 'rt', encoding='utf-8') as lines:
      next(lines)
      for line in lines:
        if isinstance(row := json.loads(line), list):
          yield row[0], row[1]

  def describe(self) -> str:
    """Returns its name and age."""
    minutes = max(0.0, time.time() - self.about['time']) / 60
    return f'{self.name}, {minutes:,.0f} minutes old'


def write(registry: Registry, storage: Storage) -> str:
  """Publishes a backup of a registry that knows a run, and deletes all but the newest; returns its name."""
  [config] = registry.facts('config')
  about = {'schema': schema.VERSION, 'id': config.meta['id'], 'time': time.time()}
  with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder, 'backup')
    registry.read_snapshot(lambda connection: _dump(connection, file, about))
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    before = storage.names(FOLDER)
    name = f'{FOLDER}/{max(map(_number, before), default=0) + 1:08d}-{sha256}.jsonl.gz'
    storage.write_file(name, file)
  for old in sorted(before, key=_number)[: 1 - KEPT]:
    storage.delete(old)
  return name


def _number(name: str) -> int:
  """Returns the number in a backup's name; 0 of another object."""
  number = name.removeprefix(f'{FOLDER}/').partition('-')[0]
  return int(number) if number.isdecimal() else 0


def _dump(connection: sa.Connection, file: pathlib.Path, about: dict[str, Any]):
  try:
    with gzip.open(file, 'wt', compresslevel=3, encoding='utf-8') as f:
      print(json.dumps(about), file=f)
      count = 0
      for name, table in TABLES.items():
        query = sa.select(table).order_by(*table.primary_key)
        for row in connection.execute(query, execution_options={'yield_per': CHUNK}).mappings():
          print(json.dumps([name, dict(row)]), file=f)
          count += 1
      print(json.dumps({'rows': count}), file=f)
  except OSError as e:
    raise NotWritten(f'{e.strerror} ({file})') from e


# -- from a backup


def read_newest(storage: Storage, run_id: str) -> Backup:
  """Returns the newest intact backup of a run. Raises InputError if there is none."""
  for name in sorted(storage.names(FOLDER), key=_number, reverse=True):
    try:
      backup = _read(storage, name)
      if (backup_id := backup.about['id']) != run_id:
        raise Corrupt(f'{storage.url_of(name)} is of another run ({backup_id})')
      return backup
    except (Missing, Corrupt) as e:
      logging.warning('%s; an older backup is looked for', e)
  raise InputError(
    f'{storage.url} has no backup of its registry, which a monitor writes: restore the database from a backup of your '
    'own, or start the run again with another --workdir and another --registry'
  )


def _read(storage: Storage, name: str) -> Backup:
  """Reads a backup and checks its digest, its tables and its end. Raises Missing, Corrupt."""
  sha256 = name.rpartition('-')[2].partition('.')[0]
  data = bytes(storage.read(name, sha256))
  try:
    with gzip.open(io.BytesIO(data), 'rt', encoding='utf-8') as lines:
      about = json.loads(next(lines))
      count, last = collections.deque(enumerate(lines), maxlen=1).pop()
    is_whole = json.loads(last) == {'rows': count} and isinstance(about['time'], float)
    if not is_whole or about['schema'] != schema.VERSION:
      raise ValueError(f'tables of version {about["schema"]}, {count} rows')
  except (ValueError, KeyError, TypeError, IndexError, StopIteration, EOFError, OSError, zlib.error) as e:
    raise Corrupt(f'{storage.url_of(name)} cannot be used ({e!r})') from e
  return Backup(name, about, data)


def restore(connection: sa.Connection, rows: Iterable[tuple[str, dict[str, Any]]]):
  """Creates all tables again, with these rows. All claims become void."""
  schema.METADATA.drop_all(connection)
  schema.METADATA.create_all(connection)
  connection.execute(sa.insert(schema.SCHEMA), {'version': schema.VERSION})
  for name, group in itertools.groupby(rows, lambda row: row[0]):
    table = TABLES[name]
    of_table = ({column.name: row[column.name] for column in table.c} for _, row in group)
    while chunk := list(itertools.islice(of_table, CHUNK)):
      connection.execute(sa.insert(table), chunk)
  connection.execute(sa.update(schema.TASKS).values(fence=schema.TASKS.c.fence + FENCES))
  connection.execute(schema.DISOWN)
  if connection.dialect.name == 'postgresql':  # whose counter of ids knows nothing of rows that came with theirs
    highest = sa.select(sa.func.coalesce(sa.func.max(schema.TASKS.c.id), 0) + 1).scalar_subquery()
    sequence = sa.func.pg_get_serial_sequence(schema.TASKS.name, 'id')
    connection.execute(sa.select(sa.func.setval(sequence, highest, False)))


# -- commands


def read_id(storage: Storage) -> str:
  """Returns the id of the run in a place. Raises InputError if islands have none."""
  try:
    return bytes(storage.fetch(ISLANDS_MARK)).decode(errors='replace')
  except Missing as e:
    raise InputError(f'--workdir={storage.url} has no run of islands ({ISLANDS_MARK} is missing)') from e


def find_fault(url: str, run_id: str) -> str:
  """Returns why a registry cannot be used for a run, or '' if it can. Raises InputError if it is another run's."""
  file = database.sqlite_file(url)
  if file and not file.exists():
    return f'the registry {file} is missing'
  try:
    with contextlib.closing(Registry(url, patience_s=PATIENCE_S, reads_only=True)) as registry:
      damage, name = registry.read_snapshot(_find_damage), registry.name
      known = [fact.meta['id'] for fact in registry.facts('config')]
  except Damaged as e:
    return e.fault
  if damage:
    return f'the registry {name} is damaged ({damage})'
  if known and known != [run_id]:
    raise InputError(f'the registry {name} is that of another run, {known[0]}: name the database of this one')
  return '' if known else f'the registry {name} has no run'


def _find_damage(connection: sa.Connection) -> str:
  """Reads all that a database has; returns what SQLite finds to be wrong."""
  for table in TABLES.values():
    for _ in connection.execute(sa.select(table), execution_options={'yield_per': CHUNK}):
      pass
  if connection.dialect.name != 'sqlite':
    return ''
  result = connection.scalar(sa.text('PRAGMA integrity_check(1)'))
  return '' if result == 'ok' else ' '.join(str(result).split())


def rebuild(url: str, storage: Storage) -> Backup:
  """Restores a registry from the newest backup, which it returns. A damaged SQLite file is kept next to it.

  Raises InputError if the registry is intact or another run's, or if there is no backup.
  """
  run_id = read_id(storage)
  if not find_fault(url, run_id):
    raise InputError(
      'the registry is intact: nothing has to be rebuilt; to go back to a backup, move the registry away'
    )
  backup = read_newest(storage, run_id)
  if file := database.sqlite_file(url):
    _rebuild_file(file, backup)
  else:
    _fill(url, backup)
  return backup


def _fill(url: str, backup: Backup):
  new_database = Database(url, PATIENCE_S)
  try:
    new_database.transact(lambda connection: restore(connection, backup.rows()))
  finally:
    new_database.close()


def _rebuild_file(file: pathlib.Path, backup: Backup):
  """Makes a new file of SQLite, and only then moves it to where the registry was."""
  aside = file.with_name(f'{file.name}.rebuilt')
  aside.unlink(missing_ok=True)
  _fill(f'{database.SQLITE}{aside.absolute()}', backup)
  for suffix in ('', '-wal', '-shm'):  # a leftover log would be applied to the new file
    if (old := file.with_name(file.name + suffix)).exists():
      os.replace(old, file.with_name(f'{file.name}.damaged{suffix}'))
  os.replace(aside, file)
  for suffix in ('.lock', '.next'):
    aside.with_name(aside.name + suffix).unlink(missing_ok=True)
