"""The training that a simulated schedule asks for: a small model of bytes, really trained, by the library's functions.

The model predicts a byte of examples/chars.py's four kinds of text from the bytes before it. Each kind is divided into
four shards. All seeds are trained at once. An outer step of a module averages the contributions by their weights and
makes a step of OuterOpt (`algorithm.outer.module_step`); a contribution may have begun from an older version.
"""

import functools
import pathlib
import sys
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

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


class Method(NamedTuple):
  """A grid and its levels, and whether each path has a shard of its own or all text."""

  grid: Mapping[str, int]
  levels: Mapping[str, tuple[str, str]]
  has_shards: bool


FOUR_BY_FOUR = {'a': 4, 'b': 4}
METHODS = {
  'diloco': Method({'replica': 8}, {'all': ('', '')}, False),
  'grid': Method(
    {'a': 4, 'b': 4}, {'ends': ('embed|head', ''), 'low': ('block_0', 'a'), 'high': ('block_1', 'b')}, True
  ),
  'grid-apart': Method({'a': 4, 'b': 4}, {'low': ('embed|block_0', 'a'), 'high': ('block_1|head', 'b')}, True),
}


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


class Trainer:
  """The modules, paths and contributions of all seeds; arrays are [S, ...]."""

  def __init__(self, method: Method, text: Text, base: dict):
    self.method = method
    self.text = text
    one = jax.tree.map(lambda x: x[0], base)
    self.levels = algorithm.Levels(algorithm.Grid(method.grid), one, **method.levels)
    self.seeds = len(jax.tree.leaves(base)[0])
    flat = self.levels.flat(base)
    self.names = {key: self.names_of(key[0]) for key in self.module_paths()}
    self.modules = {key: {name: flat[name] for name in names} for key, names in self.names.items()}
    self.outer_states = {key: outer_optimizer.init(module) for key, module in self.modules.items()}
    num_paths = self.levels.grid.num_paths
    self.states = [jax.vmap(inner_optimizer.init)(base)] * num_paths
    self.steps = [0] * num_paths
    self.begun: dict[int, dict] = {}  # by path
    self.deltas: dict[int, dict] = {}  # by task
    self.keys = [seed_keys(self.seeds, 2 + path) for path in range(num_paths)]

  def names_of(self, level_name: str) -> tuple[str, ...]:
    """Returns the parameters of a level."""
    layout = self.levels.layout
    return next(layout.names(level) for level in layout.levels if level.name == level_name)

  def module_paths(self) -> dict[Hashable, tuple[int, ...]]:
    """Returns the paths through each module, by level and coordinates."""
    grid = self.levels.grid
    found: dict[Hashable, tuple[int, ...]] = {}
    for level in self.levels.layout.levels:
      for path in range(grid.num_paths):
        key = level.name, grid.module(level, grid.coordinates(path))
        found[key] = (*found.get(key, ()), path)
    return found

  def perform(self, entry: Any) -> None:
    """Does what the schedule asks for."""
    if isinstance(entry, unequal_rules.Begin):
      self.begun[entry.path] = self.flat_path(entry.path)
    elif isinstance(entry, unequal_rules.End):
      self.train(entry.task, entry.path, entry.steps)
    else:
      self.make_outer_step(entry.module, entry.terms)

  def flat_path(self, path: int) -> dict[str, jax.Array]:
    """Returns the newest parameters of a path by name."""
    grid = self.levels.grid
    keys = [(level.name, grid.module(level, grid.coordinates(path))) for level in self.levels.layout.levels]
    return {name: x for key in keys for name, x in self.modules[key].items()}

  def train(self, task: int, path: int, steps: int) -> None:
    """Trains a path from the modules that it began from."""
    old = self.begun.pop(path)
    span = self.text.spans[path] if self.method.has_shards else self.text.all
    counts = jnp.array((self.steps[path], self.steps[path] + steps))
    arguments = self.keys[path], self.text.bytes, jnp.array(span), counts
    new, self.states[path] = train_seeds(self.levels.tree(old), self.states[path], *arguments)
    self.steps[path] += steps
    flat = self.levels.flat(new)
    self.deltas[task] = {name: np.asarray(old[name]) - np.asarray(flat[name]) for name in old}

  def make_outer_step(self, key: Hashable, terms: tuple[tuple[int, float], ...]) -> None:
    """Moves a module by the weighted mean of contributions."""
    total = sum(weight for _, weight in terms)
    if total == 0:
      return
    delta = {name: sum(w * self.deltas[task][name] for task, w in terms) / total for name in self.names[key]}
    self.modules[key], self.outer_states[key], _ = module_step(self.modules[key], self.outer_states[key], delta)

  def losses(self) -> np.ndarray:
    """Returns the held-out losses [shards, S]: of each path on its shard, or of the one model on each shard."""
    paths = range(len(self.text.spans)) if self.method.has_shards else [0] * len(self.text.spans)
    models = {path: self.levels.tree(self.flat_path(path)) for path in set(paths)}
    rows = zip(paths, self.text.held_out, strict=True)
    return np.stack([np.asarray(loss_of_seeds(models[path], held_out)) for path, held_out in rows])
