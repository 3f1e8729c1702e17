"""An outer executor: the outer step of one module at a time, from its paths' checkpoints as they come [3].

    Delta = sum_i w_i (old - new_i) / sum_i w_i  [* sqrt(number of those paths)]
    module <- OuterOpt(module, Delta)                                            [2.5, 2.7]

The sum is exact, whatever the order of the paths (exact_sum.py). An executor holds no task while it waits: what it has
summed is kept in a file of this machine, the task is given back, and a further checkpoint wakes it. An executor that
finds no such file, or one that is torn, sums anew.
"""

import functools
import json
import math
import pathlib
import time
from typing import Any

import jax
import numpy as np
import optax
import safetensors.numpy

from dipaco_jax import checkpoint, exact_sum, outer
from dipaco_jax import islands as islands_lib
from dipaco_jax.islands import Islands
from dipaco_jax.leases import Lease, Publish
from dipaco_jax.registry import Fact, Task

KINDS = ('outer',)


class Partial:
  """What has been summed of a module's contributions, and of whose."""

  def __init__(self, file: pathlib.Path):
    self.file = file
    self.sum = exact_sum.ExactSum()
    self.squares: dict[str, float] = {}  # |w (old - new)|^2 by path
    self.included: dict[str, str] = {}  # sha256 of what was added, by path
    if file.exists():
      self._read()

  def _read(self):
    try:
      with safetensors.safe_open(self.file, 'numpy') as f:
        about = json.loads(f.metadata()['about'])
        arrays = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    except (OSError, ValueError, KeyError, safetensors.SafetensorError):
      return  # torn by a crash: summed anew
    self.sum, self.squares, self.included = exact_sum.ExactSum.from_state(arrays), about['squares'], about['included']

  def save(self):
    about = json.dumps({'squares': self.squares, 'included': self.included})
    data = safetensors.numpy.save(self.sum.state(), metadata={'about': about})
    checkpoint.write_file(self.file, data)

  def add(self, path: str, sha256: str, weight: float, old: dict[str, np.ndarray], new: dict[str, np.ndarray]):
    self.squares[path] = self.sum.add(weight, old, new)
    self.included[path] = sha256


def perform(islands: Islands, task: Task, lease: Lease, scratch: pathlib.Path) -> Publish | None:
  """Adds what is there; with the last contribution the module's next version, else None."""
  started, module, phase = time.time(), task.key, task.number - 1
  level, _ = islands.parse(module)
  islands.fetch(f'shards/{islands.round(phase)}')
  weights = path_weights(islands, phase)
  wanted = [str(path) for path in islands.paths_through(module) if weights[path] > 0]
  before = islands.registry.facts('module', [module], phase)[0]
  old, state = islands_lib.split(islands.read(before.uri, before.sha256))
  partial = Partial(scratch / f'{module.replace("/", "-")}-{task.number}.safetensors')
  for fact in islands.registry.facts('checkpoint', wanted, phase):
    name, sha256 = fact.meta['objects'][level.name]
    if fact.key not in partial.included:
      partial.add(fact.key, sha256, float(weights[int(fact.key)]), old, islands.read(name, sha256))
      lease.about |= {'step': len(partial.included), 'of': len(wanted)}
      lease.check()
  if len(partial.included) < len(wanted):
    partial.save()
    islands.registry.release(task, waiting=True)
    return None
  return lambda: [publish(islands, task, old, state, partial, {'executor': islands.name, 'started': started})]


def publish(islands: Islands, task: Task, old, state, partial: Partial, about: dict[str, Any]) -> Fact:
  """The outer step, and its object; the file of the sum goes."""
  s, paths = islands.run.settings, len(partial.included)
  factor = math.sqrt(paths) if s.outer.rescale else 1.0
  new, moved, norm = step(s.outer, old, state, partial.sum.mean(), np.float32(factor))
  name, sha256 = islands.write(f'modules/{task.number}/{task.key}', islands_lib.join(new, moved))
  # |sum w d|^2 and sum |w d|^2, of which the mean cosine between outer gradients is made.
  weight = partial.sum.weight
  figures = {
    'norm': norm, 'paths': paths, 'square_of_sum': (norm / factor * weight) ** 2,
    'sum_of_squares': math.fsum(partial.squares.values()),
  }  # fmt: skip
  partial.file.unlink(missing_ok=True)
  return Fact('module', task.key, task.number, name, sha256, about | figures | {'ended': time.time()})


def step(config, params: dict[str, np.ndarray], state: dict[str, np.ndarray], mean: dict[str, np.ndarray], factor):
  """(new parameters, new outer state, |Delta|) of one module; a state is by place in Optax's tree, {} for a new one."""
  transformation = outer.make(config)
  fresh = transformation.init(params)
  there = jax.tree_util.tree_map_with_path(lambda at, x: state[jax.tree_util.keystr(at)], fresh) if state else fresh
  new, moved, norm = _compiled(config)(params, there, mean, factor)
  leaves = jax.tree_util.tree_leaves_with_path(moved)
  return jax.tree.map(np.asarray, new), {jax.tree_util.keystr(at): np.asarray(x) for at, x in leaves}, float(norm)


@functools.cache
def _compiled(config):
  """OuterOpt of one module; compiled once for all modules of a level."""
  transformation = outer.make(config)

  def update(params, state, mean, factor):
    delta = jax.tree.map(lambda m: m * factor, mean)
    updates, moved = transformation.update(delta, state, params)
    return optax.apply_updates(params, updates), moved, optax.tree.norm(delta)

  return jax.jit(update)


def path_weights(islands: Islands, phase: int) -> np.ndarray:
  """w_i of every path, [P]; 0: it takes no part [2.7]."""
  tokens = islands.run.shards_meta(islands.round(phase))['shard_tokens']
  shape = islands.run.layout.grid.shape
  return outer.path_weights(islands.active(phase), tokens, islands.run.settings.outer.reweigh, shape).reshape(-1)
