"""Limits of tokens: requests a second, bytes a day, and requests without a token."""

import pytest

from dipaco_jax.gateway.limits import DAY_S, Limits, Meter
from dipaco_jax.gateway.refusals import Refused


class Clock:
  now = 0.0

  def __call__(self) -> float:
    return self.now


@pytest.fixture
def meter():
  clock = Clock()
  return Meter(Limits(2.0, 1.0, 1000.0, 1, 1, 1), clock)


def test_requests_come_back_with_time(meter):
  for _ in range(8):
    meter.request('a')
  with pytest.raises(Refused, match='too many requests a second'):
    meter.request('a')
  meter.request('b')
  meter.clock.now = 0.6
  meter.request('a')
  with pytest.raises(Refused):
    meter.request('a')


def test_bytes_of_a_day(meter):
  meter.transfer('a', 900)
  with pytest.raises(Refused, match='too many bytes a day') as e:
    meter.transfer('a', 200)
  assert e.value.status == 429
  meter.clock.now = DAY_S / 8
  meter.transfer('a', 200)


def test_requests_without_a_token_are_limited_together(meter):
  for _ in range(4):
    assert meter.may_ask('unknown')
    meter.fail()
  assert not meter.may_ask('unknown')
  meter.clock.now = 1.1
  assert meter.may_ask('unknown')


def test_nobody_locks_out_those_whose_tokens_are_valid(meter):
  meter.succeed('valid')
  for _ in range(4):
    meter.fail('unknown')
  assert meter.may_ask('valid')
  assert not meter.may_ask('unknown')
  meter.fail('valid')  # it was revoked since
  assert not meter.may_ask('valid')
