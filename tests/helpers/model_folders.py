"""Folders of models as transformers has them, with random weights and a tokenizer of their own."""

import dataclasses
import json
import pathlib

import numpy as np
import safetensors.numpy
import shapes_of_families

from dipaco_jax.config import settings
from dipaco_jax.data import json_tokenizer
from dipaco_jax.huggingface import config_json, families
from dipaco_jax.models import transformer

SIZES = {'width': 16, 'num_layers': 4, 'num_heads': 4, 'head_dim': 8, 'mlp_dim': 24, 'seq_len': 64}
OF_FAMILY = {'olmoe': {'head_dim': 4}}  # whose heads are together as wide as the hidden state
VOCAB = 300


def model(family: str, **sizes: int) -> settings.Model:
  return dataclasses.replace(
    settings.Model(), **SIZES | shapes_of_families.FAMILIES[family] | OF_FAMILY.get(family, {}) | sizes
  )


def write(folder: pathlib.Path, family: str, text: list[str], **sizes: int) -> None:
  """Weights are of a size that a step of training changes what comes out. `sizes` replace those of SIZES."""
  made, rng = model(family, **sizes), np.random.default_rng(0)
  folder.mkdir(parents=True)
  for name, data in json_tokenizer.train(text, VOCAB).items():
    (folder / name).write_bytes(data)
  shapes = transformer.shapes(transformer.make_model(made, VOCAB))
  params = {name: rng.normal(0, 0.2, x.shape).astype('f') for name, x in shapes.items()}
  params |= {name: x + 1 for name, x in params.items() if name.endswith('scale') and not made.norm_from_one}
  kind, config = config_json.write(made, VOCAB, {'eos': 0})
  (folder / 'config.json').write_text(json.dumps(config | {'max_position_embeddings': 4096}))
  safetensors.numpy.save_file(families.to_theirs(kind, params), folder / 'model.safetensors', metadata={'format': 'pt'})
