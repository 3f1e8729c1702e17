"""Backups of the registry: lost or damaged tables are restored from them, and nothing else is changed."""

import os
import pathlib
import subprocess
import sys

import pytest
import registries
import slow
import sqlalchemy as sa
from registries import train
from repository import ROOT

from dipaco_jax.core.errors import InputError
from dipaco_jax.registry import __main__ as command, database, registry_backup, registry_schema
from dipaco_jax.registry.registry import Fact, Lost, NewTask, Registry
from dipaco_jax.storage import object_store
from dipaco_jax.storage.remedies import ISLANDS_MARK

server, url, connect, db = registries.server, registries.url, registries.connect, registries.db


@pytest.fixture
def place(tmp_path) -> object_store.Storage:
  made = object_store.open_storage(str(tmp_path / 'run'))
  made.write(ISLANDS_MARK, b'a1')
  return made


@pytest.fixture
def begun(db) -> Registry:
  """A run with tasks in every state, one fact that waits for its consequences, and more than a chunk of rows."""
  db.put([Fact('config', '', 0, '', 'f', {'id': 'a1', 'text': 'a\u2028\n"b'})])
  db.mark_scheduled(db.facts('config'))
  db.add_tasks([*train(*((str(i), 0) for i in range(5))), NewTask('outer', 'x', 1, 'waiting', 'mine')])
  db.complete(db.claim('gone', ['train']), [Fact('checkpoint', '0', 0, 'o', 'f', {'loss': 1.5, 'objects': {}})])
  db.heartbeat(db.claim('w', ['train']))
  db.put([Fact('excluded', str(i), 7, '', 'f', {}) for i in range(1200)])
  db.beat('w', 'worker', {})
  return db


def content(url: str) -> dict[str, list]:
  engine = database.connect(url)
  with engine.connect() as connection:
    found = {
      name: sorted(map(repr, connection.execute(sa.select(table)).mappings()))
      for name, table in registry_backup.TABLES.items()
    }
  engine.dispose()
  return found


def lose(url: str, how: str):
  """Has the database go, or parts of it."""
  if file := database.sqlite_file(url):
    if how == 'all':
      file.unlink()
      return
    if how == 'pages':
      data = bytearray(file.read_bytes())
      data[4096 * 3 :] = os.urandom(len(data) - 4096 * 3)
      file.write_bytes(data)
      return
  engine = database.connect(url)
  with engine.begin() as connection:
    for table in registry_schema.METADATA.sorted_tables if how == 'all' else [registry_schema.TASKS]:
      connection.execute(sa.text(f'DROP TABLE {table.name}'))
  engine.dispose()


@pytest.mark.parametrize('how', slow.but(['all', 'table', 'pages'], 'table'))
def test_a_registry_that_is_lost_is_that_of_the_backup_again(how, begun, url, place):
  if how == 'pages' and url.startswith('postgresql'):
    pytest.skip('pages of a server are not ours to damage')
  running = begun.claim('w', ['train'])
  registry_backup.write(begun, place)
  before = content(url)
  begun.close()
  lose(url, how)
  with pytest.raises(InputError, match=r'the registry .* (is missing|is damaged .*|has no tables .*): stop all roles'):
    command.check(url, place)
  assert 'start the roles again' in command.rebuild(url, place)
  if (file := database.sqlite_file(url)) and how != 'all':
    assert file.with_name('registry.db.damaged').exists(), 'it is kept for whoever wants to look'
  after = content(url)
  assert after['dipaco_facts'] == before['dipaco_facts'] and len(after['dipaco_tasks']) == 6
  again = Registry(url)
  assert {task['state'] for task in again.tasks() if task['kind'] == 'train'} == {'ready', 'done'}
  assert [fact.kind for fact in again.unscheduled(1)] == ['checkpoint']
  claims = [again.claim('b', ['train']) for _ in range(4)]
  assert '1' in {task.key for task in claims} and not any(task.is_first for task in claims)
  for _ in range(3):  # a worker of before whose claim the backup knows, or does not
    with pytest.raises(Lost):
      again.heartbeat(running)
    running = running._replace(fence=running.fence + 1)
  again.add_tasks(train(('new', 1)))  # gets an id of its own
  again.close()
  assert command.check(url, place).startswith('the registry is intact; newest backup: registry_backups/00000001-')
  with pytest.raises(InputError, match='the registry is intact: nothing has to be rebuilt'):
    command.rebuild(url, place)


def test_the_newest_backup_that_is_whole_is_used(tmp_path, place, caplog):
  url = f'sqlite:///{tmp_path}/registry.db'
  db = Registry(url)
  db.put([Fact('config', '', 0, '', 'f', {'id': 'a1'})])
  first = registry_backup.write(db, place)
  db.put([Fact('checkpoint', '0', 0, '', 'f', {})])
  second, third = registry_backup.write(db, place), registry_backup.write(db, place)
  assert place.names(registry_backup.FOLDER) == [second, third] and first not in (second, third)
  place.local_path(third).write_bytes(place.local_path(third).read_bytes()[:-9])
  lose(url, 'all')
  assert registry_backup.rebuild(url, place).name == second and f'{third} is corrupt' in caplog.text
  again = Registry(url)
  assert len(again.facts('checkpoint')) == 1
  again.close()
  assert not [*tmp_path.glob('*rebuilt*')]


def test_what_is_not_a_backup_of_this_run_is_not_used(tmp_path, place):
  url = f'sqlite:///{tmp_path}/registry.db'
  with pytest.raises(InputError, match='has no backup of its registry, which a monitor writes'):
    registry_backup.rebuild(url, place)
  db = Registry(url)
  db.put([Fact('config', '', 0, '', 'f', {'id': 'another'})])
  registry_backup.write(db, place)
  with pytest.raises(InputError, match='is that of another run, another: name the database of this one'):
    command.check(url, place)
  lose(url, 'all')
  with pytest.raises(InputError, match='has no backup'):
    registry_backup.rebuild(url, place)
  assert not pathlib.Path(f'{tmp_path}/registry.db').exists() and not [*tmp_path.glob('*rebuilt*')]


ABOUT = b'{"schema": %d, "id": "a1", "time": 1.0}\n' % registry_schema.VERSION


@pytest.mark.parametrize('text', [b'', b'{}', ABOUT, ABOUT + b'{"rows": 3}\n', b'\xff'])
def test_a_malformed_backup_is_passed_over(text, tmp_path, place):
  import gzip
  import hashlib

  for data in text, gzip.compress(text):
    name = f'{registry_backup.FOLDER}/00000001-{hashlib.sha256(data).hexdigest()}.jsonl.gz'
    place.write(name, data)
  with pytest.raises(InputError, match='has no backup'):
    registry_backup.rebuild(f'sqlite:///{tmp_path}/registry.db', place)


def test_the_command_rebuilds_and_says_what_it_needs(tmp_path, place):
  db = Registry(f'sqlite:///{tmp_path}/run/registry.db')
  db.put([Fact('config', '', 0, '', 'f', {'id': 'a1'})])
  db.close()

  def run(*words: str) -> tuple[int, str]:
    program = [sys.executable, '-m', 'dipaco_jax', 'registry', *words]
    done = subprocess.run(
      program, capture_output=True, text=True, timeout=60, env=os.environ | {'PYTHONPATH': str(ROOT)}
    )
    return done.returncode, done.stdout + done.stderr

  where = f'--workdir={tmp_path}/run'
  assert run('backup', where)[0] == 0
  lose(f'sqlite:///{tmp_path}/run/registry.db', 'all')
  status, said = run(where, 'check')
  assert status == 2 and said.startswith('dipaco_jax: the registry ') and len(said.splitlines()) == 1
  assert 'rebuild' in said
  status, said = run('rebuild', where)
  assert status == 0 and said.startswith('rebuilt from registry_backups/00000001-')
  assert run('check', where)[0] == 0


def test_the_command_names_what_is_missing(tmp_path, monkeypatch):
  monkeypatch.delenv('DIPACO_REGISTRY', raising=False)
  with pytest.raises(InputError, match='is in a bucket: name its --registry'):
    command.find_url('s3://bucket/run', None)
  assert command.find_url(str(tmp_path), None) == f'sqlite:///{tmp_path}/registry.db'
  with pytest.raises(InputError, match=r'has no run of islands \(registry.id is missing\)'):
    command.check('sqlite:////x.db', object_store.open_storage(str(tmp_path)))
