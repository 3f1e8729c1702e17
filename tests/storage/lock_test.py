"""Locks: one run in a workdir, one process of a machine in a directory; both end with their process."""

import multiprocessing
import os
import signal

import pytest

from dipaco_jax.core.errors import InputError
from dipaco_jax.storage import lock

FORK = multiprocessing.get_context('forkserver')


def holding(workdir, held):
  with lock.hold(workdir):
    held.set()
    signal.pause()


def test_a_second_run_is_told_who_holds_the_workdir(tmp_path, monkeypatch):
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


def append_slowly(folder, name):
  with lock.locked(folder):
    for _ in range(200):
      with open(folder / 'lines', 'a') as f:
        f.write(f'{name}\n')


def test_one_process_at_a_time_is_in_a_locked_directory(tmp_path):
  processes = [FORK.Process(target=append_slowly, args=(tmp_path, name)) for name in 'abc']
  for process in processes:
    process.start()
  for process in processes:
    process.join()
  lines = (tmp_path / 'lines').read_text().split()
  assert sorted(lines[::200]) == list('abc') and lines == [name for name in lines[::200] for _ in range(200)]
  assert os.listdir(tmp_path) == ['lines']
