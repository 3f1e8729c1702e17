"""A folder of a model as Hugging Face's transformers has it: written from a path, or read as the base of a grid.

The latter is `config.pretrain.init`. Every tensor in the folder has to be understood, as every field of config.json.
"""

import contextlib
import json
import logging
import re
from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from dipaco_jax.config import settings
from dipaco_jax.config.extension import is_reference
from dipaco_jax.core import json_text
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import foreign_files, tokenizer_files
from dipaco_jax.data.own_tokenizer import OwnTokenizer
from dipaco_jax.data.tokenizer import Tokenizer
from dipaco_jax.huggingface import config_json, families, origin, tokenizer_json, weight_files
from dipaco_jax.models import transformer
from dipaco_jax.storage import remote_files

DTYPES = {'float32': np.dtype(np.float32), 'bfloat16': np.dtype(jnp.bfloat16)}


def make_files(
  params: families.Arrays, model: settings.Model, tokenizer: Tokenizer, dtype: str, about: Any, max_positions: int = 0
) -> dict[str, bytes]:
  """Returns {name: bytes} of a folder; raises InputError.

  Args:
    params, model, tokenizer: a path.
    dtype: of the weights.
    about: goes into its config.json, under our own name.
    max_positions: tokens that a text may have, if those are more than in a row of training.
  """
  special_ids = tokenizer.special_ids
  family, config = config_json.write(model, len(params['embed/tokens']), special_ids)
  config['max_position_embeddings'] = max(max_positions, config['max_position_embeddings'])
  weights = {name: x.astype(DTYPES[dtype], copy=False) for name, x in families.to_theirs(family, params).items()}
  ends = list(tokenizer.end_ids)
  config['eos_token_id'] = ends if len(ends) > 1 else ends[0]
  generation = {'bos_token_id': special_ids['bos']} if 'bos' in special_ids else {}
  generation |= {'eos_token_id': config['eos_token_id'], 'pad_token_id': special_ids.get('pad', special_ids['eos'])}
  return tokenizer_json.make_files(tokenizer) | {
    'config.json': _json(config | {'torch_dtype': dtype, 'dipaco_jax': about}),
    'generation_config.json': _json(generation),
    weight_files.WEIGHTS: safetensors.numpy.save(weights, metadata={'format': 'pt'}),
  }


def is_our_config(config: bytes) -> bool:
  """Returns whether a config.json is as `make_files` wrote it: transformers keeps our key and adds its own."""
  try:
    content = json_text.parse(config)
  except ValueError:
    return False
  return isinstance(content, dict) and 'dipaco_jax' in content and 'transformers_version' not in content


def check_config(s: settings.Settings):
  """Raises InputError if `config.pretrain.init` and the rest of the config don't fit; for use before any work."""
  folder = s.pretrain.init
  _fitting_config(folder, s.model)
  _check_tokenizer(folder, s.tokenizer.model_file)
  tokenizer = open_tokenizer(s)
  theirs = _fitting_config(folder, s.model, tokenizer)
  model = transformer.make_model(s.model, tokenizer.vocab_size)
  their_tensors, ours = their_names(theirs, model), transformer.shapes(model)
  shapes_in_files = weight_files.all_shapes(folder)
  _check_names(folder, shapes_in_files, their_tensors, s.model.tied)
  for name, our_name in their_tensors.items():
    _check_shape(folder, name, shapes_in_files[name], our_name, ours[our_name].shape)
  if s.model.tied and families.ENDS['head/kernel'] in shapes_in_files:
    load_params(folder, model)  # whether that is the embedding
  for file in weight_files.find(folder):
    weight_files.check_values(folder, file)


def open_tokenizer(s: settings.Settings) -> Tokenizer:
  """Opens the tokenizer that a config names, without the tokens that its model has no row for. Raises InputError."""
  num_rows = 0
  if folder := s.pretrain.init:
    num_rows = weight_files.parsed(folder, 'config.json', weight_files.read(folder, 'config.json'))['vocab_size']
  return tokenizer_files.open_file(s.tokenizer.model_file, num_rows)


def vocab_size(s: settings.Settings) -> int:
  """Returns the size of the vocabulary of a run: of its tokenizer that is given, the user's own, or to be trained."""
  if s.tokenizer.model_file:
    return open_tokenizer(s).vocab_size
  return OwnTokenizer(s.tokenizer).vocab_size if is_reference(s.tokenizer.kind) else s.tokenizer.vocab_size


def their_names(theirs: Mapping[str, Any], model: transformer.Transformer) -> dict[str, str]:
  """Returns {name in the folder: our name} of all parameters of a model."""
  family = config_json.family_of(theirs)
  return {families.their_name(family, name): name for name in transformer.shapes(model)}


def _check_tokenizer(folder: str, named: str):
  """Raises InputError if a config names no tokenizer, or another than the folder has."""
  contents: dict[str, bytes] = {}
  for name in (tokenizer_files.JSON, tokenizer_files.MODEL):
    with contextlib.suppress(OSError):
      contents[f'{folder}/{name}'] = remote_files.read(f'{folder}/{name}')
  if named in contents or (named and not contents):
    return
  if not named and contents:
    problem = f'comes with its tokenizer: set config.tokenizer.model_file={min(contents)}'
    raise InputError(f'config.pretrain.init={folder} {problem}')
  if not named:
    advice = foreign_files.explain_missing_tokenizer(folder, remote_files.list_names(folder))
    raise InputError(f'config.pretrain.init={folder} {advice}')
  with contextlib.suppress(OSError):  # opening it reports the error
    if remote_files.read(named) not in contents.values():
      problem = f'is not the tokenizer that config.pretrain.init={folder} comes with: leave it out'
      raise InputError(f'config.tokenizer.model_file={named} {problem}')


def _check_names(folder: str, present: Collection[str], expected: Collection[str], tied: bool):
  """Raises InputError if a parameter is missing, or an existing one would be dropped."""
  if missing := sorted({*expected} - {*present}):
    raise weight_files.wrong(folder, f'{", ".join(weight_files.find(folder))} has no {missing[0]}')
  derived = {families.ENDS['head/kernel']} if tied else set()
  if odd := sorted(name for name in {*present} - {*expected} - derived if not re.fullmatch(families.DERIVED, name)):
    raise weight_files.wrong(folder, f'{odd[0]} is not a parameter of this model, of {len(odd)} such')


def _check_shape(folder: str, name: str, shape: tuple[int, ...], our_name: str, ours: tuple[int, ...]):
  if not families.fits(our_name, shape, ours):
    raise weight_files.wrong(folder, f'{name} is of shape {shape}, which contradicts its config.json')


def load_params(folder: str, model: transformer.Transformer) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """Reads the base's parameters, float32, and what the stage's record has on them: the files' sha256, what was changed.

  Raises InputError if the folder's model is no path of this config, or a file is not what it should be.
  """
  theirs, heads = _fitting_config(folder, model.config), model.config.num_heads
  shapes = transformer.shapes(model)
  their_tensors = their_names(theirs, model)
  head = families.ENDS['head/kernel']
  params: dict[str, np.ndarray] = {}
  sha256: dict[str, str] = {}
  present: set[str] = set()
  head_VD: np.ndarray | None = None
  for file in weight_files.find(folder):
    sha256[file], arrays, names = weight_files.load(folder, file, {*their_tensors, head})
    present |= {*names}
    head_VD = arrays.get(head, head_VD)
    for name in arrays.keys() & their_tensors.keys():
      our_name = their_tensors[name]
      _check_shape(folder, name, arrays[name].shape, our_name, shapes[our_name].shape)
      params[our_name] = families.to_ours(our_name, arrays[name], shapes[our_name].shape)
  _check_names(folder, present, their_tensors, model.config.tied)
  if model.config.tied and head_VD is not None:
    _check_tied(folder, head_VD, params['embed/tokens'])
  kv_heads, left_out = theirs.get('num_key_value_heads') or heads, theirs['vocab_size'] - model.vocab_size
  if kv_heads < (model.config.num_kv_heads or heads):
    message = '%s: keys and values of %d heads are repeated for %d'
    logging.warning(message, folder, kv_heads, model.config.num_kv_heads or heads)
  if left_out:
    logging.warning('%s: %d rows of its vocabulary are left out: the tokenizer has no such ids', folder, left_out)
  about = {'folder': folder, 'sha256': sha256, 'key_value_heads': kv_heads, 'vocabulary_left_out': left_out}
  if isinstance(most := theirs.get('max_position_embeddings'), int):
    about['max_positions'] = most
  about |= origin.describe(folder)
  return dict(sorted(params.items())), about


def _check_tied(folder: str, head_VD: np.ndarray, tokens_VD: np.ndarray):
  """Raises InputError if a head exists and differs from the embedding, although config.json says that they are tied."""
  if not np.array_equal(head_VD[: len(tokens_VD)].astype(np.float32), tokens_VD):
    problem = 'is not model.embed_tokens.weight, though its tie_word_embeddings is True'
    raise weight_files.wrong(
      folder, f'{families.ENDS["head/kernel"]} {problem}: set it to False there, and config.model.tied=False'
    )


def _fitting_config(folder: str, model: settings.Model, tokenizer: Tokenizer | None = None) -> Mapping[str, Any]:
  """Reads the config.json. Raises InputError if its model cannot be a path, or a token has no row in it."""
  theirs = weight_files.parsed(folder, 'config.json', weight_files.read(folder, 'config.json'))
  try:
    wrong = config_json.misfits(theirs, model)
  except InputError as e:
    raise weight_files.wrong(folder, f'config.json: {e}') from e
  if wrong:
    raise weight_files.wrong(folder, ', '.join(f'set config.model.{name}={x!r}' for name, x in wrong.items()))
  if tokenizer and theirs['vocab_size'] < tokenizer.vocab_size:
    raise weight_files.wrong(folder, _explain_rows(theirs['vocab_size'], tokenizer))
  return theirs


def _explain_rows(num_rows: int, tokenizer: Tokenizer) -> str:
  """Says which tokens have no row in the embedding, and what helps."""
  problem = f'its vocab_size is {num_rows}, and its tokenizer has {tokenizer.vocab_size} tokens'
  added = json_text.parse(tokenizer.files.get(tokenizer_files.JSON, b'{}')).get('added_tokens', [])
  beyond = [token['content'] for token in added if token['id'] >= num_rows]
  if len(beyond) != tokenizer.vocab_size - num_rows:
    return f'{problem}: it is the tokenizer of another model; put the one of this model there'
  names = ', '.join(map(repr, beyond[:3])) + (', ...' if len(beyond) > 3 else '')
  resize = f'in transformers, model.resize_token_embeddings({tokenizer.vocab_size}) and save_pretrained'
  return (
    f'{problem}: the added {names} has no row; take it out of tokenizer.json and tokenizer_config.json, or {resize}'
  )


def _json(value: Any) -> bytes:
  return (json.dumps(value, indent=1) + '\n').encode()
