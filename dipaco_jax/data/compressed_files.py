"""Files as bytes, decompressed according to their suffix; every error names the file and the fix."""

import bz2
import contextlib
import gzip
import importlib
import lzma
import sys
import tarfile
import zlib
from collections.abc import Iterator
from typing import IO, Any

from dipaco_jax.core.errors import InputError
from dipaco_jax.storage import remote_files

CHUNK_BYTES = 1 << 20
ZSTD_WINDOW_LOG = 31  # `zstd --long=31`; the library's own limit is 27
ENDINGS = ('.gz', '.bz2', '.xz', '.zst', '.zstd')
DAMAGED = (EOFError, zlib.error, lzma.LZMAError, tarfile.TarError)


def inner_name(path: str) -> str:
  """Returns a file's name without the suffix of its compression."""
  ending = next((ending for ending in ENDINGS if path.lower().endswith(ending)), '')
  return path[: len(path) - len(ending)]


def is_compressed(path: str) -> bool:
  """Returns whether a file's name says that it is compressed."""
  return inner_name(path) != path


def open_file(path: str) -> IO[bytes]:
  """Opens a file in a bucket or on this machine, and decompresses it."""
  if not is_compressed(path):
    return remote_files.open_file(path)
  file: Any = remote_files.open_file(path) if remote_files.is_remote(path) else path
  match path.lower().rpartition('.')[2]:
    case 'gz':
      return gzip.open(file, 'rb')  # type: ignore[return-value]
    case 'bz2':
      return bz2.open(file, 'rb')  # type: ignore[return-value]
    case 'xz':
      return lzma.open(file, 'rb')
  zstd = _zstd(path)
  return zstd.open(file, 'rb', options={zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG})


def _zstd(path: str) -> Any:
  """Imports Python's own zstd, or before 3.14 its backport. Raises InputError."""
  try:
    return importlib.import_module('compression.zstd' if sys.version_info >= (3, 14) else 'backports.zstd')
  except ImportError as e:
    raise InputError(f"{path}: reading .zst needs backports.zstd: pip install 'dipaco_jax[zstd]'") from e


def chunks(path: str) -> Iterator[bytes]:
  """Yields a file's bytes, decompressed; raises as `reading` does."""
  with reading(path), open_file(path) as f:
    while chunk := f.read(CHUNK_BYTES):
      yield chunk


@contextlib.contextmanager
def reading(path: str, *errors: type[Exception]) -> Iterator[None]:
  """Raises InputError if the file that is read in it is damaged, Unavailable if its disk or bucket is away.

  `errors` are those of further formats that mean damage.
  """
  try:
    with remote_files.waiting_for(path):
      yield
  except OSError as e:
    raise InputError(f'{path}: {e.strerror or e}; fix it, or leave it out') from e
  except MemoryError as e:  # of a size that a damaged file names, or of a record that is as large
    raise InputError(f'{path}: damaged, or a part of it does not fit into memory; fix it, or leave it out') from e
  except Exception as e:
    if not isinstance(e, (*DAMAGED, *errors)) and type(e).__name__ != 'ZstdError':
      raise
    raise InputError(f'{path}: damaged or cut short ({str(e)[:200]}); fix it, or leave it out') from e
