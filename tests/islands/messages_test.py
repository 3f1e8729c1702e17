"""What a path sends of a level and what an executor reads of it: the outer gradient, to the bit or rounded."""

import numpy as np
import pytest
import slow

from dipaco_jax.algorithm import compression
from dipaco_jax.islands import messages

COMPRESSED = [*compression.PLANES]


def level(seed: int) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(seed)
  return {'w': rng.normal(0, 1, (3, 50)).astype('f'), 'scale': rng.normal(1, 0.1, 7).astype('f')}


def test_without_compression_the_object_is_the_parameters_to_the_bit():
  old, new = level(0), level(1)
  sent = messages.send('none', old, new, {})
  np.testing.assert_equal(sent.arrays, new)
  assert sent.residuals == {}
  assert sent.square == pytest.approx(sum(float(((old[name] - x) ** 2).sum()) for name, x in new.items()), rel=1e-5)


@pytest.mark.parametrize('kind', slow.all_but(compression.KINDS, 'int8'))
def test_what_is_read_is_the_outer_gradient_that_was_sent(kind):
  old, new = level(0), level(1)
  minuend, subtrahend = messages.read_delta(kind, messages.send(kind, old, new, {}).arrays, old)
  for name, x in new.items():
    delta = old[name] - x
    expected = delta if kind == 'none' else np.asarray(compression.rounded(delta, kind))
    np.testing.assert_array_equal(minuend[name] - subtrahend[name], expected)


@pytest.mark.parametrize('kind', COMPRESSED)
def test_a_residual_is_what_was_not_sent(kind):
  """Of two messages: the second one sends what the first one has left."""
  old, new = level(0), level(1)
  first = messages.send(kind, old, new, {})
  second = messages.send(kind, old, new, first.residuals)
  for name, x in new.items():
    delta = old[name] - x
    of_first, of_second = (messages.decode(kind, message.arrays, old)[name] for message in (first, second))
    left = first.residuals[name].astype('f')
    np.testing.assert_allclose(left, delta - of_first, rtol=2**-8, atol=1e-6)  # bfloat16
    np.testing.assert_array_equal(of_second, np.asarray(compression.rounded(delta + left, kind)))


@pytest.mark.parametrize('kind', COMPRESSED)
def test_who_reads_and_who_makes_a_version_have_the_same_bits(kind):
  read, master = level(0), level(1)
  difference, made = messages.follow(kind, read, master)
  for name, x in messages.add(kind, read, difference).items():
    np.testing.assert_array_equal(x, made[name])
    np.testing.assert_allclose(x, read[name] + np.asarray(compression.rounded(master[name] - read[name], kind)), 1e-6)
