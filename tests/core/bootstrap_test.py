"""Bootstrap intervals of perplexity: compared with normal means, equal for equal seeds, and paired between models."""

import math

import numpy as np
import pytest

from dipaco_jax.core import bootstrap


def draw(count, seed=0):
  """Documents of unequal lengths: nats and tokens, about 3 nats a token, 0.5 apart."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(20, 200, count)
  return tokens * rng.normal(3, 0.5, count), tokens


def test_it_is_about_that_of_normal_theory():
  """The delta method for a ratio of sums: sd of the mean is sqrt(sum (n - r t)^2) / sum t."""
  nats, tokens = draw(400)
  ratio = nats.sum() / tokens.sum()
  deviation = math.sqrt(((nats - ratio * tokens) ** 2).sum()) / tokens.sum()
  low, high = (math.log(x) for x in bootstrap.interval(nats, tokens))
  # Quantiles of 2,000 draws lie within 5 of their standard errors, 0.06 deviations each; skewness adds some hundredths.
  assert abs(low - (ratio - 1.96 * deviation)) < 0.4 * deviation
  assert abs(high - (ratio + 1.96 * deviation)) < 0.4 * deviation


def test_it_covers_the_truth_as_often_as_it_says():
  covered = []
  for seed in range(200):
    low, high = bootstrap.interval(*draw(60, seed))
    covered.append(low < math.exp(3) < high)
  assert 0.88 < np.mean(covered) <= 1  # 0.95 less five standard errors of 200 draws, and what 60 documents cost


def test_a_ratio_of_models_that_agree_is_known_better_than_either():
  nats, tokens = draw(100)
  better = nats * 0.97 + np.random.default_rng(1).normal(0, 0.3, 100)
  low, high = bootstrap.interval(better - nats, tokens)
  alone = bootstrap.interval(better, tokens)
  assert low < high < 1 and (high - low) < 0.2 * (alone[1] - alone[0]) / alone[0]


def test_the_same_seed_gives_the_same_and_parts_of_the_draws_do_not_matter(monkeypatch):
  nats, tokens = draw(50)
  found = bootstrap.interval(nats, tokens, 3)
  assert found == bootstrap.interval(nats, tokens, 3) != bootstrap.interval(nats, tokens, 4)
  monkeypatch.setattr(bootstrap, 'CELLS', 700)
  assert found == bootstrap.interval(nats, tokens, 3)


def test_there_is_none_of_too_few_documents_or_of_what_is_not_finite():
  nats, tokens = draw(bootstrap.MIN_DOCUMENTS)
  assert bootstrap.interval(nats, tokens)
  assert bootstrap.interval(nats[1:], tokens[1:]) is None
  assert bootstrap.interval(nats, np.where(np.arange(len(tokens)) == 3, 0, tokens)) is None, 'one counts no token'
  nats[2] = np.nan
  assert bootstrap.interval(nats, tokens) is None


def test_equal_documents_count_once():
  """300 copies of a document say nothing about other documents, and copies of all change nothing."""
  nats, tokens = draw(50)
  contents = np.arange(50, dtype=np.uint64) << np.uint64(58)
  found = bootstrap.interval(nats, tokens, contents_N=contents)
  assert found == pytest.approx(bootstrap.interval(nats, tokens), rel=1e-12)
  assert bootstrap.interval(np.tile(nats, 3), np.tile(tokens, 3), contents_N=np.tile(contents, 3)) == pytest.approx(
    found, rel=1e-9
  )
  assert (
    bootstrap.interval(np.tile(nats[:1], 300), np.tile(tokens[:1], 300), contents_N=np.tile(contents[:1], 300)) is None
  )
  few = np.arange(300, dtype=np.uint64) % np.uint64(bootstrap.MIN_DOCUMENTS - 1)
  assert bootstrap.interval(*draw(300), contents_N=few) is None


@pytest.mark.parametrize('value', [1e6, -1e6])
def test_what_no_float_holds_is_bounded(value):
  low, high = bootstrap.interval(np.full(10, value), np.ones(10))
  assert 0 <= low <= high < math.inf
