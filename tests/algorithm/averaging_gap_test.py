"""The averaging gap [2.6]."""

import math

import pytest

from dipaco_jax.algorithm import averaging_gap


def test_what_is_not_known_on_either_side_has_no_gap():
  found = averaging_gap.gaps([1.0, None, 2.0, math.nan, 1.0], [1.5, 1.0, None, 1.0, math.inf])
  assert found == [0.5, None, None, None, None]
  assert averaging_gap.mean_gap(found) == 0.5 and averaging_gap.mean_gap([None, None]) is None
  assert averaging_gap.mean_gap([0.5, None, -0.25]) == pytest.approx(0.125)


def test_advice_is_given_where_the_gap_is_large_alone():
  words = 'averaging gap of +0.050 nats a token: the outer step makes perplexity 5.1% higher'
  assert averaging_gap.describe(0.05) == words
  large = averaging_gap.describe(0.6)
  assert large.startswith('averaging gap of +0.600 nats a token: the outer step makes perplexity 82.2% higher; ')
  assert '--config.train.steps_per_phase' in large
