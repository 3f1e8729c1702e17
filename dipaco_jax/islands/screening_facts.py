"""Screening in islands [3]: a worker judges its path before publishing, and an executor judges what it reads.

The length of an outer gradient, r, the usual length, h, and the limits are those of one job (screening.py). The fact of
a module has its h, `usual`. A worker excludes its path from all modules, as one job does; an executor leaves it out of
the one module that it reads. Facts name the paths that take no part:

    checkpoint (path, phase)    `excluded`: why, by its worker; it has no objects
    module (module, version)    `left_out`: why, by path; a version that is made again leaves out the same paths
    excluded (path, phase)      why, and the worker that trained it; the path's next phase begins with a fresh AdamW
                                state or, if it was only late, with the base model's second moments [quorum.py]
    diverged (number)           why the run cannot continue; all roles end. The same command withdraws the facts that
                                block the phase, notes `diverged resumed (number)`, and trains the phase again.

A process knows how often the run had been resumed when it began; it ends when the run diverges again.
"""

import contextlib
import functools
import hashlib
import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from dipaco_jax.algorithm import screening
from dipaco_jax.config import choices
from dipaco_jax.core.errors import Diverged
from dipaco_jax.islands import path_steps, pieces
from dipaco_jax.islands.guard import objects_of
from dipaco_jax.islands.island import Island
from dipaco_jax.islands.path_steps import PathSteps
from dipaco_jax.registry.registry import RESUMED, Conflict, Fact, NewTask, Registry

EARLIER = 'it was left out earlier in the phase'


class Bounds(NamedTuple):
  """The limits of plausible outer gradients in a phase."""

  usual: Mapping[str, float]  # h of the path's modules, by level
  exclude_above: float  # f

  def why(self, moved: Mapping[str, float]) -> str:
    """Says why a path with these r, by level, takes no part; '' if it does take part."""
    f = as_float32(self.exclude_above)
    plausible = (_is_plausible(as_float32(r), as_float32(self.usual[level]), f) for level, r in moved.items())
    return '' if all(map(bool, plausible)) else screening.exclusion_reason(moved, self.usual, self.exclude_above)


def bounds(island: Island, modules: Iterable[Fact]) -> Bounds:
  """Returns the limits for paths that start from these modules."""
  named = ((island.parse_module(fact.key)[0].name, fact) for fact in modules)
  usual = {level: fact.meta.get('usual', first_usual(island, fact.key)) for level, fact in named}
  return Bounds(usual, island.run.settings.outer.exclude_above)


def first_usual(island: Island, module: str) -> float:
  """Returns h_0 of a module, for versions whose fact does not note h."""
  names = island.layout.names(island.parse_module(module)[0])
  return screening.first_usual(sum(island.shapes[n].size for n in names), island.run.settings.inner.optimizer)


def next_usual(island: Island, module: str, usual: float, moved: Collection[float]) -> dict[str, float]:
  """Returns the metadata that notes h of the next version, from h of this one and r of the paths that took part."""
  first = first_usual(island, module)
  num_moved = sum(r > 0 for r in moved)  # not those that had a rate of 0
  next_value = float(_next_usual(as_float32(usual), as_float32(math.fsum(moved)), np.int32(num_moved), first))
  return {'usual': next_value} if math.isfinite(next_value) else {}  # JSON has no infinity


# Compiled: one operation at a time, they would take longer than a short inner step.
_is_plausible = jax.jit(screening.is_plausible)
_next_usual = jax.jit(screening.next_usual, static_argnums=3)


def as_float32(x: float) -> np.float32:
  """Rounds to float32, as one job does."""
  with np.errstate(over='ignore'):
    return np.float32(x)


@functools.lru_cache(1024)
def rates(island: Island, level: str, phase: int, steps: PathSteps) -> float:
  """Returns the sum of the learning rates of the steps that a level's outer gradient of a path's phase is of."""
  s, times, are_timed = island.run.settings, island.timetable, path_steps.are_timed(island)
  end = steps.taken if times.is_closed(phase) else times.places[level]
  count = steps.taken if are_timed else times.steps_since(level, phase)
  summed = _sum_of_rates(are_timed, s.inner, s.decay_steps, s.pretrain.steps, s.train.learning_rate)
  return float(summed(np.int32(steps.first + end - count), count))


@functools.lru_cache(8)  # a new function would be compiled again in every phase
def _sum_of_rates(are_timed: bool, *schedule: Any) -> Callable[[np.int32, int], jax.Array]:
  """Returns the compiled sum; for timed phases one program for any number of steps."""
  rate = choices.make_inner(*schedule).learning_rate
  return jax.jit(functools.partial(screening.sum_of_rates, rate), static_argnums=() if are_timed else 1)


# -- a path


def judge(
  island: Island, path: int, phase: int, squares: Mapping[str, float], steps: PathSteps, own: Iterable[Fact] = ()
) -> dict[str, Any]:  # fmt: skip
  """Judges a path's outer gradient, for its checkpoint: `moved` is r by level, `excluded` the reason for an exclusion.

  `squares` has |d|^2 of the messages, by level, possibly of some levels only; `steps` are those of the phase. `own` has
  the facts of the modules that stay with the path.
  """
  if not squares:
    return {'moved': {}}
  named = [module for level, module in island.shared_modules(path).items() if level in squares]
  modules = [*island.registry.facts('module', named, phase), *own]
  limits = bounds(island, modules)
  lengths = {level: math.sqrt(x) if math.isfinite(x) else math.nan for level, x in squares.items()}
  moved = {level: length / rates(island, level, phase, steps) for level, length in lengths.items()}
  why = island.decisions.why_excluded(path, phase, named) if island.decisions else limits.why(moved)
  finite_moved = {level: r if math.isfinite(r) else None for level, r in moved.items()}
  return {'moved': finite_moved} | ({'excluded': why} if why else {})


def exclusion(island: Island, sent: Fact, why: str, executor: str = '') -> Fact:
  """Makes the fact that a path takes no part in an outer step, as its worker, or an executor, says; logs it.

  `sent` is the fact of the checkpoint, or of the piece, with which the path would have taken part.
  """
  phase, step = pieces.part_of(island, sent).phase, path_steps.of_fact(island, sent).end
  worker, is_late = sent.meta['worker'], pieces.LATE in sent.meta
  told = ('', "the base model's second moments") if is_late else (worker, screening.FRESH)
  message = screening.exclusion_message(island.layout.grid, int(sent.key), why, *told)
  logging.warning('train, phase %d, step %d: %s', phase + 1, step, message)
  about = {'why': why, 'worker': worker, 'step': step} | ({'executor': executor} if executor else {})
  about |= {pieces.LATE: True} if is_late else {}
  return Fact('excluded', sent.key, phase, '', '', about)


# -- the end


def check(island: Island, module: str, phase: int, weights: np.ndarray, left_out: Collection[str]):
  """Raises Diverged if too many paths are excluded, one of them too often, or a module has no path left.

  `left_out` are the paths that the module's version after `phase` does without; `weights` are w_i of every path, [P].
  """
  layout, most = island.layout, island.run.settings.outer.max_excluded
  exclusions = island.registry.facts('excluded', number=phase)
  late = late_paths(exclusions)
  excluded_everywhere = {int(fact.key) for fact in exclusions if 'executor' not in fact.meta} - late
  excluded = np.isin(np.arange(weights.size), list(excluded_everywhere)).reshape(layout.grid.shape)
  paths = excluded_everywhere | {*map(int, left_out)} - late
  in_a_row = [1 + excluded_before(island, path, phase) if path in paths else 0 for path in range(weights.size)]
  try:
    screening.check_paths(layout, weights.reshape(layout.grid.shape) > 0, excluded, in_a_row, most)
    contributing = {path for path in island.paths_through(module) if weights[path] > 0} - late
    if len(contributing) > 1 and contributing <= paths:
      raise screening.no_path_left(screening.module_name(*island.parse_module(module)))
  except Diverged as e:
    end(island, phase, str(e), left_out)


def late_paths(exclusions: Iterable[Fact]) -> set[int]:
  """Returns the paths that took no part because they were late, from facts of the kind `excluded`."""
  return {int(fact.key) for fact in exclusions if pieces.LATE in fact.meta}


def excluded_before(island: Island, path: int, phase: int) -> int:
  """Counts the phases in a row, up to the one before, in which a path was trained but took no part.

  Phases in which it was late do not count.
  """
  excluded = {fact.number: pieces.LATE in fact.meta for fact in island.registry.facts('excluded', [str(path)])}
  trained = (t for t in reversed(range(phase)) if island.active_paths(t)[path] and not excluded.get(t))
  return sum(1 for _ in itertools.takewhile(excluded.__contains__, trained))


def end(island: Island, phase: int, why: str, left_out: Collection[str] = ()) -> NoReturn:
  """Ends all roles, with the reason of the first process to call this. Raises Diverged."""
  why = f'train diverged in phase {phase + 1}: {why}'
  tell(island, why, phase, left_out)
  heed(island)  # the reason of another process may be there
  raise Diverged(why)


def tell(island: Island, why: str, phase: int = -1, left_out: Collection[str] = ()):
  """Asks all roles to end, unless that was done before; `phase` is the one that diverged, or -1."""
  about = {'why': why, 'phase': phase, 'left_out': sorted(left_out), 'by': island.name}
  with contextlib.suppress(Conflict):
    island.registry.put([Fact('diverged', '', island.resumed, '', hashlib.sha256(why.encode()).hexdigest(), about)])


def heed(island: Island):
  """Raises Diverged if the run has diverged since this process began."""
  if ended := island.registry.facts('diverged', [''])[island.resumed :]:
    raise Diverged(ended[-1].meta['why'])


def times_resumed(facts: Registry) -> int:
  """Counts how often the run was resumed after it had diverged."""
  return len(facts.facts('diverged', [RESUMED]))


def resume(island: Island) -> int:
  """Resumes a run that has diverged: withdraws what blocks the phase, which is trained again from its good modules.

  Returns how often the run has been resumed, for processes that begin after it.
  """
  number = times_resumed(island.registry)
  for ended in island.registry.facts('diverged', [''])[number:]:
    phase, blocking = ended.meta['phase'], to_withdraw(island, ended)
    tasks = [NewTask('train', path, phase) for path in blocking]
    modules = {module for path in blocking for module in island.shared_modules(int(path)).values()}
    modules -= {fact.key for fact in island.registry.facts('module', sorted(modules), phase + 1)}
    tasks += [NewTask('outer', module, phase + 1) for module in sorted(modules)]
    kinds = 'checkpoint', 'excluded', 'state'
    facts = [Fact(kind, path, phase, '', '', {}) for path in blocking for kind in kinds]
    facts += [Fact('module', own, phase + 1, '', '', {}) for path in blocking for own in island.own_modules(int(path))]
    without = [fact for fact in pieces.earlier_facts(island, phase, blocking) if 'excluded' in fact.meta]
    facts, tasks = facts + without, tasks + [NewTask(*fact[:3]) for fact in without]
    if island.registry.withdraw(Fact('diverged', RESUMED, ended.number, '', '', {}), facts, tasks):
      again = f'; trained again: path {", ".join(blocking)}' if blocking else ''
      logging.warning('%s. The run is resumed%s', ended.meta['why'], again)
    number += 1
  return number


def to_withdraw(island: Island, ended: Fact) -> list[str]:
  """Returns the paths, of those excluded in the phase that diverged, that a module waits for and no new version has."""
  phase = ended.meta['phase']
  left_out = {fact.key: fact.meta.get('left_out', ()) for fact in island.registry.facts('module', number=phase + 1)}
  paths = {*ended.meta['left_out'], *(fact.key for fact in island.registry.facts('excluded', number=phase))}

  def is_free(path: str) -> bool:
    counted = {level for fact in pieces.earlier_facts(island, phase, [path]) for level in objects_of(fact)}
    modules = [module for level, module in island.shared_modules(int(path)).items() if level not in counted]
    return not left_out.keys() >= {*modules} and all(
      path in left_out[module] for module in modules if module in left_out
    )

  return sorted(filter(is_free, paths), key=int)
