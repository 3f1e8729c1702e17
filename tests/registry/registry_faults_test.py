"""Faults around a registry: damaged pages, missing tables, no permission to write, a clock that was ahead."""

import re
import sqlite3
import subprocess

import backends
import pytest
import registries
import sqlalchemy as sa
from registries import train

from dipaco_jax.core.errors import Away
from dipaco_jax.registry import database, database_errors, registry_schema
from dipaco_jax.registry.registry import Lost, NewTask, Registry

server, url, connect, db = registries.server, registries.url, registries.connect, registries.db


@pytest.mark.parametrize('what', ['dropped table', 'dropped column'])
def test_missing_tables_are_told_with_the_fix(what, url, db):
  engine = database.connect(url)
  with engine.begin() as connection:
    if what == 'dropped table':
      connection.execute(sa.text('DROP TABLE dipaco_tasks'))
    else:
      connection.execute(sa.text('ALTER TABLE dipaco_tasks DROP COLUMN error'))
  engine.dispose()
  with pytest.raises(database_errors.Unusable, match=r'is damaged \(.*: stop all roles and run .*registry .* rebuild'):
    db.tasks()
  with pytest.raises(database_errors.Unusable, match='rebuild'):
    Registry(url, reads_only=True).tasks()


def test_a_database_without_tables_is_reported_and_not_given_any_by_who_only_reads(url):
  engine = database.connect(url)  # which makes the file
  engine.connect().close()
  for _ in range(2):
    with pytest.raises(database_errors.Damaged, match=r'has no tables \(no run has begun in it, or they are lost\): '):
      Registry(url, reads_only=True)
  engine.dispose()


@pytest.mark.parametrize('reads_only', [False, True])
@pytest.mark.parametrize('first', [0, 4096])
def test_damaged_pages_are_told_with_the_fix(reads_only, first, tmp_path):
  file = tmp_path / 'registry.db'
  made = Registry(f'sqlite:///{file}')
  made.add_tasks(train(*((str(i), 0) for i in range(300))))
  made.close()
  content = bytearray(file.read_bytes())
  content[first:] = b'x' * len(content[first:])
  file.write_bytes(content)
  with pytest.raises(database_errors.Unusable, match=f'{file} is damaged .*rebuild'):
    Registry(f'sqlite:///{file}', reads_only=reads_only).tasks()


def test_a_registry_that_cannot_be_written_is_reported_and_can_be_read(tmp_path):
  with backends.small_disk(tmp_path / 'disk', 1 << 20) as disk:
    made = Registry(url := f'sqlite:///{disk}/registry.db')
    made.add_tasks(train(('0', 0)))
    made.close()
    subprocess.run(['mount', '-o', 'remount,ro', str(disk)], check=True)
    for there in url, f'sqlite:///{disk}/new/registry.db':
      with pytest.raises(database_errors.Unusable, match=r'cannot be written .*check permissions'):
        Registry(there)
    made = Registry(url, reads_only=True)
    assert len(made.tasks()) == 1
    made.close()


def test_a_user_who_may_use_no_schema_is_told(server):
  url = re.sub('search_path%3D.*', 'search_path%3Dabsent', server.new_database())
  with pytest.raises(database_errors.Unusable, match=r'cannot be written .*no schema has been selected'):
    Registry(url)


def test_sqlites_error_of_a_file_that_is_read_only_is_told_with_the_fix(tmp_path):
  """As where the folder can be written, so that the locks beside the file are had."""
  sqlite3.connect(file := tmp_path / 'registry.db').execute('CREATE TABLE t (x)').connection.close()
  engine = sa.create_engine(f'sqlite:///file:{file}?mode=ro&uri=true')
  with engine.connect() as connection, pytest.raises(sa.exc.OperationalError) as error:
    connection.execute(sa.text('INSERT INTO t VALUES (1)'))
  engine.dispose()
  assert 'the registry x cannot be written (' in str(database_errors.to_unusable(error.value, 'x'))
  assert not database_errors.is_transient(error.value)


def test_a_file_that_was_removed_is_waited_for_and_another_one_in_its_place_is_reported(tmp_path):
  made = Registry(f'sqlite:///{(file := tmp_path / "registry.db")}', patience_s=0)
  made.add_tasks(train(('0', 0)))
  file.rename(tmp_path / 'moved')
  with pytest.raises(Away, match=f'No such file or directory: .{file}'):
    made.tasks()
  assert not file.exists()
  (tmp_path / 'moved').rename(file)
  assert len(made.tasks()) == 1
  file.write_bytes(file.rename(tmp_path / 'moved').read_bytes())
  with pytest.raises(database_errors.Unusable, match=f'{file} was replaced by another file: start this process again'):
    made.tasks()
  made.close()


# -- a clock that was ahead, and was set back since


def set_ahead(url, seconds, table, **columns):
  """Has columns of all rows say what they would if the clock had been ahead when they were written."""
  engine = database.connect(url)
  with engine.begin() as connection:
    values = {name: table.c[name] + seconds if ahead else table.c[name] for name, ahead in columns.items()}
    connection.execute(sa.update(table).values(**values))
  engine.dispose()


def test_a_claim_made_while_the_clock_was_ahead_is_taken_over_at_once(db, url):
  db.add_tasks(train(('0', 0)))
  killed = db.claim('a', ['train'])
  assert db.claim('b', ['train']) is None
  set_ahead(url, 3600, registry_schema.TASKS, lease=True, claimed=True)
  assert db.claim('b', ['train']).fence == killed.fence + 1
  with pytest.raises(Lost):
    db.heartbeat(killed)


def test_a_longer_lease_than_ours_is_left_alone(db, connect):
  db.add_tasks(train(('0', 0)))
  connect(lease_s=200).claim('a', ['train'])
  assert db.claim('b', ['train']) is None


def test_what_was_ready_while_the_clock_was_ahead_waits_for_its_holder_no_longer(db, url):
  db.add_tasks([NewTask('train', '0', 0, holder='gone')])
  assert db.claim('b', ['train']) is None
  set_ahead(url, 3600, registry_schema.TASKS, since=True)
  assert db.claim('b', ['train']).key == '0'


def test_a_sign_of_life_from_the_future_is_an_old_one(db, url):
  db.beat('w', 'worker', {})
  set_ahead(url, 3600, registry_schema.ROLES, seen=True)
  assert 3590 < db.roles()[0]['silent_s'] < 3610


def test_a_duration_over_a_clock_that_was_set_back_does_not_count(db, url):
  db.add_tasks(train(('0', 0)))
  db.complete(db.claim('a', ['train']), [])
  set_ahead(url, 3600, registry_schema.TASKS, claimed=True)
  assert db.durations('train', 9) == []
