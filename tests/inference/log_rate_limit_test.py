"""A limit on log lines, by place."""

import logging

import pytest

from dipaco_jax.inference.log_rate_limit import BURST, PERIOD_S, RateLimit


@pytest.fixture
def log():
  """(logger, lines that it has shown, its clock)."""
  shown, clock = [], [0.0]
  handler = logging.Handler()
  handler.emit = lambda record: shown.append(record.getMessage())
  handler.addFilter(RateLimit(lambda: clock[0]))
  logger = logging.Logger('test')  # noqa: LOG001 (one of the test's own)
  logger.addHandler(handler)
  return logger, shown, clock


def test_one_place_cannot_fill_the_log(log):
  logger, shown, clock = log
  for i in range(10_001):
    clock[0] = 0.0 if i < 10_000 else PERIOD_S + 1
    logger.warning('trouble %d', i)
  few = [f'trouble {i}' for i in range(BURST)]
  assert shown == [*few, f'trouble 10000 (and {10_000 - BURST} times more before)']


def test_other_places_and_lines_below_warning_are_shown(log):
  logger, shown, _ = log
  for i in range(100):
    logger.warning('trouble')
    logger.info('request %d', i)
  logger.warning('other trouble')
  assert len(shown) == BURST + 100 + 1 and shown[-1] == 'other trouble'
