"""Turns of SQLite's writers: in order, and a holder that is stopped is named instead of waited for without a word."""

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from registries import train

from dipaco_jax.core.errors import Unavailable
from dipaco_jax.registry import writer_turns
from dipaco_jax.registry.registry import Registry
from dipaco_jax.storage import lock

HOLD = """
import sys, time
from dipaco_jax.registry import writer_turns
with writer_turns.writer_turn(sys.argv[1]):
  print('held', flush=True)
  time.sleep(60)
"""


@pytest.fixture
def stopped(tmp_path):
  """A process that is stopped in its turn to write into registry.db."""
  with subprocess.Popen([sys.executable, '-c', HOLD, f'{tmp_path}/registry.db'], stdout=subprocess.PIPE) as process:
    assert process.stdout.readline() == b'held\n'
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    yield process
    process.kill()


def test_a_holder_that_is_stopped_is_named_and_waited_for_with_a_limit(tmp_path, stopped, monkeypatch, caplog):
  monkeypatch.setattr(writer_turns, 'TURN_S', 0.1)
  with caplog.at_level(logging.WARNING), pytest.raises(Unavailable, match='does not answer') as error:
    Registry(f'sqlite:///{tmp_path}/registry.db', patience_s=0.15)
  words = f'process {stopped.pid} is stopped (continue it: kill -CONT {stopped.pid}, or end it'
  assert words in str(error.value) and f'the registry does not answer: {words}' in caplog.text
  stopped.kill()
  began = time.monotonic()
  made = Registry(f'sqlite:///{tmp_path}/registry.db')
  made.add_tasks(train(('0', 0)))
  assert time.monotonic() - began < 5
  made.close()


def test_all_who_wait_are_told(tmp_path, stopped, monkeypatch):
  """Whoever is next, and who waits behind that one."""
  monkeypatch.setattr(writer_turns, 'TURN_S', 0.3)
  errors: list[str] = []

  def wait():
    try:
      with writer_turns.writer_turn(f'{tmp_path}/registry.db'):
        pass
    except lock.Held as e:
      errors.append(str(e))

  threads = [threading.Thread(target=wait) for _ in range(3)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(5)
  assert len(errors) == 3 and any(str(stopped.pid) in words for words in errors)
  began = time.monotonic()
  flags = os.O_WRONLY | os.O_CREAT
  with lock.locked(f'{tmp_path}/registry.db.next', flags, 1.0), pytest.raises(lock.Held):
    writer_turns.writer_turn(f'{tmp_path}/registry.db').__enter__()
  assert time.monotonic() - began < 5


def test_a_turn_comes_in_order_and_what_fails_in_it_ends_it(tmp_path):
  file, order = f'{tmp_path}/registry.db', []

  def take(number: int):
    with writer_turns.writer_turn(file):
      order.append(number)

  threads = [threading.Thread(target=take, args=(i,)) for i in range(3)]
  with pytest.raises(KeyError), writer_turns.writer_turn(file):
    for thread in threads:
      thread.start()
      time.sleep(0.05)
    raise KeyError
  for thread in threads:
    thread.join(5)
  assert order == [0, 1, 2]
  assert lock.find_holder(f'{file}.lock') == 0


def test_a_file_system_without_locks_is_an_error(tmp_path, monkeypatch):
  def flock(handle, how):
    raise BlockingIOError if how & lock.fcntl.LOCK_NB else OSError(errno.ENOLCK, 'no locks')

  monkeypatch.setattr(lock.fcntl, 'flock', flock)
  with pytest.raises(OSError, match='no locks'), writer_turns.writer_turn(f'{tmp_path}/registry.db'):
    pass


def test_who_waits_for_a_directory_is_told_for_whom(tmp_path, monkeypatch, caplog):
  monkeypatch.setattr(lock, 'SAY_S', 0.05)
  monkeypatch.setattr(lock, 'PATIENCE_S', 0.1)
  message = f'process {os.getpid()} holds the lock of {tmp_path}, for more than'
  with lock.in_directory(tmp_path), pytest.raises(OSError, match=message):
    lock.in_directory(tmp_path).__enter__()
  assert caplog.text.count(f'waiting for a lock: process {os.getpid()} holds the lock of {tmp_path}') == 1
  with lock.in_directory(tmp_path):
    pass
