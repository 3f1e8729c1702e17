"""Documents of any source, as a deterministic stream that can be split into parts.

A source lists its documents as items in a fixed order; an item is cheap until it is read, so that a part of a stream
costs little more than its share. If a source has no validation split, the draw of a document, a hash of its content,
decides whether it is training or validation text, so that all copies are in the same split. The pieces of a long text
are in the same split, or the text is divided at one place (`source_files`). Other documents with the content of
validation text (`equality.HeldText`) are left out of training.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from dipaco_jax.config import extension, fields, settings
from dipaco_jax.core import printable
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import equality, left_out, mixture, one_source, passages, source, source_files, source_own
from dipaco_jax.data.conversation import Conversation
from dipaco_jax.data.one_source import Document, Selection

MIN_TOTAL_FLOORS = 10  # minimum of all validation tokens, as a multiple of the minimum per path
FLOORS_PER_PATH = 2  # multiple of the minimum per path for each path, because shards differ in size
UNEVEN = 2  # safety factor: a piece that is cut where held-back text begins has few sequences
ALL = 1 << 20  # sequences of a piece: more than any has
LEAST_DRAWN = 8  # expected number of validation documents; if it is lower, a hash may draw none
NOTHING = equality.HeldText()
HOW = {'stdlib': 'files'}  # unit that is held back; of datasets, documents


class HeldBack(NamedTuple):
  """Amount of text held back for validation if the source has no validation split."""

  fraction: float  # of the text
  sequences: int  # per piece of a long text; any other document gives its first one
  how: str  # 'given', or the part of the training text: 'documents', 'files' or 'ends' of files


def plan_held_back(s: settings.Settings) -> HeldBack:
  """Chooses how much to hold back: `data.min_validation_tokens` for each path, and a multiple of it in total.

  Missing tokens come first from more sequences of the pieces that are held back, then from more pieces, up to
  `data.max_validation_fraction`. Reads text only until there is enough, and estimates tokens from bytes. The result is
  the same in every process.
  """
  d = _with_kinds(source.settings_of(s))
  floor = d.min_validation_tokens * max(MIN_TOTAL_FLOORS, FLOORS_PER_PATH * s.num_paths)
  sources, how = _all_sources(d), how_held_back(d)
  given = [own for own in (one_source.find_reader(d.source)(one, 'validation') for one in sources) if own]
  fraction = 1.0 if given else d.validation_fraction
  all_parts = source.WHOLE
  kept = given or [
    one_source.take_first(one_source.train_items(d, all_parts), d.max_documents, all_parts) for d in sources
  ]
  is_by_hash = how == 'documents' or (d.source != 'files' and not given)
  read = one_source.read(d, _in_turn(kept), Selection('train'))
  counted = _count_tokens(s, read, fraction, floor, LEAST_DRAWN if is_by_hash else 0)
  sequences = ALL
  if counted.every * fraction >= floor:
    most = d.max_validation_documents * (_eval_len(s) - s.num_unscored_tokens) or math.inf
    needed = floor / max(1.0, min(counted.once * fraction, most))
    sequences = math.ceil(UNEVEN * needed) if needed > 1 else 1
  elif not given:
    fraction = min(max(fraction, d.max_validation_fraction), floor / max(counted.every, 1.0))
  if is_by_hash and counted.is_everything:
    fraction = _at_least_one(fraction, counted.draws)
  return HeldBack(d.validation_fraction if given else fraction, sequences, how)


def _at_least_one(fraction: float, draws: set[float]) -> float:
  """Raises a fraction so that the expected number of documents, at least one, has a lower draw."""
  if len(draws) < 2:
    return fraction
  count = min(max(1, round(fraction * len(draws))), len(draws) - 1)
  return max(fraction, math.nextafter(sorted(draws)[count - 1], 1))


def how_held_back(data: settings.Data) -> str:
  """Returns `HeldBack.how`; for several sources, that of the sources that are not records."""
  sources = _all_sources(data)
  if any(one_source.find_reader(data.source)(one, 'validation') for one in sources):
    return 'given'
  if data.source != 'files':
    return HOW.get(data.source, 'documents')
  hows = {source_files.held_back(one) for one in sources}
  return min(hows - {'documents'}, default='documents')


def _all_sources(data: settings.Data) -> list[settings.Data]:
  """Returns the settings of each source of a mixture, or those of the only source."""
  return [of_source for of_source, _ in sources_of(data).values()] or [data]


def _in_turn(streams: list[source.Items]) -> source.Items:
  """Yields items of the streams in turn."""
  for items in itertools.zip_longest(*streams):
    yield from (item for item in items if item is not None)


def _eval_len(s: settings.Settings) -> int:
  return s.evaluate.seq_len or s.model.seq_len


class _Counted(NamedTuple):
  """Tokens of validation text, and the documents that were read to count them."""

  once: float  # if every document gives one sequence
  every: float  # if pieces give all their sequences
  draws: set[float]
  is_everything: bool  # False if there were enough tokens before the end


def _count_tokens(
  s: settings.Settings, read: Iterator[tuple[Document, float]], fraction: float, floor: float, least_documents: int
) -> _Counted:
  """Counts the validation tokens of distinct documents until there are enough."""
  length = _eval_len(s)
  useful = length - s.num_unscored_tokens
  once = every = 0.0
  contents: set[int] = set()
  draws: set[float] = set()
  for document, draw in read:
    if once * fraction >= floor and len(draws) * fraction >= least_documents:
      return _Counted(once, every, draws, False)
    if document.content in contents:
      continue
    contents.add(document.content)
    draws.add(draw)
    scored = document.text.answers if isinstance(document.text, Conversation) else document.text
    tokens = source.num_bytes(scored) / source.BYTES_PER_TOKEN
    first = max(0.0, min(tokens, length) - s.num_unscored_tokens)
    once += first
    every += tokens * useful / length if document.draw >= 0 else first
  return _Counted(once, every, draws, True)


def documents(
  data: settings.Data,
  split: str,
  part=source.WHOLE,
  fraction: float | None = None,
  held_text: equality.HeldText | None = None,
  omitted: left_out.Omitted | None = None,
) -> Iterator[Document]:
  """Yields the documents of a split, 'train' or 'validation', in the same order every time.

  If the source has no validation split, documents with a draw below the fraction are validation text. Documents with
  the content of validation text are left out of training, whatever file they are in. Of equal validation documents,
  only the first one of each source is kept. Raises InputError if a file is missing, damaged, not UTF-8 or not valid
  JSON, or if the whole split is empty.

  Args:
    part: (k, n) selects files k, k + n, k + 2n... of the source, or documents if there are fewer than n files. The n
      parts together are the whole stream, except that each part has its share of a maximum number of documents. The id
      and draw of a document are the same in any part (except for tasks of SeqIO, see `source_seqio`).
    fraction: fraction of the text that is held back. None means data.validation_fraction.
    held_text: validation text of all parts, which is left out of training. None reads it first.
    omitted: counts what is left out. The first bad record is logged; a record that a mixture repeats counts once.
  """
  data = _with_kinds(data)
  fraction = data.validation_fraction if fraction is None else fraction
  if held_text is None:
    held_text = equality.HeldText(read_held_text(data, fraction=fraction)) if split == 'train' else NOTHING
  copies = omitted.copies if omitted else collections.Counter()
  side = Selection(split, part, fraction, held_text, copies, omitted.bad_records if omitted else None)
  is_empty = True
  for document in _documents(data, side):
    is_empty = False
    yield document
  if is_empty and part == source.WHOLE:
    raise InputError(_why_nothing_is_left(data, side))


def read_held_text(
  data: settings.Data, part=source.WHOLE, fraction: float | None = None
) -> Iterator[tuple[int, int, list[int]]]:
  """Yields (content, first place in it, hashes of its windows) of the validation text of a part, for `HeldText`.

  Yields nothing for records without a validation split, whose draws keep the splits apart.
  """
  if how_held_back(data) == 'documents':
    return
  data, fraction = _with_kinds(data), data.validation_fraction if fraction is None else fraction
  for document in _documents(data, Selection('validation', part, fraction)):
    hashes = passages.hash_windows(document.text).tolist()
    for number, extent in enumerate(document.extents):
      yield extent.content, extent.begin, [] if number else hashes


def _why_nothing_is_left(data: settings.Data, missing_side: Selection) -> str:
  """Explains why a split has no document, and how to fix it."""
  if copies := missing_side.copies['train']:
    return left_out.describe_no_training_text(copies)
  count, equal = 0, ''
  contents: set[int] = set()
  for split in ('train', 'validation'):
    side = Selection(split, fraction=missing_side.fraction)
    for document in _documents(data, side):
      count += 1
      contents.add(document.content)
      if len(contents) > 1:
        break
    count += side.copies[split]
  if count > 1 and len(contents) == 1:
    equal = f'all {count} documents are equal, so they are on one side: '
  if missing_side.is_validation:
    return (
      f'no document is left for validation: {equal}name some in config.data.validation, or raise '
      f'config.data.validation_fraction={data.validation_fraction}'
    )
  return f'no document is left for training: {equal}add text, or lower config.data.validation_fraction'


def _documents(data: settings.Data, side: Selection) -> Iterator[Document]:
  """Yields the selected documents of all sources."""
  sources = sources_of(data)
  if not sources or (side.is_validation and data.validation and not fields.sources(data.validation)):
    yield from one_source.documents(data, side)
    return

  def read(name: str, times: int) -> Iterator[Document]:
    again = dataclasses.replace(side, copies=collections.Counter(), skipped=None)
    for document in _documents(sources[name][0], again if times else side):  # counts each document once
      known_as = f'{name}/{document.id}@{times + 1}' if times else f'{name}/{document.id}'
      yield document._replace(id=known_as, domain=printable.name(name), times=times)

  streams = [mixture.Stream(functools.partial(read, name), weight) for name, (_, weight) in sources.items()]
  if side.is_validation:  # read each text once
    yield from itertools.chain.from_iterable(stream.read(0) for stream in streams)
  else:
    yield from mixture.mix(streams, lambda document: source.num_bytes(document.text) or 1)


def sources_of(data: settings.Data) -> dict[str, tuple[settings.Data, float]]:
  """Returns {name: (settings, weight)} of the sources of a mixture, or {} if `data.train` is not a mixture.

  Maximum numbers of documents are divided in proportion to the weights. A source has the validation text of its name;
  if `data.validation` is not a mixture, it is read once for all sources.
  """
  train, own = fields.sources(data.train), {source.name: source.globs for source in fields.sources(data.validation)}
  total = sum(source.weight for source in train)

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


def check_readable(data: settings.Data, plan_fraction: Callable[[], float] | None = None) -> None:
  """Reads the beginning of every file and the first document of each split. Raises InputError with the fix.

  Args:
    plan_fraction: returns the fraction to hold back; called after all beginnings are read. None uses the settings.
  """
  if data.source == 'files':
    source_files.check_beginnings(data)
  elif extension.is_reference(data.source):
    source_own.check(data)
  is_small = data.source == 'files' and source_files.is_small(data)
  fraction = plan_fraction() if plan_fraction else None
  next(documents(data, 'train', fraction=fraction, held_text=None if is_small else NOTHING))
  if is_small or data.source != 'files':  # more files have text for both splits
    next(documents(unlimited(data), 'validation', fraction=fraction))


def unlimited(data: settings.Data) -> settings.Data:
  """Returns settings without a maximum of validation documents, so that the first is found without reading all text."""
  return dataclasses.replace(data, max_validation_documents=0)


def _with_kinds(data: settings.Data) -> settings.Data:
  """Returns settings that say whether there are both files of tokens and of text."""
  if not isinstance(data, source.TextSettings) or data.source != 'files':
    return data
  return dataclasses.replace(data, has_text_too=source_files.has_tokens_and_text(data))
