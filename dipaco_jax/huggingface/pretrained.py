"""What a config need not say of the model that its grid starts from (`config.pretrain.init`): the folder says it."""

import os
import re
from collections.abc import Collection
from typing import Any

from dipaco_jax.core import json_text
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import foreign_files, tokenizer_files
from dipaco_jax.huggingface import config_json
from dipaco_jax.storage import remote_files

NAME = r'[\w.-]+/[\w.-]+'  # on the Hub
TRAINED = {'tokenizer.kind', 'tokenizer.vocab_size', 'tokenizer.sample_bytes'}  # of a tokenizer that is trained here


def fill(values: dict[str, Any], given: Collection[str], workdir: str = '') -> None:
  """Fills in fields that a config leaves at their defaults: those of `model`, and the tokenizer.

  Args:
    values: the config, by section.
    given: fields that the command line names, which are not changed.
    workdir: of the run; if it has begun from this folder, its config.json says all, as the folder may be gone.

  Raises InputError if the folder's config.json cannot be read, or is of a model that cannot be a path, or where a
  field is given that is of a tokenizer trained here.
  """
  folder = values['pretrain']['init'] = located(values['pretrain']['init'])
  if not (theirs := _begun(workdir, folder)):
    theirs = {'model': read_model(folder), 'tokenizer': _tokenizer(folder)}
  if theirs['tokenizer'] and (odd := sorted(TRAINED & {*given})):
    problem = f'is of a tokenizer that is trained, and config.pretrain.init={folder} comes with its own: leave it out'
    raise InputError(f'config.{odd[0]} {problem}')
  for section, fields in theirs.items():
    ours = values[section]
    for name, x in fields.items():
      default = config_json.DEFAULT[name] if section == 'model' else ''
      if ours.get(name, default) == default and f'{section}.{name}' not in given:
        ours[name] = x


def located(init: str) -> str:
  """Returns the folder, or where the Hub has a model of this name if there is no such folder."""
  is_name = re.fullmatch(NAME, init) and not os.path.exists(init)
  return f'{remote_files.HUB}{init}' if is_name else init.rstrip('/')


def read_model(folder: str, workdir: str = '') -> dict[str, Any]:
  """Returns the fields of config.model that a folder's config.json says, or that of the run. Raises InputError.

  Args:
    folder: as `located` returns it.
    workdir: of the run; if it has begun from this folder, the folder may be gone.
  """
  if begun := _begun(workdir, folder):
    return begun['model']
  try:
    return config_json.read_config(json_text.parse(remote_files.read(f'{folder}/config.json')))
  except OSError as e:
    if advice := foreign_files.explain_model(folder, remote_files.list_names(folder)):
      raise InputError(f'config.pretrain.init={folder.removeprefix(remote_files.HUB)} {advice}') from e
    raise _unreadable(folder, e.strerror or str(e)) from e
  except InputError as e:
    at_hub = folder.startswith(remote_files.HUB) and str(e).startswith(folder)
    raise (
      _unreadable(folder, str(e)) if at_hub else InputError(f'config.pretrain.init={folder}: config.json: {e}')
    ) from e
  except (ValueError, AttributeError, TypeError) as e:
    raise InputError(f'config.pretrain.init={folder}: config.json is not a JSON object; name another folder') from e


def _unreadable(folder: str, why: str) -> InputError:
  """Returns the error of a folder, or of a model on the Hub, that cannot be read."""
  why = ' '.join(why.split())[:300]
  if folder.startswith(remote_files.HUB):
    name = folder.removeprefix(remote_files.HUB)
    return InputError(f'config.pretrain.init={name}: there is no such folder, and from the Hub: {why}')
  fix = "name a folder as Hugging Face's transformers writes it, or a model on the Hub, as 'name/model'"
  return InputError(f'config.pretrain.init={folder}: config.json: {why}; {fix}')


def _tokenizer(folder: str) -> dict[str, str]:
  """Returns the folder's own tokenizer: what its authors' tokenizer.json says goes before SentencePiece's model."""
  candidates = [f'{folder}/{name}' for name in (tokenizer_files.JSON, tokenizer_files.MODEL)]
  return next(({'model_file': path} for path in candidates if remote_files.can_open(path)), {})


def _begun(workdir: str, folder: str) -> dict[str, Any]:
  """Returns the recorded fields of a folder for a run that has begun from it, by section, or {} if none has."""
  if not workdir:
    return {}
  try:
    kept = json_text.parse(remote_files.read(f'{workdir}/config.json'))
    model = {name: x for name, x in kept['model'].items() if name in config_json.READ and name != 'block'}  # no code
    tokenizer = {'model_file': kept['tokenizer']['model_file']}
    return {'model': model, 'tokenizer': tokenizer} if kept['pretrain']['init'] == folder else {}
  except (OSError, InputError, ValueError, KeyError, TypeError, AttributeError):
    return {}
