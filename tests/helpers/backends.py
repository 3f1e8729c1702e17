"""Where a test's runs of islands are: the registry in SQLite or PostgreSQL, objects in a folder or on S3."""

import contextlib
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator

import object_server
import postgres
import pytest
import sqlalchemy as sa

from dipaco_jax.islands import island
from dipaco_jax.registry import database, registry, registry_schema
from dipaco_jax.storage import object_store

NAMES = 'sqlite,folder', 'postgresql,folder', 'sqlite,s3', 'postgresql,s3'

FACTS = 'prepared', 'checkpoint', 'module', 'evaluation', 'round', 'finished'


class Backend:
  """Runs by the folder of this machine in which they work; with 'sqlite,folder' all of a run is there."""

  def __init__(self, name: str = NAMES[0], server: postgres.Server | None = None):
    self.name, self.server = name, server
    self.urls: dict[pathlib.Path, str] = {}

  def registry(self, place: pathlib.Path) -> str:
    if not self.server:
      return f'sqlite:///{place}/registry.db'
    if place not in self.urls:
      self.urls[place] = self.server.new_database()
    return self.urls[place]

  def storage(self, place: pathlib.Path) -> str:
    return f's3://{object_server.BUCKET}{place}' if self.name.endswith('s3') else str(place)

  def outcome(self, place: pathlib.Path) -> dict[str, tuple[str, str]]:
    """{name of a fact: (uri, sha256)} of all that a run has come to."""
    facts = registry.Registry(self.registry(place))
    found = [fact for kind in FACTS for fact in facts.facts(kind)]
    facts.close()
    return {f'{fact.kind} {fact.key} {fact.number}': (fact.uri, fact.sha256) for fact in found}

  def copy(self, source: pathlib.Path, place: pathlib.Path):
    """What a run in SQLite and a folder has come to, here."""
    shutil.copytree(source, place)
    if self.server:
      copy_rows(f'sqlite:///{source}/registry.db', self.registry(place))
    there, here = object_store.open_storage(str(source)), object_store.open_storage(self.storage(place))
    if here.local_path('') is None:
      shutil.rmtree(place / island.OBJECTS)
      for name in there.names(''):
        here.write(name, there.fetch(name))


def copy_rows(source: str, target: str):
  """Of all tables; tasks get new ids, in the same order."""
  registry.Registry(target).close()  # makes the tables
  there, here = database.connect(source), database.connect(target)
  with there.connect() as old, here.begin() as new:
    for table in (registry_schema.FACTS, registry_schema.TASKS, registry_schema.ROLES):
      columns = [column for column in table.c if column.name != 'id']
      if rows := old.execute(sa.select(*columns).order_by(*table.primary_key)).mappings().all():
        new.execute(sa.insert(table), [dict(row) for row in rows])
  there.dispose()
  here.dispose()


@contextlib.contextmanager
def opened(name: str) -> Iterator[Backend]:
  """With servers of its own, where it needs any."""
  with contextlib.ExitStack() as stack:
    server = None
    if name.startswith('postgresql'):
      server = postgres.Server()
      stack.callback(server.stop)
    if name.endswith('s3'):
      endpoint = stack.enter_context(object_server.s3_server())
      patch = stack.enter_context(pytest.MonkeyPatch.context())
      for variable, value in object_server.environment(endpoint).items():
        patch.setenv(variable, value)
    yield Backend(name, server)


@contextlib.contextmanager
def small_disk(folder: pathlib.Path, num_bytes: int, num_inodes: int = 10_000) -> Iterator[pathlib.Path]:
  """A file system of its own, for root; others skip the test."""
  folder.mkdir()
  command = ['mount', '-t', 'tmpfs', '-o', f'size={num_bytes},nr_inodes={num_inodes}', 'tmpfs', str(folder)]
  if os.getuid() or subprocess.run(command, capture_output=True).returncode:
    pytest.skip('only root may mount a small disk')
  try:
    yield folder
  finally:
    subprocess.run(['umount', '-l', str(folder)], check=True)
