"""What an object that a worker offers has to be: its size, names, shapes and dtypes follow from the layout.

The bytes before the arrays are the same for all objects of one kind, so they are compared as they are, and nothing of
what a worker sends is parsed before that. The length of outer gradients is judged later, by the executor
(`screening_facts`), which knows the module's weights.
"""

import functools
import mmap
import pathlib
from typing import NamedTuple

import jax
import numpy as np

from dipaco_jax.gateway import authority
from dipaco_jax.islands import island as island_lib, messages, state_facts
from dipaco_jax.islands.island import Island
from dipaco_jax.storage import tensors


class Expected(NamedTuple):
  """What an object has to begin with, and its size."""

  header: bytes
  size: int


class Unexpected(ValueError):
  """Error: an object is not what its name says."""


@functools.lru_cache(4096)
def of_name(island: Island, name: str, size: int) -> Expected:
  """Returns what an object of this name has to be. Raises Unexpected if no worker writes such an object.

  `size`: as offered; it only counts for parts of states, whose sizes differ. Where text stays with its owners, states
  and modules of single paths do, too.
  """
  stays = island.run.settings.data.own_text
  levels = {level.name: level for level in island.layout.levels}
  if match := authority.OF_PATH.fullmatch(name):
    level = levels.get(match[4])
    if level and level.name not in island.own_levels:
      by_row = island.run.settings.outer.row_weights
      return like(messages.expected(island.kind(level), island.level_shapes(level), by_row))
  elif (match := authority.MODULE.fullmatch(name)) and not stays:
    level = levels.get(match[2].partition('/')[0])
    if level and level.name in island.own_levels and name.startswith('objects/modules/'):
      return like(island.level_shapes(level))
  elif (match := authority.STATE.fullmatch(name)) and not stays:
    return of_part(island, int(match[3]), size)
  raise Unexpected('no worker writes an object of this name')


def of_part(island: Island, index: int, size: int) -> Expected:
  """Returns what a part of a state has to be, of a size that a state of this run may have."""
  header = tensors.header({state_facts.BYTES: jax.ShapeDtypeStruct((0,), np.uint8)})
  room = size - len(header) + len(b'0,0')
  for count in range(max(0, room - 64), room + 1):  # the header names the count, so its length depends on that
    shape = jax.ShapeDtypeStruct((count,), np.uint8)
    expected = like({state_facts.BYTES: shape})
    if expected.size == size and 0 < count <= state_facts.LARGEST_PART and index < most_parts(island):
      return expected
  raise Unexpected('no part of a state has this size')


@functools.lru_cache(4)
def most_parts(island: Island) -> int:
  """Returns how many parts a state has at most: of inner state, parameters, residuals, and own modules with theirs."""
  arrays = [*island.inner_shapes.values(), *6 * [*island.shapes.values()]]
  total = sum(np.dtype(x.dtype).itemsize * int(np.prod(x.shape)) for x in arrays) + 2**22
  return max(state_facts.PARTS, -(-total // state_facts.LARGEST_PART)) + 1


def like(shapes: messages.Shapes) -> Expected:
  """Returns what an object with arrays of these shapes has to be."""
  header = tensors.header(shapes)
  return Expected(
    header, len(header) + sum(np.dtype(x.dtype).itemsize * int(np.prod(x.shape)) for x in shapes.values())
  )


def check(file: pathlib.Path, expected: Expected):
  """Raises Unexpected if a file is not what was expected, or has values that are not finite."""
  size = file.stat().st_size
  if size != expected.size:
    raise Unexpected(f'the object has {size} bytes instead of {expected.size}')
  with open(file, 'rb') as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
    if data[: len(expected.header)] != expected.header:
      raise Unexpected('names, shapes or dtypes of the arrays are not those of this run')
    arrays = tensors.from_bytes(memoryview(data))
    try:
      if name := tensors.find_not_finite(arrays):
        raise Unexpected(f'{name} has values that are not finite')
    finally:
      arrays.clear()  # or the map could not be closed


def writer(island: Island, name: str) -> tuple[str, str, int]:
  """Returns the task (kind, key, number) that writes an object. Raises Unexpected for names that no task has."""
  try:
    return island_lib.maker(name, island)
  except (ValueError, IndexError, StopIteration) as e:
    raise Unexpected('no task writes an object of this name') from e
