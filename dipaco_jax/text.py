"""Documents of whatever source: deterministic, streaming, splittable.

A source lists its documents as items in a fixed order; an item is cheap until it is read, so that a part of a stream
costs little more than its share. Where a source has no validation split of its own, whether an item is training or
validation text depends on its name alone.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from dipaco_jax import settings, sources, sources_files, sources_seqio, sources_stdlib, sources_tfds

SOURCES = {
  'files': sources_files.items,
  'stdlib': sources_stdlib.items,
  'tfds': sources_tfds.items,
  'seqio': sources_seqio.items,
}  # (data, split) to items, or to None where there is no such split


class Document(NamedTuple):
  """One text; `domain` is '' where the source names none."""

  id: str
  text: str
  domain: str


def documents(data: settings.Data, split: str, part: tuple[int, int] = (0, 1)) -> Iterator[Document]:
  """The documents of a split, in the same order every time.

  Args:
    data: where they come from, and how many.
    split: 'train' or 'validation'; where the source has none for validation the two share one, and a document is
      validation where a hash of its name is below `validation_fraction`.
    part: (k, n) gives documents k, k + n, k + 2n...; the n parts together are the whole.

  Raises:
    ValueError: something is missing, damaged, not UTF-8 or not the JSON it should be; or the split is empty.
  """
  number = -1
  for number, item in enumerate(_items(data, split)):
    if number % part[1] == part[0]:
      yield Document(item.id, *item.read())
  if number < 0 and split == 'validation':
    raise ValueError(
      f'no document is left for validation: name some in config.data.validation, or raise '
      f'config.data.validation_fraction={data.validation_fraction}'
    )
  if number < 0:
    raise ValueError('no document is left for training: add text, or lower config.data.validation_fraction')


def check(data: settings.Data) -> None:
  """Looks at the beginning of every file and at the first document of each split.

  Raises:
    ValueError: one line that names the config field or the file, and the fix.
  """
  if data.source == 'files':
    sources_files.check(data)
  for split in ('train', 'validation'):
    next(documents(data, split))


def _items(data: settings.Data, split: str) -> Iterator[sources.Item]:
  """Those of one split, no more than the config allows."""
  find = SOURCES[data.source]
  own, most = find(data, 'validation'), data.max_validation_documents if split == 'validation' else 0
  if own and split == 'validation':
    return _first(own, most)
  train = find(data, 'train')
  assert train
  items = _first(train, data.max_documents)
  if own:
    return items
  return _first((item for item in items if (item.draw < data.validation_fraction) == (split == 'validation')), most)


def _first(items: Iterator[sources.Item], count: int) -> Iterator[sources.Item]:
  return itertools.islice(items, count or None)
