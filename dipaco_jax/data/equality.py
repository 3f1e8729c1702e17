"""The content of documents, which identifies equal documents in different files, sources and formats.

Texts are equal if they differ only in white space, Unicode composition (NFC) and a byte order mark; documents that are
token ids are equal if all ids are. A long text is also compared piece by piece, as plain text is cut into pieces, and
by its passages, which may be anywhere in another text.
"""

import hashlib
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from dipaco_jax.data import passages, text_files
from dipaco_jax.data.passages import Text

END = (1 << 32) - 1  # no text is longer
MIN_PIECE_CHARS = 1000  # of a longer document: shorter pieces may be equal by chance


class Cut(NamedTuple):
  """Where a part of a piece was: the whole piece, and the part's first character, or token, in it."""

  piece: Text
  begin: int


class Extent(NamedTuple):
  """A part of a content: its digest, and the first and last place in it, in characters without white space."""

  content: int
  begin: int = 0
  end: int = END


def digest(text: Text) -> int:
  """Returns a hash below 2^64 of a text, the same for all equal texts."""
  if isinstance(text, str):
    data = ' '.join(unicodedata.normalize('NFC', text.removeprefix('\ufeff')).split()).encode('utf-8', 'replace')
  else:
    data = b'tokens ' + text.astype('<i8').tobytes()
  return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), 'big')


def draw(content: int) -> float:
  """Returns the draw in [0, 1) of a document, by its content alone."""
  return (content >> 11) / 2**53


def extents(text: Text, cut: Cut | None = None) -> list[Extent]:
  """Returns the extents of a document: first its content, or its part of one; then other contents inside it.

  A document without text has no extents, and equals no other document.
  """
  if isinstance(text, str) and not text.strip():
    return []
  if cut:
    begin = _count(cut.piece[: cut.begin])
    return [Extent(digest(cut.piece), begin, begin + _count(text)), Extent(digest(text))]
  extents = [Extent(digest(text))]
  if isinstance(text, str) and len(text) >= 2 * text_files.PIECE_CHARS:
    pieces = text_files.pieces(iter([text.removeprefix('\ufeff').replace('\r\n', '\n')]))
    extents += [Extent(digest(piece)) for piece in pieces if len(piece) >= MIN_PIECE_CHARS]
  return extents


def _count(text: Text) -> int:
  """Counts the characters of a text without its white space, or its tokens."""
  return sum(map(len, text.split())) if isinstance(text, str) else len(text)


class HeldText:
  """The contents of all validation text, as far as documents for training have to be compared with it."""

  def __init__(self, held: Iterable[Sequence[Any]] = ()):
    """Takes the (content, first place in it, hashes of its windows) of all validation text."""
    self._begins: dict[int, int] = {}
    windows: list[list[int]] = []
    for content, begin, hashes in held:
      self._begins[content] = min(begin, self._begins.get(content, END))
      windows.append(hashes)
    self._passages = passages.HeldPassages(windows)

  def overlaps(self, parts: Sequence[Extent], text: Text) -> bool:
    """Returns whether a document shares a content, a part of one or a long passage with validation text."""
    has_content = any(self._begins.get(part.content, END) < part.end for part in parts)
    return has_content or self._passages.shares_one(text)
