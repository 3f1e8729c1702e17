"""What the benchmarks share: sizes as flags, a run's programs, rows of random tokens, times in turns, the result."""

import json
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from dipaco_jax.algorithm import modules
from dipaco_jax.config import fields, settings
from dipaco_jax.data import corpus, sentencepiece_tokenizer, tokenizer
from dipaco_jax.models import transformer
from dipaco_jax.routing import router
from dipaco_jax.storage import files, publishing, tensors
from dipaco_jax.training import mesh, module_publishing, programs

LEVELS = (
  ('stem', r'block_0/', ()),
  ('left', r'block_1/', ('a',)),
  ('right', r'block_2/', ('b',)),
  ('ends', r'embed/|head/|final_norm/|block_(?!0/|1/|2/)', ('a', 'b')),
)  # a shared level, one along each axis, path-specific ends

HELP = {
  'width': 'D',
  'num_layers': 'N',
  'num_heads': 'H',
  'head_dim': 'K; 0: width / num_heads',
  'mlp_dim': 'F',
  'vocab_size': 'V',
  'seq_len': 'L, tokens in a row',
  'batch_size': 'B, rows of a step',
  'loss_chunk': 'tokens whose logits exist at one time',
}

# Fields of config.model that families of models have beside sizes; windows are shorter than a row here.
FAMILIES: dict[str, dict[str, Any]] = {
  'llama2': {},
  'llama3': {
    'rope_base': 5e5, 'rope_scaling': 'llama3', 'rope_factor': 8.0, 'rope_original_len': 128,
  },
  'smollm2': {'rope_base': 1e5},
  'smollm3': {'rope_base': 5e6, 'no_rope_every': 4},
  'mistral': {'window': 64},
  'qwen2': {'rope_base': 1e6, 'qkv_bias': True},
  'qwen3': {'rope_base': 1e6, 'qk_norm': 'head'},
  'olmo2': {'rope_base': 5e5, 'norms': 'after', 'qk_norm': 'all'},
  'gemma3': {
    'rope_base': 1e6, 'rope_local_base': 1e4, 'window': 64, 'full_every': 6, 'norms': 'both',
    'norm_from_one': True, 'qk_norm': 'head', 'activation': 'gelu', 'embed_scale': True, 'query_scale': 256.0,
  },
}  # fmt: skip
UNSHARED = ('llama2', 'olmo2')  # every query has keys and values of its own

ABOUT = dict(fields.fields(settings.Settings))


def define_sizes(**sizes: int):
  """An integer flag for every size, and those of how to compute."""
  for name, default in ({'head_dim': 0, 'loss_chunk': settings.Model.loss_chunk} | sizes).items():
    flags.DEFINE_integer(name, default, HELP[name])
  flags.DEFINE_enum('dtype', 'float32', ABOUT['model.dtype'].choices[1:], 'of compute')
  flags.DEFINE_enum('attention', 'auto', ABOUT['model.attention'].choices, 'its kernel')
  flags.DEFINE_enum('layers', 'auto', ABOUT['model.layers'].choices, 'how blocks are compiled')
  flags.DEFINE_enum('remat', 'none', ABOUT['model.remat'].choices, 'what is computed again')
  flags.DEFINE_bool('tied', False, 'the head is the embedding, transposed')
  flags.DEFINE_integer('num_kv_heads', 0, 'of keys and values, in families that share them; 0: num_heads / 2')
  flags.DEFINE_enum('family', 'llama2', FAMILIES, 'of models, whose architecture it is')


def make_settings(grid: dict[str, int], levels: Sequence[tuple]) -> settings.Settings:
  """A run's settings, the sizes from the flags."""
  f = flags.FLAGS
  names = ['width', 'num_layers', 'num_heads', 'mlp_dim', 'seq_len', 'loss_chunk', 'dtype', 'remat', 'tied']
  names += ['attention', 'layers']
  sizes = {name: getattr(f, name) for name in names} | {'head_dim': f.head_dim or f.width // f.num_heads}
  sizes |= FAMILIES[f.family] | ({} if f.family in UNSHARED else {'num_kv_heads': f.num_kv_heads or f.num_heads // 2})
  return settings.from_dict(
    {'grid': grid, 'levels': tuple(levels), 'model': sizes, 'train': {'batch_size': f.batch_size}}
  )


def make_programs(s: settings.Settings, devices: Sequence[jax.Device]) -> programs.Programs:
  """What the run computes with on these devices."""
  network = transformer.make_model(s.model, flags.FLAGS.vocab_size)
  layout = modules.make_layout(s.grid, s.levels, transformer.shapes(network))
  placement = mesh.place(layout.grid, s.mesh, {'train.batch_size': s.train.batch_size}, devices)
  return programs.Programs(placement, layout, network, s)


def write_run(workdir: pathlib.Path, s: settings.Settings):
  """What a finished run leaves that is read to use it, with random parameters, and a router of random centroids."""
  vocab_size, rng = flags.FLAGS.vocab_size, np.random.default_rng(0)
  made = transformer.make_model(s.model, vocab_size)
  layout = modules.make_layout(s.grid, s.levels, transformer.shapes(made))
  num_paths, D = layout.grid.num_paths, s.model.width
  drawn = tokenizer.sample(corpus.documents(s.data, 'train'), 200 * vocab_size, 0)
  files.write_file(
    workdir / 'tokenizer.model', sentencepiece_tokenizer.train((words for _, words in drawn), vocab_size)
  )
  publishing.write_json(workdir / 'config.json', settings.recorded(s))
  base = {name: np.asarray(x) for name, x in transformer.init(made, jax.random.key(0)).items()}
  files.write_file(workdir / 'base' / 'params.safetensors', tensors.to_bytes(base))
  centroids = jax.numpy.asarray(rng.normal(size=(num_paths, D)), jax.numpy.float32)
  fitted = router.linear(jax.numpy.zeros(D), jax.numpy.ones(D), centroids, jax.numpy.zeros(num_paths))
  arrays = {name: np.asarray(x) for name, x in fitted._asdict().items()}
  files.write_file(workdir / 'routing' / '0' / 'router.safetensors', tensors.to_bytes(arrays))
  found = (
    (level, module, {n: base[n] + rng.normal(0, 1e-3, base[n].shape).astype('f') for n in layout.names(level)})
    for level in layout.levels
    for module in layout.grid.modules(level)
  )
  module_publishing.publish_module_files(workdir, 1, found)
  publishing.write_json(workdir / 'paths' / 'best.json', {'version': [1] * num_paths})


def random_rows(s: settings.Settings, steps: int) -> tuple[np.ndarray, np.ndarray]:
  """Tokens and segments [k, B, L]; every row holds two sequences, cut at a random place."""
  rng = np.random.default_rng(0)
  shape = (steps, s.train.batch_size, s.model.seq_len)
  tokens = rng.integers(0, flags.FLAGS.vocab_size, shape, dtype=np.int32)
  cuts = rng.integers(1, s.model.seq_len, (*shape[:2], 1))
  return tokens, (1 + (np.arange(s.model.seq_len) >= cuts)).astype(np.int32)


def in_flight(made: programs.Programs, rows: tuple[np.ndarray, np.ndarray]) -> list[jax.Array]:
  """The same rows [k, B, L] for every path in flight, on the devices."""
  both = np.stack(rows)
  return made.placement.assemble_pair(both[0].shape, made.specs.rows(1), lambda _: both, lead=1)


def seconds(function: Callable[[], Any]) -> float:
  """Of one call, its results waited for."""
  start = time.perf_counter()
  jax.block_until_ready(function())
  return time.perf_counter() - start


def in_turns(functions: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
  """Median seconds of each, called in turns (ABAB...), so that a busy machine is as busy for all."""
  times = [[seconds(function) for function in functions] for _ in range(rounds)]
  return [statistics.median(column) for column in zip(*times, strict=True)]


def num_bytes(tree) -> int:
  """Of all arrays."""
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def report(title: str, results: dict[str, Any]):
  """A table and, as the last line, one JSON object."""
  print(title)
  for name, value in results.items():
    if not isinstance(value, (list, dict)):
      print(f'{name:30}{value:>18,.4g}' if isinstance(value, float) else f'{name:30}{value!s:>18}')
  print(json.dumps(results))
