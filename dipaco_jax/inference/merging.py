"""One model out of a grid: a mixture whose experts are the MLPs of paths, or the mean of paths.

The experts of a block are the modules of the level with its MLP, in their order. All other parameters of a mixture have
to be shared by the paths, unless `average` names their level: then they are the mean of its modules.

A router starts as a classifier of the paths' hidden states. With h_ne the mean of what enters the MLP of block n, over
tokens of the shards of the paths that have expert e, and s_n^2 the variance around these means, averaged over
dimensions,

    R_n[:, e] = (h_ne - mean over e' of h_ne') / s_n^2

whose logits are the log odds of Gaussians of one width, but for a constant of each expert. Experts that were trained
apart do not mix well by that alone: the routers, or all, have to be trained for a while.

Paths may be mixtures themselves, of experts of their own and one or more that all share. Then the mixture has all of
these, and its routers are made from theirs (arXiv 2507.07024).
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


EXPERT = re.compile(r'block_\d+/mlp/(expert_\d+/)?(gate|up|down)')
ROUTER = re.compile(r'block_\d+/mlp/router')


class Expert(NamedTuple):
  """Where an expert of a merged block comes from."""

  level: str
  module: int  # number of the module among those of the plan
  number: int  # of the expert in a path's block; 0 where that has an MLP alone
  parameters: str  # what its parameters' names begin with


def mixed_model(run: TrainedRun, planned: Plan, average: Collection[str], per_token: int) -> settings_lib.Model:
  """Returns the mixture that the paths become, as `config.model`; reads nothing.

  Args:
    run, planned: whose modules will be mixed.
    average: levels whose modules are averaged in all but their experts.
    per_token: experts of a token; 0: 2, or those of a path that is a mixture itself.

  Raises InputError if parameters other than experts differ, or blocks have different numbers of them, or all share all.
  """
  if unknown := sorted({*average} - planned.modules.keys()):
    raise InputError(f'--average={unknown[0]}: there is no such level; there are {", ".join(planned.modules)}')
  for level, of_level in planned.modules.items():
    names = run.layout.names(run.layout.level(level))
    others = [name for name in names if not EXPERT.fullmatch(name) and not ROUTER.fullmatch(name)]
    if len(of_level) > 1 and others and level not in average:
      problem = f'has {len(of_level)} modules, and {min(others)} is not part of an MLP'
      advice = 'a mixture has one of each such parameter: take their mean with'
      raise InputError(f'the level {level} {problem}; {advice} --average={level}')
  model, num_experts = run.settings.model, _number_of_experts(run, planned)
  usual = model.experts_per_token if model.num_experts else 2
  least = 1 if model.num_experts and not model.normalize_gates else 2
  per_token = per_token or usual
  if not least <= per_token <= num_experts:
    raise InputError(f'--experts_per_token={per_token} should be {least} to {num_experts}, the number of experts')
  mixed = dataclasses.replace(model, num_experts=num_experts, experts_per_token=per_token)
  return mixed if model.num_experts else dataclasses.replace(mixed, normalize_gates=True)


def experts(run: TrainedRun, planned: Plan, block: int) -> list[Expert]:
  """Returns the experts of a merged block: of each expert of the paths' blocks, or of their MLP, all modules in order.

  Raises InputError if the matrices of one are in different levels.
  """
  numbers = range(run.settings.model.num_experts)
  stems = [f'block_{block}/mlp/expert_{e}' for e in numbers] or [f'block_{block}/mlp']
  found = []
  for number, stem in enumerate(stems):
    gate, *others = (run.layout.owner[f'{stem}/{name}'].name for name in ('gate', 'up', 'down'))
    if odd := next((level for level in others if level != gate), ''):
      raise InputError(f'the MLP of block {block} is in the levels {gate} and {odd}: its matrices cannot be one expert')
    found += [Expert(gate, module, number, stem) for module in range(len(planned.modules[gate]))]
  return found


def _number_of_experts(run: TrainedRun, planned: Plan) -> int:
  num_blocks, mine = run.settings.model.num_layers, max(run.settings.model.num_experts, 1)
  counts = [len(experts(run, planned, block)) for block in range(num_blocks)]
  if len({*counts}) > 1:
    listed = ', '.join(f'block {block} has {count}' for block, count in enumerate(counts))
    raise InputError(f'all blocks of a mixture have the same number of experts, but {listed}: use --to=dense')
  if counts[0] == mine:
    raise InputError('these paths share their MLPs: there is nothing to mix; use --to=dense or dipaco export')
  apart = [block for block in range(num_blocks) if _anchor(experts(run, planned, block)) is None]
  if run.settings.model.num_experts and apart:
    problem = 'have no expert in common, and so their routers nothing to compare experts with: use --to=dense'
    raise InputError(f'these paths are mixtures that, in block {apart[0]}, {problem}')
  return counts[0]


def _anchor(of_block: Sequence[Expert]) -> int | None:
  """Returns the number of the first expert that all paths share."""
  modules = collections.Counter(expert.number for expert in of_block)
  return next((number for number, count in modules.items() if count == 1), None)


def to_mixture(run: TrainedRun, version: int, planned: Plan, num_rows: int) -> Arrays:
  """Returns the parameters of `mixed_model`. Raises InputError.

  Args:
    run, version, planned: whose modules are read.
    num_rows: rows of each path's shard from which the routers are made, unless the paths have some.
  """
  modules = read_modules(run, version, planned)
  if run.settings.model.num_experts:
    routers = join_routers(run, planned, modules)
  else:
    routers = make_routers(run, version, planned.paths, num_rows)
  params = {name: x for name, x in mean(planned, modules).items() if not EXPERT.fullmatch(name)} | routers
  for block in range(run.settings.model.num_layers):
    for number, expert in enumerate(experts(run, planned, block)):
      mine = modules[expert.level][expert.module]
      for name in ('gate', 'up', 'down'):
        params[f'block_{block}/mlp/expert_{number}/{name}'] = mine[f'{expert.parameters}/{name}']
  return dict(sorted(params.items()))


def join_routers(run: TrainedRun, planned: Plan, modules: Mapping[str, Sequence[Arrays]]) -> Arrays:
  """Returns the router of each block, [D, E], from those of paths that are mixtures.

  Only differences of logits count. With a the expert that all paths share, and R_p the router of path p, the column of
  an expert is the mean of R_p[:, e] - R_p[:, a] over the paths that have it. Without `model.normalize_gates`, gates are
  smaller than in a path, as they are shares among more experts.
  """
  grid, layout = run.layout.grid, run.layout
  at = {level: {module: i for i, module in enumerate(of_level)} for level, of_level in planned.modules.items()}

  def of_path(path: int, level: str) -> int:
    return at[level][grid.module(layout.level(level), grid.coordinates(path))]

  routers: Arrays = {}
  for block in range(run.settings.model.num_layers):
    name, of_block = f'block_{block}/mlp/router', experts(run, planned, block)
    level, anchor, columns = layout.owner[name].name, _anchor(of_block), list[np.ndarray]()
    for expert in of_block:
      owners = [path for path in planned.paths if of_path(path, expert.level) == expert.module]
      theirs = [modules[level][of_path(path, level)][name].astype(np.float64) for path in owners]
      columns.append(np.mean([R_DE[:, expert.number] - R_DE[:, anchor] for R_DE in theirs], axis=0))
    routers[name] = np.ascontiguousarray(np.stack(columns, 1), np.float32)
  return routers


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
