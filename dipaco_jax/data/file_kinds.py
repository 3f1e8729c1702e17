"""Kinds of text files by their names: plain text, or documents in one of several formats.

A file of a kind that is not here is rejected by name, before any work: its syntax would be trained on.
"""

import itertools
import os
from collections.abc import Callable, Collection, Iterator

from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import (
  compressed_files,
  foreign_files,
  json_files,
  source,
  table_files,
  tar_files,
  text_files,
  token_files,
)
from dipaco_jax.storage import remote_files

TOKENS, INDEX = '.bin', '.idx'  # of files of tokens; Megatron's have an index beside them
PLAIN = ('', '.txt', '.text', '.md', '.rst', '.tex')
READERS: dict[str, Callable[[str, settings.Data, str], source.Documents]] = {
  '.jsonl': json_files.documents,
  '.ndjson': json_files.documents,
  '.json': json_files.documents,
  '.parquet': table_files.parquet,
  '.arrow': table_files.arrow,
  '.tar': tar_files.documents,
  TOKENS: token_files.documents,
}
OF_RECORDS = ('.jsonl', '.ndjson', '.json', '.parquet', '.arrow', '.tar')
NEVER_COMPRESSED = ('.parquet', '.arrow', TOKENS)
TO_PARQUET = "with pandas, read_csv('{path}'{more}).to_parquet('{stem}.parquet') makes a file that can be read"
INSTEAD = {
  '.csv': TO_PARQUET.replace('{more}', ''),
  '.tsv': TO_PARQUET.replace('{more}', ", sep='\\t'"),
  INDEX: 'name {stem}.bin, to which it belongs',
  '.tgz': 'name it {stem}.tar.gz',
  '.zip': 'unpack it, and name the files in it',
  '.tfrecord': "prepare it as a dataset, and set config.data.source='tfds'",
  '.array_record': "prepare it as a dataset, and set config.data.source='tfds'",
}
CHECK_BYTES = 1 << 20  # of each file are read before any work
CHECK_DOCUMENTS = 10_000  # or this many documents, if they are short


def suffix(path: str) -> str:
  """Returns the suffix of a file's name in lower case, without that of its compression: '.jsonl' of 'a.JSONL.gz'."""
  return os.path.splitext(compressed_files.inner_name(path))[1].lower()


def is_one_text(path: str, data: settings.Data) -> bool:
  """Returns whether a file is one text, which is cut into pieces: plain text, or tokens without documents."""
  kind = suffix(path)
  return token_files.is_one_text(path, data) if kind == TOKENS else kind not in READERS


def documents(path: str, data: settings.Data, name: str) -> source.Documents:
  """Yields (number, read) of the documents of a file that is not one text; `read` returns (text, domain)."""
  return READERS[suffix(path)](path, data, name)


def check_name(path: str, data: settings.Data) -> None:
  """Raises InputError for a file of a kind that cannot be read, with what to do instead."""
  kind = suffix(path)
  if kind in NEVER_COMPRESSED and compressed_files.is_compressed(path):
    raise InputError(f'{path}: {kind} files are read uncompressed: decompress it, or leave it out')
  if json_files.has_messages(data) and kind not in OF_RECORDS:
    raise InputError(f"{path} has no conversations (config.data.format='messages'): name {', '.join(OF_RECORDS)} files")
  if kind in READERS or kind in PLAIN or kind in data.plain_suffixes:
    return
  if kind in INSTEAD:
    fix = INSTEAD[kind].format(path=path, stem=path[: -len(kind)])
    raise InputError(f'{path}: {kind} files cannot be read: {fix}')
  fix = f'if it is plain text, set config.data.plain_suffixes={kind}, else leave it out'
  raise InputError(f'{path}: {kind} is not one of {" ".join([*PLAIN[1:], *READERS])}; {fix}')


def check_beginning(path: str, data: settings.Data) -> None:
  """Reads the beginning of a file as the stream will read it. Raises InputError, also if there is no text."""
  with compressed_files.reading(path), remote_files.open_file(path) as file:
    is_pointer = file.read(len(foreign_files.LFS)) == foreign_files.LFS
  if is_pointer:
    raise InputError(f'{path} {foreign_files.LFS_ADVICE}, or leave it out')
  if suffix(path) == TOKENS:
    token_files.say_how_it_is_taken(path, data)
  elif suffix(path) not in NEVER_COMPRESSED and (advice := foreign_files.explain_text(_first_bytes(path))):
    raise InputError(f'{path} {advice}, or leave it out')
  seen, has_document = 0, False
  bad_records: list[source.BadRecord] = []
  for number, text in enumerate(_texts(path, data, bad_records), 1):
    seen, has_document = seen + len(text), has_document or bool(text.strip() if isinstance(text, str) else len(text))
    if seen >= CHECK_BYTES or number >= CHECK_DOCUMENTS:
      break
  if not has_document and bad_records:
    raise InputError(f'{path}: none of its first records has a text ({bad_records[0].reason}); or leave out this file')
  if not has_document:
    raise InputError(f'{path}: it has no text: add text, or leave out this file')


def _first_bytes(path: str) -> bytes:
  return next(compressed_files.chunks(path), b'')


def _texts(path: str, data: settings.Data, bad_records: list[source.BadRecord]) -> Iterator[source.Text]:
  """Yields the texts of the first records of a file, or the pieces of its text; bad records go to `bad_records`."""
  if suffix(path) not in READERS:
    return text_files.decode(path)
  if is_one_text(path, data):
    return (placed.text for placed in token_files.pieces(path, data))
  first = itertools.islice(documents(path, data, ''), CHECK_DOCUMENTS)
  records = (source.read_or_skip(read, data, bad_records.append) for _, read in first)
  return (record[0] for record in records if record)


def without_indices(paths: Collection[str]) -> list[str]:
  """Returns the paths without those of indices, which are read with the files of tokens that they stand beside."""
  present = {*paths}
  return [path for path in paths if suffix(path) != INDEX or f'{os.path.splitext(path)[0]}{TOKENS}' not in present]
