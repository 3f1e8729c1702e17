"""Sums with row weights: any order gives equal bits, tiny weights keep their precision, and limits are enforced."""

import numpy as np
import pytest

from dipaco_jax.algorithm.row_sum import RowSum

OLD = {'w': np.linspace(-1, 1, 12, dtype='f').reshape(4, 3), 'scale': np.ones(4, 'f'), 'cap': np.ones((), 'f')}


def contributions():
  """Paths of which each has rows that its text does not contain: their weights are near AdamW's epsilon."""
  rng, made = np.random.default_rng(0), []
  for path in range(4):
    new = {name: (x + rng.normal(size=x.shape) * 1e-3).astype('f') for name, x in OLD.items()}
    rows = {name: rng.uniform(1e-8, 2e-8, x.shape[:1]).astype('f') for name, x in OLD.items()}
    rows['w'][path:] += np.float32(0.01)
    made.append((0.5 + path / 8, OLD, new, rows))
  return made


def total(parts) -> RowSum:
  made = RowSum()
  for part in parts:
    made.add(*part)
  return made


def test_any_order_gives_equal_bits_also_when_restored_or_taken_back():
  parts = contributions()
  expected = total(parts)
  made = RowSum.from_state({name: x.copy() for name, x in total(parts[::-1]).state().items()})
  other = 0.75, OLD, {name: x - 1 for name, x in OLD.items()}, parts[0][3]
  made.add(*other)
  made.take_back(*other)
  assert made.square() == expected.square()
  for name, mean in expected.mean().items():
    assert mean.dtype == np.float32 and mean.tobytes() == made.mean()[name].tobytes()


def test_the_mean_is_that_of_float64():
  made, square = RowSum(), 0.0
  squares = [made.add(*part) for part in contributions()]
  for name, mean in made.mean().items():
    shape = -1, *(1,) * (mean.ndim - 1)
    masses = [np.float64(w * rows[name]).reshape(shape) for w, _, _, rows in contributions()]
    moves = [np.float64(old[name] - new[name]) for _, old, new, _ in contributions()]
    dividend = sum(mass * move for mass, move in zip(masses, moves, strict=True))
    square += (dividend**2).sum()
    np.testing.assert_allclose(mean, (dividend / sum(masses)).reshape(mean.shape), rtol=1e-5, atol=1e-9)
  assert made.square() == pytest.approx(square, rel=1e-5) and min(squares) > 0


def test_a_row_without_weight_stays():
  rows = {name: np.zeros(x.shape[:1], 'f') for name, x in OLD.items()}
  made = total([(1.0, OLD, {name: x + 1 for name, x in OLD.items()}, rows)])
  assert all((mean == 0).all() for mean in made.mean().values())


@pytest.mark.parametrize(
  ('rows', 'error', 'message'),
  [
    (np.ones(3, 'f'), ValueError, 'cannot be added'),
    (np.ones(4, 'd'), ValueError, 'cannot be added'),
    (np.array([1, 1, -1, 1], 'f'), ValueError, 'a row weight is negative'),
    (np.array([1, 1, np.nan, 1], 'f'), FloatingPointError, 'w'),
    (np.array([1, 1, np.inf, 1], 'f'), FloatingPointError, 'w'),
    (np.array([1, 1, 1e6, 1], 'f'), ValueError, 'out of range'),
  ],
)
def test_bad_row_weights_are_rejected_and_change_nothing(rows, error, message):
  parts = contributions()
  made, expected = total(parts), total(parts)
  with pytest.raises(error, match=message):
    made.add(1.0, OLD, parts[0][2], parts[0][3] | {'w': rows})
  assert made.square() == expected.square() and made.contributions == 4
