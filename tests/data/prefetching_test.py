"""Prefetching keeps the order, is bounded, and ends with its iterator."""

import threading
import time

import pytest

from dipaco_jax.data import prefetching


def test_prefetch_runs_ahead_but_not_far():
  loaded = []
  stream = prefetching.prefetch(lambda i: loaded.append(i) or i * i, range(3, 9), depth=2)
  assert next(stream) == 9
  wait_for(lambda: loaded == [3, 4, 5])
  time.sleep(0.05)
  assert loaded == [3, 4, 5], 'at most two ahead'
  assert list(stream) == [16, 25, 36, 49, 64] and loaded == list(range(3, 9))
  assert list(prefetching.prefetch(str, [])) == []


def test_prefetch_loads_as_many_at_once_as_it_has_threads():
  both = threading.Barrier(2, timeout=60)
  assert list(prefetching.prefetch(lambda i: (both.wait(), i)[1], range(6), depth=2, threads=2)) == list(range(6))


def test_prefetch_passes_errors_on_and_ends_its_thread():
  def load(i):
    if i == 2:
      raise OSError('disk gone')
    return i

  stream = prefetching.prefetch(load, range(5))
  assert [next(stream), next(stream)] == [0, 1]
  with pytest.raises(OSError, match='disk gone'):
    next(stream)
  closed = prefetching.prefetch(load, range(3, 100))
  next(closed)
  closed.close()
  assert not [t for t in threading.enumerate() if t.name.startswith('prefetch')]


def wait_for(condition):
  deadline = time.monotonic() + 10
  while not condition() and time.monotonic() < deadline:
    time.sleep(0.001)
  assert condition()
