"""Plain text out of files: decoded with clear errors, and cut into pieces."""

import codecs
import dataclasses
import itertools
from collections.abc import Iterator

from dipaco_jax.core.errors import InputError
from dipaco_jax.data import compressed_files

PIECE_CHARS = 10_000  # a long text is cut before the first blank line after this many characters


@dataclasses.dataclass
class ReadSoFar:
  bytes: int = 0
  chars: int = 0


def decode(path: str, read: ReadSoFar | None = None) -> Iterator[str]:
  """Yields a file's text in chunks, counted in `read`. Raises InputError if it is not UTF-8, or has a NUL."""
  decoder = codecs.getincrementaldecoder('utf-8-sig')()
  offset, held = 0, ''  # `held`: a carriage return at the end of a chunk, whose newline may be in the next
  for chunk in itertools.chain(compressed_files.chunks(path), [b'']):
    if b'\0' in chunk:
      raise InputError(f'{path}: byte {offset + chunk.index(0)} is NUL, so this is not plain text: leave out this file')
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
