"""Text and tokenizers in a bucket, as `gs://bucket/name` or `s3://bucket/name`: found by globs, read as streams."""

import errno
import functools
import io
import re
from typing import Any, BinaryIO, cast

from dipaco_jax.core.errors import InputError
from dipaco_jax.storage import object_store

WILDCARDS = {'**/': '(?:.*/)?', '**': '.*', '*': '[^/]*', '?': '[^/]'}


def is_remote(path: str) -> bool:
  """Tells whether a path names an object in a bucket."""
  return path.startswith(('gs://', 's3://'))


def find(pattern: str) -> list[str]:
  """Lists the paths of the objects that a glob matches: `*` stays in its folder, `**/` is any folders or none.

  Raises InputError where no bucket is named, obstore is not installed, or the bucket does not answer us.
  """
  bucket, name = _split(pattern)
  folder = re.split(r'[*?[]', name)[0].rpartition('/')[0]
  parts = re.split(r'(\*\*/|\*\*$|\*|\?|\[[^]]+\])', name)
  others = [part.replace('[!', '[^') if part[:1] == '[' else re.escape(part) for part in parts]
  expression = ''.join(WILDCARDS.get(part, other) for part, other in zip(parts, others, strict=True))
  matches = re.compile(expression).fullmatch
  try:
    return [f'{bucket}/{found}' for found in _storage(bucket).names(folder) if matches(found)]
  except OSError as e:
    raise InputError(f'{pattern}: {e.strerror}; check its name and your credentials') from e


def open_file(path: str) -> BinaryIO:
  """Opens a file, in a bucket, where a part at a time is in memory, or on this machine; raises OSError."""
  return cast(BinaryIO, _Stream(path)) if is_remote(path) else open(path, 'rb')


def read(path: str) -> bytes:
  """Returns the bytes of a file, in a bucket or on this machine; raises OSError."""
  with open_file(path) as f:
    return f.read()


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

  def readinto(self, buffer) -> int:
    data = self._storage.retry(self._name, lambda: self._reader.read(len(buffer)))
    buffer[: len(data)] = memoryview(data)
    return len(data)
