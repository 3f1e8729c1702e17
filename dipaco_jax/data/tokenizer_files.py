"""Tokenizers as files: which kind one is, by what it holds; what is kept of it in a run.

A run has `tokenizer.model` (SentencePiece) or `tokenizer.json`, and beside either a `tokenizer_config.json` where one
was given or made. Of a tokenizer of the user's own it has no file.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping

from dipaco_jax.core import json_text, settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.core.extension import is_reference
from dipaco_jax.data import json_tokenizer, sentencepiece_tokenizer
from dipaco_jax.data.json_tokenizer import CONFIG, JSON, JsonTokenizer
from dipaco_jax.data.own_tokenizer import OwnTokenizer
from dipaco_jax.data.sentencepiece_tokenizer import MODEL, SentencePieceTokenizer
from dipaco_jax.data.tokenizer import Tokenizer
from dipaco_jax.storage import remote_files

FILES = (MODEL, JSON, CONFIG)  # that a run may have


def open_file(file: str | os.PathLike) -> Tokenizer:
  """Opens a tokenizer by its file, with the tokenizer_config.json beside it. Raises InputError that names the file."""
  path = os.fspath(file)
  try:
    content = remote_files.read(path)
  except OSError as e:
    raise _unusable(path, e.strerror or str(e)) from e
  files = {JSON if content.lstrip()[:1] == b'{' else MODEL: content}
  try:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
      files[CONFIG] = remote_files.read(f'{os.path.dirname(path) or "."}/{CONFIG}')
    return load(files)
  except OSError as e:
    why = f'{CONFIG} beside it: {e.strerror or e}'
    # A bucket that may not be listed answers so for what is not there.
    raise _unusable(path, f'{why}; let us list the bucket' if '403' in why else why) from e
  except InputError as e:
    raise _unusable(path, str(e)) from e


def load(files: Mapping[str, bytes]) -> Tokenizer:
  """Makes a tokenizer of its files, by name; raises InputError where they are none."""
  if JSON in files:
    return JsonTokenizer(files)
  beside = {CONFIG: files[CONFIG]} if CONFIG in files else {}
  try:
    adds_bos = bool(json_text.parse(beside.get(CONFIG, b'{}')).get('add_bos_token'))
  except (ValueError, AttributeError) as e:
    raise InputError(f'{CONFIG} beside it is not JSON of an object') from e
  return SentencePieceTokenizer(files[MODEL], adds_bos, beside)


def train(texts: Iterable[str], wanted: settings.Tokenizer) -> Mapping[str, bytes]:
  """Trains a tokenizer of the kind and size that the config says; returns its files. Raises InputError."""
  if wanted.kind == 'bytes':
    return json_tokenizer.train(texts, wanted.vocab_size)
  return {MODEL: sentencepiece_tokenizer.train(texts, wanted.vocab_size)}


def names(wanted: settings.Tokenizer, there: Callable[[str], bool]) -> list[str]:
  """Lists the files of a run's tokenizer, by which of them are `there`; `MODEL` where none is. The user's has none."""
  if is_reference(wanted.kind):
    return []
  kept = [name for name in FILES if there(name)]
  return kept if {MODEL, JSON} & {*kept} else [MODEL]


def read(wanted: settings.Tokenizer, there: Callable[[str], bool], of: Callable[[str], bytes]) -> Tokenizer:
  """Makes a run's tokenizer of its files: those of them that are `there`, which `of` reads; or the user's own."""
  if is_reference(wanted.kind):
    return OwnTokenizer(wanted)
  found = {name: of(name) for name in names(wanted, there)}
  try:
    return load(found)
  except InputError as e:
    raise InputError(f'the tokenizer: {e}') from e


def _unusable(path: str, why: str) -> InputError:
  return InputError(f'tokenizer {path!r}: {why}; name another in config.tokenizer.model_file, or none to train one')
