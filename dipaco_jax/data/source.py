"""The protocol of sources of text: documents as items, in a fixed order, cheap until they are read.

A source is a function `items(data, split, part, side)`: an iterator, or None if there is no such split.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from dipaco_jax.config import settings
from dipaco_jax.core import seeded_hash
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import equality
from dipaco_jax.data.equality import Text

T = TypeVar('T')
Part = tuple[int, int]  # (k, n): number k of n
WHOLE = (0, 1)
BYTES_PER_TOKEN = 4  # more than most vocabularies have in most languages


@dataclasses.dataclass(frozen=True)
class TextSettings(settings.Data):
  """The section `data` of a config, with what files of tokens need next to it."""

  tokenizer_file: str = ''  # that made them; '': none is named
  has_text_too: bool = False  # beside files of tokens, whose documents are then compared by their text


def settings_of(s: settings.Settings) -> TextSettings:
  """Returns a config's settings of text."""
  return TextSettings(**vars(s.data), tokenizer_file=s.tokenizer.model_file)


def num_bytes(text: Text) -> int:
  """Returns the number of bytes of a text, or an estimate for tokens."""
  return len(text.encode()) if isinstance(text, str) else BYTES_PER_TOKEN * len(text)


def most_tokens(text: Text) -> int:
  """Returns an upper bound of the number of tokens of a text: each has a byte or more, except at a document's ends."""
  return len(text.encode()) + 2 if isinstance(text, str) else len(text)


class Item(NamedTuple):
  """A document that is not read yet: its id, its draw in [0, 1), and a function that returns (text, domain).

  Items with the lowest draws are validation text. The draw of a document is a hash of its content, which is known when
  it is read, so that all copies are on one side. Pieces of one long text are not drawn one by one, or each would have
  neighbours on the other side: all have the text's draw, or draws that fall towards the text's end.
  """

  id: str
  draw: float | None  # None: by content
  read: Callable[[], tuple[Text, str]]
  is_piece: bool = False
  cut: equality.Cut | None = None  # of a piece that is cut where held-back text begins


class Placed(NamedTuple):
  """A piece of a long text: its draw, and the whole piece if it is cut where held-back text begins."""

  text: Text
  draw: float
  cut: equality.Cut | None = None


Items = Iterator[Item]
Documents = Iterator[tuple[int, Callable[[], tuple[Text, str]]]]  # of a file: (number, an item's `read`)


class BadRecord(InputError):
  """A record that has no text or cannot be parsed; `data.skip_bad_records` leaves it out."""

  def __init__(self, reason: str):
    """`reason` names the file and the record, and describes the fault."""
    super().__init__(f'{reason}; config.data.skip_bad_records=True leaves out such records')
    self.reason = reason


def read_or_skip(
  read: Callable[[], tuple[Text, str]], data: settings.Data, on_skip: Callable[[BadRecord], object]
) -> tuple[Text, str] | None:
  """Returns (text, domain) of a record; None, after a call of `on_skip`, where it is bad and the config skips those."""
  try:
    return read()
  except BadRecord as e:
    if not data.skip_bad_records:
      raise
    on_skip(e)
    return None


class Side(NamedTuple):
  """The side of a split that is wanted. A source may skip the other to save time, and cuts pieces at the border."""

  fraction: float  # of the text that is for validation: items whose draw is below
  is_validation: bool


def deal_files(files: Sequence[T], part: Part) -> tuple[Sequence[T], Part]:
  """Returns the files of a part, and which part of their documents: whole files, unless there are too few."""
  return (files[part[0] :: part[1]], WHOLE) if len(files) >= part[1] else (files, part)


def take(items: Iterable[T], part: Part) -> Iterator[T]:
  """Yields items k, k + n, k + 2n..."""
  return itertools.islice(items, part[0], None, part[1])


def already_read(text: Text, domain: str) -> tuple[Text, str]:
  """Returns its arguments, as the `read` of an item whose text is in memory."""
  return text, domain


def uniform(name: str) -> float:
  """Returns a hash of a name in [0, 1), the same on every machine."""
  return seeded_hash.of_name(name) / 2**64
