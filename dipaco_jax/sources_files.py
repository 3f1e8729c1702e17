"""Documents in files: plain text, cut into pieces, and JSON with a document a line; on disk or in a bucket."""

import codecs
import errno
import functools
import glob
import gzip
import itertools
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import IO

from dipaco_jax import remote, settings, sources

PIECE_CHARS = 10_000  # a long text is cut at the first blank line after so many
CHUNK_BYTES = 1 << 20
CHECK_BYTES = 1 << 20  # of each file are looked at before any work


def items(data: settings.Data, split: str, part: sources.Part = sources.WHOLE) -> Iterator[sources.Item] | None:
  """Those of the globs of a split; None for validation without any."""
  globs = data.validation if split == 'validation' else data.train
  return _items(data, globs, part) if globs else None


def listing(data: settings.Data) -> list[tuple[str, int]]:
  """(name, bytes) of every file; 0 in a bucket."""
  files = _find(data.train) + _find(data.validation)
  return [(name, 0 if remote.is_remote(path) else os.path.getsize(path)) for name, path in files]


def check(data: settings.Data) -> None:
  """Looks at the beginning of every file.

  Raises:
    ValueError: one line that names the config field or the file, and the fix.
  """
  for globs in (data.train, data.validation):
    for _, path in _find(globs):
      _check_file(path, data)


def _find(globs: tuple[str, ...]) -> list[tuple[str, str]]:
  """(name, path) of all files that the globs match, by name: the path below the glob's first wildcard."""
  found: dict[str, str] = {}
  for pattern in globs:
    pattern = os.path.expanduser(pattern.strip())
    root = os.path.dirname(re.split(r'[*?[]', pattern)[0])
    if remote.is_remote(pattern):
      paths = remote.find(pattern)
    else:
      paths = [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]
    if not paths:
      raise ValueError(f'{pattern!r} matches no file: mend config.data.train or config.data.validation')
    found |= {path: os.path.relpath(path, root or '.') for path in paths}
  return sorted((name, path) for path, name in found.items())


def _items(data: settings.Data, globs: tuple[str, ...], part: sources.Part) -> Iterator[sources.Item]:
  files = _find(globs)
  # A text's pieces stay on one side of the split, unless files are so few that a side could be left without any.
  whole = len(files) * data.validation_fraction >= 5
  mine, part = sources.deal(files, part)
  return sources.take(_of_files(data, mine, whole), part)


def _of_files(data: settings.Data, files: Sequence[tuple[str, str]], whole: bool) -> Iterator[sources.Item]:
  for name, path in files:
    if _is_json(path):
      for number, line in _lines(path):
        read = functools.partial(_parse, path, number, line, data)
        yield sources.Item(f'{name}:{number}', sources.spread(name, number), read)
    else:
      for number, piece in enumerate(pieces(decode(path))):
        draw = sources.uniform(name) if whole else sources.spread(name, number)
        yield sources.Item(f'{name}#{number}', draw, functools.partial(sources.as_read, piece, ''))


def _is_json(path: str) -> bool:
  return re.search(r'\.jsonl?(\.gz|\.zst)?$', path) is not None


def _open(path: str) -> IO[bytes]:
  file = remote.open_file(path) if remote.is_remote(path) else path
  if path.endswith('.gz'):
    return gzip.open(file, 'rb')  # type: ignore[return-value]
  if not path.endswith('.zst'):
    return open(path, 'rb') if isinstance(file, str) else file
  try:
    import zstandard
  except ImportError as e:
    raise ValueError(f"{path}: reading .zst needs the zstandard library: pip install 'dipaco_jax[zstd]'") from e
  return zstandard.open(file, 'rb')


def _chunks(path: str) -> Iterator[bytes]:
  """The file's bytes, decompressed, as they come."""
  try:
    with _open(path) as f:
      while chunk := f.read(CHUNK_BYTES):
        yield chunk
  except OSError as e:
    if e.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT):
      raise  # nothing is wrong with the file: the same command may go on
    raise ValueError(f'{path}: {e.strerror or e}; mend or leave out this file') from e
  except Exception as e:
    if not isinstance(e, (EOFError, zlib.error)) and type(e).__name__ != 'ZstdError':
      raise
    raise ValueError(f'{path}: damaged or cut short ({e}); mend or leave out this file') from e


def decode(path: str) -> Iterator[str]:
  """The file's text, in chunks."""
  decoder = codecs.getincrementaldecoder('utf-8-sig')()
  offset = 0
  for chunk in itertools.chain(_chunks(path), [b'']):
    if b'\0' in chunk:
      raise ValueError(f'{path}: byte {offset + chunk.index(0)} is NUL, so this is no plain text: leave out this file')
    start = offset - len(decoder.getstate()[0])
    try:
      text = decoder.decode(chunk, final=not chunk)
    except UnicodeDecodeError as e:
      raise ValueError(f'{path}: not UTF-8 at byte {start + e.start}: convert it, or leave out this file') from e
    offset += len(chunk)
    yield text.replace('\r\n', '\n')


def pieces(chunks: Iterator[str]) -> Iterator[str]:
  """Texts of about PIECE_CHARS, cut after a blank line, else after a line, else after a space, else anywhere."""
  rest = ''
  for chunk in chunks:
    rest, begin = rest + chunk, 0
    while len(rest) - begin >= 2 * PIECE_CHARS:
      ends = (rest.find(mark, begin + PIECE_CHARS, begin + 2 * PIECE_CHARS) for mark in ('\n\n', '\n', ' '))
      end = next((end + 1 for end in ends if end >= 0), begin + PIECE_CHARS)
      yield rest[begin:end]
      begin = end
    rest = rest[begin:]
  if rest.strip():
    yield rest


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
  """(number from 1, bytes) of the lines that are not blank."""
  rest, number = b'', 0
  for chunk in itertools.chain(_chunks(path), [b'\n']):
    *lines, rest = (rest + chunk).split(b'\n')
    for line in lines:
      number += 1
      if line.strip():
        yield number, line


def _parse(path: str, number: int, line: bytes, data: settings.Data) -> tuple[str, str]:
  """(text, domain) of one line of JSON."""
  where = f'{path}:{number}'
  try:
    record = json.loads(line.decode('utf-8-sig' if number == 1 else 'utf-8'))
  except UnicodeDecodeError as e:
    raise ValueError(f'{where}: not UTF-8 at byte {e.start} of the line: convert the file') from e
  except ValueError as e:
    raise ValueError(f'{where}: not JSON ({e}): there should be one object in a line') from e
  if not isinstance(record, dict) or not isinstance(record.get(data.text_key), str):
    keys = sorted(k for k, v in record.items() if isinstance(v, str)) if isinstance(record, dict) else []
    raise ValueError(f'{where}: no text under {data.text_key!r}; texts are under {keys}: set config.data.text_key')
  # JSON can spell half of a surrogate pair, which no tokenizer takes.
  text = record[data.text_key].encode('utf-8', 'replace').decode()
  domain = record.get(data.domain_key)
  return text, '' if domain is None else str(domain)


def _check_file(path: str, data: settings.Data) -> None:
  """The first CHECK_BYTES, read as the stream will read them."""
  seen, found = 0, False
  if _is_json(path):
    for number, line in _lines(path):
      found |= bool(_parse(path, number, line, data)[0].strip())
      seen += len(line)
      if seen >= CHECK_BYTES:
        break
  else:
    for text in decode(path):
      found |= bool(text.strip())
      seen += len(text)
      if seen >= CHECK_BYTES:
        break
  if not found:
    raise ValueError(f'{path}: there is no text in it: fill it, or leave out this file')
