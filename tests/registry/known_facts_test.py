"""Facts are asked for once: they never change, until a run that has diverged is resumed."""

import contextlib

import pytest

from dipaco_jax.registry import database, registry as registry_lib
from dipaco_jax.registry.known_facts import KnownFacts
from dipaco_jax.registry.registry import Conflict, Fact, NewTask


@pytest.fixture
def registries(tmp_path):
  """Those of two processes."""
  with contextlib.ExitStack() as stack:
    made = [registry_lib.Registry(f'sqlite:///{tmp_path}/registry.db') for _ in range(2)]
    for each in made:
      stack.callback(each.close)
    yield made


@pytest.fixture
def asked(monkeypatch):
  """The queries of all processes."""
  found, rows = [], database.Database.rows
  monkeypatch.setattr(database.Database, 'rows', lambda self, *a: found.append(a) or rows(self, *a))
  return found


def module(key: str, number: int, sha256: str = 'a') -> Fact:
  return Fact('module', key, number, f'uri of {key}', sha256 * 64, {'by': key})


def test_what_was_read_or_made_is_not_asked_for_again(registries, asked):
  us, them = registries
  facts = [module(key, 1) for key in ('b', 'a', 'c')]
  us.put(facts[:2])
  assert us.facts('module', ['b', 'a'], 1) == [facts[1], facts[0]] and not asked
  assert us.facts('module', ['a', 'b', 'c'], 1) == [facts[1], facts[0]] and len(asked) == 1, 'c may come at any time'
  them.add_tasks([NewTask('outer', 'c', 1)])
  them.complete(them.claim('w', ['outer']), facts[2:])
  assert us.facts('module', ['c', 'b', 'a'], 1) == sorted(facts) and len(asked) == 2
  assert us.facts('module', ['c'], 1) == facts[2:] == them.facts('module', ['c'], 1) and len(asked) == 2
  assert us.facts('module', ['c'], 2) == [] and len(asked) == 3
  assert us.facts('module', number=1) == sorted(facts) and us.facts('module', ['a'], at_least=1) == facts[1:2]


def test_what_another_has_put_otherwise_is_not_taken_for_known(registries):
  us, them = registries
  theirs, ours = module('a', 1), module('a', 1)._replace(meta={'by': 'us'})
  them.put([theirs])
  us.put([ours, module('b', 1)])
  assert us.facts('module', ['a', 'b'], 1) == [theirs, module('b', 1)]
  with pytest.raises(Conflict, match='cannot replace'):
    us.put([module('c', 1), module('a', 1, 'f')])
  assert us.facts('module', ['a', 'c'], 1) == [theirs]


def test_nothing_is_known_of_what_was_withdrawn(registries):
  us, them = registries
  for each in registries:
    each.put([module('a', 1), Fact('diverged', '', 0, '', '', {})])
  assert us.withdraw(Fact('diverged', 'resumed', 0, '', '', {}), [module('a', 1)], [])
  assert not us.facts('module', ['a'], 1)
  us.add_tasks([NewTask('outer', 'a', 1)])
  assert them.claim('w', ['outer']) and them.diverged == 1, 'so that it ends before it does anything'


def test_the_facts_that_were_asked_for_last_stay_known():
  known = KnownFacts(2)
  known.add([module('a', 1), module('b', 1)])
  known.find('module', ['a'], 1)
  known.add([module('c', 1)])
  assert known.find('module', ['a', 'b', 'c'], 1) == ([module('a', 1), module('c', 1)], ['b'])
