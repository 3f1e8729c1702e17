"""Objects in a folder, `s3://` or `gs://`, which islands exchange [3], with verified checksums.

An object is seen whole or not at all, and its sha256 is compared on every read. Names of arrays end in its first
digits, as 'objects/modules/4/low/1-06112716e50ca096.safetensors', so none is written again with other bytes.

A tree is a directory published as objects: its files, then an index, {name: sha256}.
"""

import concurrent.futures
import errno
import hashlib
import json
import threading
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dipaco_jax.core import errors, json_text
from dipaco_jax.core.errors import InputError, disk_is_full
from dipaco_jax.processes import time_use
from dipaco_jax.storage import files, lock, publishing, retry
from dipaco_jax.storage.backends import TRANSFERS, Bucket, Folder
from dipaco_jax.storage.gateway_objects import Gateway

PATIENCE_S = 600
EXTRAS = {'s3': 's3', 'gs': 'gcs'}


class Missing(OSError):
  """Error: an expected object is missing; the message names it."""


class Corrupt(OSError):
  """Error: an object's bytes differ from those that were written; the message names it."""


class Away(OSError, errors.Away):
  """Error: the storage has not answered within the patience; the message names the object."""


class Storage:
  """Objects by name, for any number of threads. Transient errors are retried for `patience_s`, then raised as Away."""

  def __init__(self, url: str, backend: Folder | Bucket | Gateway, patience_s: float):
    self.url = url
    self.backend = backend
    self.patience_s = patience_s
    self.bytes_in = self.bytes_out = 0
    self.reading, self.writing = time_use.Busy(), time_use.Busy()
    self.lock = threading.Lock()
    self.verified_trees: set[tuple[str, str]] = set()  # (prefix, sha256) of those on this machine
    self.reads: Callable[[str], bool] | None = None  # which files of trees this process reads; None: all

  def write(self, name: str, data: files.Data, sha256: str = '') -> str:
    """Publishes an object, which a disk syncs before it is seen; returns its sha256, computed unless it is given."""
    with self.writing:
      self.retry(name, lambda: self.backend.put(checked_name(name), data))
    with self.lock:
      self.bytes_out += len(data)
    return sha256 or hashlib.sha256(data).hexdigest()

  def write_file(self, name: str, file: Path) -> str:
    """Publishes a file's bytes, which are never all in memory; returns their sha256."""
    sha256 = files.digests(file.parent, [file.name])[file.name]
    with self.writing:
      self.retry(name, lambda: self.backend.put_file(checked_name(name), file))
    with self.lock:
      self.bytes_out += file.stat().st_size
    return sha256

  def read(self, name: str, sha256: str) -> memoryview:
    """Returns an object's bytes. Raises Missing, or Corrupt if their sha256 is another."""
    data = self.fetch(name)
    if hashlib.sha256(data).hexdigest() != sha256:
      raise Corrupt(f'{self.url_of(name)} is corrupt: its sha256 is not {sha256}')
    return data

  def read_file(self, name: str, sha256: str, file: Path):
    """Writes an object's bytes into a file, which are never all in memory. Raises as `read`."""

    def copy() -> str:
      digest = hashlib.sha256()
      with open(file, 'wb') as f:
        for chunk in self.backend.chunks(checked_name(name)):
          digest.update(chunk)
          f.write(chunk)
      return digest.hexdigest()

    try:
      with self.reading:
        actual_sha256 = self.retry(name, copy)
    except FileNotFoundError as e:
      raise Missing(f'{self.url_of(name)} is missing') from e
    with self.lock:
      self.bytes_in += file.stat().st_size
    if actual_sha256 != sha256:
      raise Corrupt(f'{self.url_of(name)} is corrupt: its sha256 is not {sha256}')

  def fetch(self, name: str) -> memoryview:
    """Returns an object's bytes without comparing their sha256, for objects that have a seal inside. Raises Missing."""
    try:
      with self.reading:
        data = self.retry(name, lambda: self.backend.get(checked_name(name)))
    except FileNotFoundError as e:
      raise Missing(f'{self.url_of(name)} is missing') from e
    with self.lock:
      self.bytes_in += len(data)
    return data

  def agree(self, name: str, data: bytes) -> bytes:
    """Publishes an object unless it exists; returns the existing one. One of several simultaneous calls wins."""
    self.retry(name, lambda: self.backend.create(checked_name(name), data))
    return bytes(self.fetch(name))

  def exists(self, name: str) -> bool:
    """Returns whether there is an object of this name."""
    return self.retry(name, lambda: self.backend.exists(checked_name(name)))

  def changed(self, name: str) -> float:
    """Returns when an object was written, in unix seconds. Raises FileNotFoundError."""
    return self.retry(name, lambda: self.backend.changed(checked_name(name)))

  def delete(self, name: str):
    """Removes an object, which may be absent."""
    self.retry(name, lambda: self.backend.delete(checked_name(name)))

  def names(self, prefix: str) -> list[str]:
    """Lists all objects below a folder, '' for all, sorted."""
    return self.retry(prefix, lambda: sorted(self.backend.names(prefix)))

  def tidy(self, prefix: str):
    """Removes what killed writers left below a folder, '' for all."""
    self.retry(prefix, lambda: self.backend.tidy(prefix))

  def local_path(self, name: str) -> Path | None:
    """Returns an object's file on this machine's disk, None if the storage is a bucket."""
    return self.backend.root / name if isinstance(self.backend, Folder) else None

  def url_of(self, name: str) -> str:
    """Returns an object's URL, for messages."""
    return f'{self.url}/{name}'

  def upload_tree(self, folder: Path, prefix: str, others: Callable[[], dict[str, str]] = dict) -> str:
    """Publishes all complete files of a directory as `prefix`/..., then `prefix`.index.json with their sha256.

    Returns the sha256 of the index. A directory in the storage itself is not written again. `others` waits until files
    of the same tree that are not here have been published, and returns theirs.
    """
    if self._is_stored_as(prefix, folder):
      index = tree_index(folder)
    else:
      here = self.upload_files(folder, prefix)
      index = _to_index(others() | here)
    return self.write(f'{prefix}.index.json', index)  # after the files: with it the tree is whole

  def upload_files(self, folder: Path, prefix: str) -> dict[str, str]:
    """Publishes all complete files of a directory as `prefix`/...; returns their sha256."""
    names = [str(file.relative_to(folder)) for file in files.complete_files(folder)]
    with concurrent.futures.ThreadPoolExecutor(TRANSFERS) as pool:
      written = pool.map(lambda name: self.write_file(f'{prefix}/{name}', folder / name), names)
      return dict(zip(names, written, strict=True))

  def delete_tree(self, prefix: str):
    """Removes a directory that `upload_tree` published, its index first, so that no partial tree is seen."""
    self.delete(f'{prefix}.index.json')
    for name in self.names(prefix):
      self.delete(name)

  def download_tree(self, prefix: str, folder: Path, sha256: str = ''):
    """Makes the directory that `upload_tree` published, whole or not at all, unless it already exists.

    Processes that share a disk may all call this: one of them downloads. Each compares the index with `sha256`, if it
    is given, once, of a directory that is there, too. Raises as `read`.
    """
    if (prefix, sha256) in self.verified_trees:
      return
    if not self._has_tree(prefix, folder, sha256):
      folder.parent.mkdir(parents=True, exist_ok=True)
      with lock.in_directory(folder.parent):
        if not self._has_tree(prefix, folder, sha256):
          self._download(prefix, folder, sha256)
    self.verified_trees.add((prefix, sha256))

  def _has_tree(self, prefix: str, folder: Path, sha256: str) -> bool:
    """Returns whether a directory is here, with all files that this process reads."""
    if self.reads is None or not sha256 or not folder.exists():
      return tree_matches(folder, sha256)
    try:
      index = self._read_index(prefix, sha256)
      return files.digests(folder, index) == index
    except (FileNotFoundError, NotADirectoryError):
      return False

  def _read_index(self, prefix: str, sha256: str) -> dict[str, str]:
    """Returns the sha256 of the files of a tree that this process reads, by name. Raises as `read`."""
    name = f'{prefix}.index.json'
    data = self.read(name, sha256) if sha256 else self.fetch(name)
    try:
      index = json_text.parse(bytes(data))
    except ValueError as e:
      raise Corrupt(f'{self.url_of(name)} is corrupt: {e}') from e
    if not isinstance(index, dict) or not all(isinstance(digest, str) for digest in index.values()):
      raise Corrupt(f'{self.url_of(name)} is corrupt: it is not an index')
    for name in index:
      checked_name(name)  # it comes from another process, and says where to write
    return {name: digest for name, digest in index.items() if not self.reads or self.reads(f'{prefix}/{name}')}

  def _download(self, prefix: str, folder: Path, sha256: str):
    if self._is_stored_as(prefix, folder):
      raise (Corrupt if folder.exists() else Missing)(f'{self.url_of(prefix)} differs from what was published')
    index = self._read_index(prefix, sha256)
    with publishing.publish_directory(folder, sealed=False) as aside:

      def download(name: str):
        try:
          (aside / name).parent.mkdir(parents=True, exist_ok=True)
          self.read_file(f'{prefix}/{name}', index[name], aside / name)
        except (Missing, Corrupt):
          raise
        except OSError as e:
          if not disk_is_full(e):
            raise
          message = f'{e.strerror}; TMPDIR may name another disk for what is fetched'
          raise OSError(e.errno, message, str(folder)) from e

      with concurrent.futures.ThreadPoolExecutor(TRANSFERS) as pool:
        list(pool.map(download, index))

  def _is_stored_as(self, prefix: str, folder: Path) -> bool:
    return (here := self.local_path(prefix)) is not None and here.resolve() == folder.resolve()

  def retry(self, name: str, action: Callable[[], Any]) -> Any:
    """Returns what `action` returns, called again with growing waits while its errors are transient.

    Raises FileNotFoundError, ValueError and Lost as they come, all else as OSError that names the object: Away where
    patience is over.
    """
    try:
      with time_use.doing(time_use.STORAGE):
        return retry.call(self.url_of(name), action, self.backend.is_transient, self.patience_s)
    except (ValueError, FileNotFoundError, errors.Lost):
      raise
    except Exception as e:
      message = f'{self.url_of(name)}: {retry.first_line(e)}'
      kind = Away if self.backend.is_transient(e) else OSError
      raise kind(getattr(e, 'errno', None) or errno.EIO, message) from e


def open_storage(url: str, patience_s: float = PATIENCE_S) -> Storage:
  """Opens storage in a folder (a path or file://), s3://bucket/prefix or gs://bucket/prefix.

  Raises InputError if the scheme is another, no bucket is named, or an extra has to be installed.
  """
  scheme, separator, rest = url.partition('://')
  if not separator or scheme == 'file':
    root = Path(urllib.parse.unquote(rest) if separator else url).resolve()
    return Storage(root.as_uri(), Folder(root), patience_s)
  if scheme not in EXTRAS or not rest.strip('/'):
    known = 'a folder, file:///FOLDER, s3://BUCKET/... or gs://BUCKET/...'
    raise InputError(f'{url!r} cannot store objects: give {known}')
  try:
    return Storage(url.rstrip('/'), Bucket(url.rstrip('/'), patience_s), patience_s)
  except ImportError as e:
    raise InputError(f'{scheme}:// needs obstore: pip install "dipaco_jax[{EXTRAS[scheme]}]"') from e
  except ValueError as e:
    raise InputError(f'{url!r} is no URL of a bucket ({retry.first_line(e)})') from e


def checked_name(name: str) -> str:
  """Returns a name that means the same in every backend; raises InputError for others."""
  if not name or any(part in ('', '.', '..') or files.ASIDE.fullmatch(part) for part in name.split('/')):
    raise InputError(f'{name!r} cannot name an object: parts are not empty, not . or .., and not .NAME.NUMBER')
  return name


def tree_matches(folder: Path, sha256: str) -> bool:
  """Returns whether a directory exists and, unless '' is given, has the index with this sha256."""
  return folder.exists() and sha256 in ('', hashlib.sha256(tree_index(folder)).hexdigest())


def tree_index(folder: Path) -> bytes:
  """Returns the index of a tree, as JSON: {name: sha256} of the files of a directory."""
  names = (str(file.relative_to(folder)) for file in files.complete_files(folder))
  return _to_index(files.digests(folder, names))


def _to_index(digests: dict[str, str]) -> bytes:
  return json.dumps({name: digests[name] for name in sorted(digests, key=Path)}, indent=1).encode()
