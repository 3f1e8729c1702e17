"""A hub and machines that join it: commands in processes of their own, on this machine or in network namespaces."""

import contextlib
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Self

import ports
import quick_xla
import repository

PATIENCE_S = 600  # for a process, on a machine that does much else; then it hangs
LINE = re.compile(r'python -m dipaco_jax\.join (\S+) --token=(\S+)')


def environment(**variables: str) -> dict[str, str]:
  """Of processes that have one device, and compile quickly."""
  path = os.pathsep.join([str(repository.ROOT), os.environ.get('PYTHONPATH', '')])
  return os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': quick_xla.on(1), 'PYTHONPATH': path} | variables


class Hub:
  """A hub in a process of its own; `inside`: the command that runs another one in a network namespace."""

  def __init__(
    self, config: pathlib.Path, workdir: pathlib.Path, *options: str, address: str = '127.0.0.1',
    inside: Sequence[str] = (), port: int = 0,
  ):  # fmt: skip
    self.port = port or ports.free_port()
    self.address, self.inside = address, list(inside)
    self.command = [sys.executable, '-m', 'dipaco_jax.hub', f'--config={config}', f'--workdir={workdir}']
    self.command += [f'--address={address}', f'--port={self.port}', *options]
    self.log = workdir.with_name('hub.log')

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_):
    end(self.process)

  def start(self) -> tuple[str, str]:
    """Starts it for the first time; returns the address and the token of the line that it prints."""
    self.restart()
    return self.read_line()

  def read_line(self) -> tuple[str, str]:
    """Waits for the next line with which others join; returns its address and its token."""
    line = self.process.stdout.readline()
    match = LINE.match(line)
    assert match, f'{line}{self.log.read_text()}'
    return match[1].strip("'"), match[2]

  def restart(self):
    """Starts it, when the port is free."""
    with contextlib.suppress(OSError):
      while socket.create_connection((self.address, self.port), 1):
        time.sleep(0.2)
    with open(self.log, 'ab') as log:
      self.process = subprocess.Popen(
        [*self.inside, *self.command], stdout=subprocess.PIPE, stderr=log, text=True, env=environment()
      )

  def finish(self, status: int = 0) -> str:
    """Waits for its end; returns what it printed."""
    out, _ = self.process.communicate(timeout=PATIENCE_S)
    assert self.process.returncode == status, self.log.read_text()[-4000:]
    return out


@contextlib.contextmanager
def joined(address: str, token: str, *options: str, inside: Sequence[str] = ()) -> Iterator[subprocess.Popen]:
  """Joins as another machine does: with a folder for temporary files of its own, and the token in its environment."""
  command = [*inside, sys.executable, '-m', 'dipaco_jax.join', address, *options]
  with tempfile.TemporaryDirectory(prefix='joined-', ignore_cleanup_errors=True) as folder:
    env = environment(DIPACO_TOKEN=token, TMPDIR=folder)
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
      yield process
    finally:
      end(process)


def end(process: subprocess.Popen):
  """Ends a process that a test has left; those that it has started follow it."""
  process.kill()
  for stream in (process.stdout, process.stderr):
    if stream:
      stream.close()
  process.wait()
