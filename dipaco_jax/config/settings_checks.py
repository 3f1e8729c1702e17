"""Checks of settings: the range of each field, and the constraints between fields. `s` is a Settings."""

import math
import re
from typing import Any

from dipaco_jax.algorithm.grid import Grid
from dipaco_jax.config import owners, text_settings, wires
from dipaco_jax.config.extension import is_reference
from dipaco_jax.config.fields import Field, fields, flatten, sources
from dipaco_jax.core.errors import InputError

MAX_PATHS = 2**16  # a report, and the tables of a run, have an entry for each


def check(s: Any) -> None:
  """Checks the range of each field, then the constraints between fields; raises InputError that names the fix."""
  described = dict(fields(type(s)))
  for name, value in flatten(s.to_dict()).items():
    _check_range(name, value, described.get(name, Field('')))
  num_paths = s.num_paths
  if num_paths > MAX_PATHS:
    raise InputError(f'config.grid has {num_paths:,} paths, and {MAX_PATHS:,} are the most: use a smaller grid')
  _check_model(s.model)
  if s.model.block and s.pretrain.init:
    problem = f'the folder has no parameters of your config.model.block={s.model.block!r}: leave out one of the two'
    raise InputError(f'config.pretrain.init={s.pretrain.init}: {problem}')
  text_settings.check_data(s.data)
  _check_routing(s, num_paths)
  _check_evaluate(s, num_paths)
  if s.train.paths_per_phase > num_paths:
    raise InputError(f'config.train.paths_per_phase={s.train.paths_per_phase} is more than the {num_paths} paths')
  if s.outer.lost and (s.train.paths_per_phase or s.train.schedule):
    raise InputError(f'config.outer.lost={s.outer.lost} requires that all paths train in every phase')
  _check_streaming(s)
  _check_phase_s(s)
  _check_quorum(s)
  if s.data.own_text:
    _check_own_text(s)
  if s.data.format == 'messages':
    _check_messages(s)
  try:
    re.compile(s.inner.frozen)
  except re.error as e:
    raise InputError(f'config.inner.frozen={s.inner.frozen!r} is not a regular expression: {e}') from e
  if s.outer.row_weights and s.inner.optimizer != 'adamw':
    raise InputError("config.outer.row_weights needs AdamW's second moments: leave config.inner.optimizer='adamw'")
  if s.outer.row_weights and s.outer.rescale:
    problem = 'a row that only one path has moved would move further than that path did'
    raise InputError(f'config.outer.row_weights requires config.outer.rescale=False: {problem}')
  _check_inner(s)
  if len({*s.metrics.sinks}) < len(s.metrics.sinks):
    raise InputError(f'config.metrics.sinks={s.metrics.sinks} names a sink twice')
  _check_schedule(s, num_paths)
  text_settings.check_all_is_read(s.data)
  text_settings.check_tokenizer(s.tokenizer)
  _check_warmup(s)
  _check_replicas(s)
  if s.evaluate.matrix and not s.train.early_stopping:
    raise InputError(
      'config.evaluate.matrix=True needs hold-outs, which config.train.early_stopping=False does not keep'
    )


def _check_replicas(s: Any) -> None:
  """Raises InputError if paths that are one model would have to compete for texts."""
  varied = {axis for _, _, axes in s.levels for axis in axes}
  replicas = [axis for axis, size in Grid(s.grid).sizes.items() if size > 1 and axis not in varied]
  if s.routing.method == 'discriminative' and replicas:
    problem = f'no level varies over the grid axis {replicas[0]!r}, so its paths are equal and none suits a text better'
    raise InputError(f"config.routing.method='discriminative': {problem}; use 'kmeans'")


def _check_inner(s: Any) -> None:
  if s.mesh.shard_states and s.inner.optimizer not in ('adamw', 'sgd'):
    problem = 'may need whole matrices, which no device has with config.mesh.shard_states: leave that out'
    raise InputError(f'config.inner.optimizer={s.inner.optimizer!r} {problem}')
  if is_reference(s.inner.schedule):
    for name, value in (('inner.rewarm_steps', s.inner.rewarm_steps), ('train.learning_rate', s.train.learning_rate)):
      if value:
        raise InputError(f'config.{name}={value}: leave that to your config.inner.schedule={s.inner.schedule!r}')


def _check_warmup(s: Any) -> None:
  """Raises InputError if a schedule ends before its learning rate has risen."""
  if is_reference(s.inner.schedule):
    return
  path_steps = s.num_steps - s.pretrain.steps
  if s.inner.warmup_steps > s.num_steps:
    problem = f'is longer than the {s.num_steps} steps of the run (config.pretrain.steps + phases * steps_per_phase)'
    raise InputError(
      f'config.inner.warmup_steps={s.inner.warmup_steps} {problem}: lower it, or set -1 for a tenth of them'
    )
  if s.inner.rewarm_steps > path_steps:
    problem = f'is longer than the {path_steps} steps of a path (config.train.phases * steps_per_phase): lower it'
    raise InputError(f'config.inner.rewarm_steps={s.inner.rewarm_steps} {problem}')
  if 0 < s.inner.decay_steps < s.inner.warmup_steps:
    problem = (
      f'is below config.inner.warmup_steps={s.inner.warmup_steps}: the learning rate would fall before it has risen'
    )
    raise InputError(f'config.inner.decay_steps={s.inner.decay_steps} {problem}; raise it, or set 0 for the whole run')


def _check_model(m: Any) -> None:
  if m.head_dim % 2:
    raise InputError(f'config.model.head_dim={m.head_dim} should be even: rotary embedding rotates pairs of dimensions')
  if m.num_kv_heads and m.num_heads % m.num_kv_heads:
    requirement = f'should divide config.model.num_heads={m.num_heads}: each serves the same number of query heads'
    raise InputError(f'config.model.num_kv_heads={m.num_kv_heads} {requirement}')
  if m.num_experts and m.experts_per_token > m.num_experts:
    problem = f'is more than there are: set it to config.model.num_experts={m.num_experts} or less'
    raise InputError(f'config.model.experts_per_token={m.experts_per_token} {problem}')
  if m.num_experts and m.experts_per_token == 1 and m.normalize_gates:
    problem = 'would make the gate of the only expert 1, and the router would learn nothing: set it to False'
    raise InputError(f'config.model.normalize_gates=True with config.model.experts_per_token=1 {problem}')
  if m.num_experts and m.block:
    raise InputError(f'config.model.num_experts={m.num_experts} is of the built-in block, not of config.model.block')
  for name in ('normalize_gates', 'shared_expert_dim', 'balance_loss', 'router_z_loss'):
    if getattr(m, name) and not m.num_experts:
      raise InputError(f'config.model.{name}={getattr(m, name)} requires config.model.num_experts')
  for name in ('full_every', 'rope_local_base'):
    if getattr(m, name) and not m.window:
      raise InputError(f'config.model.{name}={getattr(m, name)} requires config.model.window')
  if m.rope_scaling == 'none' and m.rope_factor != 1:
    raise InputError(f'config.model.rope_factor={m.rope_factor} requires config.model.rope_scaling')
  if m.rope_scaling in ('llama3', 'yarn') and not m.rope_original_len:
    raise InputError(f'config.model.rope_scaling={m.rope_scaling!r} needs config.model.rope_original_len')
  if m.rope_low >= m.rope_high:
    raise InputError(f'config.model.rope_low={m.rope_low} should be below config.model.rope_high={m.rope_high}')


def _check_range(name: str, value: Any, field: Field) -> None:
  if field.choices or field.extensible:
    for one in value if isinstance(value, tuple) else (value,):
      _check_choice(name, one, field)
  if type(value) in (int, float) and (value < field.least or (value == 0 and not field.zero)):
    raise InputError(f'config.{name}={value} should be {f"{field.least} or more" if field.zero else "above 0"}')
  if type(value) is float and not math.isfinite(value):
    raise InputError(f'config.{name}={value} should be a finite number')
  if field.below is not None and value >= field.below:
    raise InputError(f'config.{name}={value} should be below {field.below}')
  if field.most is not None and value > field.most:
    raise InputError(f'config.{name}={value} should be {field.most} or below')


def _check_choice(name: str, value: str, field: Field) -> None:
  if value not in field.choices and not (field.extensible and (is_reference(value) or not (value or field.choices))):
    own = ["your own, as 'package.module:name'"] if field.extensible else []
    raise InputError(f'config.{name}={value!r}: choose one of {", ".join([*field.choices, *own])}')


def _check_routing(s: Any, num_paths: int) -> None:
  _check_length('model', s.model.seq_len, s.routing.prefix_tokens, 'chooses the path, and shorter rows are left out')
  if s.routing.top_n > num_paths:
    raise InputError(f'config.routing.top_n={s.routing.top_n} is more than the {num_paths} paths of config.grid')
  if s.routing.method == 'single' and num_paths > 1:
    raise InputError(f"config.routing.method='single' is for one path; config.grid has {num_paths}: use 'kmeans'")
  first = s.routing.method
  if first == 'discriminative':
    first, end = s.routing.first, s.routing.rounds * s.routing.phases_per_round
    if not s.routing.router_fraction:
      raise InputError("config.routing.router_fraction=0: routing.method='discriminative' needs router data, say 0.005")
    if end >= s.train.phases:
      requirement = (
        f'times config.routing.rounds={s.routing.rounds} should be below config.train.phases={s.train.phases}'
      )
      requirement += ': the last shards need phases, too'
      raise InputError(f'config.routing.phases_per_round={s.routing.phases_per_round} {requirement}')
  if s.routing.method == 'owner':
    _check_owners(s)
  if s.routing.capacity and s.routing.method in ('random', 'owner', 'single'):
    raise InputError(f'config.routing.capacity requires a router with scores, which {s.routing.method!r} does not have')
  if 0 < s.routing.capacity < 1:
    raise InputError(
      f'config.routing.capacity={s.routing.capacity} should be 1 or more: otherwise not all text has room'
    )
  if s.routing.capacity and s.routing.top_n > 1:
    raise InputError(f'config.routing.capacity requires config.routing.top_n=1, not {s.routing.top_n}')


def _check_owners(s: Any) -> None:
  """Raises InputError if the owners have no names, or too few paths, or a source of text is named after none."""
  grid = Grid(s.grid)
  if s.routing.top_n > (most := grid.num_paths // len(owners.names(grid))):
    raise InputError(f'config.routing.top_n={s.routing.top_n} is more than the {most} paths of an owner')
  for source in [*sources(s.data.train), *sources(s.data.validation)] if not s.data.own_text else ():
    owners.check_domain(grid, source.name)


def _check_own_text(s: Any) -> None:
  """Raises InputError if a run needs text of owners in one place, or has no public validation text."""
  if s.routing.method != 'owner':
    raise InputError("config.data.own_text=True requires config.routing.method='owner', and owners' names in the grid")
  if not s.data.validation:
    raise InputError('config.data.own_text=True requires public validation text: name it in config.data.validation')
  if not (s.train.early_stopping and s.data.holdout_fraction):
    needed = 'config.train.early_stopping=True and config.data.holdout_fraction above 0'
    raise InputError(
      f"config.data.own_text=True requires {needed}: owners' hold-outs are all that paths are measured on"
    )
  elsewhere = 'needs the text or the modules of all owners in one place, which config.data.own_text=True keeps apart'
  unfit = {'train.paths_per_phase': s.train.paths_per_phase, 'train.schedule': s.train.schedule}
  unfit |= {f'evaluate.{name}': getattr(s.evaluate, name) for name in ('control', 'matrix', 'reroute_every')}
  unfit |= {
    'evaluate.refit_router': s.evaluate.refit_router,
    'routing.router_fraction': s.routing.router_fraction,
  }
  if (name := next((name for name, value in unfit.items() if value), None)) is not None:
    raise InputError(f'config.{name}={unfit[name]} {elsewhere}: leave it out')
  if s.routing.top_n > 1:
    raise InputError(f'config.routing.top_n={s.routing.top_n} should be 1 with config.data.own_text=True')


def _check_messages(s: Any) -> None:
  """Raises InputError if a config asks for what conversations cannot be used for."""
  only = "config.data.format='messages'"
  if s.data.source != 'files':
    raise InputError(f'{only} is for files: name them in config.data.train, not config.data.source={s.data.source!r}')
  if is_reference(s.routing.method):
    raise InputError(f'{only} needs a built-in router, not config.routing.method={s.routing.method!r}')
  if s.evaluate.reroute_every:
    problem = 'a conversation stays on its path: leave it out'
    raise InputError(f'config.evaluate.reroute_every={s.evaluate.reroute_every} with {only}: {problem}')


def _check_length(section: str, length: int, prefix: int, why: str) -> None:
  if length <= prefix:
    requirement = f'should be above config.routing.prefix_tokens={prefix}: the prefix {why}'
    raise InputError(f'config.{section}.seq_len={length} {requirement}')


def _check_evaluate(s: Any, num_paths: int) -> None:
  _check_length('evaluate', s.evaluate.seq_len or s.model.seq_len, s.routing.prefix_tokens, 'does not count')
  if min(s.evaluate.reroute_every, default=2) < 2:
    problem = f'config.evaluate.reroute_every={s.evaluate.reroute_every}'
    raise InputError(f'{problem} should be numbers of tokens, each 2 or more, such as (64, 32), or empty')
  if s.evaluate.chunk_router_steps and not s.routing.router_fraction:
    raise InputError('config.evaluate.chunk_router_steps needs router data: set config.routing.router_fraction')
  if s.evaluate.refit_router and not s.routing.router_fraction:
    raise InputError('config.evaluate.refit_router=True needs router data: set config.routing.router_fraction')
  if s.evaluate.refit_router and (num_paths == 1 or is_reference(s.routing.method)):
    kind = 'a router of your own' if num_paths > 1 else 'one path'
    raise InputError(f'config.evaluate.refit_router=True has nothing to fit with {kind}: leave it out')


def _check_streaming(s: Any) -> None:
  wire, tau = wires.make_wire(s.outer, s.train), s.train.steps_per_phase
  if -1 < s.outer.mix < 0:
    raise InputError(f'config.outer.mix={s.outer.mix} should be 0 or more, or -1 for what config.outer.overlap says')
  if not wire.stream and s.outer.overlap_steps > 0:
    raise InputError(f"config.outer.overlap_steps={s.outer.overlap_steps} requires config.outer.stream='on'")
  if wire.stream and (s.outer.lost or s.train.paths_per_phase or s.train.schedule):
    fix = 'leave out config.outer.lost, config.train.paths_per_phase and config.train.schedule'
    raise InputError(f'streaming (config.outer.stream, or wire) needs all paths in every phase: {fix}')
  if wire.stream and s.outer.floor:
    problem = 'judges what a path sends after a whole phase, and streaming sends its levels at different steps'
    raise InputError(f"config.outer.floor={s.outer.floor} {problem}: set config.outer.stream='off'")
  if wire.overlap_steps >= tau:
    raise InputError(f'config.outer.overlap_steps={wire.overlap_steps} should be below train.steps_per_phase={tau}')


def _check_phase_s(s: Any) -> None:
  """Raises InputError for what needs to know the steps of a phase before it has ended."""
  if not s.train.phase_s:
    return
  if wires.make_wire(s.outer, s.train).stream:
    problem = 'ends phases after different numbers of steps, and streaming sends levels at fixed steps'
    raise InputError(f"config.train.phase_s={s.train.phase_s} {problem}: set config.outer.stream='off'")
  if s.train.paths_per_phase or s.train.schedule or s.rounds:
    fix = 'leave out config.train.paths_per_phase, config.train.schedule and rounds of re-sharding'
    raise InputError(f'config.train.phase_s={s.train.phase_s} needs all paths in every phase, on one shard each: {fix}')
  if s.outer.max_weight < 1:
    problem = 'weighs paths by the steps that they will have taken, so that the share of an owner is not known before'
    raise InputError(f'config.train.phase_s={s.train.phase_s} {problem}: leave out config.outer.max_weight')


def _check_quorum(s: Any) -> None:
  """Raises InputError for what cannot do without a path that is late."""
  if s.outer.quorum == 1:
    if s.outer.grace_s:
      raise InputError(f'config.outer.grace_s={s.outer.grace_s} requires config.outer.quorum below 1')
    return
  name = f'config.outer.quorum={s.outer.quorum}'
  if wires.make_wire(s.outer, s.train).stream:
    problem = 'decides for a whole phase of a path, and streaming sends its levels at different steps'
    raise InputError(f"{name} {problem}: set config.outer.stream='off'")
  if s.train.paths_per_phase or s.train.schedule:
    fix = 'leave out config.train.paths_per_phase and config.train.schedule'
    raise InputError(f'{name} needs all paths in every phase: {fix}')
  if s.outer.max_weight < 1:
    problem = 'leaves out paths that are late, so that the share of an owner is not known before'
    raise InputError(f'{name} {problem}: leave out config.outer.max_weight')


def _check_schedule(s: Any, num_paths: int) -> None:
  firsts = [first for first, _ in s.train.schedule]
  if firsts and (firsts[0] != 0 or firsts != sorted(set(firsts))):
    raise InputError(f'config.train.schedule: first phases {firsts} should start at 0 and increase')
  for first, paths in s.train.schedule:
    if not paths or not all(0 <= path < num_paths for path in paths):
      raise InputError(
        f'config.train.schedule: phase {first} names paths {paths}; valid paths are 0 to {num_paths - 1}'
      )
