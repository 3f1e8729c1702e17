"""The names that facts and tasks of a run may have: the one guard where they are read [3].

A worker with credentials may insert anything. A row that no process of this run makes, or a fact whose metadata are no
JSON object, is named once and passed over.
"""

import functools
import logging
from collections.abc import Callable, Collection
from typing import Any

from dipaco_jax.core import printable
from dipaco_jax.core.errors import InputError

OF_PATHS = ('checkpoint', 'piece', 'state', 'evaluation', 'excluded')
TASKS_OF_PATHS = ('train', 'piece', 'ship', 'evaluate')
TASKS = ('prepare', 'train', 'piece', 'ship', 'outer', 'evaluate', 'reroute', 'finish')
LARGEST = 2**31 - 1  # number that PostgreSQL's column holds
TOLD = 1_000  # malformed facts that a process remembers to have named
CONFIG = 'config'


class FactNames:
  """The keys of facts by kind, and their largest number; any, before a process knows the run's config."""

  def __init__(self, num_paths: int = 0, modules: Callable[[], Collection[str]] = tuple, phases: int = LARGEST):
    self._num_paths, self._modules, self._phases = num_paths, modules, phases
    self._told: set[tuple[str, str]] = set()

  @functools.cached_property
  def _keys(self) -> dict[str, frozenset[str]]:
    paths = frozenset(map(str, range(self._num_paths)))
    if not paths:
      return {}
    modules = frozenset(self._modules())
    return dict.fromkeys((*OF_PATHS, *TASKS_OF_PATHS), paths) | {'module': modules, 'outer': modules}

  def largest(self, kind: str) -> int:
    """Returns the largest number of facts or tasks of a kind. Numbers of pieces count the pieces of all phases."""
    return self._phases if kind in self._keys and kind != 'piece' else LARGEST

  def is_sound(self, kind: str, key: Any, number: Any, meta: Any) -> bool:
    """Returns whether a fact may be of this run, and logs once where it cannot be.

    Raises InputError if it is the run's config, without which nothing can be read.
    """
    keys = self._keys.get(kind)
    is_named = (keys is None or key in keys) and isinstance(number, int) and 0 <= number <= self.largest(kind)
    if is_named and isinstance(meta, dict) and (kind != CONFIG or _is_config(meta)):
      return True
    if kind == CONFIG:
      name = printable.name(f'{kind} {key} {number}')
      raise InputError(f'the registry is damaged: its fact {name} is not that of a run; rebuild it from its backup')
    self._tell('fact', kind, key, number)
    return False

  def is_task(self, kind: str, key: str, number: int) -> bool:
    """Returns whether a task may be of this run, and logs once where it cannot be."""
    keys = self._keys.get(kind, {key})
    if not self._keys or (kind in TASKS and key in keys and 0 <= number <= self.largest(kind)):
      return True
    self._tell('task', kind, key, number)
    return False

  def _tell(self, row: str, kind: str, key: Any, number: Any):
    name = printable.name(f'{kind} {key} {number}')
    if (row, name) not in self._told and len(self._told) < TOLD:
      self._told.add((row, name))
      logging.warning('a %s of the registry is malformed and is passed over: %s', row, name)


def _is_config(meta: dict[str, Any]) -> bool:
  return isinstance(meta.get('config', {}), dict) and isinstance(meta.get('id', ''), str)
