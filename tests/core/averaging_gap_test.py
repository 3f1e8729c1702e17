"""The averaging gap [2.6]."""

import contextlib
import itertools
import math

import pytest
import slow
import small
from holdout_rows import ROWS

from dipaco_jax.core import averaging_gap
from dipaco_jax.training import metrics_log, training_loop


def test_what_is_not_known_on_either_side_has_no_gap():
  found = averaging_gap.gaps([1.0, None, 2.0, math.nan, 1.0], [1.5, 1.0, None, 1.0, math.inf])
  assert found == [0.5, None, None, None, None]
  assert averaging_gap.mean(found) == 0.5 and averaging_gap.mean([None, None]) is None
  assert averaging_gap.mean([0.5, None, -0.25]) == pytest.approx(0.125)


def test_advice_is_given_where_the_gap_is_large_alone():
  assert averaging_gap.words(0.05) == 'averaging gap of +0.050 nats a token, a perplexity +5.1% by the outer step'
  large = averaging_gap.words(0.6)
  assert large.startswith('averaging gap of +0.600 nats a token, a perplexity +82.2% by the outer step; ')
  assert '--config.train.steps_per_phase' in large


FLAT = (('all', '.*', ('a', 'b')),)
SGD = {'outer': dict(optimizer='sgd', learning_rate=1.0, rescale=False)}


def phases(levels, devices: int, folder, stop=lambda: False) -> list[dict]:
  """Rows of a run's phases, every path measured on rows of its own."""
  made = small.make_programs(small.settings({'a': 2, 'b': 2}, levels, train=dict(phases=2), **SGD), devices)
  with contextlib.suppress(training_loop.Stopped):
    small.train(small.make_job(made, holdout=ROWS), folder, stop)
  return [row for row in metrics_log.read_rows(folder) if row['kind'] == 'phase']


@pytest.mark.parametrize('devices', slow.but([1, 4], 1, 4))
def test_the_loss_before_is_that_of_paths_that_share_nothing(devices, tmp_path):
  """Until the first outer step paths of a grid are what they are alone, where SGD with a rate of 1 takes them over."""
  grid, alone = (phases(levels, devices, tmp_path / name) for name, levels in (('g', small.MIXED_LEVELS), ('f', FLAT)))
  assert grid[0]['holdout_loss_before_by_path'] == pytest.approx(alone[0]['holdout_loss_by_path'], abs=1e-5)
  gaps = averaging_gap.gaps(grid[0]['holdout_loss_before_by_path'], grid[0]['holdout_loss_by_path'])
  known = [gap for gap in gaps if gap is not None]
  assert grid[0]['averaging_gap'] == pytest.approx(sum(known) / 3, abs=1e-12) and max(map(abs, known)) > 1e-3
  assert [row['averaging_gap'] for row in alone] == pytest.approx([0, 0], abs=1e-5)


def test_a_run_that_stops_between_turns_keeps_what_it_has_measured(tmp_path):
  expected = phases(small.MIXED_LEVELS, 1, tmp_path / 'whole')
  asked = itertools.count(1)
  for _ in range(3):
    found = phases(small.MIXED_LEVELS, 1, tmp_path / 'stopped', lambda: next(asked) in (3, 8))
  for name in ('holdout_loss_before_by_path', 'averaging_gap'):
    assert [row[name] for row in found] == [row[name] for row in expected]
