"""The names that facts of a run may have: the one guard where facts are read [3].

A worker with credentials may insert anything. A fact that no process of this run makes, or whose metadata are no JSON
object, is named once and passed over.
"""

import functools
import logging
from collections.abc import Callable, Collection
from typing import Any

from dipaco_jax.core import printable
from dipaco_jax.core.errors import InputError

OF_PATHS = ('checkpoint', 'piece', 'state', 'evaluation', 'excluded', 'audited', 'confirmed', 'judged')
LARGEST = 2**31 - 1  # number that PostgreSQL's column holds
TOLD = 1_000  # malformed facts that a process remembers to have named
CONFIG = 'config'


class FactNames:
  """The keys of facts by kind, and their largest number; any, before a process knows the run's config."""

  def __init__(self, num_paths: int = 0, modules: Callable[[], Collection[str]] = tuple, phases: int = LARGEST):
    self._num_paths, self._modules, self._phases = num_paths, modules, phases
    self._told: set[str] = set()

  @functools.cached_property
  def _keys(self) -> dict[str, frozenset[str]]:
    paths = frozenset(map(str, range(self._num_paths)))
    return dict.fromkeys(OF_PATHS, paths) | {'module': frozenset(self._modules())} if paths else {}

  def largest(self, kind: str) -> int:
    """Returns the largest number of facts of a kind. Numbers of pieces count the pieces of all phases."""
    return self._phases if kind in self._keys and kind != 'piece' else LARGEST

  def is_sound(self, kind: str, key: Any, number: Any, meta: Any) -> bool:
    """Returns whether a fact may be of this run, and logs once where it cannot be.

    Raises InputError if it is the run's config, without which nothing can be read.
    """
    keys = self._keys.get(kind)
    is_named = (keys is None or key in keys) and isinstance(number, int) and 0 <= number <= self.largest(kind)
    if is_named and isinstance(meta, dict) and (kind != CONFIG or _is_config(meta)):
      return True
    name = printable.name(f'{kind} {key} {number}')
    if kind == CONFIG:
      raise InputError(f'the registry is damaged: its fact {name} is not that of a run; rebuild it from its backup')
    if name not in self._told and len(self._told) < TOLD:
      self._told.add(name)
      logging.warning('a fact of the registry is malformed and is passed over: %s', name)
    return False


def _is_config(meta: dict[str, Any]) -> bool:
  return isinstance(meta.get('config', {}), dict) and isinstance(meta.get('id', ''), str)
