"""The causes on which a thread spends its time, with a simulated clock."""

import subprocess
import sys
import threading

import pytest

from dipaco_jax.processes import time_use
from dipaco_jax.processes.time_use import (
  CHECKPOINT,
  COMPILE,
  DATABASE,
  EVALUATE,
  INNER,
  INPUT,
  LOST,
  OTHER,
  OUTER,
  STAGES,
  START,
  STORAGE,
  doing,
)


class Time:
  now = 0.0

  def monotonic(self) -> float:
    return self.now

  def go(self, seconds: float):
    self.now += seconds


@pytest.fixture
def time(monkeypatch):
  time_use.end()  # an earlier test may have left a clock
  simulated = Time()
  monkeypatch.setattr(time_use, 'time', simulated)
  yield simulated
  time_use.end()


def spent(clock) -> dict[str, float]:
  return {cause: seconds for cause, seconds in clock.read().items() if seconds}


def test_time_counts_for_the_innermost_block_and_adds_up(time):
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


def test_all_time_of_a_replay_is_lost(time):
  clock = time_use.begin()
  clock.switch(OTHER)

  @doing(LOST)
  def replay():
    with doing(INNER), doing(STORAGE):
      time.go(3)

  replay()
  replay()
  assert spent(clock) == {LOST: 6} and clock.cause == OTHER


def test_the_first_call_counts_as_start(time):
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


def test_compilations_are_subtracted_from_their_cause_and_nested_ones_count_once(time):
  clock = time_use.begin()
  clock.switch(INNER)
  time.go(1)
  time.go(2)
  clock.has_compiled(2)  # part of the next compilation
  time.go(4)
  clock.has_compiled(6)
  time.go(8)
  clock.has_compiled(3)
  assert spent(clock) == {INNER: 6, COMPILE: 9}
  with doing(STAGES):  # compilations count for stages, too
    time.go(16)
    clock.has_compiled(16)
  assert spent(clock) == {INNER: 6, COMPILE: 9, STAGES: 16}


def test_waiting_for_input_counts_only_while_devices_are_idle(time):
  clock, are_busy = time_use.begin(), iter([False, True, False])
  clock.switch(INNER)

  def items():
    for seconds in (1, 2, 4):
      time.go(seconds)
      yield seconds

  found = []
  for item in time_use.fed(items(), lambda: next(are_busy)):
    found.append(item)
    time.go(8)
  assert found == [1, 2, 4] and spent(clock) == {INPUT: 5, INNER: 26}


def test_seconds_count_for_the_stage_in_which_they_were_spent(time):
  clock = time_use.begin(age_s=3)
  time_use.enter('pretrain', OTHER)  # ignored without places, as in islands
  assert spent(clock) == {START: 3} and clock.cause == START
  time.go(1)
  clock.has_places = True
  time_use.enter('tokenize', STAGES)
  time.go(2)
  time_use.enter('train', OTHER)
  with time_use.within('control', EVALUATE):
    time.go(4)
  time.go(8)
  found = {place: {c: s for c, s in seconds.items() if s} for place, seconds in clock.read_all().items()}
  assert found == {'tokenize': {START: 4, STAGES: 2}, 'train': {OTHER: 8}, 'control': {EVALUATE: 4}}


def test_only_time_of_earlier_processes_since_the_checkpoint_is_lost(time):
  clock = time_use.begin()
  clock.take({'train': {INNER: 10, COMPILE: 5, LOST: 2, STAGES: 4}, 'pretrain': {INNER: 7}})
  clock.enter('train', START)
  time.go(1)
  clock.lose_since({INNER: 6, COMPILE: 5, STAGES: 1})  # shards of a new round remain
  assert spent(clock) == {INNER: 6, COMPILE: 5, LOST: 6, STAGES: 4, START: 1}
  clock.switch(INNER)
  time.go(3)
  clock.lose_since({})  # a new round in this process continues from its own checkpoint
  assert spent(clock) == {INNER: 9, COMPILE: 5, LOST: 6, STAGES: 4, START: 1}
  assert clock.read_all()['pretrain'][INNER] == 7


def test_time_that_only_the_checkpoint_has_is_not_lost(time):
  clock = time_use.begin()
  clock.take({'train': {INNER: 10, LOST: 50}})  # an older note; LOST has been added since
  clock.enter('train', START)
  clock.lose_since({INNER: 40, COMPILE: 5})
  assert spent(clock) == {INNER: 40, COMPILE: 5, LOST: 15}


def test_goodput_is_the_share_of_steps_in_training_time():
  found = {INNER: 6.0, OUTER: 1.0, CHECKPOINT: 2.0, LOST: 5.0, STAGES: 100.0}
  assert time_use.goodput(found) == 0.5 and time_use.goodput({}) is None and time_use.goodput({STAGES: 1.0}) is None


def test_the_age_of_a_process_begins_before_its_first_line():
  program = 'import time; began = time.time(); from dipaco_jax.processes import time_use; time.sleep(0.3); '
  program += 'print(time_use.process_age_s() - (time.time() - began))'
  done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
  assert -0.02 <= float(done.stdout) < 20


def test_overlapping_busy_times_count_once(time):
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
