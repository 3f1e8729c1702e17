"""The monitor: takes up what a killed process left unscheduled, collects garbage, and says what is stuck, and why [3].

Objects of a version or phase go when no open task is of one that is less than GENERATIONS newer: what is left suffices
to make any object of the newest again. Versions of modules that a path's early stopping points at stay.
"""

import logging
import time

from dipaco_jax import history_of_islands
from dipaco_jax import islands as islands_lib
from dipaco_jax.islands import OBJECTS, Islands

PAUSE_S = 2.0
GENERATIONS = 2
SILENT_S = 60


def watch(islands: Islands):
  """Until the run is finished."""
  collector, said = Collector(islands), ''
  while not islands_lib.is_finished(islands):
    islands_lib.advance(islands)
    collector.collect(frontier(islands) - GENERATIONS)
    why = stuck(islands)
    if why and why != said:
      logging.warning('%s', why)
    said = why
    islands.registry.beat(islands.name, 'monitor', {'task': '', 'stuck': why})
    time.sleep(PAUSE_S)
  collector.collect(islands.run.settings.train.phases)


def frontier(islands: Islands) -> int:
  """The lowest phase that somebody still works on."""
  lowest = islands.registry.lowest_open()
  found = [number - (kind != 'train') for kind, number in lowest.items() if kind in ('train', 'outer', 'evaluate')]
  return min(found, default=0)


def stuck(islands: Islands) -> str:
  """What keeps failing, and roles that have gone silent while they are needed; '' where all is well."""
  failing = [
    f'{t["kind"]} {t["key"]} {t["number"]} failed {t["attempts"]} times: {t["error"]}'
    for t in islands.registry.tasks('ready') + islands.registry.tasks('running')
    if t['error']
  ]
  alive = {r['role'] for r in islands.registry.roles() if r['silent_s'] < SILENT_S}
  needed = {'prepare': 'worker', 'train': 'worker', 'reroute': 'worker', 'outer': 'outer', 'evaluate': 'evaluator',
            'finish': 'evaluator'}  # fmt: skip
  open_kinds = {kind for kind, counts in islands.registry.counts().items() if counts.get('ready')}
  missing = sorted({needed[kind] for kind in open_kinds} - alive)
  return '; '.join([*failing[:3], *(f'nobody works as {role}: start one' for role in missing)])


class Collector:
  """Removes objects that nobody will read again, version by version."""

  def __init__(self, islands: Islands):
    self.islands = islands
    self.next = 0  # the first version that was not collected yet
    self.best: dict[int, tuple[float, int]] = {}  # hold-out loss and version that each path points at

  def collect(self, end: int):
    """Versions and phases below `end`."""
    storage = self.islands.storage
    while self.next < end:
      version, self.next = self.next, self.next + 1
      self._point(version)
      for name in storage.names(f'{OBJECTS}/paths/{version - 1}') + storage.leftovers(f'{OBJECTS}/paths/{version - 1}'):
        storage.delete(name)
      keep = self._kept()
      for old in range(version + 1):
        for name in storage.names(f'{OBJECTS}/modules/{old}') + storage.leftovers(f'{OBJECTS}/modules/{old}'):
          if name not in keep:
            storage.delete(name)

  def _point(self, version: int):
    for path, loss in enumerate(history_of_islands.holdout_losses(self.islands, version)):
      if loss is not None and (path not in self.best or loss < self.best[path][0]):
        self.best[path] = loss, version

  def _kept(self) -> set[str]:
    """Objects that paths point at, and those of newer versions (what nobody trained is of an older one too)."""
    registry, kept = self.islands.registry, set()
    for path, (_, version) in self.best.items():
      kept |= {f.uri for f in registry.facts('module', list(self.islands.modules_of(path).values()), version)}
    number = self.next
    while newer := registry.facts('module', number=number):
      kept |= {fact.uri for fact in newer}
      number += 1
    return kept
