"""What every source of text gives: its documents as items, in a fixed order, each of them cheap until it is read."""

import hashlib
from collections.abc import Callable
from typing import NamedTuple

GOLDEN = (5**0.5 - 1) / 2


class Item(NamedTuple):
  """A document not yet read: its id, where its split's draw lies in [0, 1), and how to get (text, domain)."""

  id: str
  draw: float
  read: Callable[[], tuple[str, str]]


def as_read(text: str, domain: str) -> tuple[str, str]:
  """What an item reads that is read already."""
  return text, domain


def uniform(name: str) -> float:
  """In [0, 1), the same on every machine."""
  return int.from_bytes(hashlib.blake2b(name.encode('utf-8', 'replace'), digest_size=8).digest(), 'big') / 2**64


def spread(name: str, number: int) -> float:
  """A draw for each document of one file. Golden-ratio steps leave no long gaps: one book has its validation too."""
  return (uniform(name) + number * GOLDEN) % 1
