"""Screening of outer gradients, compared with values computed by hand, and the reasons for exclusions."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from dipaco_jax.algorithm import modules, screening
from dipaco_jax.core.errors import Diverged

SPECS = (('shared', 'x', ()), ('low', 'y', ('a',)), ('own', 'z', ('a', 'b')))
LAYOUT = modules.make_layout({'a': 2, 'b': 3}.items(), SPECS, ('x', 'y', 'z'))
EVERYONE, NOBODY = np.ones((2, 3), bool), np.zeros((2, 3), bool)


def all_but(*paths):
  """Returns a mask of all paths but these."""
  return ~np.isin(np.arange(6), paths).reshape(2, 3)


@pytest.mark.parametrize(
  'moved, usual, limit, plausible',
  [
    (10.0, 1.0, 10, True), (10.1, 1.0, 10, False), (1e30, 1.0, 0, True), (1e30, math.inf, 10, True),
    (math.nan, math.inf, 10, False), (math.inf, math.inf, 10, False), (math.nan, 1.0, 0, False), (0.0, 0.0, 10, True),
  ],
)  # fmt: skip
def test_a_move_is_plausible_if_it_is_finite_and_within_a_multiple_of_the_usual_one(moved, usual, limit, plausible):
  assert bool(screening.is_plausible(jnp.float32(moved), jnp.float32(usual), jnp.float32(limit))) == plausible


def test_the_usual_move_is_averaged_with_that_of_the_paths_but_at_least_a_tenth_of_the_first():
  assert screening.first_usual(16, 'adamw') == 4 and screening.first_usual(16, 'sgd') == math.inf
  after = lambda *args: float(screening.next_usual(*map(jnp.float32, args[:3]), args[3]))  # noqa: E731
  assert after(4, 6, 3, 4.0) == 3 and after(4, 0, 0, 4.0) == 4, 'without paths it does not change'
  assert after(0.5, 0.1, 1, 4.0) == pytest.approx(0.4)
  assert after(math.inf, 6, 3, math.inf) == 2 and after(2, 0, 1, math.inf) == 1, 'SGD has no first usual move'


def test_rates_are_summed_over_the_steps_of_the_phase():
  rate = lambda s: jnp.where(s < 5, 1.0, 0.25)  # noqa: E731
  assert screening.sum_of_rates(rate, jnp.int32(3), jnp.int32(4)) == 2.5
  nothing = screening.sum_of_rates(lambda s: 0.0 * s, jnp.int32(3), jnp.int32(4))
  assert 5 / nothing == 0 and jnp.isnan(jnp.inf / nothing), 'rests of compression are divided by it'


def test_the_reason_names_the_level_and_how_far_it_went():
  usual = {'low': 1.0, 'high': 2.0}
  assert (
    screening.exclusion_reason({'low': 1.0, 'high': math.nan}, usual, 10)
    == 'its outer gradient is not finite (level high)'
  )
  reason = screening.exclusion_reason({'low': 30.0, 'high': 80.0}, usual, 10)
  assert '40 times as long' in reason and 'level high' in reason and 'config.outer.exclude_above=10' in reason


def test_phases_in_a_row_are_counted_over_those_that_a_path_trains_in():
  excluded = np.array([True, True, False, False])
  trained = np.array([True, False, True, False])
  assert screening.count_in_a_row([2, 2, 2, 2], trained, excluded) == [3, 2, 0, 2]


def test_training_continues_while_every_shared_module_has_a_path_left():
  for excluded in (NOBODY, ~all_but(0), ~all_but(0, 1, 5)):
    screening.check_paths(LAYOUT, EVERYONE, excluded, [0] * 6, 3)
  assert screening.module_without_paths(LAYOUT, EVERYONE, ~all_but(0)) is None, "a path's own module rests"


@pytest.mark.parametrize(
  'trained, excluded, in_a_row, message',
  [
    (EVERYONE, EVERYONE, 0, 'no path has'),
    (EVERYONE, ~all_but(0, 1, 2), 0, 'no path of module low/0'),
    (all_but(0), ~all_but(1, 2), 0, 'no path of module low/0'),
    (~all_but(0), ~all_but(0), 0, 'no path has'),
    (EVERYONE, ~all_but(4), 4, 'path 4 was excluded in 4 phases in a row, more than config.outer.max_excluded=3'),
  ],
)
def test_training_stops_without_paths_of_a_module_or_if_a_path_is_excluded_too_often(
  trained, excluded, in_a_row, message
):
  with pytest.raises(Diverged, match=message):
    screening.check_paths(LAYOUT, trained, excluded, [0] * 4 + [in_a_row, 0], 3)


@pytest.mark.parametrize(
  'x, sound', [(1.0, True), (900.0, True), (1100.0, False), (-1100.0, False), (1e38, False), (math.nan, False)]
)
def test_modules_are_sound_up_to_a_maximum_root_mean_square(x, sound):
  assert bool(screening.is_sound([jnp.ones(3), jnp.full((2, 2), x)])) == sound


def test_a_module_that_is_not_sound_stops_training_and_is_named():
  sound = {'shared': np.array(True), 'low': np.array([True, False]), 'own': EVERYONE}
  with pytest.raises(Diverged, match='module low/1'):
    screening.check_modules(LAYOUT, sound)
