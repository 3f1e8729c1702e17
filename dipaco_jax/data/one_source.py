"""The training or validation documents of one source."""

import collections
import dataclasses
import functools
import heapq
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

from dipaco_jax.config import extension, settings
from dipaco_jax.core import printable
from dipaco_jax.data import (
  equality,
  file_kinds,
  source,
  source_files,
  source_own,
  source_seqio,
  source_stdlib,
  source_tfds,
  token_files,
)

T = TypeVar('T')

SOURCES = {  # (data, split, part, side) -> items, None if there is no such split
  'files': source_files.items,
  'stdlib': source_stdlib.items,
  'tfds': source_tfds.items,
  'seqio': source_seqio.items,
}


def find(name: str) -> Callable[..., source.Items | None]:
  """Returns the function of a source by its name: one of SOURCES, or a function of the user."""
  return source_own.items if extension.is_reference(name) else SOURCES[name]


class Document(NamedTuple):
  """A text, with a draw in [0, 1) if it is a piece of a longer one, by which it is held back with its neighbours."""

  id: str
  text: source.Text
  domain: str  # a plain name; '' if the source names none
  draw: float = -1.0
  times: int = 0  # that the source was read whole before, in a mixture
  extents: tuple[equality.Extent, ...] = ()  # what the text consists of

  @property
  def content(self) -> int:
    """The digest of its content, the same for all copies; of a piece that is cut, that of the whole piece."""
    return self.extents[0].content if self.extents else equality.digest(self.text)


@dataclasses.dataclass(frozen=True)
class Wanted:
  """A selection of documents, and counts of those that are left out."""

  split: str
  part: source.Part = source.WHOLE
  fraction: float = 0.0  # that is held back, where a source has no validation split
  held_text: equality.HeldText = dataclasses.field(default_factory=equality.HeldText)
  copies: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # by split
  skipped: collections.Counter[str] | None = None  # bad records, by kind of file or source

  @property
  def is_validation(self) -> bool:
    return self.split == 'validation'


def train_items(data: settings.Data, part: source.Part, side: source.Side | None = None) -> source.Items:
  items = find(data.source)(data, 'train', part, side)
  assert items
  return items


def documents(data: settings.Data, side: Wanted) -> Iterator[Document]:
  """Yields the documents of a part of one split, no more than the config allows.

  Limited validation documents of files are drawn from all of them: the first ones would be of one book, or of one
  domain.
  """
  candidates = _of_split(data, side)
  if side.is_validation:
    limit = _take_lowest if data.source == 'files' else take_first
    yield from limit(_distinct(candidates, side), data.max_validation_documents, side.part)
    return
  for document in candidates:
    if side.held_text.overlaps(document.extents, document.text):
      side.copies['train'] += 1
    else:
      yield document


def _of_split(data: settings.Data, side: Wanted) -> Iterator[Document]:
  part, most = side.part, data.max_documents
  if own := find(data.source)(data, 'validation', part):
    items = own if side.is_validation else take_first(train_items(data, part), most, part)
    return (document for document, _ in read(data, items, side))
  items = train_items(data, part, source.Side(side.fraction, side.is_validation))
  if data.source != 'files' or source_files.held_back(data) == 'documents':
    items, most = take_first(items, most, part), 0
  # All records are read for both splits, as their draws depend on their text: bad ones are counted once.
  counting = dataclasses.replace(side, skipped=None) if side.is_validation else side
  drawn = read(data, items, counting, drawn=True)
  split_documents: Iterator[Document]
  split_documents = (document for document, draw in drawn if (draw < side.fraction) == side.is_validation)
  if most:  # the first so many pieces may have none at a text's end, nor of a file that is held back
    validation = max(1, round(side.fraction * most))
    split_documents = take_first(split_documents, validation if side.is_validation else max(1, most - validation), part)
  return split_documents


def read(
  data: settings.Data, items: source.Items, side: Wanted, drawn: bool = False
) -> Iterator[tuple[Document, float]]:
  """Reads items; yields documents and their draws.

  Pieces have new draws, of what is left for training, so that hold-outs are next to what is held back already.

  Args:
    drawn: pass over pieces whose draws are on the other side of the split.
  """
  fraction = side.fraction
  for item in items:
    if drawn and item.draw is not None and (item.draw < fraction) != side.is_validation:
      continue
    record = source.read_or_skip(item.read, data, functools.partial(_count_skipped, side.skipped, data, item))
    if record is None:
      continue
    text, domain = record
    as_text = isinstance(data, source.TextSettings) and data.has_text_too and not item.is_piece
    compared = token_files.decode(text, data) if as_text and not isinstance(text, str) else text
    extents = tuple(equality.extents(compared, item.cut))
    draw = max(0.0, (item.draw - fraction) / (1 - fraction)) if item.is_piece and item.draw is not None else -1.0
    document = Document(item.id, text, printable.name(domain), draw, extents=extents)
    yield document, equality.draw(document.content) if item.draw is None else item.draw


def _count_skipped(
  skipped: collections.Counter[str] | None, data: settings.Data, item: source.Item, error: source.BadRecord
) -> None:
  if skipped is None:
    return
  if not skipped:
    logging.warning('left out, as is any other bad record (config.data.skip_bad_records): %s', error.reason)
  skipped[file_kinds.suffix(item.id.rpartition(':')[0]) if data.source == 'files' else data.source] += 1


def _distinct(documents: Iterable[Document], side: Wanted) -> Iterator[Document]:
  """Yields validation documents with different contents; counts the repeated ones."""
  seen: set[int] = set()
  for document in documents:
    if document.content in seen:
      side.copies['validation'] += 1
    else:
      seen.add(document.content)
      yield document


def _take_lowest(documents: Iterable[Document], count: int, part: source.Part) -> Iterable[Document]:
  """Returns a part's share of the `count` documents of the lowest digests, in their order; 0: all documents."""
  if not count:
    return documents
  numbered = ((document.content, number, document) for number, document in enumerate(documents))
  chosen = heapq.nsmallest(len(range(part[0], count, part[1])), numbered)
  return (document for _, _, document in sorted(chosen, key=lambda entry: entry[1]))


def take_first(items: Iterator[T], count: int, part: source.Part) -> Iterator[T]:
  """Returns a part's share of the first `count` items, or documents; 0: all."""
  return itertools.islice(items, len(range(part[0], count, part[1])) if count else None)
