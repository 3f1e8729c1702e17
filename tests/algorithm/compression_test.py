import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import twin

from dipaco_jax.algorithm import compression

CODES = [*compression.LARGEST]


def hard_values(kind) -> np.ndarray:
  """Blocks of every size, with exact ties, values beside them, zeros, and very small ones."""
  rng = np.random.default_rng(0)
  blocks = [rng.normal(0, 10.0**e, 64).astype('f') for e in (-30, -8, -3, 0, 3)]
  scale = np.float32(ml_dtypes.bfloat16(0.37))
  borders = np.arange(0.5, compression.LARGEST[kind])
  largest = scale * np.float32(compression.RANGE[kind])
  for at in np.array_split(np.array(borders, 'f'), -(-len(borders) // 20)):
    ties = scale * at
    near = np.concatenate([ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(99))])
    blocks.append(np.concatenate([[largest], near, np.zeros(63 - near.size, 'f')]).astype('f'))
  blocks += [np.zeros(64, 'f'), np.full(64, 1e-38, 'f'), rng.normal(0, 1, 13).astype('f')]  # the last one is shorter
  x = np.concatenate(blocks)
  return x * np.where(np.arange(x.size) % 2, 1, -1).astype('f')


@pytest.mark.parametrize('kind', CODES)
def test_nearest_value_of_each_block(kind):
  x = hard_values(kind)
  expected = twin.compressed(x, kind)
  np.testing.assert_array_equal(compression.rounded(x, kind), expected)
  np.testing.assert_array_equal(jax.jit(lambda x: compression.rounded(x, kind))(x), expected)


@pytest.mark.parametrize('kind, bits', [('int8', 8.25), ('int4', 4.25), ('int3', 3.25), ('int2', 2.25)])
def test_bits(kind, bits):
  packed = compression.encode(jnp.ones((64, 10)), kind)
  assert 8 * sum(x.nbytes for x in packed) == bits * 640
  assert packed.codes.dtype == jnp.uint8 and packed.scales.dtype == jnp.bfloat16


@pytest.mark.parametrize('kind', CODES)
@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_seen(kind, bad):
  x = np.ones(130, 'f')
  x[70] = bad
  found = np.asarray(compression.rounded(x, kind))
  assert np.isnan(found[64:128]).all() and np.isfinite(found[:64]).all() and np.isfinite(found[128:]).all()


@pytest.mark.parametrize('kind', CODES)
def test_residuals_make_up_for_what_was_lost(kind):
  """The sum of what was sent differs from that of what was wanted by the last residual, not by one for each phase."""
  rng, phases = np.random.default_rng(1), 50
  residual, sent, wanted = jnp.zeros(640, jnp.bfloat16), 0, 0
  for _ in range(phases):
    delta = (1 + rng.normal(0, 1, 640)).astype('f')
    total = compression.total(delta, residual)
    message = compression.rounded(total, kind)
    residual = compression.next_residual(total, message)
    sent, wanted = sent + np.asarray(message, np.float64), wanted + delta.astype(np.float64)
  # bfloat16 rounds each residual by at most 2^-9 of it, which is nowhere larger than a unit of the largest value.
  quantum = 5 / compression.LARGEST[kind]
  assert np.abs(sent - wanted).max() < quantum * (1 + phases * 2.0**-9)
  assert np.abs(sent - wanted + np.asarray(residual, np.float64)).max() < quantum * phases * 2.0**-9 + 1e-4


def test_scales_are_bfloat16_also_where_all_is_one_program():
  """XLA may leave out a cast to bfloat16 and back."""
  x = np.linspace(0.1, 1.003, 64, dtype='f')
  code, scale = (np.asarray(y) for y in compression.encode(x, 'int8'))
  found = jax.jit(lambda x: compression.rounded(x, 'int8'))(x)
  np.testing.assert_array_equal(found, (code.view('i1') * scale.astype('f')[:, None]).reshape(-1))
