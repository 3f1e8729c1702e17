"""Where objects are kept: a folder of a file system, or a bucket; what `object_store` builds on."""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from dipaco_jax.storage import files

TRANSFERS = 4  # at once: files of a tree, parts of an object
PART_BYTES = 8 << 20
SILENCE_S = 120  # all parts in flight take less on 2.3 Mbit/s
PASSING = {
  getattr(errno, f'E{name}')
  for name in (
    'TIMEDOUT STALE AGAIN IO CONNRESET CONNABORTED CONNREFUSED HOSTDOWN HOSTUNREACH NETDOWN NETUNREACH NETRESET PIPE'
  ).split()
}


class Place(Protocol):
  """What both have in common. Absent objects raise FileNotFoundError; `create` leaves one that is there as it is."""

  def put(self, name: str, data: files.Data) -> None: ...
  def create(self, name: str, data: files.Data) -> None: ...
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

  def put(self, name: str, data: files.Data):
    files.write_file(self.root / name, data)

  def create(self, name: str, data: files.Data):
    path = self.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = files.beside(path)
    try:
      aside.write_bytes(data)
      files.sync(aside)
      try:
        os.link(aside, path)
      except FileExistsError:
        pass
      except OSError:  # a file system without hard links
        if not path.exists():
          os.replace(aside, path)
    finally:
      aside.unlink(missing_ok=True)
    files.sync(path.parent)

  def get(self, name: str) -> memoryview:
    return files.read_file(self.root / name).toreadonly()

  def exists(self, name: str) -> bool:
    return (self.root / name).is_file()

  def delete(self, name: str):
    path = self.root / name
    with contextlib.suppress(FileNotFoundError):
      path.unlink()
      files.sync(path.parent)

  def names(self, prefix: str) -> Iterator[str]:
    return (str(f.relative_to(self.root)) for f in self.files(prefix) if files.written_as(f) == f)

  def tidy(self, prefix: str):
    files.tidy(self.root / prefix)

  def files(self, prefix: str) -> Iterator[Path]:
    return (file for file in (self.root / prefix).rglob('*') if file.is_file())

  def copy(self, source: str, target: str):
    path = self.root / target
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = files.beside(path)
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
    files.sync(path.parent)

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

  def put(self, name: str, data: files.Data):
    self.api.put(self.store, name, data, chunk_size=PART_BYTES, max_concurrency=TRANSFERS)

  def create(self, name: str, data: files.Data):
    with contextlib.suppress(self.api.exceptions.AlreadyExistsError):
      self.api.put(self.store, name, data, mode='create')

  def get(self, name: str) -> memoryview:
    return memoryview(self.api.get(self.store, name).bytes())

  def reader(self, name: str) -> Any:
    """The object as a file that fetches PART_BYTES at a time."""
    return self.api.open_reader(self.store, name, buffer_size=PART_BYTES)

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
