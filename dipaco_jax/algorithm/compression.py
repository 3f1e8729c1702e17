"""Compression of the outer exchange to 2 to 8 bits per parameter, with feedback of the rounding errors. Pure.

An array is cut, row-major, into blocks of 64 elements, the last one filled up with zeros. Each block has a scale s in
bfloat16 and codes q of 2, 3, 4 or 8 bits:

    s = bfloat16(max_j |x_j| c)        Q(x)_j = s v(q_j)        q_j: the one whose value is nearest to x_j / s

    kind    values v                    c        at a tie         bits a parameter
    int8    0, +-1, ..., +-127          1/127    to the even q    8.25
    int4    0, +-1, ..., +-7            1/7      to the even q    4.25
    int3    0, +-1, +-2, +-3            2/7      to the even q    3.25
    int2    0, +-1                      1/2      to the even q    2.25

If x is normally distributed, the scale of int2 has about the smallest mean squared error, and that of int3 8% more.
What lies beyond the largest value is sent later.

A path sends Q of its outer gradient plus its residual, the rounding errors so far (error feedback). The module m that
paths read follows the module M of the outer optimizer by rounded differences, so that the next one corrects rounding
errors:

    c_i = Q(Delta_i + e_i)        e_i <- bfloat16(Delta_i + e_i - c_i)
    m(v) = m(v-1) + Q'(M(v) - m(v-1))

Q' is Q, but int3 if Q is int2: the errors of outer gradients average out over paths, and those of modules do not.

Nothing is random, and all processors agree to the bit. Results do not depend on how a processor rounds the quotient
x / s: it is only a guess at q, corrected by comparison with s (q +- 1/2), a product that float32 represents exactly. If
a value is not finite, its whole block becomes NaN, which screening then finds.

int4 with groups and error feedback is OpenDiPaCo's. Streaming DiLoCo (arXiv 2501.18512) sends floats of 4 bits instead.
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

BLOCK = 64
PLANES = {'int8': (8,), 'int4': (4,), 'int3': (2, 1), 'int2': (2,)}  # bits of a code, the lowest first
LARGEST = {'int8': 127, 'int4': 7, 'int3': 3, 'int2': 1}  # the largest code
RANGE = {'int8': 127, 'int4': 7, 'int3': 3.5, 'int2': 2}  # 1 / c
OF_MODULES = {'int2': 'int3'}  # Q' where it is not Q
TINY = 2.0**-100  # scales below are 0: no product is near float32's smallest numbers, which some processors flush to 0
KINDS = 'none', 'int8', 'int4', 'int2'  # of outer gradients, to choose from


class Packed(NamedTuple):
  """Blocks of codes: as many uint8 as they need, the first of several codes in the lowest bits."""

  codes: jax.Array  # uint8 [blocks, 64 bits / 8]: all codes' bits of the first plane, then those of the second
  scales: jax.Array  # bfloat16 [blocks]


def of_modules(kind: str) -> str:
  """Returns Q', how differences of modules are compressed if outer gradients are by `kind`.

  Example:
    >>> [of_modules(kind) for kind in ('none', 'int4', 'int2')]
    ['none', 'int4', 'int3']
  """
  return OF_MODULES.get(kind, kind)


def encode(x: jax.Array, kind: str) -> Packed:
  """Returns the codes and scales of an array, float32 of any shape, by `kind`, one of PLANES."""
  blocks = jnp.pad(x.reshape(-1), (0, -x.size % BLOCK)).reshape(-1, BLOCK)
  sizes = jnp.abs(blocks)
  largest = jnp.max(sizes, axis=1, keepdims=True)  # NaN where one is
  # Not astype alone, which XLA may leave out together with the way back.
  scale = jax.lax.reduce_precision(largest * jnp.float32(1 / RANGE[kind]), exponent_bits=8, mantissa_bits=7)
  scale = jnp.where(largest < TINY, 0.0, scale)
  s = jnp.where(jnp.isfinite(scale) & (scale > 0), scale, jnp.inf)  # inf: all codes are 0
  q = _nearest_integer(sizes, s, LARGEST[kind])
  signed = jnp.where(blocks < 0, -q, q).astype(jnp.int8)
  return Packed(_pack(signed.view(jnp.uint8), PLANES[kind]), scale[:, 0].astype(jnp.bfloat16))


def decode(packed: Packed, shape: tuple[int, ...], kind: str) -> jax.Array:
  """Returns Q(x), float32 of `shape`, from the result of `encode`."""
  q = _unpack(packed.codes, PLANES[kind]).astype(jnp.float32)
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
  """Returns the bytes that an array of this shape is sent in, by `kind`, one of PLANES; 'none': as float32.

  Example:
    >>> [sent_bytes((64, 2), kind) for kind in ('none', 'int8', 'int4', 'int3', 'int2')]
    [512, 132, 68, 52, 36]
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


def _pack(codes: jax.Array, planes: tuple[int, ...]) -> jax.Array:
  """Packs the lowest bits of codes, uint8 [blocks, 64] in two's complement, by planes: uint8 [blocks, 64 bits / 8]."""
  packed = []
  for bits, shift in zip(planes, _shifts(planes), strict=True):
    per_byte, plane = 8 // bits, codes >> shift & (2**bits - 1)
    packed.append(functools.reduce(jnp.bitwise_or, [plane[:, i::per_byte] << (bits * i) for i in range(per_byte)]))
  return jnp.concatenate(packed, axis=1)


def _unpack(packed: jax.Array, planes: tuple[int, ...]) -> jax.Array:
  """Returns the codes that `_pack` packed, int32 [blocks, 64]."""
  codes, begin = jnp.zeros((len(packed), BLOCK), jnp.int32), 0
  for bits, shift in zip(planes, _shifts(planes), strict=True):
    plane = packed[:, begin : begin + BLOCK * bits // 8]
    parts = [plane >> (bits * i) & (2**bits - 1) for i in range(8 // bits)]
    codes |= jnp.stack(parts, axis=2).reshape(codes.shape).astype(jnp.int32) << shift
    begin += plane.shape[1]
  sign = 1 << sum(planes) - 1
  return (codes ^ sign) - sign


def _shifts(planes: tuple[int, ...]) -> list[int]:
  """Returns the place of the lowest bit of each plane in a code."""
  return [0, *itertools.accumulate(planes)][:-1]
