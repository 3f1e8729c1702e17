"""Text out of files, plain or JSON, compressed or not: pieces and lines, decoded with clear errors."""

import codecs
import dataclasses
import errno
import gzip
import itertools
import json
import re
import zlib
from collections.abc import Iterator
from typing import IO

from dipaco_jax.core import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.storage import remote_files

PIECE_CHARS = 10_000  # a long text is cut before the first blank line after so many
ONE_A_LINE = {b'[': "jq -c '.[]' makes lines of an array", b'{': 'jq -c . makes a line of each object'}
CHUNK_BYTES = 1 << 20
CHECK_BYTES = 1 << 20  # of each file are read before any work


@dataclasses.dataclass
class ReadSoFar:
  bytes: int = 0
  chars: int = 0


def is_json(path: str) -> bool:
  return re.search(r'\.jsonl?(\.gz|\.zst)?$', path) is not None


def _open(path: str) -> IO[bytes]:
  if not path.endswith(('.gz', '.zst')):
    return remote_files.open_file(path)
  file = remote_files.open_file(path) if remote_files.is_remote(path) else path
  if path.endswith('.gz'):
    return gzip.open(file, 'rb')  # type: ignore[return-value]
  try:
    import zstandard
  except ImportError as e:
    raise InputError(f"{path}: reading .zst needs the zstandard library: pip install 'dipaco_jax[zstd]'") from e
  return zstandard.open(file, 'rb')


def chunks(path: str) -> Iterator[bytes]:
  """Yields a file's bytes, decompressed. Raises InputError where it is damaged, OSError where its disk or bucket is."""
  try:
    with _open(path) as f:
      while chunk := f.read(CHUNK_BYTES):
        yield chunk
  except OSError as e:
    if e.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT):
      raise  # nothing is wrong with the file: the same command may go on
    raise InputError(f'{path}: {e.strerror or e}; fix it, or leave it out') from e
  except Exception as e:
    if not isinstance(e, (EOFError, zlib.error)) and type(e).__name__ != 'ZstdError':
      raise
    raise InputError(f'{path}: damaged or cut short ({e}); fix it, or leave it out') from e


def decode(path: str, read: ReadSoFar | None = None) -> Iterator[str]:
  """Yields a file's text in chunks, counted in `read`. Raises InputError where it is not UTF-8, or has a NUL."""
  decoder = codecs.getincrementaldecoder('utf-8-sig')()
  offset, held = 0, ''  # `held`: a carriage return at the end of a chunk, whose newline may be in the next
  for chunk in itertools.chain(chunks(path), [b'']):
    if b'\0' in chunk:
      raise InputError(f'{path}: byte {offset + chunk.index(0)} is NUL, so this is no plain text: leave out this file')
    start = offset - len(decoder.getstate()[0])
    try:
      text = decoder.decode(chunk, final=not chunk)
    except UnicodeDecodeError as e:
      raise InputError(f'{path}: not UTF-8 at byte {start + e.start}: convert it, or leave out this file') from e
    text = held + text
    held = '\r' if chunk and text.endswith('\r') else ''
    offset, text = offset + len(chunk), text[: len(text) - len(held)].replace('\r\n', '\n')
    if read:
      read.bytes, read.chars = offset, read.chars + len(text)
    yield text


def pieces(chunks: Iterator[str]) -> Iterator[str]:
  """Cuts a text into pieces of PIECE_CHARS, or up to twice as many, at the places of `break_at`."""
  rest = ''
  for chunk in chunks:
    rest, begin = rest + chunk, 0
    while len(rest) - begin >= 2 * PIECE_CHARS:
      end = break_at(rest, begin + PIECE_CHARS, begin + 2 * PIECE_CHARS)
      yield rest[begin:end]
      begin = end
    rest = rest[begin:]
  if rest.strip():
    yield rest


def break_at(text: str, begin: int, end: int) -> int:
  """Returns where to cut: before the first blank line, else after a line, else after a space, else at `begin`.

  The newline of the blank line begins the next piece.
  """
  ends = (text.find(mark, begin, end) for mark in ('\n\n', '\n', ' '))
  return next((at + 1 for at in ends if at >= 0), begin)


def json_lines(path: str) -> Iterator[tuple[int, bytes]]:
  """Yields (number from 1, bytes) of the lines that are not blank."""
  rest, number = b'', 0
  for chunk in itertools.chain(chunks(path), [b'\n']):
    *lines, rest = (rest + chunk).split(b'\n')
    for line in lines:
      number += 1
      if line.strip():
        yield number, line


def parse_line(path: str, number: int, line: bytes, data: settings.Data, name: str = '') -> tuple[str, str]:
  """Parses a line of JSON into (text, domain), `name` where it has no domain. Raises InputError."""
  where = f'{path}:{number}'
  try:
    record = json.loads(line.decode('utf-8-sig' if number == 1 else 'utf-8'))
  except UnicodeDecodeError as e:
    raise InputError(f'{where}: not UTF-8 at byte {e.start} of the line: convert the file') from e
  except ValueError as e:
    fix = f'; {ONE_A_LINE[line.strip()]}' if line.strip() in ONE_A_LINE else ''
    raise InputError(f'{where}: not JSON ({e}): there should be one object in a line{fix}') from e
  if not isinstance(record, dict):
    raise InputError(f'{where}: no JSON object, which each line should be; {ONE_A_LINE[b"["]}')
  if not isinstance(record.get(data.text_key), str):
    keys = [key for key, value in sorted(record.items()) if isinstance(value, str)]
    fix = f'texts are under {keys}: set config.data.text_key' if keys else 'no other key has one: leave out this file'
    raise InputError(f'{where}: no text under {data.text_key!r}; {fix}')
  # JSON can spell half of a surrogate pair, which no tokenizer takes.
  text = record[data.text_key].encode('utf-8', 'replace').decode()
  domain = record.get(data.domain_key)
  return text, name if domain is None else str(domain)


def check_beginning(path: str, data: settings.Data) -> None:
  """Reads the first CHECK_BYTES as the stream will read them. Raises InputError, also where there is no text."""
  if is_json(path):
    texts = ((len(line), parse_line(path, number, line, data)[0]) for number, line in json_lines(path))
  else:
    texts = ((len(text), text) for text in decode(path))
  seen, found = 0, False
  for size, text in texts:
    seen, found = seen + size, found or bool(text.strip())
    if seen >= CHECK_BYTES:
      break
  if not found:
    raise InputError(f'{path}: there is no text in it: fill it, or leave out this file')
