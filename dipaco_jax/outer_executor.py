"""An outer executor: the outer step of one module at a time, from its paths' checkpoints as they come [3].

    Delta = sum_i w_i (old - new_i) / sum_i w_i  [* sqrt(number of those paths)]
    module <- OuterOpt(module, Delta)                                            [2.5, 2.7]

The sum is exact, whatever the order of the paths (exact_sum.py). An executor holds no task while it waits: the task is
given back, and a further checkpoint wakes it. What it has summed stays in its memory, and the oldest of it in files of
this machine; an executor that finds neither sums anew.
"""

import collections
import functools
import hashlib
import math
import pathlib
import time

import jax
import numpy as np
import optax

from dipaco_jax import checkpoint, exact_sum, jobs, outer, shards
from dipaco_jax import islands as islands_lib
from dipaco_jax.islands import Islands
from dipaco_jax.leases import Lease, Publish
from dipaco_jax.registry import Fact, Task

KINDS = ('outer',)
SHA256 = 32  # bytes, before what they are of
READERS = 2  # of contributions, beside the one that is being added
HELD = 4  # sums in memory, each with its module and outer state: 4 modules


class Partial:
  """What has been summed of a module's contributions to a version, and of whose."""

  def __init__(self, file: pathlib.Path, old: dict[str, np.ndarray], state: dict[str, np.ndarray]):
    self.file, self.old, self.state = file, old, state  # `state` is the outer one
    self.sum = exact_sum.ExactSum()
    self.squares: dict[str, float] = {}  # |w (old - new)|^2 by path
    self.started = time.time()
    if file.exists():
      self._read()

  def _read(self):
    found = checkpoint.read_file(self.file)
    if hashlib.sha256(found[SHA256:]).digest() != found[:SHA256]:
      return  # not what was written: summed anew
    state = checkpoint.from_bytes(found[SHA256:])
    paths, squares = (state.pop(name).tolist() for name in ('#paths', '#squares'))
    self.squares = dict(zip(map(str, paths), squares, strict=True))
    self.sum = exact_sum.ExactSum.from_state(state)

  def save(self):
    """For whoever goes on with it on this machine: us, or who comes after us."""
    if self.squares:
      about = {'#paths': np.array(list(map(int, self.squares))), '#squares': np.array(list(self.squares.values()))}
      data = checkpoint.to_bytes(self.sum.state() | about)
      checkpoint.write_file(self.file, hashlib.sha256(data).digest(), data)

  def add(self, path: str, weight: float, new: dict[str, np.ndarray]):
    self.squares[path] = self.sum.add(weight, self.old, new)

  def take_mean(self) -> dict[str, np.ndarray]:
    """Delta, for the sum, which goes: it is twice as large."""
    mean, self.sum = self.sum.mean(), exact_sum.ExactSum()
    return mean


class Executor:
  """Sums of the modules that were last worked on, in memory; the others wait in files."""

  def __init__(self, scratch: pathlib.Path):
    self.scratch = scratch
    self.partials: collections.OrderedDict[tuple[str, int], Partial] = collections.OrderedDict()

  def perform(self, islands: Islands, task: Task, lease: Lease) -> Publish | None:
    """Adds what is there; with the last contribution, publishes the module's next version."""
    module, phase = task.key, task.number - 1
    level, _ = islands.parse(module)
    weights = path_weights(islands, phase)
    wanted = {str(path) for path in islands.paths_through(module) if weights[path] > 0}
    partial = self.take(islands, task)
    self.put_back(task, partial)  # at once: what is summed stays, also where the next contribution cannot be read
    facts = islands.registry.facts('checkpoint', sorted(wanted - partial.squares.keys()), phase)

    def read(fact: Fact) -> tuple[Fact, dict[str, np.ndarray]]:
      return fact, islands.read(*fact.meta['objects'][level.name])

    for fact, new in shards.prefetch(read, facts, READERS, READERS):  # while others are added
      partial.add(fact.key, float(weights[int(fact.key)]), new)
      lease.about |= {'step': len(partial.squares), 'of': len(wanted)}
      lease.check()
    if partial.squares.keys() != wanted:
      islands.registry.release(task, waiting=True)
      return None
    del self.partials[task.key, task.number]
    return lambda: [publish(islands, task, partial)]

  def take(self, islands: Islands, task: Task) -> Partial:
    """The task's partial sum: from memory, from a file, or a new one. Not ours before the task is."""
    if held := self.partials.pop((task.key, task.number), None):
      return held
    before = islands.registry.facts('module', [task.key], task.number - 1)[0]
    file = self.scratch / f'{task.key.replace("/", "-")}-{task.number}.sum'
    return Partial(file, *islands_lib.split(islands.read(before.uri, before.sha256)))

  def put_back(self, task: Task, partial: Partial):
    """The one that was worked on least recently goes to its file."""
    self.partials[task.key, task.number] = partial
    if len(self.partials) > HELD:
      self.partials.popitem(last=False)[1].save()


def publish(islands: Islands, task: Task, partial: Partial) -> Fact:
  """The outer step, and its object; the sum goes, and its file."""
  s, paths, weight = islands.run.settings, len(partial.squares), partial.sum.weight
  factor = math.sqrt(paths) if s.outer.rescale else 1.0
  new, moved, norm = step(s.outer, partial.old, partial.state, partial.take_mean(), np.float32(factor))
  name, sha256 = islands.write(f'modules/{task.number}/{task.key}', islands_lib.join(new, moved))
  partial.file.unlink(missing_ok=True)
  # |sum w d|^2 and sum |w d|^2, of which the mean cosine between outer gradients is made.
  about = {
    'norm': norm, 'paths': paths, 'square_of_sum': (norm / factor * weight) ** 2,
    'sum_of_squares': math.fsum(partial.squares.values()), 'executor': islands.name, 'started': partial.started,
    'ended': time.time(),
  }  # fmt: skip
  return Fact('module', task.key, task.number, name, sha256, about)


def step(config, params: dict[str, np.ndarray], state: dict[str, np.ndarray], mean: dict[str, np.ndarray], factor):
  """(new parameters, new outer state, |Delta|) of one module; a state is by place in Optax's tree, {} for a new one."""
  transformation = outer.make(config)
  init = transformation.init
  there = jobs.from_leaves(state, jax.eval_shape(init, params)) if state else init(params)
  new, moved, norm = _compiled(config)(params, there, mean, factor)
  return jax.tree.map(np.asarray, new), jobs.named_leaves(moved), float(norm)


@functools.cache
def _compiled(config):
  """OuterOpt of one module; compiled once for all modules of a level."""
  transformation = outer.make(config)

  def update(params, state, mean, factor):
    delta = jax.tree.map(lambda m: m * factor, mean)
    updates, moved = transformation.update(delta, state, params)
    return optax.apply_updates(params, updates), moved, optax.tree.norm(delta)

  return jax.jit(update, donate_argnums=(0, 1))  # of JAX's copies


@functools.lru_cache(4)
def path_weights(islands: Islands, phase: int) -> np.ndarray:
  """w_i of every path, [P]; 0: it takes no part [2.7]."""
  number = islands.round(phase)
  islands.fetch(f'shards/{number}')
  return jobs.weights(islands.run, number)(phase).reshape(-1)
