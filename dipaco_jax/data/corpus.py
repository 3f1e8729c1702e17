"""Documents of whatever source: deterministic, streaming, splittable.

A source lists its documents as items in a fixed order; an item is cheap until it is read, so that a part of a stream
costs little more than its share. Where a source has no validation split of its own, whether an item is training or
validation text depends on its draw, which depends on its name and place alone. The pieces of a long text are on one
side, or on one side of a place in it (`sources_files`).
"""

import hashlib
import heapq
import itertools
import json
import math
from collections.abc import Iterator
from typing import NamedTuple

from dipaco_jax.core import printable, settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import source, source_files, source_seqio, source_stdlib, source_tfds

SOURCES = {
  'files': source_files.items,
  'stdlib': source_stdlib.items,
  'tfds': source_tfds.items,
  'seqio': source_seqio.items,
}  # (data, split, part) to items, or to None where there is no such split

BYTES_PER_TOKEN = 4.0  # more than most vocabularies have in most languages
LEAST_FLOORS, FLOORS = 10, 2  # of each path's floor of validation tokens: in all, and times paths, as routes are uneven
UNEVEN = 2  # times the mean: a piece that is cut where held-back text begins has few sequences to give
ALL = 1 << 20
HOW = {'stdlib': 'files'}  # are held back whole; of datasets documents


class Document(NamedTuple):
  """One text; `domain`, a plain name, is '' where the source names none.

  A piece of a longer text has a draw in [0, 1), by which it is held back with its neighbours; another has -1.
  """

  id: str
  text: str
  domain: str
  draw: float = -1.0


class Held(NamedTuple):
  """How much is held back to validate on, where the source has no text of its own for that."""

  fraction: float  # of the text
  sequences: int  # that a piece of a long text is to give; any other document gives its first
  how: str  # 'given', or of what there is to train on 'documents', 'files', 'ends' of files


def held(s: settings.Settings) -> Held:
  """So much that validation text has `data.min_validation_tokens` for each path, and in all some times as many.

  First more of each piece that is held back anyway, then more pieces, up to `data.max_validation_fraction`. Reads no
  more text than it takes to tell that there is enough; the same in every process. A token is taken for BYTES_PER_TOKEN.
  """
  d, length, num_paths = s.data, s.evaluate.seq_len or s.model.seq_len, math.prod(size for _, size in s.grid)
  useful, floor = length - s.routing.prefix_tokens, d.min_validation_tokens * max(LEAST_FLOORS, FLOORS * num_paths)
  most, own = d.max_validation_documents * useful or math.inf, SOURCES[d.source](d, 'validation')
  how = 'given' if own else source_files.held_back(d) if d.source == 'files' else HOW.get(d.source, 'documents')
  fraction, once, every = 1.0 if own else d.validation_fraction, 0.0, 0.0
  for item in own or _first(_train(d, source.WHOLE), d.max_documents, source.WHOLE):
    if once * fraction >= floor:
      break
    tokens = len(item.read()[0].encode()) / BYTES_PER_TOKEN
    first = max(0.0, min(tokens, length) - s.routing.prefix_tokens)
    once, every = once + first, every + (tokens * useful / length if item.is_piece else first)
  if every * fraction >= floor:
    needed = floor / max(1.0, min(once * fraction, most))
    return Held(d.validation_fraction, math.ceil(UNEVEN * needed) if needed > 1 else 1, how)
  raised = min(max(fraction, d.max_validation_fraction), floor / max(every, 1.0))
  return Held(d.validation_fraction if own else raised, ALL, how)


def _train(data: settings.Data, part: source.Part, side: source.Side | None = None) -> Iterator[source.Item]:
  items = SOURCES[data.source](data, 'train', part, side)
  assert items
  return items


def documents(
  data: settings.Data, split: str, part: source.Part = source.WHOLE, fraction: float | None = None
) -> Iterator[Document]:
  """The documents of a split, in the same order every time.

  Args:
    data: where they come from, and how many.
    split: 'train' or 'validation'; where the source has none for validation the two share one, and a document is
      validation where its draw is below the fraction.
    fraction: of the text that is held back; None: data.validation_fraction.
    part: (k, n) gives files k, k + n, k + 2n... of the source, or such documents where files are fewer than n. The n
      parts together are the whole, but for limits of documents, of which each part has its share. A document's id and
      its draw are the same in any part (but of a task of SeqIO, see there).

  Raises:
    InputError: something is missing, damaged, not UTF-8 or not the JSON it should be; or the whole split is empty.
  """
  item, fraction = None, data.validation_fraction if fraction is None else fraction
  for item in _items(data, split, part, fraction):
    # Of what is left for training, a share of the same text is held back by the same draw.
    draw = max(0.0, (item.draw - fraction) / (1 - fraction)) if item.is_piece else -1.0
    words, domain = item.read()
    yield Document(item.id, words, printable.name(domain), draw)
  if item or part != source.WHOLE:
    return
  if split == 'validation':
    raise InputError(
      f'no document is left for validation: name some in config.data.validation, or raise '
      f'config.data.validation_fraction={data.validation_fraction}'
    )
  raise InputError('no document is left for training: add text, or lower config.data.validation_fraction')


def fingerprint(data: settings.Data) -> str:
  """Of the files' names and sizes: parts that were made of other files do not go together."""
  listing = source_files.listing(data) if data.source == 'files' else []
  return hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:12]


def check(data: settings.Data) -> None:
  """Looks at the beginning of every file and at the first document of each split.

  Raises:
    InputError: one line that names the config field or the file, and the fix.
  """
  if data.source == 'files':
    source_files.check(data)
  next(documents(data, 'train'))
  if data.source != 'files' or source_files.is_small(data):  # of more, there is text of both splits
    next(documents(data, 'validation'))


def _items(data: settings.Data, split: str, part: source.Part, fraction: float) -> Iterator[source.Item]:
  """Those of a part of one split, no more than the config allows.

  Of files, those of validation are drawn from all of them: the first would be of one book, or of one domain.
  """
  find, is_validation = SOURCES[data.source], split == 'validation'
  own, most = find(data, 'validation', part), data.max_validation_documents if is_validation else 0
  limit = _drawn if data.source == 'files' else _first
  if own:
    return limit(own, most, part) if is_validation else _first(_train(data, part), data.max_documents, part)
  items, all_of_them = _train(data, part, source.Side(fraction, is_validation)), data.max_documents
  if data.source != 'files' or source_files.held_back(data) == 'documents':
    items, all_of_them = _first(items, all_of_them, part), 0
  mine: Iterator[source.Item] = (item for item in items if (item.draw < fraction) == is_validation)
  if all_of_them:  # of the first so many pieces none need be at a text's end, nor of a file that is held back
    validation = max(1, round(fraction * all_of_them))
    mine = _first(mine, validation if is_validation else max(1, all_of_them - validation), part)
  return limit(mine, most, part) if is_validation else mine


def _drawn(items: Iterator[source.Item], count: int, part: source.Part) -> Iterator[source.Item]:
  """A part's share of so many, those of the lowest hashes, in their order; 0: all."""
  if not count:
    return items
  numbered = ((source.uniform(f'validation {item.id}'), n, item) for n, item in enumerate(items))
  chosen = heapq.nsmallest(len(range(part[0], count, part[1])), numbered)
  return (item for _, _, item in sorted(chosen, key=lambda found: found[1]))


def _first(items: Iterator[source.Item], count: int, part: source.Part) -> Iterator[source.Item]:
  """A part's share of the first so many; 0: all."""
  return itertools.islice(items, len(range(part[0], count, part[1])) if count else None)
