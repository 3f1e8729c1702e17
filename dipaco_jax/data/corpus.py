"""Documents of whatever source: deterministic, streaming, splittable.

A source lists its documents as items in a fixed order; an item is cheap until it is read, so that a part of a stream
costs little more than its share. Where a source has no validation split of its own, an item is training or validation
text by its draw, which depends on its name and place alone. The pieces of a long text are on one side, or on one side
of a place in it (`source_files`).
"""

import collections
import dataclasses
import functools
import heapq
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from dipaco_jax.core import extension, fields, printable, settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import (
  file_kinds,
  mixture,
  source,
  source_files,
  source_own,
  source_seqio,
  source_stdlib,
  source_tfds,
)

SOURCES = {  # (data, split, part, side) -> items, None where there is no such split
  'files': source_files.items,
  'stdlib': source_stdlib.items,
  'tfds': source_tfds.items,
  'seqio': source_seqio.items,
}

MIN_TOTAL_FLOORS = 10  # times a path's floor of validation tokens, in all
FLOORS_PER_PATH = 2  # times a path's floor, for each path, as routes are uneven
UNEVEN = 2  # times the mean: a piece that is cut where held-back text begins has few sequences
ALL = 1 << 20  # sequences of a piece: more than any has
HOW = {'stdlib': 'files'}  # what is held back whole; of datasets documents


def find(name: str) -> Callable[..., source.Items | None]:
  """Returns the function of a source by its name: one of SOURCES, or that of the user's own."""
  return source_own.items if extension.is_reference(name) else SOURCES[name]


class Document(NamedTuple):
  """A text, with a draw in [0, 1) if it is a piece of a longer one, by which it is held back with its neighbours.

  In a mixture every document has a draw, so that all its repetitions are held back together.
  """

  id: str
  text: source.Text
  domain: str  # a plain name; '' where the source names none
  draw: float = -1.0
  times: int = 0  # that the source was read whole before, in a mixture


class HeldBack(NamedTuple):
  """How much text is held back for validation, where the source has no text of its own for that."""

  fraction: float  # of the text
  sequences: int  # that a piece of a long text gives; any other document gives its first
  how: str  # 'given', or of what there is to train on 'documents', 'files', 'ends' of files


def plan_held_back(s: settings.Settings) -> HeldBack:
  """Chooses how much to hold back: `data.min_validation_tokens` for each path, and in all some times as many.

  What is short comes first from the pieces that are held back anyway, then from more pieces, up to
  `data.max_validation_fraction`. Reads only as much text as shows that there is enough, counting tokens by its bytes;
  the result is the same in every process.
  """
  d = source.settings_of(s)
  floor = d.min_validation_tokens * max(MIN_TOTAL_FLOORS, FLOORS_PER_PATH * s.num_paths)
  sources: list[settings.Data] = [of_source for of_source, _ in sources_of(d).values()] or [d]
  given = [own for own in (find(d.source)(one, 'validation') for one in sources) if own]
  how = 'given' if given else _how_held_back(d.source, sources)
  fraction = 1.0 if given else d.validation_fraction
  kept = given or [_take_first(_train_items(d, source.WHOLE), d.max_documents, source.WHOLE) for d in sources]
  once, every = _count_tokens(s, _in_turn(kept), fraction, floor)
  if every * fraction >= floor:
    most = d.max_validation_documents * (_eval_len(s) - s.routing.prefix_tokens) or math.inf
    needed = floor / max(1.0, min(once * fraction, most))
    return HeldBack(d.validation_fraction, math.ceil(UNEVEN * needed) if needed > 1 else 1, how)
  raised = min(max(fraction, d.max_validation_fraction), floor / max(every, 1.0))
  return HeldBack(d.validation_fraction if given else raised, ALL, how)


def _how_held_back(name: str, sources: list[settings.Data]) -> str:
  """Says what validation text consists of where none is given; of several sources what records do not say."""
  if name != 'files':
    return HOW.get(name, 'documents')
  hows = {source_files.held_back(one) for one in sources}
  return min(hows - {'documents'}, default='documents')


def _in_turn(streams: list[source.Items]) -> source.Items:
  """Yields an item of each stream in turn."""
  for items in itertools.zip_longest(*streams):
    yield from (item for item in items if item is not None)


def _eval_len(s: settings.Settings) -> int:
  return s.evaluate.seq_len or s.model.seq_len


def _count_tokens(s: settings.Settings, items: source.Items, fraction: float, floor: float) -> tuple[float, float]:
  """Counts validation tokens, until there are enough: if each item gave one sequence, and if pieces gave all theirs."""
  length = _eval_len(s)
  useful = length - s.routing.prefix_tokens
  once = every = 0.0
  for item in items:
    if once * fraction >= floor:
      break
    record = source.read_or_skip(item.read, s.data, lambda e: None)
    tokens = source.num_bytes(record[0]) / source.BYTES_PER_TOKEN if record else 0.0
    first = max(0.0, min(tokens, length) - s.routing.prefix_tokens)
    once += first
    every += tokens * useful / length if item.is_piece else first
  return once, every


def _train_items(data: settings.Data, part: source.Part, side: source.Side | None = None) -> source.Items:
  items = find(data.source)(data, 'train', part, side)
  assert items
  return items


def documents(
  data: settings.Data,
  split: str,
  part=source.WHOLE,
  fraction: float | None = None,
  skipped: collections.Counter[str] | None = None,
) -> Iterator[Document]:
  """Yields the documents of a split, 'train' or 'validation', in the same order every time.

  Where the source has no split for validation the two share one: documents whose draw is below the fraction are
  validation text. Raises InputError where something is missing, damaged, not UTF-8 or not the JSON it should be; or the
  whole split is empty.

  Args:
    part: (k, n) gives files k, k + n, k + 2n... of the source, or such documents where files are fewer than n. The n
      parts together are the whole, but for limits of documents, of which each part has its share. A document's id and
      its draw are the same in any part (except for tasks of SeqIO, see `source_seqio`).
    fraction: of the text that is held back; None: data.validation_fraction.
    skipped: counts the bad records that `data.skip_bad_records` leaves out, by kind of file or source; the first is
      logged. A record that a mixture repeats counts once.
  """
  document, fraction = None, data.validation_fraction if fraction is None else fraction
  for document in _documents(data, split, part, fraction, skipped):
    yield document
  if document or part != source.WHOLE:
    return
  if split == 'validation':
    raise InputError(
      f'no document is left for validation: name some in config.data.validation, or raise '
      f'config.data.validation_fraction={data.validation_fraction}'
    )
  raise InputError('no document is left for training: add text, or lower config.data.validation_fraction')


def _documents(
  data: settings.Data, split: str, part: source.Part, fraction: float, skipped: collections.Counter[str] | None
) -> Iterator[Document]:
  sources = sources_of(data)
  if not sources or (split == 'validation' and data.validation and not fields.sources(data.validation)):
    for item in _items(data, split, part, fraction):
      # Hold-outs are drawn from what is left for training, by the same draw.
      draw = max(0.0, (item.draw - fraction) / (1 - fraction)) if item.is_piece else -1.0
      if record := source.read_or_skip(item.read, data, functools.partial(_count_skipped, skipped, data, item)):
        text, domain = record
        yield Document(item.id, text, printable.name(domain), draw)
    return

  def read(name: str, times: int) -> Iterator[Document]:
    for document in _documents(sources[name][0], split, part, fraction, None if times else skipped):
      known_as, draw = f'{name}/{document.id}', document.draw
      if draw < 0 and split == 'train':
        draw = source.uniform(f'hold-out of {known_as}')
      yield Document(f'{known_as}@{times + 1}' if times else known_as, document.text, printable.name(name), draw, times)

  streams = [mixture.Stream(functools.partial(read, name), weight) for name, (_, weight) in sources.items()]
  if split == 'train':
    yield from mixture.mix(streams, lambda document: source.num_bytes(document.text) or 1)
  else:  # each text once
    yield from itertools.chain.from_iterable(stream.read(0) for stream in streams)


def _count_skipped(
  skipped: collections.Counter[str] | None, data: settings.Data, item: source.Item, error: source.BadRecord
) -> None:
  if skipped is None:
    return
  if not skipped:
    logging.warning('left out, as is any other bad record (config.data.skip_bad_records): %s', error.reason)
  skipped[file_kinds.suffix(item.id.rpartition(':')[0]) if data.source == 'files' else data.source] += 1


def sources_of(data: settings.Data) -> dict[str, tuple[settings.Data, float]]:
  """Returns {name: (settings, weight)} of the sources of a mixture, {} where `data.train` is none.

  A limit of documents is divided by the weights. A source's validation text is that of its name; where
  `data.validation` is no mixture, it is read once for all of them.
  """
  train, own = fields.sources(data.train), {found.name: found.globs for found in fields.sources(data.validation)}
  total = sum(found.weight for found in train)

  def share(documents: int, weight: float) -> int:
    return documents and max(1, round(documents * weight / total))

  return {
    name: (
      dataclasses.replace(
        data,
        train=globs,
        validation=own[name] if own else data.validation,
        max_documents=share(data.max_documents, weight),
        max_validation_documents=share(data.max_validation_documents, weight),
      ),
      weight,
    )
    for name, globs, weight in train
  }


def check_readable(data: settings.Data) -> None:
  """Reads the beginning of every file and the first document of each split. Raises InputError with the fix."""
  if data.source == 'files':
    source_files.check_beginnings(data)
  elif extension.is_reference(data.source):
    source_own.check(data)
  next(documents(data, 'train'))
  if data.source != 'files' or source_files.is_small(data):  # of more, there is text of both splits
    next(documents(data, 'validation'))


def _items(data: settings.Data, split: str, part: source.Part, fraction: float) -> source.Items:
  """Yields the items of a part of one split, no more than the config allows.

  Limited validation items of files are drawn from all of them: the first ones would be of one book, or of one domain.
  """
  is_validation = split == 'validation'
  own, most = find(data.source)(data, 'validation', part), data.max_validation_documents if is_validation else 0
  limit = _take_lowest if data.source == 'files' else _take_first
  if own:
    return limit(own, most, part) if is_validation else _take_first(_train_items(data, part), data.max_documents, part)
  items, all_of_them = _train_items(data, part, source.Side(fraction, is_validation)), data.max_documents
  if data.source != 'files' or source_files.held_back(data) == 'documents':
    items, all_of_them = _take_first(items, all_of_them, part), 0
  mine: source.Items = (item for item in items if (item.draw < fraction) == is_validation)
  if all_of_them:  # the first so many pieces may have none at a text's end, nor of a file that is held back
    validation = max(1, round(fraction * all_of_them))
    mine = _take_first(mine, validation if is_validation else max(1, all_of_them - validation), part)
  return limit(mine, most, part) if is_validation else mine


def _take_lowest(items: source.Items, count: int, part: source.Part) -> source.Items:
  """Returns a part's share of the `count` items of the lowest hashes, in their order; 0: all items."""
  if not count:
    return items
  numbered = ((source.uniform(f'validation {item.id}'), n, item) for n, item in enumerate(items))
  chosen = heapq.nsmallest(len(range(part[0], count, part[1])), numbered)
  return (item for _, _, item in sorted(chosen, key=lambda found: found[1]))


def _take_first(items: source.Items, count: int, part: source.Part) -> source.Items:
  """Returns a part's share of the first `count` items; 0: all items."""
  return itertools.islice(items, len(range(part[0], count, part[1])) if count else None)
