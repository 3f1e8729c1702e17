"""Compression of the outer exchange to 2, 4 or 8 bits per parameter, with feedback of the rounding errors. Pure.

An array is cut, row-major, into blocks of 64 elements, the last one filled up with zeros. Each block has a scale s in
bfloat16 and codes q of 2, 4 or 8 bits:

    s = bfloat16(max_j |x_j| c)        Q(x)_j = s v(q_j)        q_j: the one whose value is nearest to x_j / s

    kind    values v                    c        at a tie         bits a parameter
    int8    0, +-1, ..., +-127          1/127    to the even q    8.25
    int4    0, +-1, ..., +-7            1/7      to the even q    4.25
    int2    0, +-1                      1/2      to the even q    2.25

The scale of int2 is close to that of the smallest mean squared error with three values if x is normally distributed:
1.3 instead of 1.22 standard deviations on average. What lies beyond it is sent as +-s, and the rest of it later.

A path sends Q of its outer gradient plus its residual, the rounding errors so far (error feedback). The module m that
paths read follows the module M of the outer optimizer by rounded differences, so that the next one corrects rounding
errors:

    c_i = Q(Delta_i + e_i)        e_i <- bfloat16(Delta_i + e_i - c_i)
    m(v) = m(v-1) + Q(M(v) - m(v-1))

Nothing is random, and all processors agree to the bit. Results do not depend on how a processor rounds the quotient
x / s: it is only a guess at q, corrected by comparison with s (q +- 1/2), a product that float32 represents exactly. If
a value is not finite, its whole block becomes NaN, which screening then finds.

int4 with groups and error feedback is OpenDiPaCo's. Streaming DiLoCo (arXiv 2501.18512) sends floats of 4 bits instead.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

BLOCK = 64
BITS = {'int8': 8, 'int4': 4, 'int2': 2}  # of a code
LARGEST = {'int8': 127, 'int4': 7, 'int2': 1}  # the largest code
RANGE = {'int8': 127, 'int4': 7, 'int2': 2}  # 1 / c
TINY = 2.0**-100  # scales below are 0: no product is near float32's smallest numbers, which some processors flush to 0
KINDS = ('none', *BITS)


class Packed(NamedTuple):
  """Blocks of codes: as many uint8 as they need, the first of several codes in the lowest bits."""

  codes: jax.Array  # uint8 [blocks, 64], [blocks, 32] or [blocks, 16]
  scales: jax.Array  # bfloat16 [blocks]


def encode(x: jax.Array, kind: str) -> Packed:
  """Returns the codes and scales of an array, float32 of any shape, by `kind`, one of KINDS but 'none'."""
  blocks = jnp.pad(x.reshape(-1), (0, -x.size % BLOCK)).reshape(-1, BLOCK)
  sizes = jnp.abs(blocks)
  largest = jnp.max(sizes, axis=1, keepdims=True)  # NaN where one is
  # Not astype alone, which XLA may leave out together with the way back.
  scale = jax.lax.reduce_precision(largest * jnp.float32(1 / RANGE[kind]), exponent_bits=8, mantissa_bits=7)
  scale = jnp.where(largest < TINY, 0.0, scale)
  s = jnp.where(jnp.isfinite(scale) & (scale > 0), scale, jnp.inf)  # inf: all codes are 0
  q = _nearest_integer(sizes, s, LARGEST[kind])
  signed = jnp.where(blocks < 0, -q, q).astype(jnp.int8)
  codes = signed.view(jnp.uint8) if kind == 'int8' else _pack(signed, BITS[kind])
  return Packed(codes, scale[:, 0].astype(jnp.bfloat16))


def decode(packed: Packed, shape: tuple[int, ...], kind: str) -> jax.Array:
  """Returns Q(x), float32 of `shape`, from the result of `encode`."""
  codes = packed.codes.view(jnp.int8) if kind == 'int8' else _unpack(packed.codes, BITS[kind])
  q = codes.astype(jnp.float32)
  return (q * packed.scales.astype(jnp.float32)[:, None]).reshape(-1)[: math.prod(shape)].reshape(shape)


def rounded(x: jax.Array, kind: str) -> jax.Array:
  """Returns Q(x), as float32.

  Example:
    >>> rounded(jnp.array([-7.0, 0.4, 3.6]), 'int4')
    Array([-7.,  0.,  4.], dtype=float32)
  """
  return decode(encode(x, kind), x.shape, kind)


@functools.cache
def sent_bytes(shape: tuple[int, ...], kind: str) -> int:
  """Returns the bytes that an array of this shape is sent in, by `kind`, one of KINDS; 'none': as float32.

  Example:
    >>> [sent_bytes((64, 2), kind) for kind in ('none', 'int8', 'int4', 'int2')]
    [512, 132, 68, 36]
  """
  x = jax.ShapeDtypeStruct(shape, jnp.float32)
  sent = x if kind == 'none' else jax.eval_shape(functools.partial(encode, kind=kind), x)
  return sum(part.size * part.dtype.itemsize for part in jax.tree.leaves(sent))


def first_residual(tree: Any) -> Any:
  """Returns the residuals e of a path that has sent nothing yet, or starts with fresh state: zeros, bfloat16."""
  return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.bfloat16), tree)


def total(delta: Any, residual: Any) -> Any:
  """Returns Delta + e, which is rounded and sent."""
  return jax.tree.map(lambda d, e: d + e.astype(jnp.float32), delta, residual)


def next_residual(to_send: jax.Array, sent: jax.Array) -> jax.Array:
  """Returns the residual after c = `sent` was sent of Delta + e = `to_send`."""
  return jax.lax.reduce_precision(to_send - sent, exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)


def _nearest_integer(sizes: jax.Array, s: jax.Array, largest: int) -> jax.Array:
  """Returns the integers nearest to |x| / s, even ones at a tie, up to `largest`, as float32."""
  guess = jnp.minimum(jnp.round(sizes / s), largest)
  above = s * (guess + 0.5)
  below = s * (guess - 0.5)
  odd = guess % 2 == 1
  up = (sizes > above) | ((sizes == above) & odd)
  down = (sizes < below) | ((sizes == below) & odd)
  return jnp.where(jnp.isinf(s), 0.0, jnp.minimum(guess + up - down, largest))


def _pack(codes: jax.Array, bits: int) -> jax.Array:
  """Packs codes of so many bits, int8 [blocks, 64], as two's complement: uint8 [blocks, 64 bits / 8]."""
  per_byte, lowest = 8 // bits, codes.view(jnp.uint8) & (2**bits - 1)
  return functools.reduce(jnp.bitwise_or, [lowest[:, i::per_byte] << (bits * i) for i in range(per_byte)])


def _unpack(packed: jax.Array, bits: int) -> jax.Array:
  """Returns the codes that `_pack` packed."""
  parts = [(packed >> (bits * i)) & (2**bits - 1) for i in range(8 // bits)]
  codes = jnp.stack(parts, axis=2).reshape(len(packed), -1).view(jnp.int8)
  return jnp.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes)
