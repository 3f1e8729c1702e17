"""Losses of validation text by its source: what rows of a table are compared on, with bootstrap intervals.

A source is a book, a law, an article: its documents are drawn together, as they say little about other sources. A
record keeps the losses packed, so that any two rows can be compared later. Sources, kinds and tokens, which are the
same for all runs of one text and tokenizer, stand in a file of results once.
"""

import base64
import collections
import glob
import gzip
import hashlib
import json
import math
import pathlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import config
import numpy as np

from dipaco_jax.core import bootstrap
from dipaco_jax.data import equality
from dipaco_jax.pipeline import document_losses

MODELS = ('paths', 'base')
LINES = ('.jsonl', '.jsonl.gz')  # files whose documents may name a source
UNIT = 1e-3  # nats a token: losses are rounded to it, which moves the mean of 300 sources by some 0.00002

ALL_TEXT = ('perplexity', 'perplexity_final', 'loss', 'validation_loss')
Packed = dict[str, str]  # `sources`: their digest, kinds and tokens; `nats`: of each model


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


def matching_files(globs: Sequence[Any]) -> list[str]:
  """Returns the files that --data or --validation names."""
  return sorted(file for pattern in globs for file in glob.glob(pattern, recursive=True))


def pack_run(workdir: pathlib.Path, globs: Sequence[Any]) -> Packed | None:
  """Returns the packed losses of a finished run; None if it kept none, or its text is not in files of JSON lines."""
  files = matching_files(globs)
  if not files or not all(file.endswith(LINES) for file in files) or not (workdir / document_losses.FILE).exists():
    return None
  losses = read(workdir, files)
  return pack(losses) if all(np.isfinite(nats).all() for nats in losses.nats.values()) else None


def pack(losses: Losses) -> Packed:
  """Returns the losses as strings for a record, of 2 bytes or so a source and model."""
  sources = {'names': losses.names, 'kind': losses.kind.tolist(), 'tokens': losses.tokens.astype(int).tolist()}
  rounded_MS = np.stack([losses.nats[name] / losses.tokens / UNIT for name in MODELS]).round().astype('<u2')
  bytes_2MS = np.moveaxis(rounded_MS[..., None].view(np.uint8), -1, 0)  # high bytes alone compress well
  return {'sources': _compress(json.dumps(sources).encode()), 'nats': _compress(bytes_2MS.tobytes())}


def unpack(packed: Packed) -> Losses:
  """Returns what `pack` has packed."""
  sources = json.loads(_decompress(packed['sources']))
  tokens = np.array(sources['tokens'], np.float64)
  low_MS, high_MS = np.frombuffer(_decompress(packed['nats']), np.uint8).reshape(2, len(MODELS), -1).astype(int)
  nats = dict(zip(MODELS, (256 * high_MS + low_MS) * UNIT * tokens, strict=True))
  return Losses(sources['names'], np.array(sources['kind']), tokens, nats)


def _compress(data: bytes) -> str:
  return base64.b85encode(zlib.compress(data, 9)).decode()


def _decompress(packed: str) -> bytes:
  return zlib.decompress(base64.b85decode(packed))


def set_sources_apart(records: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str]]:
  """Returns the records with a digest in the place of their sources, and the sources by digest."""
  sources, shortened = {}, []
  for record in records:
    if packed := record.get('by_source'):
      digest = hashlib.sha256(packed['sources'].encode()).hexdigest()[:16]
      sources[digest] = packed['sources']
      record = record | {'by_source': packed | {'sources': digest}}
    shortened.append(record)
  return shortened, sources


def put_sources_back(records: Sequence[dict[str, Any]], sources: Mapping[str, str]) -> list[dict[str, Any]]:
  """Returns the records as they were before `set_sources_apart`."""
  return [
    record | {'by_source': packed | {'sources': sources[packed['sources']]}}
    if (packed := record.get('by_source'))
    else record
    for record in records
  ]


def groups_of(field: str, kind_S: np.ndarray) -> np.ndarray | None:
  """Returns which sources each group of a result's field has, [G, S]; None if it is not a loss by kind of text.

  `perplexity` has one group, `perplexity_by_domain.KIND` that kind, and a mean of config.MEANS a group for each kind.
  """
  name, _, kind = field.partition('.')
  kinds = np.unique(kind_S)
  if name == 'perplexity_by_domain' and kind:
    chosen = [k for k in kinds if k not in config.MEANS[kind]] if kind in config.MEANS else [kind]
    return np.stack([kind_S == k for k in chosen]) if chosen and {*chosen} <= {*kinds} else None
  return np.ones((1, len(kind_S)), bool) if field in ALL_TEXT else None


def mean_loss(nats_S: np.ndarray, tokens_S: np.ndarray, groups_GS: np.ndarray) -> np.ndarray:
  """Returns the mean over groups of sources of their losses, nats a token; with any axes before that of sources."""
  return np.mean([(nats_S * group_S).sum(-1) / (tokens_S * group_S).sum(-1) for group_S in groups_GS], axis=0)


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
