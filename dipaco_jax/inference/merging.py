"""One model out of a grid: a mixture whose experts are the MLPs of paths, or the mean of paths.

The experts of a block are the modules of the level with its MLP, in their order. All other parameters of a mixture have
to be shared by the paths, unless `average` names their level: then they are the mean of its modules.

A router starts as a classifier of the paths' hidden states. With h_ne the mean of what enters the MLP of block n, over
tokens of the shards of the paths that have expert e, and s_n^2 the variance around these means, averaged over
dimensions,

    R_n[:, e] = (h_ne - mean over e' of h_ne') / s_n^2

whose logits are the log odds of Gaussians of one width, but for a constant of each expert. Experts that were trained
apart do not mix well by that alone: the routers, or all, have to be trained for a while.
"""

import collections
import contextlib
import dataclasses
import functools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from dipaco_jax.algorithm.grid import Coordinates
from dipaco_jax.config import settings as settings_lib
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import loader
from dipaco_jax.inference.trained_run import TrainedRun
from dipaco_jax.models import layers, transformer

BATCH = 8  # rows whose hidden states are in memory at one time
Arrays = dict[str, np.ndarray]


class Moments(NamedTuple):
  """Sums over tokens."""

  sum_D: Any  # of x
  squares: Any  # of |x|^2
  count: Any

  def __add__(self, other: 'Moments') -> 'Moments':  # type: ignore[override]
    return Moments(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


NOTHING = Moments(0.0, 0.0, 0.0)


def newest_version(run: TrainedRun) -> int:
  """Returns the newest published version, which all paths have. Raises InputError if there is none."""
  folders = {name.split('/')[1] for name in run.files.storage.names('modules')}
  versions = [int(folder) for folder in folders if folder.isdecimal()]
  return max(versions or run.best_versions)


class Plan(NamedTuple):
  """Which modules are merged: for each level those of the paths, in their order, with the number of paths through."""

  paths: Sequence[int]
  modules: Mapping[str, Mapping[Coordinates, int]]


def plan(run: TrainedRun, paths: Sequence[int]) -> Plan:
  """Returns the plan of some paths of a run."""
  grid, modules = run.layout.grid, dict[str, Mapping[Coordinates, int]]()
  for level in run.layout.levels:
    counts = collections.Counter(grid.module(level, grid.coordinates(path)) for path in paths)
    modules[level.name] = dict(sorted(counts.items()))
  return Plan(paths, modules)


def read_modules(run: TrainedRun, version: int, planned: Plan) -> dict[str, list[Arrays]]:
  """Returns the modules of a plan by level, in their order. Raises InputError."""
  files = {
    (level, run.layout.grid.module(run.layout.level(level), run.layout.grid.coordinates(path))): file
    for path in planned.paths
    for level, file in run.module_files(path, version).items()
  }
  return {
    level: [run.finite_arrays(*files[level, at]) for at in of_level] for level, of_level in planned.modules.items()
  }


def mean(planned: Plan, modules: Mapping[str, Sequence[Arrays]]) -> Arrays:
  """Returns the mean of the paths, in float64 and then float32."""
  means: Arrays = {}
  for level, of_level in modules.items():
    weights = [*planned.modules[level].values()]
    for name in of_level[0]:
      stacked = np.stack([module[name] for module in of_level]).astype(np.float64)
      means[name] = np.asarray(np.average(stacked, axis=0, weights=weights), np.float32)
  return means


MLP = re.compile(r'block_(\d+)/mlp/(gate|up|down)')


def mixed_model(run: TrainedRun, planned: Plan, average: Collection[str], per_token: int) -> settings_lib.Model:
  """Returns the mixture that the paths become, as `config.model`; reads nothing.

  Args:
    run, planned: whose modules will be mixed.
    average: levels whose modules are averaged in all but their MLPs.
    per_token: experts of a token.

  Raises InputError if parameters other than MLPs differ, or blocks have different numbers of MLPs, or all of them one.
  """
  if unknown := sorted({*average} - planned.modules.keys()):
    raise InputError(f'--average={unknown[0]}: there is no such level; there are {", ".join(planned.modules)}')
  for level, of_level in planned.modules.items():
    others = [name for name in run.layout.names(run.layout.level(level)) if not MLP.fullmatch(name)]
    if len(of_level) > 1 and others and level not in average:
      problem = f'has {len(of_level)} modules, and {min(others)} is not part of an MLP'
      advice = 'a mixture has one of each such parameter: take their mean with'
      raise InputError(f'the level {level} {problem}; {advice} --average={level}')
  num_experts = _number_of_experts(run, planned)
  if not 2 <= per_token <= num_experts:
    raise InputError(f'--experts_per_token={per_token} should be 2 to {num_experts}, the number of experts')
  return dataclasses.replace(
    run.settings.model, num_experts=num_experts, experts_per_token=per_token, normalize_gates=True
  )


def _number_of_experts(run: TrainedRun, planned: Plan) -> int:
  counts = []
  for block in range(run.settings.model.num_layers):
    gate, *others = (run.layout.owner[f'block_{block}/mlp/{name}'].name for name in ('gate', 'up', 'down'))
    if odd := next((level for level in others if level != gate), ''):
      raise InputError(f'the MLP of block {block} is in the levels {gate} and {odd}: its matrices cannot be one expert')
    counts.append(len(planned.modules[gate]))
  if len({*counts}) > 1:
    listed = ', '.join(f'block {block} has {count}' for block, count in enumerate(counts))
    raise InputError(f'all blocks of a mixture have the same number of experts, but {listed}: use --to=dense')
  if counts[0] == 1:
    raise InputError('these paths share their MLPs: there is nothing to mix; use --to=dense or dipaco export')
  return counts[0]


def to_mixture(run: TrainedRun, version: int, planned: Plan, num_rows: int) -> Arrays:
  """Returns the parameters of `mixed_model`. Raises InputError.

  Args:
    run, version, planned: whose modules are read.
    num_rows: rows of each path's shard from which the routers are made.
  """
  routers = make_routers(run, version, planned.paths, num_rows)
  modules = read_modules(run, version, planned)
  params = mean(planned, modules) | routers
  for of_level in modules.values():
    for name in of_level[0]:
      if match := MLP.fullmatch(name):
        del params[name]
        params |= {f'block_{match[1]}/mlp/expert_{e}/{match[2]}': m[name] for e, m in enumerate(of_level)}
  return dict(sorted(params.items()))


def make_routers(run: TrainedRun, version: int, paths: Sequence[int], num_rows: int) -> Arrays:
  """Returns the router of each block, [D, E], from rows of the shards of the paths. Raises InputError."""
  sums = collections.defaultdict[int, dict[tuple[int, ...], Moments]](dict)
  for path in paths:
    coordinates = run.layout.grid.coordinates(path)
    for block, of_path in measure(run, version, path, num_rows).items():
      module = run.layout.grid.module(run.layout.owner[f'block_{block}/mlp/up'], coordinates)
      sums[block][module] = sums[block].get(module, NOTHING) + of_path
  return {
    f'block_{block}/mlp/router': to_router([by_module[at] for at in sorted(by_module)])
    for block, by_module in sums.items()
  }


def to_router(by_expert: Sequence[Moments]) -> np.ndarray:
  """Returns a router, [D, E] float32, see above."""
  means_ED = np.stack([moments.sum_D / moments.count for moments in by_expert])
  around = sum(m.squares - m.count * np.sum(mean_D**2) for m, mean_D in zip(by_expert, means_ED, strict=True))
  variance = around / (sum(m.count for m in by_expert) * means_ED.shape[1])
  return np.ascontiguousarray(((means_ED - means_ED.mean(0)) / variance).T, np.float32)


def measure(run: TrainedRun, version: int, path: int, num_rows: int) -> dict[int, Moments]:
  """Returns the moments of what enters each block's MLP, over a path's first rows. Raises InputError."""
  tokens_NL, segments_NL = read_rows(run, path, num_rows)
  loaded = run.path(path, version)
  moments = dict.fromkeys(range(run.settings.model.num_layers), NOTHING)
  for start in range(0, len(tokens_NL), BATCH):
    part = slice(start, start + BATCH)
    sums = mlp_inputs(loaded.model, loaded.params, tokens_NL[part], segments_NL[part])
    moments = {block: of_block + Moments(*map(np.float64, sums[block])) for block, of_block in moments.items()}
  return moments


def read_rows(run: TrainedRun, path: int, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the first rows of a path's shard, tokens and segments, [N, L] each. Raises InputError if it has none."""
  name = f'shards/{run.settings.rounds}/{path}/train.array_record'
  file = run.files.storage.local_path(name)
  rows = None
  with contextlib.suppress(OSError):
    rows = loader.read_rows(str(file), 0, num_rows, run.settings.model.seq_len) if file else None
  if rows is None or not len(rows[0]):
    advice = 'routers are made of rows of the shards: name a workdir on this machine that has them'
    raise InputError(f'--workdir={run.workdir}: {name} is missing or empty; {advice}')
  return rows


@functools.partial(jax.jit, static_argnums=0)
def mlp_inputs(
  model: transformer.Transformer, params: transformer.Params, tokens_BL: jax.Array, segments_BL: jax.Array
) -> dict[int, tuple[jax.Array, jax.Array, jax.Array]]:
  """Returns by block the sum of what enters its MLP, [D], the sum of squares, and the number of tokens."""
  unrolled = transformer.Transformer(
    dataclasses.replace(model.config, layers='unrolled', remat='none'), model.vocab_size, model.dtype
  )  # scanned blocks have no names, and what is recomputed cannot be looked at
  is_text_BL1, sums = (segments_BL != 0)[..., None], dict[int, Any]()

  def note(next_call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    if isinstance(context.module, layers.MLP) and context.method_name == '__call__':
      x_BLD = jnp.where(is_text_BL1, args[0].astype(jnp.float32), 0)
      block = int(context.module.path[0].removeprefix('block_'))
      sums[block] = x_BLD.sum((0, 1)), jnp.sum(x_BLD**2), is_text_BL1.sum()
    return next_call(*args, **kwargs)

  with nn.intercept_methods(note):
    transformer.hidden(unrolled, params, tokens_BL, segments_BL)
  return sums
