"""The backup pool: workers of low priority, which take abandoned tasks and copy those of stragglers [3].

A copy is trained with the straggler's own fence, and holds no lease. Whichever completes the task first counts; the
other finds the facts there, or is refused.
"""

import statistics

from dipaco_jax.islands import registry as registry_lib
from dipaco_jax.islands.interval import Interval
from dipaco_jax.islands.island import Island
from dipaco_jax.islands.registry import Task

LOOK_S = 10.0  # between looks; a task that is ready at two looks in a row counts as abandoned
STRAGGLES = 2.0  # a straggler has run so many times as long as the median of RECENT tasks
RECENT = 32
COPY = 'copy of '


class Backup:
  """The source of one backup worker's tasks."""

  def __init__(self, island: Island, kinds: tuple[str, ...]):
    self.island, self.kinds = island, kinds
    self.look = Interval(LOOK_S)
    self.ready: set[tuple[int, int]] = set()  # ids and fences, at the last look

  def next(self) -> Task | None:
    """Claims an abandoned task, or returns a straggler's as a copy; None where there is neither."""
    if not self.look.is_due():
      return None
    before = self.ready
    running = self.island.registry.tasks('running')
    ready = self.island.registry.tasks('ready') + [row for row in running if row['lease_left_s'] < 0]
    mine = [row for row in ready if row['kind'] in self.kinds]
    self.ready = {(row['id'], row['fence']) for row in mine}
    for row in mine:
      if (row['id'], row['fence']) in before:
        return self.island.registry.claim(self.island.name, [row['kind']], [row['key']])
    others = [row for row in running if row['owner'] != self.island.name and row['lease_left_s'] >= 0]
    return self.straggler([row for row in others if row['kind'] == 'train'])

  def straggler(self, running: list[registry_lib.Row]) -> Task | None:
    """Returns, as a copy, the longest running straggler that no other backup copies; None where there is none."""
    registry = self.island.registry
    usual_s = registry.durations('train', RECENT) if running else []
    late = [row for row in running if usual_s and running_s(row) > STRAGGLES * statistics.median(usual_s)]
    taken = {role['about'].get('task') for role in registry.roles() if role['silent_s'] < registry.lease_s}
    for row in sorted(late, key=running_s, reverse=True):
      task = Task(*(row[name] for name in Task._fields))
      if COPY + task.words not in taken:
        registry.beat(self.island.name, 'worker', {'task': COPY + task.words})  # at once, for other backups
        return task
    return None


def running_s(row: registry_lib.Row) -> float:
  """Returns the seconds since a task was claimed."""
  # lease - lease_left_s is the database's present time
  return row['lease'] - row['lease_left_s'] - row['claimed']
