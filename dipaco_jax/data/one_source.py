"""The training or validation documents of one source."""

import collections
import dataclasses
import functools
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

from dipaco_jax.config import extension, settings
from dipaco_jax.core import printable
from dipaco_jax.data import (
  equality,
  file_kinds,
  left_out,
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


def find_reader(name: str) -> Callable[..., source.Items | None]:
  """Returns the function that lists the items of a source: one of SOURCES, or a function of the user."""
  return source_own.items if extension.is_reference(name) else SOURCES[name]


class Document(NamedTuple):
  """A text. A piece of a longer text has a draw in [0, 1), by which it is held back together with its neighbours."""

  id: str
  text: source.Text
  domain: str  # a plain name; '' if the source names none
  draw: float = -1.0
  times: int = 0  # how often a mixture has read the whole source before
  extents: tuple[equality.Extent, ...] = ()  # contents that the text consists of

  @property
  def content(self) -> int:
    """The digest of the text, equal for all copies. A part of a piece has the digest of the whole piece."""
    return self.extents[0].content if self.extents else equality.digest(self.text)


@dataclasses.dataclass(frozen=True)
class Selection:
  """Which documents of a source to read, and counts of those that are left out."""

  split: str
  part: source.Part = source.WHOLE
  fraction: float = 0.0  # held back for validation if the source has no validation split
  held_text: equality.HeldText = dataclasses.field(default_factory=equality.HeldText)
  copies: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # by split
  skipped: collections.Counter[str] | None = None  # bad records, by kind of file or source

  @property
  def is_validation(self) -> bool:
    return self.split == 'validation'


def train_items(data: settings.Data, part: source.Part, side: source.Side | None = None) -> source.Items:
  items = find_reader(data.source)(data, 'train', part, side)
  assert items
  return items


def documents(data: settings.Data, side: Selection) -> Iterator[Document]:
  """Yields the documents of a part of one split, up to the maximum number in the config.

  If validation documents of files are limited, they are sampled from all documents, because the first ones may all come
  from one book or one domain.
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


def _of_split(data: settings.Data, side: Selection) -> Iterator[Document]:
  part, most = side.part, data.max_documents
  if own := find_reader(data.source)(data, 'validation', part):
    items = own if side.is_validation else take_first(train_items(data, part), most, part)
    return (document for document, _ in read(data, items, side))
  items = train_items(data, part, source.Side(side.fraction, side.is_validation))
  if data.source != 'files' or source_files.held_back(data) == 'documents':
    items, most = take_first(items, most, part), 0
  # Both splits read all records, because draws depend on the text; only one of them counts the bad records.
  counting = dataclasses.replace(side, skipped=None) if side.is_validation else side
  drawn = read(data, items, counting, drawn=True)
  split_documents: Iterator[Document]
  split_documents = (document for document, draw in drawn if (draw < side.fraction) == side.is_validation)
  if most:  # limit each split: the first `most` pieces may all belong to one split
    validation = max(1, round(side.fraction * most))
    split_documents = take_first(split_documents, validation if side.is_validation else max(1, most - validation), part)
  return split_documents


def read(
  data: settings.Data, items: source.Items, side: Selection, drawn: bool = False
) -> Iterator[tuple[Document, float]]:
  """Reads items; yields documents and their draws.

  The draws of pieces are rescaled to the training split, so that hold-outs are next to the validation text.

  Args:
    drawn: whether to skip pieces that belong to the other split.
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
  if skipped is not None:
    kind = file_kinds.suffix(item.id.rpartition(':')[0]) if data.source == 'files' else data.source
    left_out.count_bad_record(skipped, kind, error.reason)


def _distinct(documents: Iterable[Document], side: Selection) -> Iterator[Document]:
  """Yields validation documents with distinct contents; counts the copies."""
  seen: set[int] = set()
  for document in documents:
    if document.content in seen:
      side.copies['validation'] += 1
    else:
      seen.add(document.content)
      yield document


def _take_lowest(documents: Iterable[Document], count: int, part: source.Part) -> Iterable[Document]:
  """Returns a part's share of the `count` documents with the lowest digests, in stream order. 0 means all."""
  if not count:
    return documents
  numbered = ((document.content, number, document) for number, document in enumerate(documents))
  chosen = heapq.nsmallest(len(range(part[0], count, part[1])), numbered)
  return (document for _, _, document in sorted(chosen, key=lambda entry: entry[1]))


def take_first(items: Iterator[T], count: int, part: source.Part) -> Iterator[T]:
  """Returns a part's share of the first `count` items or documents. 0 means all."""
  return itertools.islice(items, len(range(part[0], count, part[1])) if count else None)
