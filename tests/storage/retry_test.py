"""Repeated calls: as long as their errors are transient and patience lasts, and no longer."""

import threading
import time

import pytest

from dipaco_jax.storage import retry


class Clock:
  """Time that passes while somebody sleeps."""

  def __init__(self):
    self.now, self.waits = 0.0, []

  def monotonic(self) -> float:
    return self.now

  def sleep(self, seconds: float):
    self.waits.append(seconds)
    self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
  made = Clock()
  monkeypatch.setattr(retry, 'time', made)
  return made


def failing(*errors: Exception):
  """A call that raises these one after another, then returns how often it was made."""
  made = []

  def action() -> int:
    made.append(0)
    if len(made) <= len(errors):
      raise errors[len(made) - 1]
    return len(made)

  return action


def test_waits_double_up_to_the_longest(clock, caplog):
  errors = [OSError(f'away\nand more {i}') for i in range(12)]
  assert retry.call('the place', failing(*errors), lambda e: True, 600) == 13
  for attempt, wait_s in enumerate(clock.waits):
    longest = min(retry.LONGEST_WAIT_S, retry.FIRST_WAIT_S * 2**attempt)
    assert longest / 2 <= wait_s <= longest
  assert caplog.messages[0].startswith('the place: away; the next attempt is in 0.')


def test_an_error_that_is_not_transient_is_raised_at_once(clock):
  with pytest.raises(KeyError):
    retry.call('x', failing(OSError(), KeyError('k')), lambda e: isinstance(e, OSError), 600)
  assert len(clock.waits) == 1


def test_the_last_error_is_raised_when_patience_is_over(clock):
  with pytest.raises(OSError, match='still away'):
    retry.call('x', failing(*[OSError('still away')] * 100), lambda e: True, 60)
  assert clock.now == pytest.approx(60)


def test_an_action_is_called_again_and_again_until_the_block_ends():
  calls, twice = [], threading.Event()

  def action():
    calls.append(time.monotonic())
    if len(calls) == 2:
      twice.set()

  with retry.every(0.01, 'asking', action):
    assert twice.wait(10)
  count = len(calls)
  time.sleep(0.1)
  assert len(calls) == count >= 2


def test_an_action_that_fails_is_reported_and_called_again(caplog):
  calls, again = [], threading.Event()

  def action():
    calls.append(0)
    if len(calls) == 1:
      raise ConnectionError('the database is away\nand more')
    again.set()

  with retry.every(0.01, 'asking', action):
    assert again.wait(10)
  assert caplog.messages == ['asking: ConnectionError: the database is away; retrying in 0.01 s']
