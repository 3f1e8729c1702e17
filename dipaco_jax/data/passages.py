"""Passages of long texts, which are recognized regardless of where the texts are cut.

A passage is known by hashes of windows of its characters, in which any white space is one space. Which windows count
depends on their hashes alone, so that copies have the same ones, independent of the text before them.
"""

import unicodedata
from collections.abc import Iterable, Sequence

import numpy as np

Text = str | np.ndarray  # or a document's tokens, with those around it, of a file that others made
WINDOW = 64  # bytes of a text, or tokens; a power of 2
EVERY = 64  # on average, one of this many windows counts; a power of 2
LEAST_SHARED = 8  # windows in a row, about 500 characters: shorter passages may be equal by chance
COMMON = 8  # documents: a passage of more of them, such as a license, is no copy of any


def hash_windows(text: Text) -> np.ndarray:
  """Returns the hashes of the windows of a text that count, in their order and each once, uint64."""
  if isinstance(text, str):
    letters = ' '.join(unicodedata.normalize('NFC', text.removeprefix('\ufeff')).split())
    hashes = _OF_BYTES[np.frombuffer(letters.encode('utf-8', 'replace'), np.uint8)]
  else:
    hashes = _mix(text.astype(np.uint64) + np.uint64(1))
  width, power = 1, np.uint64(0x9E3779B97F4A7C15)
  while width < WINDOW:  # the hash of two neighbouring windows
    hashes = hashes[:-width] * power + hashes[width:]
    width, power = 2 * width, power**2
  hashes = _mix(hashes)
  counted = hashes[hashes & np.uint64(EVERY - 1) == 0]
  return counted[np.sort(np.unique(counted, return_index=True)[1])]


def _mix(hashes: np.ndarray) -> np.ndarray:
  hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return hashes ^ (hashes >> np.uint64(31))


_OF_BYTES = _mix(np.arange(256, dtype=np.uint64) + np.uint64(1))


class HeldPassages:
  """The passages of all validation text."""

  def __init__(self, documents: Iterable[Sequence[int]] = ()):
    """Takes the hashes of the windows of each document."""
    document_hashes = [np.array(hashes, np.uint64) for hashes in documents]
    hashes, counts = np.unique(np.concatenate([np.zeros(0, np.uint64), *document_hashes]), return_counts=True)
    self._hashes = hashes[counts <= COMMON]

  def shares_one(self, text: Text) -> bool:
    """Returns whether a text has a passage of validation text."""
    if not len(self._hashes):
      return False
    hashes = hash_windows(text)
    at = np.searchsorted(self._hashes, hashes).clip(max=len(self._hashes) - 1)
    is_held = self._hashes[at] == hashes
    ends = np.flatnonzero(np.concatenate([[True], ~is_held, [True]]))
    return bool(np.diff(ends).max() > LEAST_SHARED)
