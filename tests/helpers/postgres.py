"""A PostgreSQL server of the tests' own, which they may kill."""

import contextlib
import glob
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time

import psutil
import psycopg
import pytest

FOLDERS = '/usr/lib/postgresql/*/bin:/usr/pgsql-*/bin:/opt/homebrew/opt/postgresql*/bin'  # not on PATH in Debian


def programs() -> pathlib.Path | None:
  """The folder of initdb and postgres, the newest version's."""
  found = [name for pattern in FOLDERS.split(':') for name in sorted(glob.glob(f'{pattern}/initdb'))]
  found += [name] if (name := shutil.which('initdb')) else []
  return pathlib.Path(found[-1]).resolve().parent if found else None


class Server:
  """In a temporary folder, on a socket there and no port; as another user for root, whom PostgreSQL refuses."""

  def __init__(self):
    self._programs = programs()
    if not self._programs:
      pytest.skip('PostgreSQL is not installed: no initdb')
    self._folder = pathlib.Path(tempfile.mkdtemp(prefix='pg'))  # a socket's path has 107 characters at most
    self._user = None
    if os.geteuid() == 0:
      self._user = 'postgres'
      shutil.chown(self._folder, self._user)
    self._run('initdb', '-U', 'postgres', '-A', 'trust', '--no-sync', '--locale=C.UTF-8')
    self._databases = 0
    self.start()

  def _run(self, program: str, *arguments: str):
    command = [str(self._programs / program), '-D', str(self._folder / 'data'), *arguments]
    with open(self._folder / 'log', 'a') as log:
      done = subprocess.run(command, stdout=log, stderr=log, user=self._user, cwd=self._folder)
    assert not done.returncode, (self._folder / 'log').read_text()

  def url(self, database: str) -> str:
    return f'postgresql://postgres@/{database}?host={self._folder}'

  def new_database(self) -> str:
    """Its URL. Truly a schema of the one database, which is made at once."""
    self._databases += 1
    with psycopg.connect(self.url('postgres'), autocommit=True) as connection:
      connection.execute(f'CREATE SCHEMA d{self._databases}')
    return self.url('postgres') + f'&options=-csearch_path%3Dd{self._databases}'

  @property
  def socket(self) -> pathlib.Path:
    return self._folder / '.s.PGSQL.5432'

  def by_port(self, url: str, port: int) -> str:
    """The URL of the same database, for those who come by a port of this machine that leads to the socket."""
    return url.replace(f'host={self._folder}', f'host=127.0.0.1&port={port}')

  def start(self):
    options = f"-k {self._folder} -c listen_addresses='' -c fsync=off"  # processes die here, the machine does not
    self._run('pg_ctl', '-w', '-t', '60', '-l', str(self._folder / 'server'), '-o', options, 'start')

  def stop(self):
    self.kill()
    shutil.rmtree(self._folder)

  def kill(self):
    """SIGKILL, as from the system that runs out of memory. What it leaves is removed, as by those who start it again.

    Its processes end by themselves when they notice; until then none may start on the same files. The lock files stay,
    and name a process that may be another's by then.
    """
    pid = int((self._folder / 'data' / 'postmaster.pid').read_text().split()[0])
    left = psutil.Process(pid).children(recursive=True)
    os.kill(pid, signal.SIGKILL)
    assert not psutil.wait_procs(left, timeout=30)[1]
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
      time.sleep(0.01)
    for file in [self._folder / 'data' / 'postmaster.pid', *self._folder.glob('.s.PGSQL.*')]:
      with contextlib.suppress(FileNotFoundError):
        file.unlink()
