"""Locks in buckets: held while their process writes them, taken over from one that is gone, and lost to another."""

import time

import pytest

from dipaco_jax.buckets import bucket_lock
from dipaco_jax.core.errors import InputError
from dipaco_jax.storage import object_store


@pytest.fixture
def storage(tmp_path, monkeypatch):
  monkeypatch.setattr(bucket_lock, 'BEAT_S', 0.2)
  monkeypatch.setattr(bucket_lock, 'SILENCE_S', 1.5)
  return object_store.open_storage((tmp_path / 'place').as_uri())


def test_it_is_released_and_rejected_while_its_holder_is_running(storage):
  lost = []
  with bucket_lock.hold(storage, 'mine', lost.append):
    assert bucket_lock.holder(storage)['scratch'] == 'mine'
    other = bucket_lock.hold(storage, 'other', lost.append)
    with pytest.raises(InputError, match=r'is in use by process \d+ on'), other:
      pass
  assert bucket_lock.read(storage) is None and bucket_lock.holder(storage) is None and not lost
  with pytest.raises(KeyError), bucket_lock.hold(storage, 'mine', lost.append):
    raise KeyError
  assert bucket_lock.read(storage) is None


@pytest.mark.parametrize('scratch', ['the same', 'another'])
def test_one_of_a_killed_process_is_taken_over(storage, scratch, monkeypatch):
  monkeypatch.setattr(bucket_lock.retry, 'every', lambda *_: pytest.MonkeyPatch.context())  # it beats no more
  killed = bucket_lock.hold(storage, 'the same', print)
  killed.__enter__()
  started = time.monotonic()
  with bucket_lock.hold(storage, scratch, print):
    assert bucket_lock.read(storage)['scratch'] == scratch
  assert (time.monotonic() - started < 1) == (scratch == 'the same')


def test_a_holder_that_slept_too_long_gets_an_error(storage):
  lost = []
  with bucket_lock.hold(storage, 'mine', lost.append):
    there = bucket_lock.read(storage)
    storage.write('lock', bucket_lock.seals.dumps(there | {'process': 'another', 'host': 'island-2'}).encode())
    deadline = time.monotonic() + 20
    while not lost and time.monotonic() < deadline:
      time.sleep(0.01)
  assert 'island-2' in str(lost[0])
  assert bucket_lock.read(storage)['process'] == 'another'
