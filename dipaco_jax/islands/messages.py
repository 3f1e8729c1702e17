"""What paths and modules exchange as objects in storage, whole or compressed [2.5; algorithm/compression.py].

    of a path's level    whole: its parameters after the phase; compressed: Q(Delta + e)
    of a module          whole: its weights; compressed: Q'(M(v) - m(v-1)), its difference to the version before

The arrays of a compressed object are, for each parameter, `NAME:codes` and `NAME:scales`. With `outer.row_weights` a
path's object of a level that it shares has `NAME:rows` too: the weights of the parameter's rows, float32.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dipaco_jax.algorithm import compression
from dipaco_jax.algorithm.row_sum import ROWS

Arrays = dict[str, np.ndarray]
CODES, SCALES = ':codes', ':scales'


Shapes = Mapping[str, jax.ShapeDtypeStruct]  # of the arrays of an object, by name


class Sent(NamedTuple):
  """What a path sends of a level."""

  arrays: Arrays  # of the object
  square: float  # |d|^2 of the outer gradient as it is sent; NaN or infinite where that is not finite
  residuals: Arrays  # bfloat16, or {} if nothing is compressed


def send(
  kind: str, old: Mapping[str, np.ndarray], new: Arrays, residuals: Mapping[str, np.ndarray],
  rows: Mapping[str, np.ndarray] | None = None,
) -> Sent:  # fmt: skip
  """Makes a path's message of a level.

  Args:
    kind: one of compression.KINDS.
    old: weights of the module.
    new: parameters of the path.
    residuals: residuals of the last message, zeros if there are none.
    rows: row weights of the path, None without `outer.row_weights`.
  """
  weights = {name + ROWS: x for name, x in (rows or {}).items()}
  if kind == 'none':
    return Sent(new | weights, square_of_difference(old, new), {})
  arrays = Arrays()
  squares = []
  after = Arrays()
  for name, x in new.items():
    residual = residuals.get(name)
    residual = np.zeros(x.shape, ml_dtypes.bfloat16) if residual is None else residual
    packed, left, square = _send(kind, old[name], x, residual)
    arrays |= _named(name, jax.tree.map(np.asarray, packed))
    after[name] = np.asarray(left)
    squares.append(float(square))
  return Sent(arrays | weights, sum(squares), after)


@functools.partial(jax.jit, static_argnums=0)
def _send(kind: str, old: jax.Array, new: jax.Array, residual: jax.Array):
  total = compression.total(old - new, residual)
  packed = compression.encode(total, kind)
  sent = compression.decode(packed, total.shape, kind)
  return packed, compression.next_residual(total, sent), jnp.sum(jnp.square(sent))


def split_rows(arrays: Arrays) -> tuple[Arrays, Arrays]:
  """Splits the object that `send` made into what `read_delta` takes and the row weights, or {} if it has none."""
  rows = {name.removesuffix(ROWS): x for name, x in arrays.items() if name.endswith(ROWS)}
  return {name: x for name, x in arrays.items() if not name.endswith(ROWS)}, rows


def expected(kind: str, shapes: Shapes, by_row: bool = False) -> Shapes:
  """Returns shapes and dtypes of the arrays in an object that `send` makes, from the shapes of the parameters.

  by_row: whether the object has row weights.
  """
  if by_row:
    rows = {name + ROWS: jax.ShapeDtypeStruct(x.shape[:1], np.float32) for name, x in shapes.items()}
    return {**expected(kind, shapes), **rows}
  if kind == 'none':
    return shapes
  return {at: x for name, of in shapes.items() for at, x in _named(name, _packed(kind, of.shape)).items()}


@functools.cache
def _packed(kind: str, shape: tuple[int, ...]) -> compression.Packed:
  return jax.eval_shape(functools.partial(compression.encode, kind=kind), jax.ShapeDtypeStruct(shape, jnp.float32))


def check_shapes(arrays: Mapping[str, np.ndarray], like: Shapes):
  """Raises ValueError if arrays do not have these names, shapes and dtypes."""
  for name in sorted({*arrays, *like}):
    actual_shape, expected_shape = (
      f'{x.dtype}{[*x.shape]}' if (x := of.get(name)) is not None else 'nothing' for of in (arrays, like)
    )
    if actual_shape != expected_shape:
      raise ValueError(f'{name} is {actual_shape} instead of {expected_shape}')


def read_delta(kind: str, arrays: Arrays, old: Arrays) -> tuple[Arrays, Arrays]:
  """Returns two sets of arrays from the object that `send` made; their difference is the path's outer gradient.

  They are the module's weights and the path's parameters or, after compression, the gradient and zeros.
  """
  if kind == 'none':
    return old, arrays
  sent = decode(kind, arrays, old)
  return sent, {name: np.zeros(x.shape, np.float32) for name, x in sent.items()}


def square_of_difference(old: Mapping[str, np.ndarray], new: Arrays) -> float:
  """Returns |old - new|^2; NaN or infinite where that is not finite."""
  with np.errstate(over='ignore', invalid='ignore'):
    return sum(float(np.linalg.norm(old[name] - x)) ** 2 for name, x in new.items())


def decode(kind: str, arrays: Arrays, like: Mapping[str, np.ndarray]) -> Arrays:
  """Returns the arrays of a compressed object, shaped as those in `like`. Raises ValueError if they do not fit."""
  expected = {name + end for name in like for end in (CODES, SCALES)}
  if arrays.keys() != expected:
    raise ValueError(f'{min(arrays.keys() ^ expected)} does not belong into a message of these parameters')
  return {n: np.asarray(_decode(kind, x.shape, arrays[n + CODES], arrays[n + SCALES])) for n, x in like.items()}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _decode(kind: str, shape: tuple[int, ...], codes: jax.Array, scales: jax.Array) -> jax.Array:
  return compression.decode(compression.Packed(codes, scales), shape, kind)


def follow(kind: str, read: Arrays, master: Arrays) -> tuple[Arrays, Arrays]:
  """Returns the object of the difference that moves the weights of paths towards M, and the new weights m(v)."""
  arrays, new = Arrays(), Arrays()
  for name, m in read.items():
    packed, moved = _follow(kind, m, master[name])
    arrays |= _named(name, jax.tree.map(np.asarray, packed))
    new[name] = np.asarray(moved)
  return arrays, new


@functools.partial(jax.jit, static_argnums=0)
def _follow(kind: str, read: jax.Array, master: jax.Array):
  packed = compression.encode(master - read, kind)
  return packed, read + compression.decode(packed, read.shape, kind)


def add(kind: str, read: Arrays, difference: Arrays) -> Arrays:
  """Returns m(v) from m(v-1) and the object of their difference."""
  moved = decode(kind, difference, read)
  return {name: x + moved[name] for name, x in read.items()}


def _named(name: str, packed: compression.Packed) -> dict[str, Any]:
  return {name + CODES: packed.codes, name + SCALES: packed.scales}
