"""Phases that end without the paths that are late: `outer.quorum` and `outer.grace_s` [3].

The next version of a module needs the contributions of all n paths that share it or, with a quorum q < 1, of

    K = ceil(q n)     paths, and of those that come within
    grace_s           seconds after the K-th, by the database's clock

A path that is not done by then is late in this phase: it takes no part in it, in any module, as if its worker had
excluded it (screening_facts.py). Its task is completed with facts that say so:

    checkpoint (path, phase)    without objects; `excluded` is the reason, and `late` is set
    excluded (path, phase)      with `late`, which is no sign that the run diverges
    module (own, phase + 1)     the path's own modules, unchanged

They are inserted in one transaction that takes the task from its worker, if it has one, whose fence is then too old. So
a path is either in all modules of a phase or late, and never both. It begins its next phase as all others do, with the
newest modules, and with the second moments of the base model, if that has an AdamW state, so that any worker may train
it without a replay:

    m = 0        v, t: those of the base model

With v = 0, the first steps would be too long; the m of the base model would lead all that were late the same way.

A path whose checkpoint was withdrawn (withdrawals.py) is awaited, because a module may contain what it sent at first.
A path is late as soon as one of its modules has waited long enough. A module of which all paths are late stays as it
is. If paths have modules of their own, all of them are awaited in the last phase of a round and of the run, because
only their workers can publish these modules.
"""

import logging
import math
from collections.abc import Sequence

from dipaco_jax.islands import outer_weights, path_steps, pieces, schedule, screening_facts, withdrawals
from dipaco_jax.islands.guard import Later
from dipaco_jax.islands.island import Island, carried_metadata
from dipaco_jax.islands.path_steps import PathSteps
from dipaco_jax.registry.registry import Conflict, Fact, NewTask

NOBODY = 'nobody in time'  # the worker of a checkpoint of a path that is late


def is_on(island: Island) -> bool:
  """Returns whether phases may end without some paths."""
  return island.run.settings.outer.quorum < 1 and not island.decisions


def close(island: Island):
  """Ends the phases of the paths that are late for a module whose outer step waits."""
  if is_on(island):
    for task in island.registry.tasks('waiting', 'outer'):
      close_module(island, task['key'], task['number'])


def close_module(island: Island, module: str, version: int) -> bool:
  """Ends the phase of the paths that are late for a version of a module; returns whether there are any."""
  phase, closed = version - 1, list[Fact]()
  if awaits_all(island, phase):
    return False
  late, why = find_late(island, module, phase)
  for path in late:
    try:
      facts = late_facts(island, path, phase, why)
      if island.registry.settle(NewTask(pieces.TRAIN, str(path), phase), facts):
        closed += facts
    except (Later, Conflict) as e:  # another process decides otherwise at this moment
      logging.warning('phase %d of path %d does not end yet: %s', phase + 1, path, e)
  schedule.schedule(island, closed)
  return bool(closed)


def awaits_all(island: Island, phase: int) -> bool:
  """Returns whether a phase does not end before all paths are done: their workers publish their own modules then."""
  return bool(island.own_levels) and island.has_own_objects(phase + 1)


def find_late(island: Island, module: str, phase: int) -> tuple[list[int], str]:
  """Returns the paths that are late for the outer step of a module after a phase, and why."""
  outer, paths = island.run.settings.outer, sorted(outer_weights.module_weights(island, module, phase), key=int)
  checkpoints = island.registry.facts(pieces.CHECKPOINT, paths, phase)
  withdrawn = withdrawals.withdrawn(island.registry, pieces.CHECKPOINT, phase)
  missing = {*paths} - {fact.key for fact in checkpoints} - withdrawn
  needed = quorum_size(outer.quorum, len(paths))
  waited = island.registry.seconds_since_end(pieces.TRAIN, contributing(checkpoints), phase)
  if not missing or len(waited) < needed or sorted(waited, reverse=True)[needed - 1] < outer.grace_s:
    return [], ''
  why = f'late: {needed} of {len(paths)} paths of {module} were done more than {outer.grace_s:g} s before'
  return sorted(map(int, missing)), why


def quorum_size(quorum: float, paths: int) -> int:
  """Returns K, the smallest number of paths that is a share `quorum` of all or more."""
  return math.ceil(quorum * paths - 1e-9)  # 0.28 * 25 is a little more than 7


def contributing(checkpoints: Sequence[Fact]) -> list[str]:
  """Returns the paths, by name, whose checkpoints contain outer gradients."""
  return [fact.key for fact in checkpoints if 'excluded' not in fact.meta]


def decided(island: Island, path: int, phase: int) -> str:
  """Returns why a path is late in a phase of a run that is computed again, or ''."""
  is_late = island.decisions and (path, phase) in island.decisions.late
  return island.decisions.excluded[path, phase] if is_late else ''


def late_facts(island: Island, path: int, phase: int, why: str) -> list[Fact]:
  """Makes the facts of a path that is late in a phase. Raises Later."""
  first = path_steps.first(island, path, phase)
  about = {'worker': NOBODY, 'rows': [], 'timed_steps': 0, 'timed_s': 0.0, 'holdout_loss': None}
  about |= {'excluded': why, pieces.LATE: True} | path_steps.noted(island, PathSteps(first or 0, 0))
  own_modules = [
    fact._replace(number=phase + 1, meta=carried_metadata(fact) | {'left_out': {str(path): why}})
    for fact in island.registry.facts('module', island.own_modules(path), phase)
  ]
  checkpoint = schedule.checkpoint_fact(path, phase, {}, about, own_modules=own_modules)
  return [checkpoint, screening_facts.exclusion(island, checkpoint, why), *own_modules]
