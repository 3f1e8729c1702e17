"""Which phases of paths are audited, by whom, and what follows from the result [docs/audit.md].

    audit_seed                 random; which phases are audited follows from it alone. Workers must not know it: a
                               gateway shows it to none of them
    audit (path, phase)        task of any worker but the one that trained the phase, of the path's owner where text
                               stays with its owners; fact audited (path, phase)
    confirm (path, phase)      task of a third worker, if the audit has found other values; fact confirmed (path, phase)
    suspended (NAME)           of the one of the three whose result differs from those of both others (suspensions.py)

Each phase of each path is drawn independently with probability `audit.fraction`, when its checkpoint is a fact. All
phases count alike, whether or not a state was published before them: a worker knows where states are published. An
audit begins from the newest state published before the phase, and compares the phases that it repeats on the way, too.

An audit that no worker can do is closed by a fact that says so: a run never waits for it.
"""

import contextlib
import hashlib
import hmac
import json
import logging
import secrets
from collections.abc import Collection, Iterable
from typing import Any

from dipaco_jax.islands import owner_facts, pieces, suspensions
from dipaco_jax.islands.island import AUDIT, CONFIRM, STATE, Island
from dipaco_jax.registry.registry import Conflict, Fact, NewTask, Row, Task

KINDS = (AUDIT, CONFIRM)
OPEN = ('ready', 'running')  # states of tasks that are not done
AUDITED, CONFIRMED = 'audited', 'confirmed'
FACT_OF = {AUDIT: AUDITED, CONFIRM: CONFIRMED}
SEED = 'audit_seed'
CLOSED = 'closed'  # in the metadata of a fact: why nobody has computed anything


def is_on(island: Island) -> bool:
  """Returns whether phases of this run are audited."""
  return island.run.settings.audit.fraction > 0


# -- the draw


def secret_seed(island: Island) -> str:
  """Returns the seed of the draw, which the first process that asks for it makes."""
  if not (facts := island.registry.facts(SEED)):
    seed = secrets.token_hex(16)
    new_fact = Fact(SEED, '', 0, '', hashlib.sha256(seed.encode()).hexdigest(), {'seed': seed})
    with contextlib.suppress(Conflict):  # another process has made one
      island.registry.put([new_fact])
    facts = island.registry.facts(SEED)
    island.registry.mark_scheduled(facts)
  return facts[0].meta['seed']


def is_drawn(seed: str, path: int, phase: int, fraction: float) -> bool:
  """Returns whether a phase of a path is audited, with probability `fraction` for who does not know the seed."""
  digest = hmac.digest(seed.encode(), f'{path} {phase}'.encode(), 'sha256')
  return int.from_bytes(digest[:8], 'big') < fraction * 2**64


def draw(island: Island, drawn: dict[str, int]):
  """Adds the audits of checkpoints that became facts; `drawn` has the newest phase of each path that was considered."""
  if not is_on(island):
    return
  seed, fraction = secret_seed(island), island.run.settings.audit.fraction
  newest = island.registry.newest(pieces.CHECKPOINT)
  late = {(fact.key, fact.number) for fact in island.registry.facts('excluded') if pieces.LATE in fact.meta}
  island.registry.add_tasks(
    NewTask(AUDIT, path, phase)
    for path, last in newest.items()
    if int(path) not in island.members.until  # whose workers have ended
    for phase in range(drawn.get(path, -1) + 1, last + 1)
    if island.active_paths(phase)[int(path)] and (path, phase) not in late
    if is_drawn(seed, int(path), phase, fraction)
  )
  drawn |= newest


# -- the tasks


def open_tasks(island: Island) -> list[Row]:
  """Returns the audits that are not done, as rows of the registry."""
  return [row for kind in KINDS for state in OPEN for row in island.registry.tasks(state, kind)]


def published(island: Island, path: str, phase: int) -> list[Fact]:
  """Returns the facts of all pieces of a path's phase, in their order; without the last if it was withdrawn."""
  return pieces.earlier_facts(island, phase, [path]) + island.registry.facts(pieces.CHECKPOINT, [path], phase)


def may_do(island: Island, kind: str, path: str, phase: int, name: str, holder: str = '') -> bool:
  """Returns whether a worker is none of those whose results are compared; a holder is the disk of a worker."""
  facts = published(island, path, phase)
  others = {fact.meta.get('worker') for fact in facts}
  if kind == CONFIRM:
    others |= {fact.meta['by'] for fact in island.registry.facts(AUDITED, [path], phase)}
  return name not in others and not (holder and holder in {fact.meta.get('holder') for fact in facts})


def claim(island: Island, name: str, paths: Collection[str] | None, holder: str = '') -> Task | None:
  """Claims an audit of one of these paths, None for all, that a worker of this name and disk may do."""
  for row in open_tasks(island):
    is_free = row['state'] == 'ready' or row['lease_left_s'] < 0
    is_ours = is_free and (paths is None or row['key'] in paths)
    is_ours = is_ours and may_do(island, row['kind'], row['key'], row['number'], name, holder)
    if is_ours and (task := island.registry.claim_chosen(name, row)):
      return task
  return None


class Queue:
  """The audits that one worker does: in the share of its tasks that the settings say, and whenever it has no other."""

  def __init__(self, island: Island, holder: str = ''):
    self.island, self.holder = island, holder
    self.owed = 0.0  # audits that this worker should do before its next task

  @property
  def is_due(self) -> bool:
    return self.owed >= 1

  def note(self, task: Task):
    """Counts a task that this worker has begun."""
    if task.kind == pieces.TRAIN:
      self.owed = min(2.0, self.owed + self.island.run.settings.audit.fraction)
    elif task.kind in KINDS:
      self.owed = max(0.0, self.owed - 1)

  def next(self) -> Task | None:
    """Claims an audit that this worker may do, or returns None."""
    name, keys = self.island.name, owner_facts.claim_keys(self.island)
    if not self.island.registry.sees_others:  # a gateway chooses
      return self.island.registry.claim(name, KINDS, keys, self.holder)
    return claim(self.island, name, keys, self.holder)


# -- the facts


def result(task: Task, checkpoint: str, is_equal: bool | None, digest: str, about: dict[str, Any]) -> Fact:
  """Makes the fact of an audit; `is_equal` is None if nothing was compared."""
  identity = hashlib.sha256(json.dumps([checkpoint, is_equal, digest]).encode()).hexdigest()
  noted = {'checkpoint': checkpoint, 'equal': is_equal, 'digest': digest}
  return Fact(FACT_OF[task.kind], task.key, task.number, '', identity, noted | about)


def closed(island: Island, task: Task, why: str) -> Fact:
  """Makes the fact that an audit was given up."""
  checkpoints = island.registry.facts(pieces.CHECKPOINT, [task.key], task.number)
  worker = checkpoints[0].meta.get('worker', '') if checkpoints else ''
  about = {CLOSED: why, 'by': island.name, 'worker': worker}
  return result(task, checkpoints[0].sha256 if checkpoints else '', None, '', about)


def follow(island: Island, facts: Iterable[Fact]):
  """Does what follows from facts of audits: another audit, a third worker's opinion, or a suspension."""
  for fact in facts:
    if fact.kind == CONFIRMED:
      _judge(island, fact)
      continue
    if fact.meta.get('differing'):  # phases that were repeated on the way
      island.registry.add_tasks([NewTask(AUDIT, fact.key, phase) for phase in fact.meta['differing'][:1]])
    if fact.meta.get('equal') is False:
      logging.warning('%s: a third worker, if there is one, computes it too', describe(island, fact))
      island.registry.add_tasks([NewTask(CONFIRM, fact.key, fact.number)])


def _judge(island: Island, confirmed: Fact):
  """Suspends the one of three workers whose result differs from those of both others, if there is one."""
  if not (audits := island.registry.facts(AUDITED, [confirmed.key], confirmed.number)):
    return
  audited = audits[0]
  maker, auditor, third = audited.meta['worker'], audited.meta['by'], confirmed.meta['by']
  is_exact = not island.run.settings.audit.tolerance
  phase = f'phase {confirmed.number + 1} of path {confirmed.key}'
  about = {'path': int(confirmed.key), 'phase': confirmed.number}
  if confirmed.meta.get('equal') is None:
    why = f'no third worker has confirmed it ({confirmed.meta.get(CLOSED, "nothing was compared")})'
    logging.warning('%s and %s disagree on %s, and %s: check both machines', maker, auditor, phase, why)
  elif confirmed.meta['equal']:
    message = f'its audit of {phase} by {maker} differs from what {maker} and {third} have computed'
    suspensions.suspend(island.registry, auditor, message, island.name, about)
    logging.warning('%s is suspended: %s', auditor, message)
  elif is_exact and confirmed.meta['digest'] != audited.meta['digest']:
    message = 'check whether their machines compute differently; config.audit.tolerance allows for that'
    logging.warning('%s, %s and %s all disagree on %s: %s', maker, auditor, third, phase, message)
  else:
    levels = audited.meta['levels'] or confirmed.meta['levels']
    message = f'{auditor} and {third} have computed other values of {phase} (levels {", ".join(levels)})'
    suspensions.suspend(island.registry, maker, message, island.name, about)
    logging.warning('%s is suspended: %s', maker, message)


def describe(island: Island, audited: Fact) -> str:
  """Returns a line about an audit that has found other values."""
  path = island.layout.grid.path_name(int(audited.key))
  levels = ', '.join(audited.meta.get('levels', []))
  maker, auditor = audited.meta['worker'], audited.meta['by']
  return (
    f'audit of phase {audited.number + 1} of path {path}: {auditor} has computed other values of {levels} than {maker}'
  )


def agrees_with_state(island: Island, checkpoint: Fact, expected: str) -> bool:
  """Returns whether the state that is published after a checkpoint, if there is one, has this digest."""
  states = island.registry.facts(STATE, [checkpoint.key], checkpoint.number)
  return all(fact.sha256 == expected for fact in states if fact.meta.get('checkpoint') == checkpoint.sha256)
