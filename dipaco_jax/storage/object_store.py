"""A place for objects that islands exchange: a folder, `s3://` or `gs://`; what is read is what was written [3].

An object is seen whole or not at all, and verified on every read. A name, 'modules/level-a/0/7-3.safetensors', is
written by one attempt only and never again with other bytes, so that copies may share the bytes with their source.
"""

import concurrent.futures
import contextlib
import errno
import hashlib
import itertools
import json
import logging
import random
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dipaco_jax.core.errors import InputError
from dipaco_jax.storage import files, lock, publishing, trees
from dipaco_jax.storage.backends import TRANSFERS, Bucket, Folder

PATIENCE_S = 600
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 20
EXTRAS = {'s3': 's3', 'gs': 'gcs'}


class Missing(OSError):
  """An object that should be there is not; names it."""


class Corrupt(OSError):
  """An object's bytes are not those that were written; names it."""


class Storage:
  """Objects by name, for any number of threads. Errors that pass are waited out for `patience_s`, then raised."""

  def __init__(self, url: str, place: Folder | Bucket, patience_s: float):
    self.url, self.place, self.patience_s = url, place, patience_s
    self.bytes_in = self.bytes_out = 0
    self.lock = threading.Lock()
    self.whole: set[tuple[str, str]] = set()  # trees that are on this machine as they were published

  def write(self, name: str, data: files.Data, sha256: str = '') -> str:
    """Publishes an object; returns its sha256, which is worked out unless it is given.

    On a disk it is synced before it is seen. A full disk raises at once.
    """
    self.patiently(name, lambda: self.place.put(checked(name), data))
    with self.lock:
      self.bytes_out += len(data)
    return sha256 or hashlib.sha256(data).hexdigest()

  def read(self, name: str, sha256: str) -> memoryview:
    """An object's bytes; raises Missing, or Corrupt where their sha256 is another."""
    data = self.fetch(name)
    if hashlib.sha256(data).hexdigest() != sha256:
      raise Corrupt(f'{self.where(name)} is corrupt: its sha256 is not {sha256}')
    return data

  def agree(self, name: str, data: bytes) -> bytes:
    """Publishes an object unless it is there; returns what is there. Of many that call this at once, one counts."""
    self.patiently(name, lambda: self.place.create(checked(name), data))
    return bytes(self.fetch(name))

  def exists(self, name: str) -> bool:
    return self.patiently(name, lambda: self.place.exists(name))

  def delete(self, name: str):
    """Removes an object, which may be absent."""
    self.patiently(name, lambda: self.place.delete(checked(name)))

  def names(self, prefix: str) -> list[str]:
    """All objects in a folder, '' for all, sorted; those in folders below it too."""
    return self.patiently(prefix, lambda: sorted(self.place.names(prefix)))

  def tidy(self, prefix: str):
    """Removes what killed writers left in a folder, '' for all. Living ones fail: for where nobody is to write."""
    self.patiently(prefix, lambda: self.place.tidy(prefix))

  def copy(self, source: str, target: str):
    """Gives an object a second name that stays when the first goes; no bytes travel where the place can do that."""
    with self.naming_missing(source):
      self.patiently(target, lambda: self.place.copy(source, checked(target)))

  def local(self, name: str) -> Path | None:
    """Where an object is on this machine's disk; None where it is remote."""
    return self.place.root / name if isinstance(self.place, Folder) else None

  def upload_tree(self, folder: Path, prefix: str):
    """Publishes all files of a directory as `prefix`/..., then `prefix`.index.json with their sha256.

    Files that are already there because the directory is the place itself are not written again. Empty directories
    are left out, and so is what killed writers left; the largest files are in memory together, `TRANSFERS` at a time.
    """
    if not self.is_here(folder, prefix):
      with concurrent.futures.ThreadPoolExecutor(TRANSFERS) as pool:
        list(pool.map(lambda f: self.write(f'{prefix}/{f.relative_to(folder)}', f.read_bytes()), files.files(folder)))
    self.write(f'{prefix}.index.json', trees.index_of(folder))  # after the files: a tree is whole

  def download_tree(self, prefix: str, folder: Path, sha256: str = ''):
    """Makes the directory that `upload_tree` published: seen whole or not at all; one that is there already stays.

    Processes that share a disk may all call this: one of them downloads. Raises as `read`.

    Args:
      sha256: of the tree's index. What is there already is compared with it too, once by each process.
    """
    if (prefix, sha256) in self.whole:
      return
    if not trees.is_whole(folder, sha256):
      folder.parent.mkdir(parents=True, exist_ok=True)
      with lock.locked(folder.parent):
        if not trees.is_whole(folder, sha256):
          self._download(prefix, folder, sha256)
    self.whole.add((prefix, sha256))

  def _download(self, prefix: str, folder: Path, sha256: str):
    if self.is_here(folder, prefix):
      raise (Corrupt if folder.exists() else Missing)(f'{self.where(prefix)} is not as it was published')
    index_name = f'{prefix}.index.json'
    data = self.fetch(index_name)
    try:
      index = json.loads(bytes(data))
    except ValueError as e:
      raise Corrupt(f'{self.where(index_name)} is corrupt: {e}') from e
    if sha256 and hashlib.sha256(data).hexdigest() != sha256:
      raise Corrupt(f'{self.where(index_name)} is corrupt: its sha256 is not {sha256}')
    with publishing.publish_directory(folder, sealed=False) as aside:

      def download(name: str):
        data = self.read(f'{prefix}/{name}', index[name])
        (aside / name).parent.mkdir(parents=True, exist_ok=True)
        (aside / name).write_bytes(data)

      with concurrent.futures.ThreadPoolExecutor(TRANSFERS) as pool:
        list(pool.map(download, index))

  def is_here(self, folder: Path, prefix: str) -> bool:
    """Whether a directory is what is stored as `prefix`."""
    here = self.local(prefix)
    return here is not None and here.resolve() == folder.resolve()

  def fetch(self, name: str) -> memoryview:
    """As `read`, not verified: for what carries its own proof."""
    with self.naming_missing(name):
      data = self.patiently(name, lambda: self.place.get(name))
    with self.lock:
      self.bytes_in += len(data)
    return data

  @contextlib.contextmanager
  def naming_missing(self, name: str) -> Iterator[None]:
    try:
      yield
    except FileNotFoundError as e:
      raise Missing(f'{self.where(name)} is missing') from e

  def where(self, name: str) -> str:
    return f'{self.url}/{name}'

  def patiently(self, name: str, action: Callable[[], Any]) -> Any:
    """What `action` returns; again, less and less often, while its errors are of those that pass. All are OSErrors."""
    deadline = time.monotonic() + self.patience_s
    for attempt in itertools.count():
      try:
        return action()
      except (ValueError, FileNotFoundError):
        raise
      except Exception as e:
        wait_s = random.uniform(0.5, 1) * min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**attempt)
        why = str(e).split('\n', 1)[0]
        if not self.place.passes(e) or time.monotonic() + wait_s > deadline:
          raise OSError(getattr(e, 'errno', None) or errno.EIO, f'{self.where(name)}: {why}') from e
      logging.warning('%s: %s; the next attempt is in %.1f s', self.where(name), why, wait_s)
      time.sleep(wait_s)


def open_storage(url: str, patience_s: float = PATIENCE_S) -> Storage:
  """Storage in a folder (a path or file://), s3://bucket/prefix or gs://bucket/prefix.

  Raises InputError that names the fix: another scheme, no bucket, or an extra that is to be installed.
  """
  scheme, separator, rest = url.partition('://')
  if not separator or scheme == 'file':
    root = Path(urllib.parse.unquote(rest) if separator else url).resolve()
    return Storage(root.as_uri(), Folder(root), patience_s)
  if scheme not in EXTRAS or not rest.strip('/'):
    raise InputError(
      f'{url!r} is no place for objects: give a folder, file:///FOLDER, s3://BUCKET/... or gs://BUCKET/...'
    )
  try:
    return Storage(url.rstrip('/'), Bucket(url.rstrip('/'), patience_s), patience_s)
  except ImportError as e:
    raise InputError(f'{scheme}:// needs obstore: pip install "dipaco_jax[{EXTRAS[scheme]}]"') from e


def checked(name: str) -> str:
  """A name that means the same everywhere; raises InputError."""
  if not name or any(part in ('', '.', '..') or files.ASIDE.fullmatch(part) for part in name.split('/')):
    raise InputError(f'{name!r} cannot name an object: parts are not empty, not . or .., and not .NAME.NUMBER')
  return name
