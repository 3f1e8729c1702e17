"""Losses of validation text by its source: what rows of a table are compared on, with bootstrap intervals.

A source is a book, a law, an article: its documents are drawn together, as they say little about other sources. A
record keeps the losses packed, so that any two rows can be compared later.
"""

import base64
import collections
import gzip
import hashlib
import json
import math
import pathlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from dipaco_jax.core import bootstrap
from dipaco_jax.data import equality
from dipaco_jax.pipeline import document_losses

MODELS = ('paths', 'base')


class Losses(NamedTuple):
  """Losses by source, [S] each."""

  names: str  # digest of the sources' names
  kind: np.ndarray  # of text, by name
  tokens: np.ndarray  # that count
  nats: dict[str, np.ndarray]  # by model


def read_documents(file: str) -> Iterator[dict[str, Any]]:
  """Yields the documents of a file of JSON lines, gzipped or not."""
  with gzip.open(file, 'rt') if file.endswith('.gz') else open(file) as lines:
    for line in lines:
      yield json.loads(line)


def read(workdir: pathlib.Path, files: Sequence[str]) -> Losses:
  """Reads the losses of a finished run by the sources that its validation files name in `source`."""
  of_run = document_losses.read(workdir)
  if of_run is None:
    raise FileNotFoundError(workdir / document_losses.FILE)
  known = {
    equality.digest(document['text']): (document.get('source', document['text']), document.get('domain', 'all'))
    for file in files
    for document in read_documents(file)
  }
  totals: dict[tuple[str, str], np.ndarray] = collections.defaultdict(lambda: np.zeros(1 + len(MODELS)))
  columns = np.stack([of_run.tokens, *(of_run.nats[name] for name in MODELS)], axis=1)
  for digest, row in zip(of_run.content, columns, strict=True):
    totals[known[int(digest)]] += row
  sources = sorted(source for source, row in totals.items() if row[0] > 0)
  table = np.array([totals[source] for source in sources])
  names = hashlib.sha256(json.dumps(sources).encode()).hexdigest()[:16]
  nats = {name: table[:, 1 + i] for i, name in enumerate(MODELS)}
  return Losses(names, np.array([kind for _, kind in sources]), table[:, 0], nats)


def pack(losses: Losses) -> str:
  """Returns the losses as a string for a record."""
  values = {
    'names': losses.names,
    'kind': losses.kind.tolist(),
    'tokens': losses.tokens.astype(int).tolist(),
    'nats': {name: [round(float(x), 3) for x in nats] for name, nats in losses.nats.items()},
  }
  return base64.b64encode(zlib.compress(json.dumps(values).encode(), 9)).decode()


def unpack(packed: str) -> Losses:
  """Returns what `pack` has packed."""
  values = json.loads(zlib.decompress(base64.b64decode(packed)))
  nats = {name: np.array(x, np.float64) for name, x in values['nats'].items()}
  return Losses(values['names'], np.array(values['kind']), np.array(values['tokens'], np.float64), nats)


def mean(losses: Sequence[Losses]) -> Losses:
  """Returns the mean over seeds, whose sources are the same."""
  first = losses[0]
  nats = {name: np.mean([one.nats[name] for one in losses], axis=0) for name in first.nats}
  return first._replace(nats=nats)


def perplexity(losses: Losses, kinds: Sequence[str], model: str = 'paths') -> float:
  """Returns the perplexity of these kinds of text."""
  chosen = np.isin(losses.kind, kinds)
  return math.exp(losses.nats[model][chosen].sum() / losses.tokens[chosen].sum())


def change(of: Losses, against: np.ndarray, kinds: Sequence[str]) -> tuple[float, tuple[float, float] | None]:
  """Returns the ratio of perplexities less 1, and its 95% interval over sources; None for too few sources.

  against: nats of the other model on the same sources.
  """
  chosen = np.isin(of.kind, kinds)
  difference, tokens = (of.nats['paths'] - against)[chosen], of.tokens[chosen]
  interval = bootstrap.interval(difference, tokens)
  ratio = math.exp(difference.sum() / tokens.sum())
  return ratio - 1, interval and (interval[0] - 1, interval[1] - 1)
