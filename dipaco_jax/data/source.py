"""What every source of text gives: its documents as items, in a fixed order, each of them cheap until it is read."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from dipaco_jax.core import seeded_hash

T = TypeVar('T')
Part = tuple[int, int]  # (k, n): number k of n
WHOLE = (0, 1)
GOLDEN = (5**0.5 - 1) / 2


class Item(NamedTuple):
  """A document not yet read: its id, its draw in [0, 1), and how to get (text, domain).

  Those whose draw is lowest are validation text. Pieces of one long text are not drawn one by one, or each would have
  neighbours on the other side: all have the text's draw, or theirs falls towards the text's end.
  """

  id: str
  draw: float
  read: Callable[[], tuple[str, str]]
  is_piece: bool = False


class Side(NamedTuple):
  """Of text that is validation text in part: what a source may leave out, for time, and has to cut apart."""

  fraction: float  # that is for validation: items whose draw is below
  is_validation: bool  # the side that is wanted


def deal(files: Sequence[T], part: Part) -> tuple[Sequence[T], Part]:
  """The files that a part is made of, and what part of their documents: whole files, unless there are too few."""
  return (files[part[0] :: part[1]], WHOLE) if len(files) >= part[1] else (files, part)


def take(items: Iterable[T], part: Part) -> Iterator[T]:
  """Items k, k + n, k + 2n..."""
  return itertools.islice(items, part[0], None, part[1])


def as_read(text: str, domain: str) -> tuple[str, str]:
  """What an item reads that is read already."""
  return text, domain


def uniform(name: str) -> float:
  """In [0, 1), the same on every machine."""
  return seeded_hash.of_name(name) / 2**64


def spread(name: str, number: int) -> float:
  """A draw for each document of one file. Golden-ratio steps leave no long gaps: one book has its validation too."""
  return (uniform(name) + number * GOLDEN) % 1
