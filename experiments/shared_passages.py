"""Text that two documents have in common: an opening of OPENING characters, or PASSAGE characters in a row."""

import functools
import re
from collections.abc import Iterable, Sequence

import numpy as np

OPENING = 300
PASSAGE = 100
BASE = 0x9E3779B97F4A7C15  # of hashes of passages; odd, so that it has an inverse modulo 2^64
FILTER_BITS = 27


def opening(text: str) -> str:
  """Returns the beginning of a text, blind to case, punctuation and white space, with digits masked."""
  return re.sub(r'\d', '0', ' '.join(re.findall(r'[^\W_]+', text[: 4 * OPENING].lower())))[:OPENING]


@functools.cache
def powers(base: int, bits: int) -> np.ndarray:
  """Returns base^0, base^1, ... modulo 2^64."""
  factors = np.full(1 << bits, base, np.uint64)
  factors[0] = 1
  return np.cumprod(factors, dtype=np.uint64)


def hash_passages(text: str) -> np.ndarray:
  """Returns a polynomial hash of every PASSAGE characters in a row; any white space is one space."""
  codes = np.frombuffer(' '.join(text.split()).encode('utf-32-le'), np.uint32).astype(np.uint64)
  count = len(codes) - PASSAGE + 1
  if count <= 0:
    return np.zeros(0, np.uint64)
  bits = len(codes).bit_length()
  sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(codes * powers(BASE, bits)[: len(codes)], dtype=np.uint64)])
  return (sums[PASSAGE:] - sums[:count]) * powers(pow(BASE, -1, 1 << 64), bits)[:count]


def find(texts: Sequence[str], corpus: Iterable[str]) -> np.ndarray:
  """Returns whether each text has a passage that a text of the corpus has too."""
  hashes = [hash_passages(text) for text in texts]
  known, which = np.unique(np.concatenate(hashes), return_inverse=True)
  shift = np.uint64(64 - FILTER_BITS)
  may_be_known = np.zeros(1 << FILTER_BITS, bool)  # most passages of the corpus need no search
  may_be_known[known >> shift] = True
  is_shared = np.zeros(len(known), bool)
  for text in corpus:
    passages = hash_passages(text)
    passages = passages[may_be_known[passages >> shift]]
    places = np.minimum(np.searchsorted(known, passages), len(known) - 1)
    is_shared[places[known[places] == passages]] = True
  owners = np.repeat(np.arange(len(texts)), [len(of_text) for of_text in hashes])
  return np.bincount(owners, is_shared[which], minlength=len(texts)) > 0
