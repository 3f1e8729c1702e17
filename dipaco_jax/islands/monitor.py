"""The monitor: schedules what killed processes left unscheduled, collects garbage, and says what is stuck, and why [3].

Objects of a version or phase are deleted when all open tasks are at least GENERATIONS newer: the rest suffices to make
any object of the newest versions again. Some are kept for longer: versions of modules that early stopping points at,
and the inner state that each path goes on from, however long ago it was last drawn. When the run is finished, only the
modules of the last version and of those that early stopping chose are left.
"""

import logging
import time

from dipaco_jax.islands import evaluator, live_page, outer_executor, run_history, schedule, screening_facts, worker
from dipaco_jax.islands.island import OBJECTS, Island
from dipaco_jax.islands.path_state import INNER
from dipaco_jax.storage import retry

PAUSE_S = 2.0  # between looks
GENERATIONS = 2  # of objects that are kept below the open tasks, as above
ROLES = {'worker': worker.KINDS, 'outer': outer_executor.KINDS, 'evaluator': evaluator.KINDS}
SILENT_S = 60  # a role that is silent for longer counts as gone


def watch(island: Island):
  """Watches until the run is finished; raises Diverged where it has diverged."""
  collector, page, about = Collector(island), live_page.LivePage(island), {'task': '', 'stuck': ''}
  # Signs of life come from a thread, as collecting may take minutes.
  with retry.every(PAUSE_S, lambda: island.registry.beat(island.name, 'monitor', dict(about))):
    while not schedule.is_finished(island):
      screening_facts.heed(island)
      schedule.advance(island)
      collector.collect(frontier(island) - GENERATIONS)
      if (why := stuck(island)) and why != about['stuck']:
        logging.warning('%s', why)
      about['stuck'] = why
      page.write_if_due()
      time.sleep(PAUSE_S)
    collector.collect(island.run.settings.train.phases)
    collector.finish()


def frontier(island: Island) -> int:
  """Returns the lowest phase that a task works on, or will once all facts have had their consequences."""
  before = {'train': 0, 'outer': 1, 'evaluate': 1, 'checkpoint': 0, 'module': 0}  # of tasks, and of facts
  lowest = island.registry.lowest_open()
  return min((lowest[kind] - back for kind, back in before.items() if kind in lowest), default=0)


def stuck(island: Island) -> str:
  """Returns what is stuck: tasks that keep failing, and roles that are needed and silent; '' where all is well."""
  found = [t for state in ('ready', 'running') for t in island.registry.tasks(state) if t['error']]
  failing = [f'{t["kind"]} {t["key"]} {t["number"]} failed {t["attempts"]} times: {t["error"]}' for t in found]
  alive = {r['role'] for r in island.registry.roles() if r['silent_s'] < SILENT_S}
  ready = island.registry.ready_kinds()
  needed = {role for role, kinds in ROLES.items() if not ready.isdisjoint(kinds)}
  return '; '.join([*failing[:3], *(f'nobody works as {role}: start one' for role in sorted(needed - alive))])


class Collector:
  """Deletes objects that nobody will read again, version by version."""

  def __init__(self, island: Island):
    self.island = island
    self.next = 0  # the first version that was not collected yet
    self.left: list[int] = []  # collected versions of which something was kept
    self.inner: dict[str, str] = {}  # name of the newest inner state that was collected, by path
    self.pointers = run_history.Pointers(island)

  def collect(self, end: int):
    """Collects versions below `end`, and the phases that made them."""
    while self.next < end:
      version, self.next = self.next, self.next + 1
      if version:
        self.pointers.add(version)
        self._forget(f'{OBJECTS}/paths/{version - 1}', self._inner(version - 1))
      keep = self._kept()
      self.left = [v for v in [*self.left, version] if self._forget(f'{OBJECTS}/modules/{v}', keep)]

  def finish(self):
    """Collects the rest: the last phase, and objects made again, or by a process that did not know of the end."""
    self.pointers.add(self.next)
    self._forget(OBJECTS, self._kept())
    self.island.storage.tidy('')

  def _forget(self, prefix: str, keep: set[str]) -> bool:
    """Deletes the objects in a folder but `keep`; returns whether any is left."""
    self.island.storage.tidy(prefix)
    names = self.island.storage.names(prefix)
    for name in {*names} - keep:
      self.island.storage.delete(name)
    return not keep.isdisjoint(names)

  def _inner(self, phase: int) -> set[str]:
    """Returns the names of the inner states that the phase's paths go on from; deletes the ones before."""
    kept = set()
    for fact in self.island.registry.facts('checkpoint', number=phase):
      if INNER in fact.meta['objects']:
        if before := self.inner.get(fact.key):
          self.island.storage.delete(before)
        self.inner[fact.key] = fact.meta['objects'][INNER][0]
        kept.add(self.inner[fact.key])
    return kept

  def _kept(self) -> set[str]:
    """Returns objects of modules that early stopping points at, and of all newer versions, which may share them."""
    versions = {*self.pointers.version} - {0}
    kept = {fact.uri for version in versions for fact in self.island.registry.facts('module', number=version)}
    number = self.next
    while newer := self.island.registry.facts('module', number=number):
      kept |= {fact.uri for fact in newer}
      number += 1
    return kept
