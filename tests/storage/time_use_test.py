"""What a thread's time is spent on, by a clock that the test moves."""

import threading

import pytest

from dipaco_jax.storage import time_use
from dipaco_jax.storage.time_use import DATABASE, INNER, OTHER, REPLAY, START, STORAGE, doing


class Time:
  now = 0.0

  def monotonic(self) -> float:
    return self.now

  def go(self, seconds: float):
    self.now += seconds


@pytest.fixture
def time(monkeypatch):
  found = Time()
  monkeypatch.setattr(time_use, 'time', found)
  yield found
  time_use.end()


def spent(clock) -> dict[str, float]:
  return {cause: seconds for cause, seconds in clock.read().items() if seconds}


def test_the_inner_of_nested_blocks_counts_and_all_adds_up(time):
  clock = time_use.begin()
  time.go(1)
  clock.switch(OTHER)
  with doing(INNER):
    time.go(2)
    with doing(DATABASE):
      time.go(4)
    time.go(8)
    assert spent(clock) == {START: 1, INNER: 10, DATABASE: 4}
  time.go(16)
  assert spent(clock) == {START: 1, INNER: 10, DATABASE: 4, OTHER: 16} and sum(spent(clock).values()) == time.now


def test_all_of_a_replay_is_the_replay_s(time):
  clock = time_use.begin()
  clock.switch(OTHER)

  @doing(REPLAY)
  def replay():
    with doing(INNER), doing(STORAGE):
      time.go(3)

  replay()
  replay()
  assert spent(clock) == {REPLAY: 6} and clock.cause == OTHER


def test_what_is_done_for_the_first_time_is_a_start(time):
  clock = time_use.begin()
  clock.switch(OTHER)
  for seconds in (5, 1, 1):
    with doing(INNER, first='step'):
      time.go(seconds)
  assert spent(clock) == {START: 5, INNER: 2}


def test_an_error_ends_a_block_and_another_thread_is_not_measured(time):
  clock = time_use.begin()
  clock.switch(OTHER)
  with pytest.raises(KeyError), doing(INNER):
    raise KeyError
  assert clock.cause == OTHER

  def elsewhere():
    with doing(STORAGE):
      time.go(7)

  thread = threading.Thread(target=elsewhere)
  thread.start()
  thread.join()
  assert spent(clock) == {OTHER: 7}
  assert time_use.begin() is clock
  time_use.end()
  with doing(STORAGE):
    time.go(9)
  assert time_use.begin() is not clock


def test_busy_is_the_time_of_all_together(time):
  busy = time_use.Busy()
  with busy:
    time.go(1)
    with busy:
      time.go(2)
    time.go(4)
    assert busy.read() == 7
  time.go(8)
  with busy:
    time.go(16)
  assert busy.read() == 23
