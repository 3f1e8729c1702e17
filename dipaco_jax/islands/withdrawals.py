"""Withdrawal of facts with objects that can no longer be read [3]. Only this file withdraws facts.

The first publication of a result is kept. If one of its objects is lost, the task is performed again, perhaps by a
machine that computes different bits. Then there are two cases:

    the published result can be read        the new result is dropped, and the task is complete
    one of its objects is missing           the new result replaces it, in one transaction
    or malformed

A contribution that is malformed is withdrawn as soon as an executor reads it, and its task is opened again, for any
worker; after MOST attempts the path is left out instead. A path's state that cannot be read is withdrawn too: nothing
replaces it, and the path is replayed from an earlier one.

Facts that depend on a fact are withdrawn with it: the state and the exclusion of a checkpoint. Later versions of a
module that name the same object get the new one. Other later facts stay, because they can be read by themselves. With
compression, a version that is the difference to a replaced one counts as lost (island.read_difference), and is replaced
in turn.

Each withdrawal is a fact (registry.py), inserted in one transaction with its changes, so that all processes see either
the old facts or the new ones. Processes drop what they remember at their next contact with the registry. Until then, a
process may read or publish results of the old fact, which are facts like all others.
"""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Sequence

from dipaco_jax.islands import floor_facts, owner_facts, pieces
from dipaco_jax.islands.guard import Gone
from dipaco_jax.islands.island import Island, carried_metadata
from dipaco_jax.islands.module_weights import WHOLE, ModuleWeights
from dipaco_jax.registry import fact_rows
from dipaco_jax.registry.fact_rows import Conflict, Fact, Withdrawal
from dipaco_jax.registry.registry import NewTask, Registry, Task

MOST = 3  # withdrawals of a malformed contribution, after which its path is left out


def complete(island: Island, task: Task, facts: Sequence[Fact]) -> Sequence[Fact]:
  """Completes a task, whose facts may be there otherwise; returns those that stand. Raises registry.Lost."""
  return _settle(island, facts, functools.partial(island.registry.complete, task))


def put(island: Island, facts: Sequence[Fact]):
  """Inserts facts. A fact replaces a different one of its name if that one can no longer be read."""
  try:
    island.registry.put(facts)
  except Conflict:
    for fact in facts:
      _settle(island, [fact], island.registry.put)


def _settle(island: Island, facts: Sequence[Fact], insert: Callable[..., None]) -> Sequence[Fact]:
  """Inserts facts, or what stands in their place, or both in turn while other processes change what stands."""
  try:
    insert(facts)
    return facts
  except Conflict as e:
    standing = e.standing
  while True:
    why = why_unreadable(island, facts[0], standing) or owner_facts.why_replaced(facts[0], standing)
    to_insert, withdrawal = standing, Withdrawal([], '', island.name)
    if why:
      to_insert, withdrawal = _replacing(island, facts, standing, why)
    try:
      insert(to_insert, withdrawal=withdrawal)
    except Conflict as e:
      standing = e.standing
      continue
    outcome = f'is replaced by the repeated result: {why}' if why else 'stays: the repeated result is dropped'
    logging.warning('%s was already published with different bits, and %s', _names_of(facts), outcome)
    return to_insert


def _replacing(
  island: Island, facts: Sequence[Fact], standing: Sequence[Fact], why: str
) -> tuple[list[Fact], Withdrawal]:  # fmt: skip
  """Returns the facts to insert in place of those that stand, and the withdrawal of these."""
  new = {fact[:3]: fact for fact in facts}
  replaced = [fact for fact in standing if fact[:3] in new and not fact_rows.is_same(fact, new[fact[:3]])]
  followers = [pair for old in replaced for pair in _followers(island, old, new[old[:3]])]
  dependents = [dependent for old in replaced for dependent in _dependents(island, old)]
  withdrawn = {fact[:3]: fact for fact in [*replaced, *(old for old, _ in followers), *dependents]}
  return [*facts, *(fact for _, fact in followers)], Withdrawal([*withdrawn.values()], why, island.name)


def replace(island: Island, old: Fact, new: Fact, is_lost: bool = False):
  """Replaces a fact by another of its name, unless the old fact's object exists; `is_lost`: whether that is known."""
  try:
    if is_lost:
      raise Gone(old.uri, f'{old.uri} is not in the store of its owner')
    island.read_object(old.uri, old.sha256)
  except Gone as e:
    followers = _followers(island, old, new)
    withdrawal = Withdrawal([old, *(before for before, _ in followers)], island.error_text(e), island.name)
    island.registry.put([new, *(after for _, after in followers)], withdrawal)


def withdraw(island: Island, fact: Fact, why: Gone):
  """Withdraws a fact that cannot be read, and that no task makes again."""
  if island.registry.revoke(Withdrawal([fact], island.error_text(why), island.name)):
    logging.warning('%s is withdrawn: %s', _names_of([fact]), why)


def times_withdrawn(registry: Registry, fact: Fact) -> int:
  """Counts how often a fact of this name was withdrawn."""
  return _withdrawn_names(registry, fact.number).count(f'{fact.kind} {fact.key}')


def withdrawn(registry: Registry, kind: str, number: int) -> set[str]:
  """Returns the keys of the facts of a kind and number that were withdrawn."""
  names = _withdrawn_names(registry, number)
  return {name.removeprefix(f'{kind} ') for name in names if name.startswith(f'{kind} ')}


def _withdrawn_names(registry: Registry, number: int) -> list[str]:
  return [mark.key.rpartition(' ')[0] for mark in registry.facts(fact_rows.WITHDRAWN, number=number)]


def train_again(island: Island, fact: Fact, why: Gone) -> bool:
  """Withdraws a path's messages, and opens its task again.

  Returns False if that was done MOST times, or the path's owner has left, so that nobody would take the task.
  """
  if int(fact.key) in island.members.until or times_withdrawn(island.registry, fact) >= MOST:
    return False
  kind = pieces.TRAIN if fact.kind == pieces.CHECKPOINT else fact.kind
  withdrawal = Withdrawal([fact, *_dependents(island, fact)], island.error_text(why), island.name)
  if island.registry.revoke(withdrawal, [NewTask(kind, fact.key, fact.number)]):
    message = '%s by %s is withdrawn, and trained again: %s'
    logging.warning(message, _names_of([fact]), fact.meta.get('worker', 'an unnamed worker'), why)
  return True


def why_unreadable(island: Island, first: Fact, standing: Sequence[Fact]) -> str:
  """Says why facts of a task cannot stand: the first of them was withdrawn, or one cannot be read; '' if they can."""
  if first[:3] not in [fact[:3] for fact in standing]:
    return f'{_names_of([first])} was withdrawn'
  try:
    for fact in standing:
      _read(island, fact)
  except Gone as e:
    return island.error_text(e)
  return ''


def _read(island: Island, fact: Fact):
  """Reads all that a fact names, as its readers do, but not what is in the store of another. Raises island.Gone."""
  stays = island.run.settings.data.own_text and not island.owner  # states, and modules of single paths
  if fact.kind in (pieces.CHECKPOINT, pieces.PIECE):
    for level in island.layout.levels if 'excluded' not in fact.meta else ():
      if level.name in pieces.piece(island, pieces.part_of(island, fact)).sent and level.name not in island.own_levels:
        island.read_contribution(fact, level)
  elif fact.kind == 'module' and (
    fact.key.partition('/')[0] not in island.own_levels or (island.has_own_objects(fact.number) and not stays)
  ):
    dataclasses.replace(island, weights=ModuleWeights()).read_module(fact)  # nothing that is in memory
    if WHOLE in fact.meta:
      island.read_whole(fact.key, *fact.meta[WHOLE])
  elif fact.kind == floor_facts.JUDGED:
    if not any(floor_facts.is_of(fact, sent) for sent in island.registry.facts('checkpoint', [fact.key], fact.number)):
      raise Gone(fact.key, 'its checkpoint was withdrawn')
  elif fact.kind == 'state':
    checkpoints = island.registry.facts(pieces.CHECKPOINT, [fact.key], fact.number)
    if not checkpoints or checkpoints[0].sha256 != fact.meta.get('checkpoint'):
      raise Gone(fact.key, 'its checkpoint was withdrawn')
    for each in fact.meta['objects'] if not stays else ():
      island.read_object(*each)


def _followers(island: Island, old: Fact, new: Fact) -> list[tuple[Fact, Fact]]:
  """Returns later versions of a module that have the same object, as no path took part, and what replaces them."""
  if old.kind != 'module':
    return []
  later = island.registry.facts('module', [old.key], at_least=old.number + 1)
  about = carried_metadata(new)
  same = itertools.takewhile(lambda fact: fact.uri == old.uri, later)
  return [(fact, new._replace(number=fact.number, meta=fact.meta | about)) for fact in same]


def _dependents(island: Island, fact: Fact) -> list[Fact]:
  """Returns the facts to withdraw with a checkpoint or piece: the state after it, and its worker's exclusion."""
  if fact.kind not in (pieces.CHECKPOINT, pieces.PIECE):
    return []
  phase = pieces.phase_of(island, fact.kind, fact.number)
  states = island.registry.facts('state', [fact.key], phase) if fact.kind == pieces.CHECKPOINT else []
  excluded = island.registry.facts('excluded', [fact.key], phase) if 'excluded' in fact.meta else []
  return states + [exclusion for exclusion in excluded if 'executor' not in exclusion.meta]


def _names_of(facts: Sequence[Fact]) -> str:
  return f'{facts[0].kind} {facts[0].key} {facts[0].number}'
