"""Exact sums: any order gives equal bits, results equal arithmetic with fractions, and limits are enforced."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dipaco_jax.algorithm import exact_sum
from dipaco_jax.algorithm.exact_sum import ExactSum

SHAPES = {'b': (3, 2), 'a': (5,), 'scalar': (), 'none': (0, 4)}
QUANTUM = Fraction(1, 2**40)
WEIGHTS = st.floats(2.0**-20, 2, width=32) | st.just(1.0)
VALUES = st.floats(-31, 31, width=32)  # a contribution is at most 2 * 62, below the limit


@st.composite
def trees(draw) -> dict[str, np.ndarray]:
  return {
    name: np.array([draw(VALUES) for _ in range(math.prod(shape))], np.float32).reshape(shape)
    for name, shape in SHAPES.items()
  }


CONTRIBUTIONS = st.lists(st.tuples(WEIGHTS, trees(), trees()), min_size=1, max_size=6)


def total(contributions) -> ExactSum:
  made = ExactSum()
  for contribution in contributions:
    made.add(*contribution)
  return made


def assert_same(one: ExactSum, other: ExactSum):
  assert (one.contributions, one.weight_quanta) == (other.contributions, other.weight_quanta)
  for x, y in ((one.state(), other.state()), (one.mean(), other.mean())):
    assert x.keys() == y.keys()
    for name in x:
      assert x[name].dtype == y[name].dtype and x[name].tobytes() == y[name].tobytes()


@settings(max_examples=60, deadline=None)
@given(CONTRIBUTIONS, st.randoms(use_true_random=False))
def test_any_order_gives_equal_bits_also_when_restored_between(contributions, rng):
  expected, restored = total(contributions), ExactSum()
  for contribution in rng.sample(contributions, len(contributions)):
    restored.add(*contribution)
    restored = ExactSum.from_state({name: x.copy() for name, x in restored.state().items()})
  assert_same(restored, expected)


@settings(max_examples=60, deadline=None)
@given(CONTRIBUTIONS)
def test_it_is_the_sum_of_fractions(contributions):
  made = total(contributions)
  weights = [round(Fraction(w) / QUANTUM) for w, _, _ in contributions]
  assert made.weight_quanta == sum(weights) and made.weight == float(sum(weights) * QUANTUM)
  for name, mean in made.mean().items():
    assert mean.dtype == np.float32 and mean.shape == SHAPES[name]
    for i in np.ndindex(mean.shape):
      pairs = zip(weights, contributions, strict=True)
      differences = [(o[name][i] - n[name][i]) * np.float32(q * QUANTUM) for q, (_, o, n) in pairs]
      quanta = sum(round(Fraction(float(d)) / QUANTUM) for d in differences)
      assert mean[i] == np.float32(quanta / sum(weights))  # Python rounds a quotient of integers once


def random_tree(size: int, seed: int, scale: float = 0.1) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(seed)
  return {'w': (rng.normal(size=size) * scale).astype('f'), 'bias': (rng.normal(size=7) * scale).astype('f')}


@pytest.mark.parametrize('size', [1, exact_sum.ROW + 1, exact_sum.BLOCK, exact_sum.STRIP + exact_sum.BLOCK + 5])
def test_the_mean_is_that_of_float64(size):
  weights, old = [1.0, 0.75, 2.5], random_tree(size, 0)
  made = ExactSum()
  squares = [made.add(weight, old, random_tree(size, seed + 1)) for seed, weight in enumerate(weights)]
  expected = np.zeros(len(weights))
  for name, mean in made.mean().items():
    c_PN = [np.float32(w) * (old[name] - random_tree(size, seed + 1)[name]) for seed, w in enumerate(weights)]
    sums = np.sum(c_PN, 0, dtype=np.float64)
    bound = len(weights) * 2.0**-41 / sum(weights) + np.abs(sums) / sum(weights) * 2.0**-23
    assert (np.abs(mean - sums / sum(weights)) <= bound).all()
    expected += np.square(c_PN, dtype=np.float64).sum(1)
  np.testing.assert_allclose(squares, expected, rtol=1e-5)


def test_what_float32_sums_would_lose_is_kept():
  made, zero = ExactSum(), {'x': np.zeros(1, 'f')}
  for value in (100, 2.0**-40, 2.0**-42, 3 * 2.0**-42, -100):
    made.add(1, {'x': np.full(1, value, 'f')}, zero)
  assert made.mean()['x'] * 5 == 2 * 2.0**-40  # 1/4 of a quantum rounds to none, 3/4 to one


@pytest.mark.parametrize('value, error', [
  (np.nan, FloatingPointError), (np.inf, FloatingPointError), (-np.inf, FloatingPointError), (3e38, FloatingPointError),
  (128, ValueError), (-128, ValueError), (1e6, ValueError),
])  # fmt: skip
@pytest.mark.parametrize('at', [0, -1])
@pytest.mark.parametrize('first', [True, False])
def test_what_is_rejected_is_named_and_leaves_the_sum_as_it_was(value, error, at, first):
  size = exact_sum.STRIP + exact_sum.BLOCK + 3
  old, new, made = random_tree(size, 0), random_tree(size, 1), ExactSum()
  if not first:
    made.add(0.5, old, new)
  before = {name: x.copy() for name, x in made.state().items()}
  spoiled = {**new, 'w': new['w'].copy()}
  spoiled['w'][at], old['w'][at] = value, 0
  with pytest.raises(error, match=r'^w: weight \* \(old - new\) is') as raised:
    made.add(2 if value == 3e38 else 1, old, spoiled)
  assert type(raised.value) is error
  assert made.state().keys() == before.keys()
  for name, x in made.state().items():
    np.testing.assert_array_equal(x, before[name])


def test_values_below_the_limit_are_taken_however_many_there_are():
  size, made = exact_sum.BLOCK + 1, ExactSum()
  largest = np.nextafter(np.float32(exact_sum.LIMIT), np.float32(0))
  for sign in (1, 1, -1):
    made.add(1, {'w': np.full(size, sign * largest)}, {'w': np.zeros(size, 'f')})
  np.testing.assert_array_equal(made.mean()['w'], np.full(size, largest / 3, 'f'))


@pytest.mark.parametrize('sign', [1, -1])
def test_most_contributions_of_the_largest_values_are_summed(sign):
  largest = np.nextafter(np.float32(exact_sum.LIMIT), np.float32(0))
  made = total([(1, {'x': np.full(1, sign * largest)}, {'x': np.zeros(1, 'f')})])
  while made.contributions < exact_sum.MAX_CONTRIBUTIONS:
    made = ExactSum.from_state({name: x + x for name, x in made.state().items()})
  assert made.contributions == exact_sum.MAX_CONTRIBUTIONS and made.mean()['x'] == sign * largest
  assert made.weight == exact_sum.MAX_CONTRIBUTIONS
  with pytest.raises(ValueError, match='more than 32768 contributions'):
    made.add(1, {'x': np.zeros(1, 'f')}, {'x': np.zeros(1, 'f')})


@pytest.mark.parametrize('weight', [0, -1, np.nan, np.inf, 2.0**20, 2.0**-42])
def test_weights_are_positive_and_bounded(weight):
  with pytest.raises(ValueError, match='is not between'):
    ExactSum().add(weight, random_tree(1, 0), random_tree(1, 1))


def test_a_sum_of_weights_that_its_state_cannot_hold_is_rejected():
  made, tree = ExactSum(), {'w': np.zeros(1, 'f')}
  weight = 2.0**20 - 0.5
  for _ in range(8):
    made.add(weight, tree, tree)
  with pytest.raises(ValueError, match=r'sum has to stay below 2\^23'):
    made.add(weight, tree, tree)
  assert ExactSum.from_state(made.state()).weight == 8 * weight


@pytest.mark.parametrize(
  'other, message',
  [
    ({'w': np.zeros(2, 'f')}, r'bias: nothing cannot be added to a sum of'),
    ({**random_tree(3, 0)}, r'w: float32\[3\] cannot be added to a sum of uint64\[2\]'),
    ({**random_tree(2, 0), 'more': np.zeros(1, 'f')}, r'more: float32\[1\] cannot be added to a sum of nothing'),
    ({**random_tree(2, 0), 'w': np.zeros(2)}, r'w: float64\[2\] cannot be'),
  ],
)
def test_other_shapes_are_named(other, message):
  made, tree = ExactSum(), random_tree(2, 0)
  made.add(1, tree, tree)
  for old, new in ((tree, other), (other, tree)):
    with pytest.raises(ValueError, match=message):
      made.add(1, old, new)
  assert made.contributions == 1


def test_a_mean_of_nothing_is_rejected():
  with pytest.raises(ValueError, match='no contributions'):
    ExactSum().mean()
  assert ExactSum().state().keys() == {'#contributions', '#weight_quanta'}
