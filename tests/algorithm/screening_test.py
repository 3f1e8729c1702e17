"""Which outer gradients count: by hand, and what is said of those that do not."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from dipaco_jax.algorithm import modules, screening
from dipaco_jax.core.errors import Diverged

SPECS = (('shared', 'x', ()), ('low', 'y', ('a',)), ('own', 'z', ('a', 'b')))
LAYOUT = modules.make_layout({'a': 2, 'b': 3}.items(), SPECS, ('x', 'y', 'z'))
EVERYONE, NOBODY = np.ones((2, 3), bool), np.zeros((2, 3), bool)


def but(*paths):
  """Everyone but these."""
  return ~np.isin(np.arange(6), paths).reshape(2, 3)


@pytest.mark.parametrize(
  'moved, usual, limit, plausible',
  [
    (10.0, 1.0, 10, True), (10.1, 1.0, 10, False), (1e30, 1.0, 0, True), (1e30, math.inf, 10, True),
    (math.nan, math.inf, 10, False), (math.inf, math.inf, 10, False), (math.nan, 1.0, 0, False), (0.0, 0.0, 10, True),
  ],
)  # fmt: skip
def test_a_move_is_plausible_up_to_so_many_times_the_usual_one_and_where_it_is_finite(moved, usual, limit, plausible):
  assert bool(screening.is_plausible(jnp.float32(moved), jnp.float32(usual), jnp.float32(limit))) == plausible


def test_the_usual_move_goes_halfway_to_the_mean_of_the_paths_and_not_below_a_tenth_of_the_first():
  assert screening.first_usual(16, 'adamw') == 4 and screening.first_usual(16, 'sgd') == math.inf
  after = lambda *args: float(screening.next_usual(*map(jnp.float32, args[:3]), args[3]))  # noqa: E731
  assert after(4, 6, 3, 4.0) == 3 and after(4, 0, 0, 4.0) == 4, 'without paths it stays'
  assert after(0.5, 0.1, 1, 4.0) == pytest.approx(0.4)
  assert after(math.inf, 6, 3, math.inf) == 2 and after(2, 0, 1, math.inf) == 1, 'of SGD nothing is known at first'


def test_the_sum_of_rates_is_that_of_the_steps_of_the_phase():
  rate = lambda s: jnp.where(s < 5, 1.0, 0.25)  # noqa: E731
  assert screening.sum_of_rates(rate, jnp.int32(3), jnp.int32(4)) == 2.5
  nothing = screening.sum_of_rates(lambda s: 0.0 * s, jnp.int32(3), jnp.int32(4))
  assert 5 / nothing == 0 and jnp.isnan(jnp.inf / nothing), 'it divides what compression has left'


def test_the_reason_names_the_level_and_how_far_it_went():
  usual = {'low': 1.0, 'high': 2.0}
  assert (
    screening.exclusion_reason({'low': 1.0, 'high': math.nan}, usual, 10)
    == 'its outer gradient is not finite (level high)'
  )
  words = screening.exclusion_reason({'low': 30.0, 'high': 80.0}, usual, 10)
  assert '40 times as long' in words and 'level high' in words and 'config.outer.exclude_above=10' in words


def test_phases_in_a_row_are_counted_over_those_that_a_path_trains_in():
  excluded = np.array([True, True, False, False])
  trained = np.array([True, False, True, False])
  assert screening.count_in_a_row([2, 2, 2, 2], trained, excluded) == [3, 2, 0, 2]


def test_training_goes_on_while_every_shared_module_has_a_path_left():
  for excluded in (NOBODY, ~but(0), ~but(0, 1, 5)):
    screening.check_paths(LAYOUT, EVERYONE, excluded, [0] * 6, 3)
  assert screening.module_without_paths(LAYOUT, EVERYONE, ~but(0)) is None, "a path's own module rests"


@pytest.mark.parametrize(
  'heard, excluded, in_a_row, words',
  [
    (EVERYONE, EVERYONE, 0, 'no path has'),
    (EVERYONE, ~but(0, 1, 2), 0, 'no path of module low/0'),
    (but(0), ~but(1, 2), 0, 'no path of module low/0'),
    (~but(0), ~but(0), 0, 'no path has'),
    (EVERYONE, ~but(4), 4, 'path 4 was excluded in 4 phases in a row, more than config.outer.max_excluded=3'),
  ],
)
def test_training_stops_where_it_is_no_use_to_go_on(heard, excluded, in_a_row, words):
  with pytest.raises(Diverged, match=words):
    screening.check_paths(LAYOUT, heard, excluded, [0] * 4 + [in_a_row, 0], 3)


@pytest.mark.parametrize(
  'x, sound', [(1.0, True), (900.0, True), (1100.0, False), (-1100.0, False), (1e38, False), (math.nan, False)]
)
def test_modules_are_sound_up_to_a_root_mean_square(x, sound):
  assert bool(screening.is_sound([jnp.ones(3), jnp.full((2, 2), x)])) == sound


def test_an_outer_step_that_is_not_sound_stops_training_and_names_the_module():
  sound = {'shared': np.array(True), 'low': np.array([True, False]), 'own': EVERYONE}
  with pytest.raises(Diverged, match='module low/1'):
    screening.check_modules(LAYOUT, sound)
