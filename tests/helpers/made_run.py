"""The workdir of a run whose modules were drawn, not trained: all that reading and generating look at."""

import dataclasses
import functools
import json
import pathlib

import numpy as np
import small

from dipaco_jax.algorithm import modules
from dipaco_jax.config import settings as settings_lib
from dipaco_jax.data import sentencepiece_tokenizer
from dipaco_jax.models import transformer
from dipaco_jax.routing import chunk_router
from dipaco_jax.storage import module_store, publishing, tensors
from dipaco_jax.training import module_publishing

TEXT = [
  'The quick brown fox jumps over the lazy dog. ',
  'Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich - 12.345 Mal! ',
  'def f(x):\n    return {x: [1, 2, 3]}\n',
]
GRID = {'a': 2, 'b': 2}
LEVELS = (('shared', 'embed|final_norm', ()), ('low', 'block_0', ('a',)), ('high', 'block_[12]', ('b',)))


@functools.cache
def tokenizer_bytes() -> bytes:
  return sentencepiece_tokenizer.train(TEXT * 20, 330)


def settings(levels=LEVELS, **changes) -> settings_lib.Settings:
  sizes = {'num_layers': 3, 'seq_len': 96} | changes.pop('model', {})
  return small.settings(GRID, levels, model=dataclasses.asdict(small.settings().model) | sizes, **changes)


def write(workdir: pathlib.Path, s: settings_lib.Settings, *, chooser: bool = False, seed: int = 0) -> str:
  """Every module drawn by itself, at version 2; the last path points at version 1, whose modules are others."""
  rng = np.random.default_rng(seed)
  vocab_size = sentencepiece_tokenizer.SentencePieceTokenizer(tokenizer_bytes()).vocab_size
  made = transformer.make_model(s.model, vocab_size)
  layout = modules.make_layout(s.grid, s.levels, transformer.shapes(made))
  publishing.write_json(workdir / 'config.json', settings_lib.recorded(s))
  publishing.write_sealed(workdir / 'tokenizer.model', tokenizer_bytes())
  base = small.base(made, seed)
  with publishing.publish_directory(workdir / 'base') as aside:
    (aside / 'params.safetensors').write_bytes(tensors.to_bytes(base))
  num_paths, width = layout.grid.num_paths, s.model.width
  fitted = {
    'mean': np.zeros(width),
    'scale': np.ones(width),
    'hidden': np.zeros((width, 0)),
    'hidden_bias': np.zeros(0),
    'centroids': rng.normal(size=(num_paths, width)),
    'bias': np.zeros(num_paths),
  }
  fitted = {name: x.astype('f') for name, x in fitted.items()}
  with publishing.publish_directory(workdir / 'routing' / '0') as aside:
    (aside / 'router.safetensors').write_bytes(tensors.to_bytes(fitted))
  for version in (1, 2):
    found = []
    for level in layout.levels:
      for module in layout.grid.modules(level):
        drawn = small.base(made, int(rng.integers(2**31)))
        found.append((level, module, {name: drawn[name] for name in layout.names(level)}))
    module_publishing.publish_module_files(workdir, version, found)
  versions = [2] * (num_paths - 1) + [1]
  publishing.write_json(workdir / 'paths' / 'best.json', {'version': versions})
  if chooser:
    drawn = {name: np.asarray(x) for name, x in chunk_router.init_params(base, num_paths).items()}
    drawn[chunk_router.KERNEL] = rng.normal(size=drawn[chunk_router.KERNEL].shape).astype('f')
    publishing.write_sealed(workdir / 'evaluation' / 'chooser.safetensors', tensors.to_bytes(drawn))
  return str(workdir)


def parameters(workdir: str, path: int) -> dict[str, np.ndarray]:
  """One path's, by the function that training itself uses."""
  folder = pathlib.Path(workdir)
  s = settings_lib.from_dict(json.loads((folder / 'config.json').read_text()))
  layout = modules.make_layout(s.grid, s.levels, transformer.shapes(transformer.make_model(s.model, 1)))
  return module_store.load_path(folder, layout, path)
