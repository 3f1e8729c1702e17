"""A folder of a model as Hugging Face's transformers has it: written from a path, or read as the base of a grid.

The latter is `config.pretrain.init`. Every tensor in the folder has to be understood, as every field of config.json.
"""

import contextlib
import hashlib
import json
import logging
import re
from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from dipaco_jax.core import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import tokenizer_files
from dipaco_jax.data.tokenizer import Tokenizer
from dipaco_jax.huggingface import config_json, families, tokenizer_json
from dipaco_jax.models import transformer
from dipaco_jax.storage import remote_files, tensors

DTYPES = {'float32': np.dtype(np.float32), 'bfloat16': np.dtype(jnp.bfloat16)}
MOST_HEADER_BYTES = 100 << 20  # safetensors' own limit
FLOATS = ('F64', 'F32', 'BF16', 'F16')  # safetensors' names
WEIGHTS, INDEX = 'model.safetensors', 'model.safetensors.index.json'


def make_files(
  params: families.Arrays, model: settings.Model, tokenizer: Tokenizer, dtype: str, about: Any
) -> dict[str, bytes]:
  """Returns {name: bytes} of a folder; raises InputError. `about` goes into its config.json, under our own name."""
  special_ids = tokenizer.special_ids
  family, config = config_json.write(model, len(params['embed/tokens']), special_ids)
  weights = {name: x.astype(DTYPES[dtype], copy=False) for name, x in families.to_theirs(family, params).items()}
  generation = {f'{name}_token_id': special_ids[name] for name in ('bos', 'eos') if name in special_ids}
  generation['pad_token_id'] = special_ids.get('pad', special_ids['eos'])
  return tokenizer_json.make_files(tokenizer) | {
    'config.json': _json(config | {'torch_dtype': dtype, 'dipaco_jax': about}),
    'generation_config.json': _json(generation),
    WEIGHTS: safetensors.numpy.save(weights, metadata={'format': 'pt'}),
  }


def _wrong(folder: str, words: str) -> InputError:
  return InputError(f'config.pretrain.init={folder}: {words}')


def is_our_config(config: bytes) -> bool:
  """Returns whether a config.json is as `make_files` wrote it: transformers keeps our key and adds its own."""
  try:
    found = json.loads(config)
  except ValueError:
    return False
  return isinstance(found, dict) and 'dipaco_jax' in found and 'transformers_version' not in found


def check_config(s: settings.Settings):
  """Raises InputError where `config.pretrain.init` and the rest of the config don't fit; for use before any work."""
  folder = s.pretrain.init
  _fitting_config(folder, s.model)
  if not s.tokenizer.model_file:
    raise _tokenizer_error(folder)
  vocab_size = tokenizer_files.open_file(s.tokenizer.model_file).vocab_size
  theirs = _fitting_config(folder, s.model, vocab_size)
  there = {name for file in _weight_files(folder) for name in _weight_names(folder, file)}
  _check_names(folder, there, their_names(theirs, transformer.make_model(s.model, vocab_size)), s.model.tied)


def their_names(theirs: Mapping[str, Any], model: transformer.Transformer) -> dict[str, str]:
  """Returns {name in the folder: our name} of all parameters of a model."""
  family = config_json.family_of(theirs)
  return {families.their_name(family, name): name for name in transformer.shapes(model)}


def _tokenizer_error(folder: str) -> InputError:
  """Returns the error of a config that names no tokenizer, by whether the folder has one."""
  for name in (tokenizer_files.MODEL, tokenizer_files.JSON):
    with contextlib.suppress(OSError):
      remote_files.open_file(f'{folder}/{name}').close()
      words = f'comes with its tokenizer: set config.tokenizer.model_file={folder}/{name}'
      return InputError(f'config.pretrain.init={folder} {words}')
  words = 'has no tokenizer.model and no tokenizer.json: name its own in config.tokenizer.model_file, or start from '
  return InputError(f'config.pretrain.init={folder} {words}another folder')


def _check_names(folder: str, there: Collection[str], wanted: Collection[str], tied: bool):
  """Raises InputError where a parameter is missing, or one that is there would be dropped."""
  if missing := sorted({*wanted} - {*there}):
    raise _wrong(folder, f'{", ".join(_weight_files(folder))} has no {missing[0]}')
  derived = {families.ENDS['head/kernel']} if tied else set()
  if odd := sorted(name for name in {*there} - {*wanted} - derived if not re.fullmatch(families.DERIVED, name)):
    raise _wrong(folder, f'{odd[0]} is not a parameter of this model, of {len(odd)} such')


def _weight_names(folder: str, name: str) -> Collection[str]:
  """Returns the names of a file's weights, by its header; raises InputError where we cannot take one's type."""
  try:
    with remote_files.open_file(f'{folder}/{name}') as file:
      header = json.loads(file.read(min(int.from_bytes(file.read(8), 'little'), MOST_HEADER_BYTES)))
    types = {key: x['dtype'] for key, x in header.items() if key != '__metadata__'}
  except OSError as e:
    raise _unreadable(folder, name, e) from e
  except (ValueError, AttributeError, TypeError, KeyError) as e:
    raise _wrong(folder, f'{name} is no safetensors file, or not whole') from e
  for key, kind in types.items():
    if kind not in tensors.DTYPES or (key.endswith(('.weight', '.bias')) and kind not in FLOATS):
      raise _wrong_type(folder, name, kind)
  return types.keys()


def load_params(folder: str, model: transformer.Transformer) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """Reads the base's parameters, float32, and what the stage's record has on them: the files' sha256, what was changed.

  Raises InputError where the folder's model is no path of this config, or a file is not what it should be.
  """
  theirs, heads = _fitting_config(folder, model.config, model.vocab_size), model.config.num_heads
  shapes, wanted = transformer.shapes(model), their_names(theirs, model)
  found: dict[str, np.ndarray] = {}
  sha256: dict[str, str] = {}
  there: set[str] = set()
  heads_kernel: np.ndarray | None = None
  for file in _weight_files(folder):
    data = _read(folder, file)
    sha256[file] = hashlib.sha256(data).hexdigest()
    arrays = _arrays(folder, file, data)
    there |= {*arrays}
    heads_kernel = arrays.get(families.ENDS['head/kernel'], heads_kernel)
    try:
      for name in arrays.keys() & wanted.keys():
        found[wanted[name]] = families.to_ours(name, wanted[name], arrays[name], shapes[wanted[name]].shape)
    except InputError as e:
      raise _wrong(folder, str(e)) from e
  _check_names(folder, there, wanted, model.config.tied)
  if model.config.tied and heads_kernel is not None:
    _check_tied(folder, heads_kernel, found['embed/tokens'])
  kv_heads, left_out = theirs.get('num_key_value_heads') or heads, theirs['vocab_size'] - model.vocab_size
  if kv_heads < (model.config.num_kv_heads or heads):
    words = '%s: keys and values of %d heads are repeated for %d'
    logging.warning(words, folder, kv_heads, model.config.num_kv_heads or heads)
  if left_out:
    logging.warning('%s: %d rows of its vocabulary are left out: the tokenizer has no such ids', folder, left_out)
  about = {'folder': folder, 'sha256': sha256, 'key_value_heads': kv_heads, 'vocabulary_left_out': left_out}
  return dict(sorted(found.items())), about


def _check_tied(folder: str, head_VD: np.ndarray, tokens_VD: np.ndarray):
  """Raises InputError where a head that is there is not the embedding, as config.json says."""
  if not np.array_equal(head_VD[: len(tokens_VD)].astype(np.float32), tokens_VD):
    words = 'is not model.embed_tokens.weight, though its tie_word_embeddings is True'
    raise _wrong(folder, f'{families.ENDS["head/kernel"]} {words}: set it to False there, and config.model.tied=False')


def _fitting_config(folder: str, model: settings.Model, vocab_size: int = 0) -> Mapping[str, Any]:
  """Reads the config.json. Raises InputError where its model cannot be a path, or its vocabulary is too small."""
  theirs = _parsed(folder, 'config.json', _read(folder, 'config.json'))
  try:
    wrong = config_json.misfits(theirs, model)
  except InputError as e:
    raise _wrong(folder, str(e)) from e
  if wrong:
    raise _wrong(folder, ', '.join(f'set config.model.{name}={x!r}' for name, x in wrong.items()))
  if theirs['vocab_size'] < vocab_size:
    words = f'has a vocabulary of {theirs["vocab_size"]}, config.tokenizer.model_file one of {vocab_size}'
    raise InputError(f'config.pretrain.init={folder} {words}: name its own tokenizer')
  return theirs


def _weight_files(folder: str) -> list[str]:
  try:
    index = remote_files.read(f'{folder}/{INDEX}')
  except OSError:
    return [WEIGHTS]
  return sorted(set(_parsed(folder, INDEX, index).get('weight_map', {}).values()))


def _read(folder: str, name: str) -> bytes:
  try:
    return remote_files.read(f'{folder}/{name}')
  except OSError as e:
    raise _unreadable(folder, name, e) from e


def _unreadable(folder: str, name: str, e: OSError) -> InputError:
  fix = "name a folder as Hugging Face's transformers writes it, with weights in safetensors"
  return _wrong(folder, f'{name}: {e.strerror or e}; {fix}')


def _parsed(folder: str, name: str, data: bytes) -> dict[str, Any]:
  try:
    if isinstance(found := json.loads(data), dict):
      return found
  except ValueError:
    pass
  raise _wrong(folder, f'{name} is not JSON of an object; name another folder')


def _arrays(folder: str, name: str, data: bytes) -> dict[str, np.ndarray]:
  try:
    return tensors.from_bytes(memoryview(data))
  except KeyError as e:
    raise _wrong_type(folder, name, e.args[0]) from e
  except (ValueError, TypeError) as e:
    raise _wrong(folder, f'{name} is no safetensors file, or not whole: {e}') from e


def _wrong_type(folder: str, name: str, kind: str) -> InputError:
  return _wrong(folder, f'{name} has weights of type {kind!r}: convert them to float32, bfloat16 or float16')


def _json(value: Any) -> bytes:
  return (json.dumps(value, indent=1) + '\n').encode()
