"""What is wrong with bad settings: ranges of single fields, and what fields say of each other. `s` is a Settings."""

import math
from collections.abc import Mapping
from typing import Any

from dipaco_jax.core.errors import InputError

CHOICES = {
  'data.source': ('files', 'stdlib', 'tfds', 'seqio'),
  'model.dtype': ('auto', 'float32', 'bfloat16'),
  'model.attention': ('auto', 'xla', 'cudnn', 'splash'),
  'model.layers': ('auto', 'scanned', 'unrolled'),
  'model.remat': ('none', 'full', 'dots'),
  'inner.optimizer': ('adamw', 'sgd'),
  'outer.optimizer': ('nesterov', 'momentum', 'sgd', 'adam'),
  'routing.method': ('kmeans', 'product_kmeans', 'discriminative', 'random', 'single'),
  'routing.first': ('kmeans', 'product_kmeans', 'random'),
  'routing.arrange': ('none', 'alike', 'unlike'),
  'routing.labels': ('exact', 'coordinate'),
}
MAY_BE_ZERO = (
  'seed max_validation_documents max_documents max_holdout_rows holdout_fraction steps paths_per_phase warmup_steps '
  'rewarm_steps decay_steps final_fraction b1 b2 weight_decay clip_norm momentum seq_len batch_size every_phases data '
  'microbatch capacity router_fraction lost hidden chunk_router_steps mixture max_skipped exclude_above max_excluded '
  'min_validation_tokens train.learning_rate'
).split()
FRACTIONS = 'validation_fraction max_validation_fraction holdout_fraction router_fraction lost b1 b2 momentum'.split()


def flatten(nested: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """`{'a': {'b': 1}}` to `{'a.b': 1}`."""
  flat: dict[str, Any] = {}
  for key, value in nested.items():
    flat |= flatten(value, f'{prefix}{key}.') if isinstance(value, Mapping) else {prefix + key: value}
  return flat


def check(s):
  """Ranges of single fields, then what fields say of each other; raises InputError that names the fix."""
  for name, value in flatten(s.to_dict()).items():
    _check_range(name, value)
  for name, size in (('pretrain', s.pretrain.batch_size), ('train', s.train.batch_size)):
    if not size:
      raise InputError(f'config.{name}.batch_size=0 should be above 0')
  num_paths = math.prod(size for _, size in s.grid)
  if s.model.head_dim % 2:
    raise InputError(f'config.model.head_dim={s.model.head_dim} should be even: rotary embedding turns pairs')
  _check_data(s.data)
  _check_routing(s, num_paths)
  _check_evaluate(s, num_paths)
  if s.train.paths_per_phase > num_paths:
    raise InputError(f'config.train.paths_per_phase={s.train.paths_per_phase} is more than the {num_paths} paths')
  if s.outer.lost and (s.train.paths_per_phase or s.train.schedule):
    raise InputError(f'config.outer.lost={s.outer.lost} is for runs in which all paths train in every phase')
  if s.outer.row_weights and s.inner.optimizer != 'adamw':
    raise InputError("config.outer.row_weights needs AdamW's second moments: leave config.inner.optimizer='adamw'")
  if s.outer.row_weights and s.outer.rescale:
    raise InputError(
      'config.outer.row_weights goes with config.outer.rescale=False: a row that one path alone has moved would go '
      'further than that path'
    )
  _check_schedule(s, num_paths)


def _check_range(name: str, value):
  last = name.split('.')[-1]
  if name in CHOICES and value not in CHOICES[name]:
    raise InputError(f'config.{name}={value!r}: choose one of {", ".join(CHOICES[name])}')
  may_be_zero = last in MAY_BE_ZERO or name in MAY_BE_ZERO
  if type(value) in (int, float) and (value < 0 or (value == 0 and not may_be_zero)):
    raise InputError(f'config.{name}={value} should be {"0 or more" if may_be_zero else "above 0"}')
  if type(value) is float and not math.isfinite(value):
    raise InputError(f'config.{name}={value} should be a finite number')
  if last in FRACTIONS and value >= 1:
    raise InputError(f'config.{name}={value} should be below 1')
  if name == 'outer.learning_rate' and value > 10:
    raise InputError(f'config.{name}={value} should be 10 or below; 0.7 is what the papers use')
  if last == 'final_fraction' and value > 1:
    raise InputError(f'config.{name}={value} should be 1 (a constant rate) or below')


def _check_routing(s, num_paths: int):
  if not s.model.seq_len > s.routing.prefix_tokens:
    raise InputError(
      f'config.model.seq_len={s.model.seq_len} should be above config.routing.prefix_tokens='
      f'{s.routing.prefix_tokens}: the prefix is not trained on'
    )
  if s.routing.top_n > num_paths:
    raise InputError(f'config.routing.top_n={s.routing.top_n} is more than the {num_paths} paths of config.grid')
  if s.routing.method == 'single' and num_paths > 1:
    raise InputError(f"config.routing.method='single' is for one path; config.grid has {num_paths}: use 'kmeans'")
  if s.routing.method == 'discriminative':
    _check_discriminative(s)
  if 0 < s.routing.capacity < 1:
    raise InputError(f'config.routing.capacity={s.routing.capacity} should be 1 or more: all text has to go somewhere')
  if s.routing.capacity and s.routing.top_n > 1:
    raise InputError(f'config.routing.capacity is for one path per sequence, config.routing.top_n={s.routing.top_n}')


def _check_evaluate(s, num_paths: int):
  if 0 < s.evaluate.seq_len <= s.routing.prefix_tokens:
    raise InputError(
      f'config.evaluate.seq_len={s.evaluate.seq_len} should be above config.routing.prefix_tokens='
      f'{s.routing.prefix_tokens}: the prefix does not count'
    )
  if min(s.evaluate.reroute_every, default=2) < 2:
    raise InputError(f'config.evaluate.reroute_every={s.evaluate.reroute_every}: chunks should have 2 tokens or more')
  if s.evaluate.chunk_router_steps and not s.routing.router_fraction:
    raise InputError('config.evaluate.chunk_router_steps needs router data: set config.routing.router_fraction')
  if s.evaluate.mixture > num_paths:
    raise InputError(f'config.evaluate.mixture={s.evaluate.mixture} is more than the {num_paths} paths of config.grid')


def _check_data(data):
  if data.source == 'files' and not data.train:
    raise InputError("config.data.train is empty: name the text, for instance --config.data.train='my/*.txt'")
  if data.source in ('tfds', 'seqio'):
    _check_dataset(data)


def _check_dataset(data):
  example = 'c4/en:3.0.1' if data.source == 'tfds' else 'my_task'
  if not data.name:
    raise InputError(f'config.data.name is empty: name what to read, for instance --config.data.name={example}')
  if data.source == 'tfds' and ':' not in data.name:
    raise InputError(f'config.data.name={data.name!r} names no version: add it, as in {example!r}')
  if data.source == 'tfds' and not data.data_dir:
    raise InputError('config.data.data_dir is empty: name the folder, or gs://, where tfds has prepared the dataset')
  for name in ('train', 'validation'):
    if getattr(data, name):
      raise InputError(f"config.data.{name} is for source='files': {data.source} has splits of its own")


def _check_discriminative(s):
  if not s.routing.router_fraction:
    raise InputError("config.routing.router_fraction=0: routing.method='discriminative' needs router data, say 0.005")
  if s.routing.rounds * s.routing.phases_per_round >= s.train.phases:
    raise InputError(
      f'config.routing.phases_per_round={s.routing.phases_per_round} times config.routing.rounds={s.routing.rounds} '
      f'should be below config.train.phases={s.train.phases}: the last shards are to be trained on'
    )


def _check_schedule(s, num_paths: int):
  firsts = [first for first, _ in s.train.schedule]
  if firsts and (firsts[0] != 0 or firsts != sorted(set(firsts))):
    raise InputError(f'config.train.schedule: first phases {firsts} should start at 0 and rise')
  for first, paths in s.train.schedule:
    if not paths or not all(0 <= path < num_paths for path in paths):
      raise InputError(f'config.train.schedule: phase {first} names paths {paths}; they go from 0 to {num_paths - 1}')
