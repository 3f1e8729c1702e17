"""Tokenizers as files: their kinds, recognized by content, and the files that a run keeps.

A run has `tokenizer.model` (SentencePiece) or `tokenizer.json`, and next to it `tokenizer_config.json`,
`chat_template.jinja` and `generation_config.json` if they were given or generated. A user's own tokenizer has no files
in the run.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping

from dipaco_jax.config import settings
from dipaco_jax.config.extension import is_reference
from dipaco_jax.core import json_text
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import foreign_files, json_tokenizer, sentencepiece_tokenizer, special_tokens
from dipaco_jax.data.json_tokenizer import CONFIG, JSON, JsonTokenizer
from dipaco_jax.data.own_tokenizer import OwnTokenizer
from dipaco_jax.data.sentencepiece_tokenizer import MODEL, SentencePieceTokenizer
from dipaco_jax.data.special_tokens import GENERATION
from dipaco_jax.data.tokenizer import Tokenizer
from dipaco_jax.storage import remote_files

TEMPLATE = 'chat_template.jinja'
FILES = (MODEL, JSON, CONFIG, TEMPLATE, GENERATION)  # that a run may have
BESIDE = (CONFIG, TEMPLATE, GENERATION, 'config.json')  # read from the folder of a given tokenizer


def open_file(file: str | os.PathLike, num_rows: int = 0) -> Tokenizer:
  """Opens a tokenizer file, with the related files next to it. Raises InputError that names the file.

  Args:
    file: path or URL of the tokenizer file.
    num_rows: number of rows of the model's embedding. Tokens of tokenizer.json without a row are left out if no text
      can contain them. 0 keeps all tokens.
  """
  path = os.fspath(file)
  try:
    content = remote_files.read(path)
  except IsADirectoryError as e:
    raise InputError(f'config.tokenizer.model_file={path} is a folder: name its {JSON} or {MODEL}') from e
  except OSError as e:
    raise _unusable(path, e.strerror or str(e)) from e
  if advice := foreign_files.explain_tokenizer(path, content):
    raise InputError(f'config.tokenizer.model_file={path} {advice}')
  files = {JSON if content.lstrip()[:1] == b'{' else MODEL: content}
  folder = os.path.dirname(path) or '.'
  try:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
      files[CONFIG] = remote_files.read(f'{folder}/{CONFIG}')
    files |= _read_chat_files(folder)
    tokenizer = load(files)
    if JSON in files and 0 < num_rows < tokenizer.vocab_size:
      tokenizer = load(json_tokenizer.leave_out_without_row(files, num_rows))
    return tokenizer
  except OSError as e:
    why = f'{CONFIG} beside it: {e.strerror or e}'
    # A bucket without permission to list it answers 403 for files that do not exist.
    raise _unusable(path, f'{why}; grant permission to list the bucket' if '403' in why else why) from e
  except InputError as e:
    raise _unusable(path, str(e)) from e


def _read_chat_files(folder: str) -> dict[str, bytes]:
  """Returns the chat template of a folder, and the generation_config.json with the end tokens of its model.

  If generation_config.json names no end tokens, they are those of config.json, as in transformers.
  """
  contents = {name: _read_if_exists(f'{folder}/{name}') for name in (TEMPLATE, GENERATION)}
  if not special_tokens.listed_ends(contents) and (ends := _ends_of_model(folder)):
    contents[GENERATION] = json.dumps(json_text.parse(contents[GENERATION] or b'{}') | {'eos_token_id': ends}).encode()
  return {name: content for name, content in contents.items() if content is not None}


def _ends_of_model(folder: str) -> list[int]:
  """Returns the end tokens in a folder's config.json, or [] if it is not the config of a model."""
  try:
    config = json_text.parse(_read_if_exists(f'{folder}/config.json') or b'{}')
  except ValueError:
    return []  # loading the model reports the error
  try:
    return special_tokens.end_ids(config) if isinstance(config, dict) else []
  except InputError as e:
    raise InputError(f'config.json next to it: {e}') from e


def _read_if_exists(path: str) -> bytes | None:
  try:
    return remote_files.read(path)
  except (FileNotFoundError, NotADirectoryError):
    return None
  except OSError as e:
    if remote_files.is_remote(path) and '403' in str(e):  # the answer for a missing file without permission to list
      return None
    raise InputError(f'{os.path.basename(path)} beside it: {e.strerror or e}') from e


def load(files: Mapping[str, bytes]) -> Tokenizer:
  """Loads a tokenizer from {name: content} of its files. Raises InputError if they are not a tokenizer."""
  tokenizer = JsonTokenizer(files) if JSON in files else _load_pieces(files)
  tokenizer.end_ids  # noqa: B018  # raises if the files name invalid end tokens
  return tokenizer


def _load_pieces(files: Mapping[str, bytes]) -> Tokenizer:
  try:
    config = json_text.parse(files.get(CONFIG, b'{}'))
    adds_bos = bool(config.get('add_bos_token'))
  except (ValueError, AttributeError) as e:
    raise InputError(f'{CONFIG} next to it is not a JSON object') from e
  beside = {name: content for name, content in files.items() if name != MODEL}
  return SentencePieceTokenizer(files[MODEL], adds_bos, beside, config)


def train(texts: Iterable[str], config: settings.Tokenizer) -> Mapping[str, bytes]:
  """Trains a tokenizer of the kind and size in the config; returns its files. Raises InputError."""
  if config.kind == 'bytes':
    return json_tokenizer.train(texts, config.vocab_size)
  return {MODEL: sentencepiece_tokenizer.train(texts, config.vocab_size)}


def names(config: settings.Tokenizer, exists: Callable[[str], bool]) -> list[str]:
  """Lists the existing files of a run's tokenizer, or `MODEL` if none exists. A user's own tokenizer has no files."""
  if is_reference(config.kind):
    return []
  kept = [name for name in FILES if exists(name)]
  return kept if {MODEL, JSON} & {*kept} else [MODEL]


def read(config: settings.Tokenizer, exists: Callable[[str], bool], read_file: Callable[[str], bytes]) -> Tokenizer:
  """Loads a run's tokenizer from its existing files, which `read_file` reads, or the user's own tokenizer."""
  if is_reference(config.kind):
    return OwnTokenizer(config)
  contents = {name: read_file(name) for name in names(config, exists)}
  try:
    return load(contents)
  except InputError as e:
    raise InputError(f'the tokenizer: {e}') from e


def _unusable(path: str, why: str) -> InputError:
  return InputError(f'tokenizer {path!r}: {why}; name another in config.tokenizer.model_file, or none to train one')
