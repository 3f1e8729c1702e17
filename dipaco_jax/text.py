"""Documents of whatever source: deterministic, streaming, splittable.

A source lists its documents as items in a fixed order; an item is cheap until it is read, so that a part of a stream
costs little more than its share. Where a source has no validation split of its own, whether an item is training or
validation text depends on its name alone.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator
from typing import NamedTuple

from dipaco_jax import plain, settings, sources, sources_files, sources_seqio, sources_stdlib, sources_tfds

SOURCES = {
  'files': sources_files.items,
  'stdlib': sources_stdlib.items,
  'tfds': sources_tfds.items,
  'seqio': sources_seqio.items,
}  # (data, split, part) to items, or to None where there is no such split


class Document(NamedTuple):
  """One text; `domain`, a plain name, is '' where the source names none."""

  id: str
  text: str
  domain: str


def documents(data: settings.Data, split: str, part: sources.Part = sources.WHOLE) -> Iterator[Document]:
  """The documents of a split, in the same order every time.

  Args:
    data: where they come from, and how many.
    split: 'train' or 'validation'; where the source has none for validation the two share one, and a document is
      validation where a hash of its name is below `validation_fraction`.
    part: (k, n) gives files k, k + n, k + 2n... of the source, or such documents where files are fewer than n. The n
      parts together are the whole, but for limits of documents, of which each part has its share. A document's id and
      its draw are the same in any part (but of a task of SeqIO, see there).

  Raises:
    ValueError: something is missing, damaged, not UTF-8 or not the JSON it should be; or the whole split is empty.
  """
  item = None
  for item in _items(data, split, part):
    words, domain = item.read()
    yield Document(item.id, words, plain.name(domain))
  if item or part != sources.WHOLE:
    return
  if split == 'validation':
    raise ValueError(
      f'no document is left for validation: name some in config.data.validation, or raise '
      f'config.data.validation_fraction={data.validation_fraction}'
    )
  raise ValueError('no document is left for training: add text, or lower config.data.validation_fraction')


def fingerprint(data: settings.Data) -> str:
  """Of the files' names and sizes: parts that were made of other files do not go together."""
  listing = sources_files.listing(data) if data.source == 'files' else []
  return hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:12]


def check(data: settings.Data) -> None:
  """Looks at the beginning of every file and at the first document of each split.

  Raises:
    ValueError: one line that names the config field or the file, and the fix.
  """
  if data.source == 'files':
    sources_files.check(data)
  for split in ('train', 'validation'):
    next(documents(data, split))


def _items(data: settings.Data, split: str, part: sources.Part) -> Iterator[sources.Item]:
  """Those of a part of one split, no more than the config allows."""
  find = SOURCES[data.source]
  own, most = find(data, 'validation', part), data.max_validation_documents if split == 'validation' else 0
  if own and split == 'validation':
    return _first(own, most, part)
  train = find(data, 'train', part)
  assert train
  items = _first(train, data.max_documents, part)
  if own:
    return items
  drawn = (item for item in items if (item.draw < data.validation_fraction) == (split == 'validation'))
  return _first(drawn, most, part)


def _first(items: Iterator[sources.Item], count: int, part: sources.Part) -> Iterator[sources.Item]:
  """A part's share of the first so many; 0: all."""
  return itertools.islice(items, len(range(part[0], count, part[1])) if count else None)
