"""The two backends of `object_store`: a folder of a file system, and a bucket.

Both have the methods that `Storage` calls; `Folder` documents them. A folder also has `root`, a bucket also `reader`.
"""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from dipaco_jax.storage import files

TRANSFERS = 4  # maximum at once: files of a tree, or parts of an object
PART_BYTES = 8 << 20
SILENCE_S = 120  # a line of 2.3 Mbit/s transfers all parts in flight in less time
TRANSIENT_NAMES = (
  'TIMEDOUT STALE AGAIN IO CONNRESET CONNABORTED CONNREFUSED HOSTDOWN HOSTUNREACH NETDOWN NETUNREACH NETRESET PIPE'
)
TRANSIENT = {getattr(errno, f'E{name}') for name in TRANSIENT_NAMES.split()}


def is_transient_status(status: int) -> bool:
  """Returns whether a request with this HTTP status may succeed later."""
  return status >= 500 or status in (408, 429)


class Folder:
  """Objects as files. A killed writer leaves a temporary file behind, which `tidy` removes."""

  def __init__(self, root: Path):
    self.root = root

  def put(self, name: str, data: files.Data):
    """Writes an object atomically. An existing object is replaced."""
    files.write_file(self.root / name, data)

  def put_file(self, name: str, file: Path):
    """Writes an object with the bytes of a file."""
    self.put(name, files.read_file(file))

  def create(self, name: str, data: files.Data):
    """Writes an object if none of this name exists. An existing object stays unchanged."""
    files.write_file(self.root / name, data, publish=_link_unless_there)

  def adopt(self, name: str, file: Path):
    """Gives a file on this disk the name of an object, synced. An existing object is replaced."""
    target = self.root / name
    target.parent.mkdir(parents=True, exist_ok=True)
    files.sync(file)
    os.replace(file, target)
    files.sync(target.parent)

  def get(self, name: str) -> memoryview:
    """Returns an object's bytes. Raises FileNotFoundError."""
    return files.read_file(self.root / name).toreadonly()

  def chunks(self, name: str) -> Iterator[files.Data]:
    """Yields an object's bytes, PART_BYTES at a time. Raises FileNotFoundError."""
    with open(self.root / name, 'rb') as f:
      while chunk := f.read(PART_BYTES):
        yield chunk

  def exists(self, name: str) -> bool:
    """Returns whether there is an object of this name."""
    return (self.root / name).is_file()

  def size(self, name: str) -> int:
    """Returns the bytes of an object. Raises FileNotFoundError."""
    return (self.root / name).stat().st_size

  def changed(self, name: str) -> float:
    """Returns the time when an object was written, in Unix seconds. Raises FileNotFoundError."""
    return (self.root / name).stat().st_mtime

  def delete(self, name: str):
    """Removes an object. Does nothing if there is none of this name."""
    path = self.root / name
    with contextlib.suppress(FileNotFoundError):
      path.unlink()
      files.sync(path.parent)

  def names(self, prefix: str) -> Iterator[str]:
    """Yields the names of all objects below a folder, '' for all, in any order."""
    return (str(file.relative_to(self.root)) for file in files.complete_files(self.root / prefix))

  def tidy(self, prefix: str):
    """Removes temporary files of killed writers below a folder, '' for all."""
    files.tidy(self.root / prefix)

  def is_transient(self, error: Exception) -> bool:
    """Returns whether the call that raised this error may succeed later."""
    return isinstance(error, OSError) and error.errno in TRANSIENT


def _link_unless_there(aside: Path, path: Path):
  try:
    os.link(aside, path)
  except OSError:  # the object exists, or the file system has no hard links
    if not path.exists():
      os.replace(aside, path)


class Bucket:
  """Objects in S3 or Google Cloud Storage. obstore reads credentials, region and endpoint from the environment.

  A killed writer may leave an incomplete multipart upload, billed until the bucket's lifecycle rule removes it.
  """

  def __init__(self, url: str, patience_s: float):
    import obstore.store

    self.store: Any = obstore.store.from_url(
      url,
      retry_config={'max_retries': 3, 'retry_timeout': timedelta(seconds=min(60, patience_s))},
      # Endpoints that the user sets may have http URLs. A long transfer is not an error, but silence is.
      client_options=dict(allow_http=True, timeout=timedelta(days=1), read_timeout=timedelta(seconds=SILENCE_S)),
    )
    self.api: Any = obstore

  def put(self, name: str, data: files.Data):
    self.api.put(self.store, name, data, chunk_size=PART_BYTES, max_concurrency=TRANSFERS)

  def put_file(self, name: str, file: Path):
    self.api.put(self.store, name, file, chunk_size=PART_BYTES, max_concurrency=TRANSFERS)

  def create(self, name: str, data: files.Data):
    with contextlib.suppress(self.api.exceptions.AlreadyExistsError):
      self.api.put(self.store, name, data, mode='create')

  def get(self, name: str) -> memoryview:
    return memoryview(self.api.get(self.store, name).bytes())

  def chunks(self, name: str) -> Iterator[files.Data]:
    yield from (memoryview(chunk) for chunk in self.api.get(self.store, name).stream(min_chunk_size=PART_BYTES))

  def reader(self, name: str) -> Any:
    """Opens an object as a file that fetches PART_BYTES at a time."""
    return self.api.open_reader(self.store, name, buffer_size=PART_BYTES)

  def exists(self, name: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
      self.api.head(self.store, name)
      return True
    return False

  def size(self, name: str) -> int:
    return self.api.head(self.store, name)['size']

  def sign(self, method: str, name: str, seconds: float) -> str:
    """Returns a URL by which anybody may send one kind of request, GET or PUT, for an object, for some seconds."""
    return self.api.sign(self.store, method, name, timedelta(seconds=seconds))

  def changed(self, name: str) -> float:
    return self.api.head(self.store, name)['last_modified'].timestamp()

  def delete(self, name: str):
    with contextlib.suppress(FileNotFoundError):
      self.api.delete(self.store, name)

  def names(self, prefix: str) -> Iterator[str]:
    return (entry['path'] for chunk in self.api.list(self.store, prefix or None) for entry in chunk)

  def identities(self, prefix: str) -> Iterator[tuple[str, str]]:
    """Yields (name, identity of its content) of all objects below a folder, '' for all."""
    for chunk in self.api.list(self.store, prefix or None):
      yield from ((x['path'], f'{x["size"]} {x["e_tag"] or x["last_modified"].isoformat()}') for x in chunk)

  def tidy(self, prefix: str):
    """Does nothing: incomplete uploads are invisible."""

  def is_transient(self, error: Exception) -> bool:
    """Returns whether an error is a timeout, a broken connection or HTTP status 5xx, 408 or 429.

    obstore has no exception types for these, and its readers raise OSErrors without an errno.
    """
    status = re.search(r'status code: (\d+)', str(error))
    is_reader_error = type(error) is OSError and error.errno is None
    is_generic = is_reader_error or isinstance(error, self.api.exceptions.GenericError)
    return is_generic and (not status or is_transient_status(int(status[1])))
