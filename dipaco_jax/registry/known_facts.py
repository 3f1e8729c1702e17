"""Facts that a process has read or made: they do not change until some are withdrawn, so they are asked for once."""

import collections
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

LIMIT = 2_000  # facts; one of a checkpoint has some kilobytes of metadata


class KnownFacts:
  """The facts that were asked for last, for any number of threads; that a fact is not there is never known."""

  def __init__(self, limit: int = LIMIT):
    self.limit = limit
    self._facts: collections.OrderedDict[tuple[str, str, int], Any] = collections.OrderedDict()
    self._lock = threading.Lock()
    self.generation = 0  # how often all was forgotten

  def find(self, kind: str, keys: Sequence[str], number: int) -> tuple[list[Any], list[str]]:
    """Returns the facts of these names that are known, and the keys of the others."""
    with self._lock:
      known = {key: self._facts[kind, key, number] for key in keys if (kind, key, number) in self._facts}
      for key in known:
        self._facts.move_to_end((kind, key, number))
    return list(known.values()), [key for key in keys if key not in known]

  def read(
    self, kind: str, keys: Sequence[str] | None, number: int | None, ask: Callable[[Sequence[str] | None], list[Any]]
  ) -> list[Any]:  # fmt: skip
    """Returns facts from `ask(keys)`, which is called for those alone that are not known, if all are named; by key."""
    if keys is None or number is None:
      return ask(keys)
    known, unknown_keys = self.find(kind, keys, number)
    if unknown_keys:
      generation = self.generation
      facts = ask(unknown_keys)
      self.add(facts, generation)
      known += facts
    return sorted(known, key=lambda fact: fact.key)

  def add(self, facts: Iterable[Any], generation: int = 0):
    """Notes facts that were in the registry at a generation. Facts of an earlier one may have been withdrawn since."""
    with self._lock:
      if generation != self.generation:
        return
      for fact in facts:
        self._facts[fact[:3]] = fact
      while len(self._facts) > self.limit:
        self._facts.popitem(last=False)

  def clear(self):
    """Forgets all, as facts are withdrawn."""
    with self._lock:
      self._facts.clear()
      self.generation += 1
