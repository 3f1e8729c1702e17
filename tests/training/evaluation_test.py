"""Losses by path, the matrix, and early stopping when the loss grows worse on purpose."""

import functools
import math

import jax
import numpy as np
import pytest
import small
from holdout_rows import COUNTS, ROWS, load
from hypothesis import given, strategies as st

from dipaco_jax.models import loss
from dipaco_jax.training import evaluation


@pytest.fixture(scope='module')
def made():
  return small.make_programs(small.settings({'a': 2, 'b': 2}, small.MIXED_LEVELS), 2)


def params_of(made, path):
  return small.base(made.model, path)


def mean(made, params, rows_of):
  """Of a path's parameters on a path's rows, None without rows."""
  if not COUNTS[rows_of]:
    return None
  nll, count = jax.jit(functools.partial(loss.path_loss, made.model, 8))(params, *load(rows_of, 0, COUNTS[rows_of]))
  return float(nll / count)


# Means of sums over targets, of values near 4 nats.
CLOSE = 4 * small.ROWS * small.LENGTH * small.EPS


@pytest.mark.slow
def test_matrix_is_every_path_on_every_hold_out(made):
  table = evaluation.loss_matrix(made, functools.partial(params_of, made), ROWS)
  for path in range(4):
    assert table[path] == [pytest.approx(mean(made, params_of(made, path), rows), abs=CLOSE) for rows in range(4)]
  assert table[0][0] != pytest.approx(table[1][0], abs=100 * CLOSE)


def test_in_flight_asks_for_each_path_once(made):
  asked = []

  def params(path):
    asked.append(path)
    return params_of(made, path)

  for turn in made.placement.turns():
    found = small.fetched(evaluation.in_flight(made, turn, params))
    for i, path in enumerate(made.placement.paths(turn)):
      small.assert_close({n: x.reshape(2, *x.shape[2:])[i] for n, x in found.items()}, params_of(made, path), 0)
  assert sorted(asked) == [0, 1, 2, 3]


def test_a_loss_that_is_not_finite_is_never_the_best():
  best_version, best_loss = [0, 0, 2, 2], [None, None, 1.0, None]  # the last: of a round that has just begun
  losses = [evaluation.to_compare(x) for x in (float('nan'), None, -float('inf'), float('nan'))]
  evaluation.update_best(3, losses, best_version, best_loss)
  assert best_version == [3, 3, 2, 2]  # what points nowhere has no other choice
  evaluation.update_best(4, [9.0, 9.0, 9.0, 9.0], best_version, best_loss)
  assert (best_version, best_loss) == ([4, 4, 2, 4], [9.0, 9.0, 1.0, 9.0])


def test_a_models_loss_is_weighted_by_targets():
  models, targets = [[0, 2], [1], [3, 4]], [1.0, 5.0, 3.0, 0.0, 0.0]
  assert evaluation.by_model(models, [2.0, 0.1, 4.0, None, None], targets) == [3.5, 0.1, 3.5, None, None]
  inf = float('inf')
  assert evaluation.by_model(models, [2.0, None, inf, None, None], targets) == [inf, None, inf, None, None]


def test_mean_without_targets_is_none():
  found = evaluation.Losses([np.array([3.0, 4.0]), np.zeros(0)], [np.array([2.0, 0.0]), np.zeros(0)])
  assert evaluation.mean_by_path(found) == [3.5, None]


@given(st.data())
def test_summarize_is_the_direct_computation(data):
  n, num_paths = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
  sequences = [
    (
      data.draw(st.floats(0, 500)),
      data.draw(st.integers(1, 100)),
      data.draw(st.integers(1, 400)),
      data.draw(st.integers(0, num_paths - 1)),
      data.draw(st.integers(0, 1)),
    )
    for _ in range(n)
  ]
  scored = evaluation.Scored(*map(np.array, zip(*sequences, strict=True)))
  found = evaluation.summarize(scored, num_paths, ['law', 'news'])

  def perplexity(chosen):
    if not chosen:
      return None
    return pytest.approx(math.exp(math.fsum(s[0] for s in chosen) / sum(s[1] for s in chosen)), rel=1e-12)

  assert found['perplexity'] == perplexity(sequences)
  assert found['perplexity_by_path'] == [perplexity([s for s in sequences if s[3] == p]) for p in range(num_paths)]
  by_domain = {name: perplexity([s for s in sequences if s[4] == i]) for i, name in enumerate(['law', 'news'])}
  assert found['perplexity_by_domain'] == by_domain
  assert found['validation_tokens'] == sum(s[1] for s in sequences)
  bits = math.fsum(s[0] for s in sequences) / math.log(2) / sum(s[2] for s in sequences)
  assert found['bits_per_byte'] == pytest.approx(bits, rel=1e-12)


def test_summarize_without_tokens():
  with pytest.raises(ValueError, match='longer than the prefix'):
    evaluation.summarize(evaluation.Scored(*(np.zeros(1, int),) * 5), 1, ['all'])
