"""Differences count only where documents and seeds agree on them."""

import numpy as np
import pytest

from dipaco_jax.core import paired

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(50, 200, 300)
HARD = RNG.normal(4.0, 0.8, 300)  # documents differ far more than models do


def losses(shift: float, tokens: np.ndarray = TOKENS, seed: int = 0) -> paired.Losses:
  noise = np.random.default_rng(seed).normal(0, 0.05, len(tokens))
  return paired.Losses((HARD[: len(tokens)] + shift + noise) * tokens, tokens)


def test_a_difference_within_the_noise_of_seeds_does_not_count_with_one_seed():
  found = paired.compare([losses(4.388 - 4.392, seed=1)], [losses(0.0, seed=2)])
  assert found.low < 0 < found.high
  assert found.high - found.low >= 2 * paired.SEED_NOISE


def test_a_large_difference_counts_with_one_seed():
  found = paired.compare([losses(-0.1, seed=1)], [losses(0.0, seed=2)])
  assert found.mean == pytest.approx(-0.1, abs=6 * 0.05 * 2**0.5 / 300**0.5) and found.high < 0


def test_seeds_that_agree_find_a_smaller_difference():
  ours, theirs = ([losses(shift, seed=10 * k + j) for k in (1, 2, 3)] for j, shift in enumerate((-0.015, 0.0)))
  found = paired.compare(ours, theirs)
  assert found.high < 0


def test_seeds_that_disagree_widen_the_interval():
  theirs = [losses(0.0, seed=k) for k in (1, 2, 3)]
  found = paired.compare([losses(shift, seed=k) for k, shift in ((4, -0.2), (5, -0.1), (6, 0.15))], theirs)
  assert found.low < 0 < found.high


def test_equal_documents_count_once_and_so_do_those_of_several_seeds():
  ours, theirs = [losses(-0.1, seed=1)], [losses(0.0, seed=2)]
  equal = [x._replace(contents=np.zeros(len(TOKENS), np.uint64)) for x in (*ours, *theirs)]
  assert paired.compare(equal[:1], equal[1:]) is None
  once, thrice = paired.compare(ours, theirs), paired.compare(ours * 3, theirs * 3)
  few = [x._replace(nats=x.nats[:7], tokens=x.tokens[:7]) for x in (*ours, *theirs)]
  assert paired.compare(few[:1] * 3, few[1:] * 3) is None
  assert once.mean == pytest.approx(thrice.mean)


def test_what_was_not_measured_alike_is_not_compared():
  assert paired.compare([losses(0.0, TOKENS[:7])], [losses(0.0, TOKENS[:7])]) is None  # too few documents
  assert paired.compare([losses(0.0, TOKENS[:100])], [losses(0.0, TOKENS[100:200])]) is None
  assert paired.compare([], []) is None
