"""An outer executor: the outer step of one module at a time, from its paths' checkpoints as they come [3].

    Delta = sum_i w_i (old - new_i) / sum_i w_i  [* sqrt(number of those paths)]
    module <- OuterOpt(module, Delta)                                            [2.5, 2.7]

The sum is exact, whatever the order of the paths (exact_sum.py). An executor holds no task while it waits: the task is
given back, and a further checkpoint wakes it. What it has summed stays in its memory, and the oldest of it in files of
this machine; an executor that finds neither sums anew.

Who is excluded by the path's worker is left out, and what is not plausible when it is read here: a machine in between
may be bad. A module of one path alone, which is left out, stays as it is (`screening_facts`).
"""

import collections
import functools
import hashlib
import json
import math
import pathlib
import time
from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from dipaco_jax.core import exact_sum, outer, screening
from dipaco_jax.data import loader
from dipaco_jax.islands import screening_facts
from dipaco_jax.islands.island import Island, pack_module, unpack_module
from dipaco_jax.islands.lease import Lease
from dipaco_jax.islands.registry import Fact, Task
from dipaco_jax.islands.role_loop import Publish
from dipaco_jax.islands.screening_facts import Bounds
from dipaco_jax.pipeline import jobs
from dipaco_jax.storage import files, tensors

KINDS = ('outer',)
SHA256 = 32  # bytes, before what they are of
READERS = 2  # of contributions, beside the one that is being added
HELD = 4  # sums in memory, each with its module and outer state: 4 modules


class Partial:
  """What has been summed of a module's contributions to a version, and of whose; and who was left out."""

  def __init__(self, file: pathlib.Path, old: dict[str, np.ndarray], state: dict[str, np.ndarray], bounds: Bounds):
    self.file, self.old, self.state, self.bounds = file, old, state, bounds  # `state` is the outer one
    self.sum = exact_sum.ExactSum()
    self.squares: dict[str, float] = {}  # |w (old - new)|^2 by path
    self.moved: dict[str, float] = {}  # r of screening.py, by path
    self.left_out: dict[str, str] = {}  # why, by path
    self.started = time.time()
    if file.exists():
      self._read()

  def _read(self):
    found = files.read_file(self.file)
    if hashlib.sha256(found[SHA256:]).digest() != found[:SHA256]:
      return  # not what was written: summed anew
    state = tensors.from_bytes(found[SHA256:])
    self.squares, self.moved, self.left_out = json.loads(state.pop('#paths').tobytes())
    self.sum = exact_sum.ExactSum.from_state(state)

  def save(self):
    """For whoever goes on with it on this machine: us, or who comes after us."""
    if self.squares or self.left_out:
      paths = json.dumps([self.squares, self.moved, self.left_out]).encode()
      data = tensors.to_bytes(self.sum.state() | {'#paths': np.frombuffer(paths, np.uint8)})
      files.write_file(self.file, hashlib.sha256(data).digest(), data)

  def add(self, path: str, weight: float, new: dict[str, np.ndarray]):
    """Adds what a path has come to; or leaves it out, with the reason, where that is not finite or not plausible."""
    [level] = self.bounds.usual
    try:
      square = self.sum.add(weight, self.old, new)
    except FloatingPointError:
      self.left_out[path] = self.bounds.why({level: math.nan})
    except ValueError as e:
      self.left_out[path] = str(e)
    else:
      moved = math.sqrt(square) / weight / self.bounds.rates
      if why := self.bounds.why({level: moved}):
        self.sum.take_back(weight, self.old, new)
        self.left_out[path] = why
      else:
        self.squares[path], self.moved[path] = square, moved

  def is_of(self, excluded: Collection[str]) -> bool:
    """Whether it has left out none but these, and added none of them."""
    return self.left_out.keys() <= set(excluded) and self.squares.keys().isdisjoint(excluded)

  def take_mean(self) -> dict[str, np.ndarray]:
    """Delta, for the sum, which goes: it is twice as large."""
    mean, self.sum = self.sum.mean(), exact_sum.ExactSum()
    return mean


class Executor:
  """Sums of the modules that were last worked on, in memory; the others wait in files."""

  def __init__(self, scratch: pathlib.Path):
    self.scratch = scratch
    self.partials: collections.OrderedDict[tuple[str, int], Partial] = collections.OrderedDict()

  def perform(self, island: Island, task: Task, lease: Lease) -> Publish | None:
    """Adds what is there; with the last contribution, publishes the module's next version."""
    module, phase = task.key, task.number - 1
    level, _ = island.parse_module(module)
    weights = module_weights(island, module, phase)
    made = island.registry.facts('module', [module], task.number)  # once, by us or by another
    excluded: dict[str, str] = dict(made[0].meta.get('left_out', {})) if made else {}
    partial = self.take(island, task)
    if made and not partial.is_of(excluded):
      partial = self.take(island, task, anew=True)
    self.put_back(task, partial)  # at once: what is summed stays, also where the next contribution cannot be read
    missing = weights.keys() - partial.squares.keys() - partial.left_out.keys()
    facts = {fact.key: fact for fact in island.registry.facts('checkpoint', sorted(missing), phase)}
    excluded |= {path: fact.meta['excluded'] for path, fact in facts.items() if not made and 'excluded' in fact.meta}

    def read(fact: Fact) -> tuple[Fact, dict[str, np.ndarray]]:
      return fact, island.read_object(*fact.meta['objects'][level.name])

    to_add = [fact for path, fact in facts.items() if path not in excluded]
    for fact, new in prefetching.prefetch(read, to_add, READERS, READERS):  # while others are added
      partial.add(fact.key, weights[fact.key], new)
      lease.about |= {'step': len(partial.squares), 'of': len(weights)}
      lease.check()
    left_out = excluded | partial.left_out
    if made and not partial.is_of(excluded):
      raise RuntimeError(f'{module} {task.number}: {partial.left_out} counted when it was made: is this machine sound?')
    if left_out and not made:
      lease.check()
      screening_facts.check(island, module, phase, path_weights(island, phase), left_out)
    if partial.squares.keys() | left_out.keys() != weights.keys():
      island.registry.release(task, waiting=True)
      return None
    screening_facts.heed(island)  # else what has been withdrawn since might be in the sum
    del self.partials[task.key, task.number]
    return lambda: publish(island, task, partial, left_out)

  def take(self, island: Island, task: Task, anew: bool = False) -> Partial:
    """The task's partial sum: from memory, from a file, or a new one. Not ours before the task is."""
    held = self.partials.pop((task.key, task.number), None)
    if held and not anew:
      return held
    before = version_before(island, task)
    file = self.scratch / f'{task.key.replace("/", "-")}-{task.number}.sum'
    if anew:
      file.unlink(missing_ok=True)
    bounds = screening_facts.bounds(island, [before], task.number - 1)
    return Partial(file, *unpack_module(island.read_object(before.uri, before.sha256)), bounds)

  def put_back(self, task: Task, partial: Partial):
    """The one that was worked on least recently goes to its file."""
    self.partials[task.key, task.number] = partial
    if len(self.partials) > HELD:
      self.partials.popitem(last=False)[1].save()


def version_before(island: Island, task: Task) -> Fact:
  """Of the task's module."""
  return island.registry.facts('module', [task.key], task.number - 1)[0]


def publish(island: Island, task: Task, partial: Partial, left_out: dict[str, str]) -> list[Fact]:
  """The outer step, and its object, or none where no path counts; and whom we ourselves leave out."""
  phase, usual = task.number - 1, next(iter(partial.bounds.usual.values()))
  owners = {f.key: f.meta['worker'] for f in island.registry.facts('checkpoint', sorted(partial.left_out), phase)}
  about: dict[str, Any] = {'executor': island.name, 'started': partial.started}
  about |= screening_facts.next_usual(island, task.key, usual, partial.moved.values())
  about |= {'left_out': left_out} if left_out else {}
  if partial.squares:
    name, sha256, figures = outer_step(island, task, partial)
  else:
    (_, _, _, name, sha256, _), figures = version_before(island, task), {}
  partial.file.unlink(missing_ok=True)
  more = [
    screening_facts.exclusion(island, int(path), phase, why, owners[path], island.name)
    for path, why in partial.left_out.items()
  ]
  return [Fact('module', task.key, task.number, name, sha256, about | figures | {'ended': time.time()}), *more]


def outer_step(island: Island, task: Task, partial: Partial) -> tuple[str, str, dict[str, Any]]:
  """Object and sha256 of the next version, and what is said of its outer gradient; the sum goes."""
  s, paths, weight = island.run.settings, len(partial.squares), partial.sum.weight
  factor = math.sqrt(paths) if s.outer.rescale else 1.0
  new, moved, norm, is_sound = step(s.outer, partial.old, partial.state, partial.take_mean(), np.float32(factor))
  if not is_sound:
    words = str(screening.module_too_large(screening.module_name(*island.parse_module(task.key))))
    screening_facts.end(island, task.number - 1, words)
  name, sha256 = island.write_object(f'modules/{task.number}/{task.key}', pack_module(new, moved))
  # |sum w d|^2 and sum |w d|^2, of which the mean cosine between outer gradients is made.
  figures = {
    'norm': norm,
    'paths': paths,
    'square_of_sum': (norm / factor * weight) ** 2,
    'sum_of_squares': math.fsum(partial.squares.values()),
  }
  return name, sha256, figures


def step(config, params: dict[str, np.ndarray], state: dict[str, np.ndarray], mean: dict[str, np.ndarray], factor):
  """(new parameters, new outer state, |Delta|, whether all is sound) of one module.

  A state is by place in Optax's tree; {} for a new one.
  """
  transformation = outer.make_optimizer(config)
  init = transformation.init
  there = jobs.from_leaves(state, jax.eval_shape(init, params)) if state else init(params)
  new, moved, norm, is_sound = _compiled(config)(params, there, mean, factor)
  return jax.tree.map(np.asarray, new), jobs.named_leaves(moved), float(norm), bool(is_sound)


@functools.cache
def _compiled(config):
  """OuterOpt of one module; compiled once for all modules of a level."""
  transformation = outer.make_optimizer(config)

  def update(params, state, mean, factor):
    delta = jax.tree.map(lambda m: m * factor, mean)
    *new, norm = outer.step(transformation, params, state, delta)
    return *new, norm, screening.is_sound(new)

  return jax.jit(update, donate_argnums=(0, 1))  # of JAX's copies


def module_weights(island: Island, module: str, phase: int) -> dict[str, float]:
  """w_i of a module's paths, by their names, divided by one power of two: the largest is in (1/2, 1].

  That leaves the mean as it is; and what is in the exact sum's range follows from how far paths move alone.
  """
  weights = path_weights(island, phase)
  found = {str(path): float(weights[path]) for path in island.paths_through(module) if weights[path] > 0}
  fraction, exponent = math.frexp(max(found.values(), default=1.0))
  return {path: math.ldexp(w, int(fraction == 0.5) - exponent) for path, w in found.items()}


@functools.lru_cache(4)
def path_weights(island: Island, phase: int) -> np.ndarray:
  """w_i of every path, [P]; 0: it takes no part [2.7]."""
  number = island.round_of(phase)
  island.fetch_trees(f'shards/{number}')
  return jobs.weights(island.run, number)(phase).reshape(-1)
