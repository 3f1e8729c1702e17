"""Oversight of audits: they are drawn in time, never keep a run from ending, and find what they need [audit_facts.py].

The monitor draws audits and closes those that no worker can do; so does any role that finds nothing else to do in the
run. States that are published after their audit are compared with what the audit expects. The inputs of open audits are
kept (monitor.py).
"""

import functools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from dipaco_jax.islands import audit_facts, lineage, owner_facts, pieces, suspensions
from dipaco_jax.islands.island import Island
from dipaco_jax.islands.lease import OWNER
from dipaco_jax.islands.state_facts import STATE
from dipaco_jax.registry.registry import SILENT_S, Conflict, Fact, Lost, NewTask, Row

PATIENCE_S = 2 * SILENT_S  # without a worker that may do an audit, after which the audit is closed


def live_workers(island: Island) -> list[tuple[str, str]]:
  """Returns (name, owner) of the workers that are not suspended and were heard lately; one that has ended may return.

  The owner is '' where all text is in one place.
  """
  suspended = suspensions.current(island.registry)
  live = (role for role in island.registry.workers() if role['name'] not in suspended)
  return [(role['name'], role['about'].get(OWNER, '')) for role in live]


def without_workers(island: Island) -> list[Row]:
  """Returns the open audits that no live worker may do."""
  if not (rows := audit_facts.open_tasks(island)):
    return []
  workers, owners_paths = live_workers(island), owner_facts.paths_of_owners(island)

  def has_none(row: Row) -> bool:
    path = row['key']
    names = [name for name, owner in workers if not owners_paths or path in owners_paths.get(owner, ())]
    disks = {
      fact.meta.get('worker'): fact.meta.get('holder', '') for fact in island.registry.facts(pieces.CHECKPOINT, [path])
    }
    may_do = functools.partial(audit_facts.may_do, island, row['kind'], path, row['number'])
    return not any(may_do(name, disks.get(name, '')) for name in names)

  return [row for row in rows if (row['state'] == 'ready' or row['lease_left_s'] < 0) and has_none(row)]


def close(island: Island, rows: Iterable[Row], why: str) -> list[Fact]:
  """Closes audits; returns their facts."""
  facts = []
  for row in rows:
    if task := island.registry.claim_chosen(island.name, row):
      fact = audit_facts.closed(island, task, why)
      try:
        island.registry.complete(task, [fact])
      except (Lost, Conflict):
        continue
      facts.append(fact)
      logging.warning('%s was given up: %s', island.words(task), why)
  return facts


def are_all_that_is_left(island: Island) -> bool:
  """Returns whether audits, and perhaps the end of the run, which waits for them, are the only tasks that are open."""
  open_kinds = {kind for kind, states in island.registry.counts().items() if {*states} - {'done'}}
  return bool(open_kinds) and open_kinds <= {*audit_facts.KINDS, 'finish'}


class Overseer:
  """The monitor's part: draws audits, closes those that nobody can do, and compares states that come late."""

  def __init__(self, island: Island, clock: Callable[[], float] = time.monotonic):
    self.island, self.clock = island, clock
    self.drawn: dict[str, int] = {}
    self.lonely_since: dict[int, float] = {}  # by task: since when no live worker may do it
    self.idle_since: dict[int, float] = {}  # since when the run waits for it, and nobody does it
    self.running = set[tuple[str, int]]()  # paths and phases of audits that were open at the last look
    self.has_looked = False
    self.expected: dict[tuple[str, int], Fact] = {}  # audits of phases whose state is not published yet

  def look(self) -> list[Fact]:
    """Draws and closes audits; returns the facts of those that it has closed."""
    if not audit_facts.is_on(self.island):
      return []
    audit_facts.draw(self.island, self.drawn)
    self._note_states(audit_facts.open_tasks(self.island))
    self._compare_states()
    lonely = {row['id']: row for row in without_workers(self.island)}
    self._note(self.lonely_since, lonely)
    is_end = are_all_that_is_left(self.island)
    idle = {row['id']: row for row in audit_facts.open_tasks(self.island) if is_end and row['state'] == 'ready'}
    self._note(self.idle_since, idle)
    now = self.clock()
    alone = [row for id_, row in lonely.items() if now - self.lonely_since[id_] >= PATIENCE_S]
    late = [row for id_, row in idle.items() if now - self.idle_since[id_] >= self._patience_s]
    facts = close(self.island, alone, 'no worker that may do it is alive')
    return facts + close(self.island, late, 'no worker has begun it, and the run waits for nothing else')

  def needed_since(self) -> dict[int, tuple[int, int]]:
    """Returns the lowest and the highest phase of audits, by path, whose inputs have to be kept."""
    if not audit_facts.is_on(self.island):
      return {}
    phases: dict[int, list[int]] = {}
    for row in audit_facts.open_tasks(self.island):
      phases.setdefault(int(row['key']), []).append(row['number'])
    for fact in self.island.registry.unscheduled():  # from which other audits may follow
      if fact.kind == audit_facts.AUDITED:
        phases.setdefault(int(fact.key), []).extend([fact.number, *fact.meta.get('differing', [])])
    for path, phase in self.expected:
      if lineage.publishes_state(self.island, int(path), phase):
        phases.setdefault(int(path), []).append(phase)
    return {path: (min(numbers), max(numbers)) for path, numbers in phases.items()}

  def _note_states(self, rows: Sequence[Row]):
    """Notes what states should be, as audits that ended since the last look have found."""
    island, ended = self.island, self.running - {(row['key'], row['number']) for row in rows}
    self.running = {(row['key'], row['number']) for row in rows}
    facts = [fact for path, phase in ended for fact in island.registry.facts(audit_facts.AUDITED, [path], phase)]
    if not self.has_looked:
      facts, self.has_looked = island.registry.facts(audit_facts.AUDITED), True
    self.expected |= {(fact.key, fact.number): fact for fact in facts if STATE in fact.meta}

  def _compare_states(self):
    """Has a third worker look at states that were published after their audit, and differ from what it expects."""
    newest = self.island.registry.newest(STATE) if self.expected else {}
    for (path, phase), audited in list(self.expected.items()):
      if phase > newest.get(path, -1):
        continue
      del self.expected[path, phase]  # no audit begins from this state, or it is compared now
      for checkpoint in self.island.registry.facts(pieces.CHECKPOINT, [path], phase):
        if not audit_facts.agrees_with_state(self.island, checkpoint, audited.meta[STATE]):
          logging.warning('the state of path %s after phase %d differs from its audit', path, phase + 1)
          self.island.registry.add_tasks([NewTask(audit_facts.CONFIRM, path, phase)])

  @property
  def _patience_s(self) -> float:
    return PATIENCE_S + 4 * self.island.registry.lease_s

  def _note(self, since: dict[int, float], rows: Collection[int]):
    """Notes when rows were seen first without a gap."""
    for gone in since.keys() - {*rows}:
      del since[gone]
    for row in rows:
      since.setdefault(row, self.clock())


def settle(island: Island) -> list[Fact]:
  """Draws all audits, and closes those that nobody can do if the run waits for nothing else; returns their facts."""
  if not audit_facts.is_on(island):
    return []
  audit_facts.draw(island, {})
  if not are_all_that_is_left(island):
    return []
  return close(island, without_workers(island), 'no worker that may do it is alive')
