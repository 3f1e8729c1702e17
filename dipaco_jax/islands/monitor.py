"""The monitor: takes up what a killed process left unscheduled, collects garbage, and says what is stuck, and why [3].

Objects of a version or phase go when no open task is of one that is less than GENERATIONS newer: what is left suffices
to make any object of the newest again. What is of use for longer stays: versions of modules that early stopping points
at, and the inner state that each path goes on from, be it long since it was last drawn. When the run is finished, all
goes but the modules of the last version and of those that are pointed at.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from dipaco_jax.islands import live_page, run_history, schedule, screening_facts
from dipaco_jax.islands.island import OBJECTS, Island
from dipaco_jax.islands.schedule import INNER

PAUSE_S = 2.0
GENERATIONS = 2
SILENT_S = 60


def watch(island: Island):
  """Until the run is finished; raises Diverged where it is no use to go on."""
  collector, page, about = Collector(island), live_page.LivePage(island), {'task': '', 'stuck': ''}
  with heard(island, about):
    while not schedule.is_finished(island):
      screening_facts.heed(island)
      schedule.advance(island)
      collector.collect(frontier(island) - GENERATIONS)
      why = stuck(island)
      if why and why != about['stuck']:
        logging.warning('%s', why)
      about['stuck'] = why
      page.due()
      time.sleep(PAUSE_S)
    collector.collect(island.run.settings.train.phases)
    collector.finish()


@contextlib.contextmanager
def heard(island: Island, about: dict[str, str]) -> Iterator[None]:
  """Gives signs of life in a thread: to collect may take minutes."""
  over = threading.Event()

  def beat():
    while not over.wait(PAUSE_S):
      island.registry.beat(island.name, 'monitor', dict(about))

  thread = threading.Thread(target=beat, daemon=True)
  thread.start()
  try:
    yield
  finally:
    over.set()
    thread.join()


def frontier(island: Island) -> int:
  """The lowest phase that somebody still works on, or will as soon as a fact's consequences are there."""
  before = {'train': 0, 'outer': 1, 'evaluate': 1, 'checkpoint': 0, 'module': 0}  # of tasks, and of facts
  lowest = island.registry.lowest_open()
  return min((lowest[kind] - back for kind, back in before.items() if kind in lowest), default=0)


def stuck(island: Island) -> str:
  """What keeps failing, and roles that have gone silent while they are needed; '' where all is well."""
  failing = [
    f'{t["kind"]} {t["key"]} {t["number"]} failed {t["attempts"]} times: {t["error"]}'
    for t in island.registry.tasks('ready') + island.registry.tasks('running')
    if t['error']
  ]
  alive = {r['role'] for r in island.registry.roles() if r['silent_s'] < SILENT_S}
  needed = {'prepare': 'worker', 'train': 'worker', 'reroute': 'worker', 'outer': 'outer', 'evaluate': 'evaluator',
            'finish': 'evaluator'}  # fmt: skip
  missing = sorted({needed[kind] for kind in island.registry.ready_kinds()} - alive)
  return '; '.join([*failing[:3], *(f'nobody works as {role}: start one' for role in missing)])


class Collector:
  """Removes objects that nobody will read again, version by version."""

  def __init__(self, island: Island):
    self.island = island
    self.next = 0  # the first version that was not collected yet
    self.left: list[int] = []  # collected versions of which something was kept
    self.inner: dict[str, str] = {}  # name of the newest inner state that was collected, by path
    self.pointers = run_history.Pointers(island)

  def collect(self, end: int):
    """Versions below `end`, and the phases that made them."""
    while self.next < end:
      version, self.next = self.next, self.next + 1
      if version:
        self.pointers.add(version)
        self._forget(f'{OBJECTS}/paths/{version - 1}', self._inner(version - 1))
      keep = self._kept()
      self.left = [v for v in [*self.left, version] if self._forget(f'{OBJECTS}/modules/{v}', keep)]

  def finish(self):
    """What no version collected: the last phase, and what was made again or by one who did not know that it is over."""
    self.pointers.add(self.next)
    self._forget(OBJECTS, self._kept())
    self.island.storage.tidy('')

  def _forget(self, prefix: str, keep: set[str]) -> bool:
    """Removes all but `keep`; whether something is left."""
    storage = self.island.storage
    storage.tidy(prefix)
    names = storage.names(prefix)
    for name in {*names} - keep:
      storage.delete(name)
    return not keep.isdisjoint(names)

  def _inner(self, phase: int) -> set[str]:
    """Inner states of the phase's paths, which they go on from; those of before go."""
    kept = set()
    for fact in self.island.registry.facts('checkpoint', number=phase):
      if INNER in fact.meta['objects']:
        if before := self.inner.get(fact.key):
          self.island.storage.delete(before)
        self.inner[fact.key] = fact.meta['objects'][INNER][0]
        kept.add(self.inner[fact.key])
    return kept

  def _kept(self) -> set[str]:
    """Modules that paths point at, and those of newer versions (what nobody trained is of an older one too)."""
    versions = {*self.pointers.version} - {0}
    kept = {fact.uri for version in versions for fact in self.island.registry.facts('module', number=version)}
    number = self.next
    while newer := self.island.registry.facts('module', number=number):
      kept |= {fact.uri for fact in newer}
      number += 1
    return kept
