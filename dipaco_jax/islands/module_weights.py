"""Weights of modules as paths read them: whole, or from differences since a whole version [3].

A module's fact names its object. Where modules are compressed, that is the difference to the version before, whose
object is `before` in the metadata. Every `outer.whole_every` versions there is a whole object too, [name, sha256] in
`whole`; `since` is the newest version up to this one that has one. A version in which no path took part has the object
of the one before.
"""

import itertools
import re
import threading
from collections.abc import Sequence
from concurrent import futures
from typing import Any

from dipaco_jax.islands.guard import Malformed, guarding
from dipaco_jax.islands.kept_arrays import KeptArrays
from dipaco_jax.islands.messages import Arrays
from dipaco_jax.registry.registry import Fact, Registry

BEFORE = 'before'
SINCE = 'since'
WHOLE = 'whole'
NAME = re.compile(r'objects/(?:modules|differences|outer)/(\d{1,15})/(.+)-[0-9a-f]+\.safetensors')
MASTER = 'master/'  # before the names of M's arrays in the object of the outer state


def check_name(module: Fact, name: str):
  """Raises Malformed if an object, by its name, is of another module, or of a later version than the fact."""
  named = NAME.fullmatch(name)
  keys = module.key, module.key.partition('/')[0]  # of version 0, all modules of a level have one object
  if not named or int(named[1]) > module.number or named[2] not in keys[: 1 if int(named[1]) else 2]:
    message = f'{name} cannot be of {module.key} in version {module.number}'
    raise Malformed(f'objects/modules/{module.number}/{module.key}-', message)


def chain(registry: Registry, fact: Fact) -> list[Fact]:
  """Returns the facts from which a version's weights follow: a whole version, then those that differ, in order."""
  if fact.meta.get(SINCE, fact.number) == fact.number:
    return [fact]
  return registry.facts('module', [fact.key], at_least=fact.meta[SINCE], at_most=fact.number)


def objects(registry: Registry, facts: Sequence[Fact]) -> set[str]:
  """Returns the names of the objects that readers of these versions may need."""
  names = {name for fact in facts for name in (fact.uri, _whole(fact)[0])}
  since = {(fact.key, n) for fact in facts for n in range(fact.meta.get(SINCE, fact.number), fact.number)}
  if since:
    numbers = [number for _, number in since]
    older = registry.facts('module', at_least=min(numbers), at_most=max(numbers))
    names |= {name for fact in older if (fact.key, fact.number) in since for name in (fact.uri, _whole(fact)[0])}
  return names


def _whole(fact: Fact) -> Sequence[str]:
  return fact.meta.get(WHOLE, (fact.uri, fact.sha256))


class ModuleWeights:
  """The weights and outer states that a process keeps, for any number of threads; nobody may change them."""

  def __init__(self, kept: KeptArrays | None = None):
    self.kept = kept or KeptArrays()
    self.reader = futures.ThreadPoolExecutor(1)  # for what will be needed
    self.reading = threading.Lock()  # of weights, one at a time: a thread finds what another was reading

  def read(self, island: Any, fact: Fact) -> Arrays:
    """Returns the weights of a module's version. Raises island.Gone."""
    check_name(fact, fact.uri)
    if (kept_weights := self.kept.get(fact.uri)) is not None:
      return kept_weights
    with self.reading, guarding(fact.uri):
      return self._read(island, fact)

  def _read(self, island: Any, fact: Fact) -> Arrays:
    if (kept_weights := self.kept.get(fact.uri)) is not None:
      return kept_weights
    if (weights := self.kept.get(fact.meta.get(BEFORE, ''))) is not None:
      weights = island.read_difference(fact, weights)
    else:
      weights = self._follow(island, chain(island.registry, fact))
    self.kept.put(fact.uri, weights)
    return weights

  def read_state(self, island: Any, name: str, sha256: str) -> Arrays:
    """Returns a module's outer state, from its object. Raises island.Gone."""
    if (state := self.kept.get(name)) is None:
      self.kept.put(name, state := island.read_object(name, sha256))
    return state

  def _follow(self, island: Any, links: list[Fact]) -> Arrays:
    """Returns the weights at the end of a chain, from the last link that is kept, or its whole beginning."""
    kept_links = ((i, x) for i, link in reversed([*enumerate(links)]) if (x := self.kept.get(link.uri)))
    begin, weights = next(kept_links, (0, None))
    if weights is None:
      weights = island.read_whole(links[0].key, *_whole(links[0]))
    for before, link in itertools.pairwise(links[begin:]):
      if link.uri != before.uri:
        weights = island.read_difference(link, weights, before.uri)
    return weights
