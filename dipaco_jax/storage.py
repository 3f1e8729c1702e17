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
import os
import pathlib
import random
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Protocol

from dipaco_jax import checkpoint, trees

Path = pathlib.Path
PATIENCE_S = 600
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 20
TRANSFERS = 4  # at once: files of a tree, parts of an object
PART_BYTES = 8 << 20
SILENCE_S = 120  # all parts in flight take less on 2.3 Mbit/s
EXTRAS = {'s3': 's3', 'gs': 'gcs'}
PASSING = {getattr(errno, f'E{name}') for name in (
  'TIMEDOUT STALE AGAIN IO CONNRESET CONNABORTED CONNREFUSED HOSTDOWN HOSTUNREACH NETDOWN NETUNREACH NETRESET PIPE'
).split()}  # fmt: skip


class Missing(OSError):
  """An object that should be there is not; names it."""


class Corrupt(OSError):
  """An object's bytes are not those that were written; names it."""


class Place(Protocol):
  """What a folder and a bucket have in common. Absent objects raise FileNotFoundError."""

  def put(self, name: str, data: checkpoint.Data) -> None: ...
  def get(self, name: str) -> memoryview: ...
  def exists(self, name: str) -> bool: ...
  def delete(self, name: str) -> None: ...
  def names(self, prefix: str) -> Iterator[str]: ...
  def tidy(self, prefix: str) -> None: ...
  def copy(self, source: str, target: str) -> None: ...
  def passes(self, error: Exception) -> bool: ...


class Folder:
  """Objects as files. A killed writer leaves a file aside, which `tidy` removes."""

  def __init__(self, root: Path):
    self.root = root

  def put(self, name: str, data: checkpoint.Data):
    checkpoint.write_file(self.root / name, data)

  def get(self, name: str) -> memoryview:
    return checkpoint.read_file(self.root / name).toreadonly()

  def exists(self, name: str) -> bool:
    return (self.root / name).is_file()

  def delete(self, name: str):
    path = self.root / name
    with contextlib.suppress(FileNotFoundError):
      path.unlink()
      checkpoint.sync(path.parent)

  def names(self, prefix: str) -> Iterator[str]:
    return (str(f.relative_to(self.root)) for f in self.files(prefix) if trees.written_as(f) == f)

  def tidy(self, prefix: str):
    for file in [file for file in self.files(prefix) if trees.written_as(file) != file]:
      file.unlink(missing_ok=True)

  def files(self, prefix: str) -> Iterator[Path]:
    return (file for file in (self.root / prefix).rglob('*') if file.is_file())

  def copy(self, source: str, target: str):
    path = self.root / target
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = checkpoint.beside(path)
    try:
      os.link(self.root / source, aside)
    except FileNotFoundError:
      raise
    except OSError:  # a file system without hard links, or another one
      return self.put(target, self.get(source))
    try:
      os.replace(aside, path)
    finally:
      aside.unlink(missing_ok=True)  # of one file, rename(2) leaves both names
    checkpoint.sync(path.parent)

  def passes(self, error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in PASSING


class Bucket:
  """Objects in S3 or Google Cloud Storage; credentials, region and endpoint are the environment's, as obstore reads it.

  An upload in parts whose writer was killed is never seen, but is paid for until the bucket's lifecycle rule
  (abort incomplete multipart uploads) removes it.
  """

  def __init__(self, url: str, patience_s: float):
    import obstore.store

    self.store: Any = obstore.store.from_url(
      url,
      retry_config={'max_retries': 3, 'retry_timeout': timedelta(seconds=min(60, patience_s))},
      client_options={
        'allow_http': True,  # of an endpoint that the user names; the others are https
        'timeout': timedelta(days=1),  # a large object on a slow line is not an error, silence is
        'read_timeout': timedelta(seconds=SILENCE_S),
      },
    )
    self.api: Any = obstore

  def put(self, name: str, data: checkpoint.Data):
    self.api.put(self.store, name, data, chunk_size=PART_BYTES, max_concurrency=TRANSFERS)

  def get(self, name: str) -> memoryview:
    return memoryview(self.api.get(self.store, name).bytes())

  def exists(self, name: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
      self.api.head(self.store, name)
      return True
    return False

  def delete(self, name: str):
    with contextlib.suppress(FileNotFoundError):
      self.api.delete(self.store, name)

  def names(self, prefix: str) -> Iterator[str]:
    return (found['path'] for chunk in self.api.list(self.store, prefix or None) for found in chunk)

  def tidy(self, prefix: str):
    """Nothing is ever seen of what was not finished."""

  def copy(self, source: str, target: str):
    self.api.copy(self.store, source, target)

  def passes(self, error: Exception) -> bool:
    """Timeouts, broken connections, 5xx, 408 and 429; obstore has no type for them, other errors have theirs."""
    status = re.search(r'status code: (\d+)', str(error))
    generic = isinstance(error, self.api.exceptions.GenericError)
    return generic and (not status or int(status[1]) >= 500 or int(status[1]) in (408, 429))


class Storage:
  """Objects by name, for any number of threads. Errors that pass are waited out for `patience_s`, then raised."""

  def __init__(self, url: str, place: Folder | Bucket, patience_s: float):
    self.url, self.place, self.patience_s = url, place, patience_s
    self.bytes_in = self.bytes_out = 0
    self.lock = threading.Lock()
    self.whole: set[tuple[str, str]] = set()  # trees that are on this machine as they were published

  def write(self, name: str, data: checkpoint.Data, sha256: str = '') -> str:
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
        list(pool.map(lambda f: self.write(f'{prefix}/{f.relative_to(folder)}', f.read_bytes()), trees.files(folder)))
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
      with trees.locked(folder.parent):
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
    with checkpoint.publish_directory(folder) as aside:

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

  Raises ValueError that names the fix: another scheme, no bucket, or an extra that is to be installed.
  """
  scheme, separator, rest = url.partition('://')
  if not separator or scheme == 'file':
    root = Path(urllib.parse.unquote(rest) if separator else url).resolve()
    return Storage(root.as_uri(), Folder(root), patience_s)
  if scheme not in EXTRAS or not rest.strip('/'):
    raise ValueError(
      f'{url!r} is no place for objects: give a folder, file:///FOLDER, s3://BUCKET/... or gs://BUCKET/...'
    )
  try:
    return Storage(url.rstrip('/'), Bucket(url.rstrip('/'), patience_s), patience_s)
  except ImportError as e:
    raise ValueError(f'{scheme}:// needs obstore: pip install "dipaco_jax[{EXTRAS[scheme]}]"') from e


def checked(name: str) -> str:
  """A name that means the same everywhere; raises ValueError."""
  if not name or any(part in ('', '.', '..') or trees.ASIDE.fullmatch(part) for part in name.split('/')):
    raise ValueError(f'{name!r} cannot name an object: parts are not empty, not . or .., and not .NAME.NUMBER')
  return name
