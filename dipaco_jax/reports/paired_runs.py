"""Two runs on the validation documents that both have: bits per byte by kind, and the difference with its interval.

    bits per byte of a run        sum_i n_i / (ln 2 sum_i b_i)        n_i nats, b_i bytes of document i
    ratio of two runs             (sum_i n_i / sum_i b_i) / (sum_i m_i / sum_i c_i)

The interval is a bootstrap over documents, which are drawn together (`bootstrap`); runs with different tokenizers count
different bytes of a document, so numerators and denominators are both drawn.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dipaco_jax.core import bootstrap
from dipaco_jax.reports import headline, run_contents
from dipaco_jax.reports.run_contents import Contents

ALL = 'all kinds'


class Pair(NamedTuple):
  """Two runs on the documents of a kind."""

  kind: str
  documents: int
  first: float  # bits per byte
  other: float
  interval: tuple[float, float] | None  # of the ratio of other to first


def compare(first: Contents, other: Contents) -> list[Pair]:
  """Returns a pair for all shared documents and one for each kind, the largest first; [] if none is shared."""
  if first.documents is None or other.documents is None:
    return []
  at, places = _match(run_contents.keys(first, other), run_contents.keys(other, first))
  if not len(at):
    return []
  domain = first.documents.domain[at]
  pairs = []
  for number in [None, *sorted({*domain.tolist()}, key=lambda k: -int((domain == k).sum()))]:
    chosen = np.ones(len(at), bool) if number is None else domain == number
    a, b = (_losses(run, where[chosen]) for run, where in ((first, at), (other, places)))
    if min(a[1].sum(), b[1].sum()) > 0:
      kind = ALL if number is None else first.domains[number]
      pairs.append(
        Pair(kind, int(chosen.sum()), _bits(*a), _bits(*b), _interval(a, b, first.documents.content[at[chosen]]))
      )
  return pairs


def _match(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns the places in `a` and in `b` of the same documents; of equal ones, the first of each."""
  _, in_a, in_b = np.intersect1d(a, b, return_indices=True)
  order = np.argsort(in_a)
  return in_a[order], in_b[order]


def _losses(run: Contents, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns nats and bytes of the documents at these places."""
  assert run.documents is not None
  return run.documents.nats['paths'][at], run.documents.num_bytes[at]


def _bits(nats: np.ndarray, num_bytes: np.ndarray) -> float:
  return float(nats.sum() / math.log(2) / num_bytes.sum())


def _interval(
  a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray], content: np.ndarray
) -> tuple[float, float] | None:
  """Returns the interval of the ratio; sequences of one document, [N] `content`, are drawn together."""
  (nats_a, bytes_a), (nats_b, bytes_b) = a, b
  counted = (bytes_a > 0) & (bytes_b > 0)
  rows = np.stack([nats_a, bytes_a, nats_b, bytes_b])[:, counted]
  return bootstrap.quantiles(lambda sums: sums[2] / sums[3] * sums[1] / sums[0], rows, content[counted])


def table(pairs: Sequence[Pair], names: tuple[str, str]) -> list[list[str]]:
  """Returns a row of names and a row for each kind."""
  head = ['kind', 'documents in both', *names, f'{names[1]} against {names[0]}']
  rows = [
    [
      p.kind,
      f'{p.documents:,}',
      f'{p.first:.4f}',
      f'{p.other:.4f}',
      headline.signed_change(p.other / p.first, p.interval),
    ]
    for p in pairs
  ]
  return [head, *rows]
