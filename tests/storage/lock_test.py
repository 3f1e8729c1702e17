"""Locks: one run in a workdir, one process of a machine in a directory; both end with their process."""

import concurrent.futures
import multiprocessing
import os
import signal
import time

import pytest

from dipaco_jax.core.errors import InputError
from dipaco_jax.storage import lock

FORK = multiprocessing.get_context('forkserver')


def holding(workdir, held):
  with lock.hold(workdir):
    held.set()
    signal.pause()


def test_the_error_of_a_second_run_names_the_holder_of_the_workdir(tmp_path, monkeypatch):
  monkeypatch.setattr(lock, 'HOLD_ATTEMPTS', 1)
  with lock.hold(tmp_path):
    assert lock.owner(tmp_path)['pid'] == os.getpid()
    with (
      pytest.raises(InputError, match=rf'workdir={tmp_path} is in use by process {os.getpid()} on'),
      lock.hold(tmp_path),
    ):
      pass
    assert lock.owner(tmp_path)['pid'] == os.getpid(), 'it is as it was'
  assert lock.owner(tmp_path) is None
  with lock.hold(tmp_path):
    pass


def test_a_lock_ends_with_its_process(tmp_path):
  held = FORK.Event()
  process = FORK.Process(target=holding, args=(tmp_path, held))
  process.start()
  assert held.wait(60) and lock.owner(tmp_path)['pid'] == process.pid
  process.kill()
  process.join()
  with lock.hold(tmp_path):
    assert lock.owner(tmp_path)['pid'] == os.getpid()


def test_nobody_holds_what_was_never_held(tmp_path):
  assert lock.owner(tmp_path) is None and os.listdir(tmp_path) == []


def test_one_at_a_time_is_in_a_locked_directory(tmp_path):
  """Threads, here: a lock is of its open file, so they exclude each other as processes do."""
  inside, seen = [], []

  def enter(name):
    with lock.in_directory(tmp_path):
      inside.append(name)
      time.sleep(0.02)
      seen.append([*inside])
      inside.pop()

  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    list(pool.map(enter, range(8)))
  assert sorted(seen) == [[name] for name in range(8)] and os.listdir(tmp_path) == []


def test_a_record_that_is_being_written_names_nobody(tmp_path, monkeypatch):
  monkeypatch.setattr(lock, 'HOLD_ATTEMPTS', 1)
  with lock.hold(tmp_path):
    (tmp_path / 'lock').write_text('{"pid": 1')
    assert lock.owner(tmp_path) == {}
    with pytest.raises(InputError, match='is in use by process None'), lock.hold(tmp_path):
      pass
