"""Products of 16 bits that are computed into float32, against those of float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slow

from dipaco_jax.models import products

SPECS = {
  'BLD,DF->BLF': ((3, 5, 64), (64, 7)),
  'BLD,DHK->BLHK': ((3, 5, 64), (64, 2, 4)),
  'BLHK,HKD->BLD': ((3, 5, 8, 8), (8, 8, 6)),
}


def both(spec, wide, dtype):
  """The product, and the gradients of its sum weighted at random."""
  keys = jax.random.split(jax.random.key(0), 3)
  x, w = (
    jax.random.normal(key, shape).astype('bfloat16').astype(t)
    for key, shape, t in zip(keys, SPECS[spec], (dtype, 'float32'), strict=False)
  )
  y = products.product(spec, x, w, wide)
  weight = jax.random.normal(keys[2], y.shape).astype('bfloat16')
  return y, *jax.grad(lambda x, w: (products.product(spec, x, w, wide) * weight).sum().astype('float32'), (0, 1))(x, w)


@pytest.mark.parametrize('spec', slow.all_but(SPECS, *[*SPECS][:1]))
def test_all_sums_are_of_float32_and_rounded_once(spec):
  exact = both(spec, False, 'float32')
  y, dx, dw = both(spec, True, 'bfloat16')
  for found, wanted in ((y, exact[0]), (dx, exact[1])):
    assert found.dtype == 'bfloat16'
    np.testing.assert_allclose(found.astype('float32'), wanted, rtol=2**-8, atol=1e-5)
  assert dw.dtype == 'float32'
  np.testing.assert_allclose(dw, exact[2], rtol=1e-5, atol=1e-5)  # no rounding to 16 bits


@pytest.mark.parametrize('spec', SPECS)
def test_other_products_are_those_of_einsum(spec):
  x, w = (jnp.ones(shape, 'bfloat16') for shape in SPECS[spec])
  for wide, dtype in ((True, 'float32'), (False, 'bfloat16')):
    a, b = x.astype(dtype), w.astype('float32')
    found = str(jax.make_jaxpr(lambda a, b, wide=wide: products.product(spec, a, b, wide))(a, b))
    assert found == str(jax.make_jaxpr(lambda a, b: jnp.einsum(spec, a, b.astype(a.dtype)))(a, b))


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_a_transposed_product_is_summed_in_float32(dtype):
  key_x, key_y = jax.random.split(jax.random.key(1))
  x_ND, y_NF = jax.random.normal(key_x, (96, 5), dtype), jax.random.normal(key_y, (96, 7), dtype)
  found = products.transposed_product(x_ND, y_NF)
  wanted = np.asarray(x_ND, np.float64).T @ np.asarray(y_NF, np.float64)
  assert found.dtype == 'float32'
  np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
