"""An outer executor: the outer step of one module at a time, from its paths' checkpoints as they come [3].

    Delta = sum_i w_i n_i / tau (old - new_i) / sum_i w_i n_i / tau  [* sqrt(number of those paths)]
    module <- OuterOpt(module, Delta)                                            [2.5, 2.7]

A path that has taken all tau steps has n_i / tau = 1; others exist with `train.phase_s` only (path_steps.py).

The sum has the same bits in any order of the paths (exact_sum.py). An executor holds no task while it waits: it
releases the task, and the next checkpoint wakes the task. Sums stay in memory, the least recently used ones in files on
this machine; an executor that has neither sums again from the beginning.

Paths that their workers have excluded are left out, and so are contributions of suspended workers (suspensions.py) and
those below the floor (floor_facts.py).
Contributions are screened again when they are read, because a machine in between may be faulty. A module is unchanged
if its only path is left out (`screening_facts`).
"""

import collections
import functools
import json
import logging
import math
import pathlib
import time
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np

from dipaco_jax.algorithm import compression, outer, screening
from dipaco_jax.algorithm.exact_sum import ExactSum
from dipaco_jax.algorithm.grid import Level
from dipaco_jax.algorithm.row_sum import RowSum
from dipaco_jax.config import choices, settings
from dipaco_jax.data import prefetching
from dipaco_jax.islands import (
  floor_facts,
  messages,
  outer_weights,
  path_steps,
  pieces,
  quorum,
  screening_facts,
  suspensions,
  withdrawals,
)
from dipaco_jax.islands.guard import Later, Malformed
from dipaco_jax.islands.island import DIFFERENCES, OUTER, Island
from dipaco_jax.islands.lease import Lease
from dipaco_jax.islands.module_weights import BEFORE, MASTER, SINCE, WHOLE
from dipaco_jax.islands.path_state import Arrays
from dipaco_jax.islands.role_loop import Publish
from dipaco_jax.islands.screening_facts import Bounds
from dipaco_jax.pipeline import jobs
from dipaco_jax.processes import time_use
from dipaco_jax.registry.registry import Fact, Task
from dipaco_jax.storage import tensors

KINDS = ('outer',)
DIGITS = 16  # of the digest of the version before, in the names of files
READERS = 2  # of contributions, beside the one that is being added
MAX_IN_MEMORY = 4  # sums, each as large as 2 modules


class Partial:
  """The sum of a module's contributions to a version so far: whose they are, and who was left out."""

  def __init__(
    self, file: pathlib.Path | None, old: Arrays, state: Arrays, bounds: Bounds, kind: str, by_row: bool = False
  ):  # fmt: skip
    self.file = file
    self.old = old
    self.state = state  # of the outer optimizer
    self.bounds = bounds
    self.kind = kind  # how contributions are compressed
    self.by_row = by_row  # whether contributions have row weights
    self.sum: ExactSum | RowSum = self.sum_type()
    self.squares: dict[str, float] = {}  # |w (old - new)|^2 by path; with row weights |w s (old - new)|^2
    self.moved: dict[str, float] = {}  # r of screening.py, by path
    self.left_out: dict[str, str] = {}  # why, by path
    self.barred: dict[str, str] = {}  # why, by path, facts of others say so; looked up at each claim, and not saved
    self.started = time.time()
    saved = tensors.read_with_digest(file) if file and file.exists() else None
    if saved is not None:  # otherwise it is missing or damaged, and summed again
      self.squares, self.moved, self.left_out = json.loads(saved.pop('#paths').tobytes())
      self.sum = self.sum_type.from_state(saved)

  @property
  def sum_type(self) -> type[ExactSum | RowSum]:
    """The type of the sum."""
    return RowSum if self.by_row else ExactSum

  def save(self):
    """Writes the sum to its file, for this process or a later one of this machine."""
    if self.file and (self.squares or self.left_out):
      paths = json.dumps([self.squares, self.moved, self.left_out]).encode()
      tensors.write_with_digest(self.file, self.sum.state() | {'#paths': np.frombuffer(paths, np.uint8)})

  def add(self, path: str, weight: float, rates: float, sent: Arrays):
    """Adds a path's contribution, or leaves it out, with the reason, where it is not finite or not plausible.

    `rates` is the sum of the learning rates of its steps.
    """
    [level] = self.bounds.usual
    try:
      rows: list[Arrays] = []
      if self.by_row:
        sent, *rows = messages.split_rows(sent)
      old, new = messages.read_delta(self.kind, sent, self.old)
      square = self.sum.add(weight, old, new, *rows)
      length = math.sqrt(messages.square_of_difference(old, new)) if self.by_row else math.sqrt(square) / weight
    except (FloatingPointError, ValueError) as e:
      self.left_out[path] = str(e) if isinstance(e, ValueError) else self.bounds.why({level: math.nan})
      return
    moved = length / rates
    if why := self.bounds.why({level: moved}):
      self.sum.take_back(weight, old, new, *rows)
      self.left_out[path] = why
    else:
      self.squares[path], self.moved[path] = square, moved

  def agrees_with(self, excluded: Collection[str]) -> bool:
    """Returns whether the sum leaves out no other paths than these, and contains none of them."""
    return self.left_out.keys() <= set(excluded) and self.squares.keys().isdisjoint(excluded)


class Executor:
  """Makes outer steps; sums of the modules that it last worked on are in memory, the others in files."""

  def __init__(self, scratch: pathlib.Path):
    self.scratch = scratch
    self.partials: collections.OrderedDict[tuple[str, int], Partial] = collections.OrderedDict()

  def perform(self, island: Island, task: Task, lease: Lease) -> Publish | None:
    """Adds the available contributions. After the last one, returns a function that publishes the next version."""
    module, phase = task.key, task.number - 1
    level, _ = island.parse_module(module)
    weights = outer_weights.module_weights(island, module, phase)
    published = island.registry.facts('module', [module], task.number)  # by an earlier attempt, here or elsewhere
    excluded: dict[str, str] = dict(published[0].meta.get('left_out', {})) if published else {}
    partial = self.take(island, task)
    if published and not partial.agrees_with(excluded):
      partial = self.take(island, task, anew=True)
    sent = contributions(island, task, level, weights)
    sent = sent if published else floor_facts.only_judged(island, task, sent)
    barred = {} if published else why_barred(island, task, sent)
    if not partial.squares.keys().isdisjoint(barred):
      partial = self.take(island, task, anew=True)
    partial.barred = barred
    self.put_back(task, partial)  # at once: the sum is kept also where the next contribution cannot be read
    excluded |= barred
    facts = {path: fact for path, fact in sent.items() if path not in partial.squares | partial.left_out}
    excluded |= {path: fact.meta['excluded'] for path, fact in facts.items() if 'excluded' in fact.meta}
    to_add = [fact for path, fact in facts.items() if path not in excluded]
    read = functools.partial(read_contribution, island, level)
    for fact, new in prefetching.prefetch(read, to_add, READERS, READERS):  # while others are added
      if not isinstance(new, Malformed):
        steps = path_steps.of_fact(island, fact)
        weight = weights[fact.key] * path_steps.share(island, steps)
        partial.add(fact.key, weight, screening_facts.rates(island, level.name, phase, steps), new)
      elif not withdrawals.train_again(island, fact, new):
        excluded[fact.key] = partial.left_out[fact.key] = str(new)
      lease.about |= {'step': len(partial.squares), 'of': len(weights)}
      lease.check()
    left_out = excluded | partial.left_out
    if published and not partial.agrees_with(excluded):
      message = '%s %d: %s were not excluded at first; if only this process excludes them, check this machine'
      logging.warning(message, module, task.number, partial.left_out)
    if left_out and not published:
      lease.check()
      late = {path for path, fact in sent.items() if pieces.LATE in fact.meta}
      implausible = left_out.keys() - barred.keys() - late  # the others are no sign of divergence
      screening_facts.check(island, module, phase, outer_weights.path_weights(island, phase), implausible)
    if partial.squares.keys() | left_out.keys() != weights.keys():
      if quorum.is_on(island):
        quorum.close_module(island, module, task.number)  # this wakes the task
      island.registry.release(task, waiting=True)
      return None
    screening_facts.heed(island)  # the sum might contain a contribution that was withdrawn since
    del self.partials[task.key, task.number]
    return lambda: keep_made(island, make_next_version(island, task, partial, left_out), partial)

  def take(self, island: Island, task: Task, anew: bool = False) -> Partial:
    """Takes the task's partial sum from memory or its file, or begins a new one; only for an owner of the task."""
    self.forget_before(task)
    held = self.partials.pop((task.key, task.number), None)
    before = version_before(island, task)
    file = self.scratch / f'{stem(task)}{task.number}.{before.sha256[:DIGITS]}.sum'
    if anew:
      file.unlink(missing_ok=True)
    elif held and held.file == file:  # else it began from a version that was replaced
      return held
    bounds = screening_facts.bounds(island, [before])
    kind, by_row = island.kind(island.parse_module(task.key)[0]), island.run.settings.outer.row_weights
    return Partial(file, *island.read_module(before), bounds, kind, by_row)

  def forget_before(self, task: Task):
    """Drops sums of the module's earlier versions: others have finished those that are left."""
    for module, number in [*self.partials]:
      if module == task.key and number < task.number:
        del self.partials[module, number]
    for file in self.scratch.glob(f'{stem(task)}*.sum'):
      version = file.name.removeprefix(stem(task)).partition('.')[0]
      if version.isdecimal() and int(version) < task.number:  # else it is another module's, as of 0-1 beside 0
        file.unlink(missing_ok=True)

  def put_back(self, task: Task, partial: Partial):
    """Keeps a sum in memory, and moves the least recently used to its file."""
    self.partials[task.key, task.number] = partial
    if len(self.partials) > MAX_IN_MEMORY:
      self.partials.popitem(last=False)[1].save()


def why_barred(island: Island, task: Task, sent: Mapping[str, Fact]) -> dict[str, str]:
  """Returns why contributions are left out whatever they contain, by path: as facts say or, in a replay, as decided."""
  if island.decisions:
    left_out = island.decisions.left_out.get((task.key, task.number), {})
    return {path: why for path, why in left_out.items() if path in sent and 'excluded' not in sent[path].meta}
  return floor_facts.why_left_out(island, sent) | suspensions.why_left_out(island, sent)


def stem(task: Task) -> str:
  """Returns how the names of the files of a module's sums begin, before the version."""
  return f'{task.key.replace("/", "-")}-'


def contributions(island: Island, task: Task, level: Level, paths: Collection[str]) -> dict[str, Fact]:
  """Returns the facts of what these paths, by name, have sent for the task's module; leaves out who sent nothing."""
  kind, number = pieces.fact_name(island, pieces.sender(island, level.name, task.number))
  return {fact.key: fact for fact in island.registry.facts(kind, sorted(paths), number)}


def read_contribution(island: Island, level: Level, fact: Fact) -> tuple[Fact, Arrays | Malformed]:
  """Returns a fact and what its path has sent of a level, or the error that this is malformed."""
  try:
    return fact, island.read_contribution(fact, level)
  except Malformed as e:
    return fact, e


def version_before(island: Island, task: Task) -> Fact:
  """Returns the fact of the task's module before the outer step."""
  for fact in island.registry.facts('module', [task.key], task.number - 1):
    return fact
  raise Later(f'{task.key} is not there in version {task.number - 1}')


def make_next_version(island: Island, task: Task, partial: Partial, left_out: dict[str, str]) -> list[Fact]:
  """Takes the outer step unless all paths are left out; returns the facts of the module and of paths left out here."""
  usual, out = next(iter(partial.bounds.usual.values())), partial.left_out | partial.barred
  about: dict[str, Any] = {'executor': island.name, 'started': partial.started}
  about |= screening_facts.next_usual(island, task.key, usual, partial.moved.values())
  about |= {'left_out': left_out} if left_out else {}
  if partial.squares:
    new, state, figures = outer_step(island, task.key, task.number, partial)
    name, sha256, written = write_version(island, task, partial, new, state)
    figures |= written
  else:
    before = version_before(island, task)
    figures = {name: before.meta[name] for name in (OUTER, SINCE) if name in before.meta}
    name, sha256 = before.uri, before.sha256
  if partial.file:
    partial.file.unlink(missing_ok=True)
  module_fact = Fact('module', task.key, task.number, name, sha256, about | figures | {'ended': time.time()})
  level = island.parse_module(task.key)[0]
  sent = contributions(island, task, level, out) if out else {}
  return [module_fact, *(screening_facts.exclusion(island, sent[path], why, island.name) for path, why in out.items())]


def keep_made(island: Island, facts: list[Fact], partial: Partial) -> list[Fact]:
  """Keeps the next version of the module, so that it need not be read again; returns its facts."""
  module_fact, kept = facts[0], island.weights.kept
  if OUTER in module_fact.meta:
    kept.put(module_fact.meta[OUTER][0], partial.state)
  kept.put(module_fact.uri, partial.old)
  return facts


@time_use.doing(time_use.OUTER)
def outer_step(
  island: Island, module: str, version: int, partial: Partial
) -> tuple[Arrays, Arrays, dict[str, Any]]:  # fmt: skip
  """Takes the outer step that makes a module's version. Consumes the sum.

  Returns the parameters, the state of the outer optimizer, and what the fact notes.
  """
  s, paths = island.run.settings, len(partial.squares)
  factor = math.sqrt(paths) if s.outer.rescale else 1.0
  if isinstance(partial.sum, RowSum):
    weight, square = None, partial.sum.square()
  else:
    weight, square = partial.sum.weight, None
  mean, partial.sum = partial.sum.mean(), partial.sum_type()  # which frees the sum: it is larger than the module
  # M, which the outer optimizer updates; the weights themselves before the first compression
  master = {name: partial.state.get(MASTER + name, x) for name, x in partial.old.items()}
  state = {name: x for name, x in partial.state.items() if not name.startswith(MASTER)}
  new, state, norm, is_sound = step(s.outer, master, state, mean, np.float32(factor))
  del mean, master  # as large as the module; writing makes another copy
  if not is_sound:
    message = str(screening.module_too_large(screening.module_name(*island.parse_module(module))))
    screening_facts.end(island, version - 1, message)
  # |sum w d|^2 and sum |w d|^2, from which the mean cosine between outer gradients follows.
  square = square if weight is None else (norm / factor * weight) ** 2
  squares = {'square_of_sum': square, 'sum_of_squares': math.fsum(partial.squares.values())}
  return new, state, {'norm': norm, 'paths': paths} | squares


def write_version(
  island: Island, task: Task, partial: Partial, new: Arrays, state: Arrays
) -> tuple[str, str, dict[str, Any]]:
  """Writes a module's next version and the state for the next outer step; returns the metadata of its fact."""
  at, version = f'{task.number}/{task.key}', task.number
  if partial.kind == 'none':
    partial.old, partial.state = new, state
    name, sha256 = island.write_object(f'modules/{at}', new)
    return name, sha256, {OUTER: island.write_object(f'{OUTER}/{at}', state)} if state else {}
  before = version_before(island, task)
  difference, partial.old = messages.follow(compression.of_modules(partial.kind), partial.old, new)
  partial.state = state | {MASTER + name: x for name, x in new.items()}
  about: dict[str, Any] = {BEFORE: before.uri, SINCE: before.meta.get(SINCE, 0)}
  about[OUTER] = island.write_object(f'{OUTER}/{at}', partial.state)
  if version % island.run.settings.outer.whole_every == 0 or version == island.run.settings.train.phases:
    about |= {SINCE: version, WHOLE: island.write_object(f'modules/{at}', partial.old)}
  name, sha256 = island.write_object(f'{DIFFERENCES}/{at}', difference)
  return name, sha256, about


def step(config: settings.Outer, params: Arrays, state: Arrays, mean: Arrays, factor: np.float32):
  """Takes the outer step of one module, with Delta = factor * mean.

  A state is by place in Optax's tree, {} for a new one. Returns (parameters, state, |Delta|, whether all is sound).
  """
  init = choices.make_outer_optimizer(config).init
  outer_state = jobs.from_leaves(state, jax.eval_shape(init, params)) if state else init(params)
  new, moved, norm, is_sound = _compiled(config)(params, outer_state, mean, factor)
  return jax.tree.map(np.asarray, new), jobs.named_leaves(moved), float(norm), bool(is_sound)


@functools.cache
def _compiled(config: settings.Outer):
  """Returns the outer step of one module, compiled once for all modules of a level."""
  transformation = choices.make_outer_optimizer(config)

  def update(params, state, mean, factor):
    delta = jax.tree.map(lambda m: m * factor, mean)
    *new, norm = outer.module_step(transformation, params, state, delta)
    return *new, norm, screening.is_sound(new)

  return jax.jit(update, donate_argnums=(0, 1))  # which are copies on the device
