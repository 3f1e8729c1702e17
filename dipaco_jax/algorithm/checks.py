"""Checks of what enters the library: structure, shapes and dtypes of pytrees, of which no values are read."""

from typing import Any

import jax
import numpy as np

Tree = Any  # a pytree of arrays


def name_leaves(tree: Tree) -> list[tuple[str, Any]]:
  """Returns the leaves of a pytree, each with its name: the keys on the way to it, joined by '/'.

  Example:
    >>> name_leaves({'layers': [{'w': 1.0}, {'w': 2.0}]})
    [('layers/0/w', 1.0), ('layers/1/w', 2.0)]
  """
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return [(jax.tree_util.keystr(keys, simple=True, separator='/'), x) for keys, x in leaves]


def check_like(argument: str, tree: Tree, expected: Tree, fix: str, dtypes: bool = False) -> None:
  """Checks a pytree that a function gets against one that it expects.

  Args:
    argument: name of the function's argument, for the message.
    tree: the pytree.
    expected: arrays or jax.ShapeDtypeStruct.
    fix: what to give instead, for the message.
    dtypes: whether dtypes are to be equal too.

  Raises:
    ValueError: structures, shapes or dtypes differ.
  """
  structure: Any = jax.tree.structure(expected)
  if jax.tree.structure(tree) != structure:
    raise ValueError(f'{argument}: {_describe_difference(tree, expected)}; {fix}')
  for (name, x), wanted in zip(name_leaves(tree), jax.tree.leaves(expected), strict=True):
    if np.shape(x) != wanted.shape:
      raise ValueError(f'{argument}: {name!r} has shape {np.shape(x)} instead of {wanted.shape}; {fix}')
    if dtypes and _dtype(x) != _dtype(wanted):
      raise ValueError(f'{argument}: {name!r} has dtype {_dtype(x)} instead of {_dtype(wanted)}; {fix}')


def check_leading_axes(argument: str, tree: Tree, sizes: tuple[int | str, ...], fix: str) -> None:
  """Raises ValueError if the leading axes of a leaf have other sizes; a size that is not known is given by its name."""
  for name, x in name_leaves(tree):
    if np.shape(x)[: len(sizes)] != sizes:
      leaf = f'{argument}: {name!r}' if name else argument
      raise ValueError(f'{leaf} has shape {np.shape(x)} instead of ({", ".join(map(str, sizes))}, ...); {fix}')


def _describe_difference(tree: Tree, expected: Tree) -> str:
  """Returns which leaves of a pytree are missing or unknown, or where else structures differ."""
  names = {name for name, _ in name_leaves(tree)}
  expected_names = {name for name, _ in name_leaves(expected)}
  missing = ', '.join(map(repr, sorted(expected_names - names)[:3]))
  unknown = ', '.join(map(repr, sorted(names - expected_names)[:3]))
  if missing or unknown:
    return ' and '.join(f'{some} {what}' for some, what in ((missing, 'missing'), (unknown, 'unexpected')) if some)
  return f'{type(tree).__name__} of another structure than {type(expected).__name__}'


def _dtype(x: Any) -> np.dtype:
  """Returns the dtype that JAX gives to an array: float64 is float32 unless 64 bits are enabled."""
  return jax.dtypes.canonicalize_dtype(x.dtype if hasattr(x, 'dtype') else np.result_type(x))
