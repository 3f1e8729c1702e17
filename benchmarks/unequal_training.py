"""The training that a simulated schedule asks for: a small model of bytes, really trained, by the library's functions.

The model predicts a byte of examples/chars.py's four kinds of text from the bytes before it. Each kind is divided into
four shards. All seeds are trained at once. An outer step of a module averages the contributions by their weights and
makes a step of OuterOpt (`algorithm.outer.module_step`); a contribution may have begun from an older version.
"""

import functools
import pathlib
import sys
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import unequal_rules

from dipaco_jax import algorithm
from dipaco_jax.algorithm import outer as outer_lib

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / 'examples'))
import chars

BYTES, CONTEXT, EMBED, HIDDEN, BATCH = 128, 6, 6, 36, 32
WIDTH = CONTEXT * EMBED
SHARDS_PER_KIND = 4
HELD_OUT = 512  # bytes of each shard that are predicted to measure the loss
PRETRAIN = 200

inner_optimizer = optax.adamw(3e-3)
outer_optimizer = optax.sgd(0.7, 0.9, nesterov=True)  # DiLoCo's


def init(key: jax.Array) -> dict:
  """Returns the parameters of the model."""
  keys = iter(jax.random.split(key, 6))

  def draw(*shape: int) -> jax.Array:
    return jax.random.normal(next(keys), shape) / np.sqrt(shape[0])

  blocks = {f'block_{i}': {'up': draw(WIDTH, HIDDEN), 'down': draw(HIDDEN, WIDTH)} for i in range(2)}
  return blocks | {'embed': draw(BYTES, EMBED) * 8, 'head': draw(WIDTH, BYTES)}


def loss(params: dict, rows: jax.Array) -> jax.Array:
  """Returns the mean loss in nats of the last byte of each row [N, CONTEXT + 1]."""
  x = params['embed'][rows[:, :CONTEXT]].reshape(len(rows), WIDTH)
  for block in (params['block_0'], params['block_1']):
    h = x / (1e-6 + jnp.std(x, -1, keepdims=True))
    x = x + jax.nn.gelu(h @ block['up']) @ block['down']
  return optax.losses.softmax_cross_entropy_with_integer_labels(x @ params['head'], rows[:, CONTEXT]).mean()


def train(params: dict, state: Any, key: jax.Array, text: jax.Array, span: jax.Array, steps: jax.Array) -> Any:
  """Trains a path for some steps on bytes of text[span[0]:span[1]], from step steps[0] to steps[1]."""

  def step(i: jax.Array, carry: Any) -> Any:
    params, state = carry
    at = jax.random.randint(jax.random.fold_in(key, i), (BATCH, 1), span[0], span[1] - CONTEXT)
    grads = jax.grad(loss)(params, text[at + jnp.arange(CONTEXT + 1)])
    updates, state = inner_optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return jax.lax.fori_loop(steps[0], steps[1], step, (params, state))


train_seeds = jax.jit(jax.vmap(train, in_axes=(0, 0, 0, None, None, None)))
loss_of_seeds = jax.jit(jax.vmap(loss, in_axes=(0, None)))
module_step = jax.jit(functools.partial(outer_lib.module_step, outer_optimizer))


class Text:
  """The text of all shards in one array; where each begins and ends; rows that are held out."""

  def __init__(self):
    texts = [np.array_split(chars.read_kind(kind), SHARDS_PER_KIND) for kind in chars.KINDS]
    shards = [shard for parts in texts for shard in parts]
    borders = [int(len(shard) * (1 - chars.HELD_OUT)) for shard in shards]
    kept = [shard[:border] for shard, border in zip(shards, borders, strict=True)]
    ends = np.cumsum([len(shard) for shard in kept])
    self.bytes = jnp.asarray(np.concatenate(kept), jnp.int32)
    self.spans = [(int(end) - len(shard), int(end)) for shard, end in zip(kept, ends, strict=True)]
    self.all = (0, len(self.bytes))
    rest = [shard[border:] for shard, border in zip(shards, borders, strict=True)]
    self.held_out = [jnp.asarray(held_out_rows(shard), jnp.int32) for shard in rest]


def held_out_rows(shard: np.ndarray) -> np.ndarray:
  """Returns rows [HELD_OUT, CONTEXT + 1] at equal distances."""
  at = np.linspace(0, len(shard) - CONTEXT - 1, HELD_OUT).astype(int)
  return shard[at[:, None] + np.arange(CONTEXT + 1)]


def pretrain(text: Text, seeds: int) -> dict:
  """Returns dense models [S, ...] from which paths begin."""
  params = jax.vmap(init)(seed_keys(seeds, 0))
  states = jax.vmap(inner_optimizer.init)(params)
  arguments = jnp.array(text.all), jnp.array((0, PRETRAIN))
  return train_seeds(params, states, seed_keys(seeds, 1), text.bytes, *arguments)[0]


def seed_keys(seeds: int, purpose: int) -> jax.Array:
  """Returns one random key for each seed."""
  return jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), purpose))(jnp.arange(seeds))


class Memory:
  """Results that were computed before: many rules train the same at other times. Each result has a number."""

  def __init__(self):
    self.results: dict[Hashable, tuple[int, Any]] = {}

  def get(self, key: Hashable, compute: Callable[[], Any]) -> tuple[int, Any]:
    """Returns the number and the value of a result, which is computed once."""
    if key not in self.results:
      self.results[key] = len(self.results), compute()
    return self.results[key]


class Trainer:
  """The modules, paths and contributions of all seeds; arrays are [S, ...], with their numbers in `memory`."""

  def __init__(self, method: unequal_rules.Method, text: Text, base: dict, memory: Memory):
    self.method = method
    self.text = text
    self.memory = memory
    one = jax.tree.map(lambda x: x[0], base)
    self.levels = algorithm.Levels(algorithm.Grid(method.grid), one, **method.levels)
    flat = self.levels.flat(base)
    layout = self.levels.layout
    names = {level.name: layout.names(level) for level in layout.levels}
    self.module_paths = method.module_paths()
    self.modules: dict[Hashable, tuple[int, Any]] = {}  # parameters and OuterOpt's states
    for key in self.module_paths:
      module = {name: flat[name] for name in names[key[0]]}  # type: ignore[index]
      start = module, outer_optimizer.init(module)
      self.modules[key] = memory.get(('start', key), functools.partial(tuple, start))
    states = jax.vmap(inner_optimizer.init)(base)
    num_paths = self.levels.grid.num_paths
    self.trained = [memory.get(('fresh', path), lambda: ({}, states)) for path in range(num_paths)]
    self.steps = [0] * num_paths
    self.begun: dict[int, tuple[tuple[int, ...], dict]] = {}  # by path
    self.contributions: dict[int, tuple[int, Any]] = {}  # by task
    seeds = len(jax.tree.leaves(base)[0])
    self.keys = [seed_keys(seeds, 2 + path) for path in range(num_paths)]

  def perform(self, entry: Any) -> None:
    """Does what the schedule asks for."""
    if isinstance(entry, unequal_rules.Begin):
      self.begun[entry.path] = self.path(entry.path)
    elif isinstance(entry, unequal_rules.End):
      self.train(entry.task, entry.path, entry.steps)
    else:
      self.make_outer_step(entry.module, entry.terms)

  def path(self, path: int) -> tuple[tuple[int, ...], dict[str, jax.Array]]:
    """Returns the newest parameters of a path by name, and the numbers of its modules."""
    of_path = [self.modules[key] for key, paths in self.module_paths.items() if path in paths]
    return tuple(n for n, _ in of_path), {name: x for _, (module, _) in of_path for name, x in module.items()}

  def train(self, task: int, path: int, steps: int) -> None:
    """Trains a path from the modules that it began from, with its own inner state."""
    numbers, old = self.begun.pop(path)
    last, (_, state) = self.trained[path]
    first = self.steps[path]

    def compute() -> tuple[dict, Any]:
      span = self.text.spans[path] if self.method.has_shards else self.text.all
      arguments = self.keys[path], self.text.bytes, jnp.array(span), jnp.array((first, first + steps))
      new, new_state = train_seeds(self.levels.tree(old), state, *arguments)
      flat = self.levels.flat(new)
      return {name: np.asarray(old[name]) - np.asarray(flat[name]) for name in old}, new_state

    self.steps[path] += steps
    self.trained[path] = self.memory.get(('train', path, numbers, last, first, steps), compute)
    self.contributions[task] = self.trained[path]

  def make_outer_step(self, key: Hashable, terms: tuple[tuple[int, float], ...]) -> None:
    """Moves a module by the weighted mean of contributions."""
    total = sum(weight for _, weight in terms)
    if total == 0:
      return
    number, (module, state) = self.modules[key]
    given = [(*self.contributions[task], weight) for task, weight in terms if weight]
    given.sort(key=lambda term: term[0])

    def compute() -> tuple[dict, Any]:
      delta = {name: sum(w * deltas[name] for _, (deltas, _), w in given) / total for name in module}
      return module_step(module, state, delta)[:2]

    names = tuple((n, w) for n, _, w in given)
    self.modules[key] = self.memory.get(('outer', key, number, names), compute)

  def losses(self) -> np.ndarray:
    """Returns the held-out losses [shards, S]: of each path on its shard, or of the one model on each shard."""
    paths = range(len(self.text.spans)) if self.method.has_shards else [0] * len(self.text.spans)
    return np.stack([self.loss(path, shard) for shard, path in enumerate(paths)])

  def loss(self, path: int, shard: int) -> np.ndarray:
    """Returns the losses [S] of a path on a shard."""
    numbers, flat = self.path(path)
    rows = self.text.held_out[shard]
    key = 'loss', shard, numbers
    return self.memory.get(key, lambda: np.asarray(loss_of_seeds(self.levels.tree(flat), rows)))[1]
