"""Remote text and tokenizers: in a bucket, as `gs://bucket/name` or `s3://bucket/name`, or on the Hugging Face Hub.

They are found by globs, and read as streams. Files of the Hub, as `hf://datasets/user/name/*.parquet`, are read
through fsspec, by the file system that huggingface_hub has.
"""

import contextlib
import errno
import functools
import io
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, cast

from dipaco_jax.core.errors import InputError, Unavailable
from dipaco_jax.storage import backends, object_store

HUB = 'hf://'
BUFFER_BYTES = 1 << 20
WILDCARDS = {'**/': '(?:.*/)?', '**': '.*', '*': '[^/]*', '?': '[^/]'}


def is_remote(path: str) -> bool:
  """Returns whether a path names an object in a bucket, or a file of the Hub."""
  return path.startswith(('gs://', 's3://', HUB))


def find(pattern: str) -> list[str]:
  """Lists the paths of the objects that a glob matches: `*` stays in its folder, `**/` is any folders or none.

  Raises InputError if no bucket is named, the library is not installed, or the bucket does not answer us.
  """
  if pattern.startswith(HUB):
    return _find_in_hub(pattern)
  bucket, name = _split(pattern)
  folder = re.split(r'[*?[]', name)[0].rpartition('/')[0]
  parts = re.split(r'(\*\*/|\*\*$|\*|\?|\[[^]]+\])', name)
  others = [part.replace('[!', '[^') if part[:1] == '[' else re.escape(part) for part in parts]
  expression = ''.join(WILDCARDS.get(part, other) for part, other in zip(parts, others, strict=True))
  matches = re.compile(expression).fullmatch
  try:
    return [f'{bucket}/{object_name}' for object_name in _storage(bucket).names(folder) if matches(object_name)]
  except OSError as e:
    raise InputError(f'{pattern}: {e.strerror}; check its name and your credentials') from e


def identities(paths: Sequence[str]) -> dict[str, str]:
  """Returns {path: identity of its content} of existing objects and files of the Hub.

  It is the size and the entity tag, which a bucket lists, or the Hub's hash. Raises OSError, Unavailable.
  """
  identity_by_path = {path: _identity_in_hub(path) for path in paths if path.startswith(HUB)}
  by_bucket: dict[str, list[str]] = {}
  for path in paths:
    if not path.startswith(HUB):
      by_bucket.setdefault(_split(path)[0], []).append(_split(path)[1])
  for bucket, names in by_bucket.items():
    with waiting_for(bucket):
      listed = _list_identities(_storage(bucket), os.path.commonpath([os.path.dirname(name) for name in names]))
    identity_by_path |= {f'{bucket}/{name}': listed[name] for name in names if name in listed}
  return {path: identity for path, identity in identity_by_path.items() if identity}


def _list_identities(storage: object_store.Storage, folder: str) -> dict[str, str]:
  backend = storage.backend
  return storage.retry(folder, lambda: dict(backend.identities(folder))) if isinstance(backend, backends.Bucket) else {}


def _identity_in_hub(path: str) -> str:
  with waiting_for(path):
    try:
      about = _hub(path).info(path.removeprefix(HUB))
    except FileNotFoundError:
      return ''
    except (InputError, OSError):
      raise
    except Exception as e:  # of httpx, and of the Hub's own kinds
      raise _OfHub(e) from e
  return f'{about["size"]} {(about.get("lfs") or {}).get("sha256") or about.get("blob_id") or ""}'


def list_names(folder: str) -> list[str]:
  """Lists the names in a folder, or [] if it cannot be listed."""
  try:
    if is_remote(folder):
      return sorted(path.rpartition('/')[2] for path in find(f'{folder}/*'))
    return sorted(os.listdir(folder))
  except (OSError, InputError):
    return []


def open_file(path: str) -> BinaryIO:
  """Opens a file, in a bucket, where a part at a time is in memory, or on this machine; raises OSError."""
  if path.startswith(HUB):
    return _open_in_hub(path)
  return cast(BinaryIO, io.BufferedReader(_Stream(path), BUFFER_BYTES)) if is_remote(path) else open(path, 'rb')


@contextlib.contextmanager
def waiting_for(path: str) -> Iterator[None]:
  """Raises Unavailable, which is not an OSError, if the disk, bucket or Hub of a file is unavailable in the block."""
  try:
    yield
  except OSError as e:
    if is_away(path, e):
      raise Unavailable(f'{path}: {e.strerror or e}; run the same command again when it can be read') from e
    raise


def read(path: str) -> bytes:
  """Returns the bytes of a file, in a bucket or on this machine; raises OSError, Unavailable if it is away."""
  with waiting_for(path), open_file(path) as f:
    return f.read()


def can_open(path: str) -> bool:
  """Returns whether a file exists and can be read. Raises Unavailable if its disk, bucket or Hub is unavailable."""
  try:
    with waiting_for(path):
      open_file(path).close()
    return True
  except OSError:
    return False


def is_away(path: str, error: OSError) -> bool:
  """Returns whether an error means that the disk, bucket or Hub of a file may answer later."""
  if path.startswith(HUB):
    status = getattr(getattr(error, 'response', None), 'status_code', None)
    return not isinstance(error, FileNotFoundError) and (status is None or backends.is_transient_status(status))
  return isinstance(error, Unavailable) if is_remote(path) else error.errno in backends.TRANSIENT


class _OfHub(OSError):
  """An error of the Hub that is no OSError, with the response that it has, if any."""

  def __init__(self, error: Exception):
    super().__init__(f'{" ".join(str(error).split())[:200]}; check its name, the network and HF_TOKEN')
    self.response = getattr(error, 'response', None)


def _open_in_hub(path: str) -> BinaryIO:
  try:
    return cast(BinaryIO, _hub(path).open(path.removeprefix(HUB), 'rb'))
  except (InputError, OSError):
    raise
  except Exception as e:  # of httpx, and of the Hub's own kinds
    raise _OfHub(e) from e


def _find_in_hub(pattern: str) -> list[str]:
  try:
    return [HUB + path.lstrip('/') for path in sorted(_hub(pattern).glob(pattern.removeprefix(HUB)))]
  except InputError:
    raise
  except Exception as e:  # of requests, and of the Hub's own kinds
    raise InputError(f'{pattern}: {" ".join(str(e).split())[:200]}; check its name, the network and HF_TOKEN') from e


def _hub(path: str) -> Any:
  """Returns the Hub as a file system of fsspec's. Raises InputError."""
  try:
    import fsspec

    return fsspec.filesystem(HUB.removesuffix('://'))
  except ImportError as e:
    raise InputError(f"{path}: reading from the Hub needs huggingface_hub: pip install 'dipaco_jax[hub]'") from e


def _split(path: str) -> tuple[str, str]:
  """Splits `gs://bucket/a/b` into `gs://bucket` and `a/b`."""
  scheme, _, rest = path.partition('://')
  bucket, _, name = rest.partition('/')
  return f'{scheme}://{bucket}', name


@functools.cache
def _storage(bucket: str) -> Any:
  return object_store.open_storage(bucket)


class _Stream(io.RawIOBase):
  """An object read a part at a time, with the retries of `Storage.retry`."""

  def __init__(self, path: str):
    bucket, self._name = _split(path)
    self._storage = _storage(bucket)
    backend = self._storage.backend
    try:
      self._reader = self._storage.retry(self._name, lambda: backend.reader(self._name))
    except FileNotFoundError as e:
      raise FileNotFoundError(errno.ENOENT, 'there is no such object', path) from e

  def readable(self) -> bool:
    return True

  def seekable(self) -> bool:
    return True

  def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
    self._reader.seek(offset, whence)
    return self.tell()

  def tell(self) -> int:
    return self._reader.tell()

  def readinto(self, buffer) -> int:
    at, has_failed = self.tell(), False

    def read():
      nonlocal has_failed
      if has_failed:  # read again, the same reader may panic
        self._reader = self._storage.backend.reader(self._name)
        self._reader.seek(at)
      has_failed = True  # unless this returns
      return self._reader.read(len(buffer))

    data = self._storage.retry(self._name, read)
    buffer[: len(data)] = memoryview(data)
    return len(data)
