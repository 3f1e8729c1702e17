"""16-bit matrix products with float32 results that are then rounded, which is at least twice as fast on CPUs."""

import functools

import jax
import jax.numpy as jnp
from jax import Array


def product(spec: str, x: Array, w: Array, wide: bool) -> Array:
  """Returns einsum(spec, x, w) in the dtype of x, to which w is rounded.

  Args:
    spec: of `jnp.einsum`, with two operands, in which no index stands in one place only.
    x: activations.
    w: a matrix, float32 or in the dtype of x; its gradient has its dtype.
    wide: products of 16 bits are computed into float32, those of gradients too, so that that of w isn't rounded.
  """
  if wide and x.dtype.itemsize == 2:
    return _wide(spec, x, w)
  return jnp.einsum(spec, x, w.astype(x.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _wide(spec: str, x: Array, w: Array) -> Array:
  return into_float32(spec, x, w.astype(x.dtype)).astype(x.dtype)


def _forward(spec: str, x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
  return _wide(spec, x, w), (x, w)


def _backward(spec: str, factors: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
  x, w = factors
  inputs, result = spec.split('->')
  of_x, of_w = inputs.split(',')
  dx = into_float32(f'{result},{of_w}->{of_x}', g, w.astype(x.dtype)).astype(x.dtype)
  return dx, into_float32(f'{of_x},{result}->{of_w}', x, g).astype(w.dtype)


_wide.defvjp(_forward, _backward)


def into_float32(spec: str, x: Array, y: Array) -> Array:
  """Returns einsum(spec, x, y) as float32."""
  return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)


def transposed_product(x_ND: Array, y_NF: Array) -> Array:
  """Returns x^T y as float32, [D, F].

  Of 16 bits the sum is over two dimensions, one of which has length 1: for that XLA transposes x. Over one dimension
  alone a CPU would compute in float32, and take four times as long.
  """
  if x_ND.dtype.itemsize == 2:
    return into_float32('END,ENF->DF', x_ND[None], y_NF[None])
  return into_float32('ND,NF->DF', x_ND, y_NF)
