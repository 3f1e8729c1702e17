"""Errors of data from other islands, and the one guard inside which all such data is parsed [3].

An object is Gone if it is missing or differs from what was published, and Malformed if the published bytes are not a
valid module, contribution or state. No other error reaches a role, whatever an object or its fact contains.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from dipaco_jax.core import printable
from dipaco_jax.registry.registry import Fact
from dipaco_jax.storage import object_store, retry


class Later(OSError):
  """A task cannot be done yet, through no fault of this process; it should be tried again."""


class Gone(Later):
  """An object or a directory in storage is missing or corrupt; `name` says which."""

  def __init__(self, name: str, message: str):
    super().__init__(message)
    self.name = name


class Malformed(Gone):
  """An object has the published bytes, but they are not valid; or it is lost, and nobody can make it again."""


@contextlib.contextmanager
def raising_gone(name: str) -> Iterator[None]:
  """Raises Gone if storage misses an object or a directory, or finds it corrupt."""
  try:
    yield
  except (object_store.Missing, object_store.Corrupt) as e:
    raise Gone(name, str(e)) from e


@contextlib.contextmanager
def guarding(name: str) -> Iterator[None]:
  """Raises Malformed if data that another process has published cannot be parsed. Errors of storage pass."""
  try:
    yield
  except (OSError, MemoryError):
    raise
  except Exception as e:  # each format has errors of its own
    raise Malformed(name, printable.text(f'{name} is malformed: {retry.first_line(e)}')) from e


def objects_of(fact: Fact) -> dict[str, tuple[str, str]]:
  """Returns the objects that a checkpoint or piece names, (name, sha256) by level; leaves out malformed entries."""
  named = fact.meta.get('objects')

  def is_name(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(x, str) for x in value)

  by_level = named if isinstance(named, dict) else {}
  return {level: (name[0], name[1]) for level, name in by_level.items() if is_name(name)}
