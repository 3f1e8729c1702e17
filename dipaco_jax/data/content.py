"""Digests of the text of a config. Equal digests mean equal text, wherever the files are.

The SHA-256 of a local file is computed once, and again only if its size, times or inode change. Objects in buckets and
files of the Hub have identities that their servers provide.
"""

import concurrent.futures
import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from dipaco_jax.config import fields, settings
from dipaco_jax.config.extension import is_reference
from dipaco_jax.data import corpus, one_source, source, source_files, source_seqio, source_stdlib, source_tfds
from dipaco_jax.storage import remote_files

THREADS = 4  # that read files
RACY_NS = 2_000_000_000  # a file that was read this soon after a change may change again with the same times

Known = list[int | str]  # size, times in ns, inode, when it was read in ns, sha256


class File(NamedTuple):
  """A file of text."""

  name: str  # from which ids of documents are made
  path: str
  domain: str = ''


class Content(NamedTuple):
  """Text that a field of the config names: files, or a digest if the text is not in files."""

  files: tuple[File, ...] = ()
  other: str = ''


class Digests:
  """Digests of files by path. Files with a `known` digest are not read again."""

  def __init__(self, known: Mapping[str, Known]):
    self.known = dict(known)

  def of_files(self, paths: Iterable[str]) -> dict[str, str]:
    """Returns {path: digest} of the files that exist. Raises OSError or Unavailable if a file cannot be read."""
    unique_paths = list(dict.fromkeys(paths))
    remote = [path for path in unique_paths if remote_files.is_remote(path)]
    local = [path for path in unique_paths if not remote_files.is_remote(path)]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
      digests = dict(zip(local, pool.map(self._of_file, local), strict=True))
    return {path: digest for path, digest in digests.items() if digest} | remote_files.identities(remote)

  def of_content(self, content: Content) -> str:
    """Returns a digest of a field's content. Raises FileNotFoundError if a file no longer exists."""
    digests = self.of_files(file.path for file in content.files)
    if missing := [file.path for file in content.files if file.path not in digests]:
      raise FileNotFoundError(2, 'No such file or directory', missing[0])
    listed = [[file.name, file.domain, digests[file.path]] for file in content.files]
    return hashlib.sha256(json.dumps([listed, content.other]).encode()).hexdigest()

  def _of_file(self, path: str) -> str:
    """Returns the sha256 of a file; '' if there is none."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
      state, known = _state(path), self.known.get(path)
      if known and known[:-2] == state and int(known[-2]) - max(state[1:3]) > RACY_NS:
        return str(known[-1])
      now = time.time_ns()
      with remote_files.waiting_for(path), open(path, 'rb') as f:
        sha256 = hashlib.file_digest(f, 'sha256').hexdigest()
      self.known[path] = [*state, now, sha256]
      return sha256
    return ''


def _state(path: str) -> list[int]:
  stat = os.stat(path)
  return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def of_text(data: settings.Data) -> dict[str, Content]:
  """Returns the content of each field that names text. Raises InputError if there is no text."""
  if data.source == 'files':
    return {f'data.{split}': Content(tuple(_files(data, split))) for split in ('train', 'validation')}
  if is_reference(data.source):
    return {'data.source': Content(other=_digest_documents(data))}
  of_source = {'stdlib': source_stdlib, 'tfds': source_tfds, 'seqio': source_seqio}[data.source]
  return {'data.source' if data.source == 'stdlib' else 'data.name': Content(other=of_source.content_digest(data))}


def _files(data: settings.Data, split: str) -> list[File]:
  """Lists the files of a split. Files of a mixture have the name of their source as prefix and domain."""
  sources = corpus.sources_of(data)
  if not sources or (split == 'validation' and not fields.sources(data.validation)):
    return [File(*file) for file in source_files.list_with_domains(data, split)]
  return [
    File(f'{name}/{file}', path, name)
    for name, (of_source, _) in sources.items()
    for file, path, _ in source_files.list_with_domains(of_source, split)
  ]


def _digest_documents(data: settings.Data) -> str:
  """Reads all documents of a user's source, and returns their digest."""
  total = hashlib.sha256()
  for split in ('train', 'validation'):
    for item in one_source.find_reader(data.source)(data, split) or ():
      document = source.read_or_skip(item.read, data, lambda error: None)
      total.update(json.dumps([split, item.id, *map(str, document or ())]).encode())
  return total.hexdigest()
