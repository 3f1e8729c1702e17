"""Documents in tar files as WebDataset has them: samples, whose files share the name up to its first dot.

A sample's text is its .txt, or is in its .json, which may also tell its domain. Its other files are not read.
"""

import functools
import itertools
import os
import tarfile
from collections.abc import Iterator
from typing import IO, Any

from dipaco_jax.config import settings
from dipaco_jax.core import json_text
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import compressed_files, json_files, source

BLOCK = 512  # bytes; a tar file ends with blocks of zeros
BUFFER_BYTES = 1 << 16  # which tarfile copies at each read
MAX_NAME_BYTES = 1 << 20  # of a header that is longer than a block; tarfile keeps all of it
LONG_HEADERS = (
  tarfile.XHDTYPE,
  tarfile.XGLTYPE,
  tarfile.SOLARIS_XHDTYPE,
  tarfile.GNUTYPE_LONGNAME,
  tarfile.GNUTYPE_LONGLINK,
)


def documents(path: str, data: settings.Data, name: str) -> source.Documents:
  """Yields the samples of a tar file, numbered from 1; `name` is the domain of those that have none."""
  for number, (key, files) in enumerate(samples(path), 1):
    yield number, functools.partial(_parse, path, key, files, data, name)


def samples(path: str) -> Iterator[tuple[str, dict[str, bytes]]]:
  """Yields (key, {ending: bytes}) of the samples: neighbouring files of one key. Raises InputError if it is cut."""
  for key, members in itertools.groupby(_members(path), lambda member: member[0]):
    members_of_sample: dict[str, bytes] = {}
    for _, ending, content in members:
      if ending in members_of_sample:
        raise InputError(f'{path}: it has two files {key}.{ending}; names of samples should be unique')
      members_of_sample[ending] = content
    yield key, members_of_sample


def _members(path: str) -> Iterator[tuple[str, str, bytes]]:
  """Yields (key, ending, bytes) of all files; of those that are no text without their bytes."""
  with compressed_files.reading(path), compressed_files.open_file(path) as f:
    stream = _Tail(f)
    how = {'mode': 'r|', 'bufsize': BUFFER_BYTES, 'tarinfo': _Member}
    with tarfile.open(fileobj=stream, **how) as tar:  # type: ignore[call-overload]
      for member in tar:
        folder, file = os.path.split(member.name)
        stem, _, ending = file.partition('.')
        if member.isfile() and stem:  # else a folder, or macOS's own '._name'
          content = tar.extractfile(member) if ending.lower() in ('txt', 'json') else None
          most = json_files.MAX_LINE_BYTES + 1  # a file that is longer is no document
          yield os.path.join(folder, stem), ending.lower(), content.read(most) if content else b''
    while stream.read(compressed_files.CHUNK_BYTES):
      pass
    if stream.tail.strip(b'\0') or len(stream.tail) < BLOCK:
      raise tarfile.ReadError('no end of archive')


class _Member(tarfile.TarInfo):
  """A file of an archive, whose headers take little memory: a small compressed archive may have very long ones."""

  def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
    if self.type in LONG_HEADERS and self.size > MAX_NAME_BYTES:
      raise tarfile.ReadError(f'a name of {self.size:,} bytes')
    try:
      return super()._proc_member(tar)  # type: ignore[misc]
    except (ValueError, RecursionError) as e:  # a number that is none; headers behind headers
      raise tarfile.ReadError(f'a header cannot be read: {e}') from e

  def _refuse_sparse(self, *_: Any):
    raise tarfile.ReadError(f'{self.name} is a sparse file')

  _proc_sparse = _proc_gnusparse_10 = _refuse_sparse  # whose lists of holes have any length


class _Tail:
  """A file that is read, and its last block so far."""

  def __init__(self, file: IO[bytes]):
    self._file, self.tail = file, b''

  def read(self, size: int) -> bytes:
    data = self._file.read(size)
    self.tail = (self.tail + data[-BLOCK:])[-BLOCK:]
    return data


def _parse(path: str, key: str, files: dict[str, bytes], data: settings.Data, name: str) -> tuple[str, str]:
  where = f'{path}: {key}'
  if any(len(content) > json_files.MAX_LINE_BYTES for content in files.values()):
    problem = f'its .txt or .json is larger than {json_files.MAX_LINE_BYTES >> 20} MiB: cut it into several documents'
    raise source.BadRecord(f'{where}: {problem}')
  try:
    record = json_text.parse(files['json'].decode('utf-8-sig')) if 'json' in files else {}
    text = files['txt'].decode('utf-8-sig') if 'txt' in files else None
  except UnicodeDecodeError as e:
    raise source.BadRecord(f'{where}: not UTF-8 at byte {e.start}: convert it') from e
  except ValueError as e:
    raise source.BadRecord(f'{where}.json: not JSON ({e}): correct it') from e
  if not isinstance(record, dict):
    raise source.BadRecord(f'{where}.json: not a JSON object')
  if json_files.has_messages(data):
    messages = json_files.value_of(record, json_files.text_key(data))
    return json_files.as_conversation(messages, where, data), json_files.domain_of(record, data, name)
  if text is None and not isinstance(text := json_files.value_of(record, data.text_key), str):
    fix = json_files.which_key(sorted(json_files.text_keys(record))) if 'json' in files else 'leave out this file'
    raise source.BadRecord(f'{where}: no .txt, and no text under {data.text_key!r}; {fix}')
  return json_files.as_text(text, path), json_files.domain_of(record, data, name)
