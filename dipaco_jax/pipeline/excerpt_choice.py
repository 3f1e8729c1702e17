"""Excerpts of a run's validation text for its report: the path of each chunk, and its loss next to the base's.

They are the beginnings of a few validation documents, of as many domains and paths as can be.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dipaco_jax.config import settings
from dipaco_jax.data import packing
from dipaco_jax.data.tokenizer import Tokenizer, Transcript
from dipaco_jax.models import transformer as model_lib
from dipaco_jax.pipeline import run as run_lib, token_losses
from dipaco_jax.routing import chunk_losses, chunk_router, own_router
from dipaco_jax.storage import module_store, publishing, tensors
from dipaco_jax.telemetry import metrics_log

DOCUMENTS, TOKENS = 6, 512  # at most, and of each
CANDIDATES = 1000  # documents that they are chosen among
ROWS = 8  # texts at one time
LENGTH_STEP = 128  # texts are padded to a multiple of this, up to the model's length, so that few programs are compiled

Known = Callable[[int], np.ndarray] | None


class Text(NamedTuple):
  """A text that is read as one sequence."""

  name: str
  tokens: np.ndarray
  goes_on: bool = False  # from the one before it
  length: int = 0  # of the whole of it, as far as it is known; 0: that of `tokens`


def chunk_tokens(s: settings.Settings) -> int:
  """Returns W, the tokens in a chunk: the shortest that the run is evaluated with, or the default."""
  return min(s.evaluate.reroute_every, default=chunk_losses.DEFAULT_CHUNK)


@dataclasses.dataclass(frozen=True)
class Reader:
  """The models, router and tokenizer of a run that are needed to read texts."""

  model: model_lib.Transformer
  base: Any  # parameters
  params: Callable[[int], Any]  # of a path
  fitted: own_router.AnyRouter | None  # None: it is not asked
  chooser: Any  # parameters of the learned one, or None
  tokenizer: Tokenizer
  prefix_tokens: int

  @property
  def by(self) -> str:
    """Name of what chooses a path within a text: 'chooser', 'router' or ''."""
    return 'chooser' if self.chooser is not None else 'router' if self.fitted is not None else ''

  def read(self, path: int | None, rows: tuple[np.ndarray, np.ndarray], size: int) -> Any:
    """Returns `chunk_losses.losses_and_routes` of padded rows, `size` at a time, under a path; None: the base model."""
    params = self.base if path is None else self.params(path)
    fitted = None if isinstance(self.fitted, own_router.OwnRouter) else self.fitted
    read = functools.partial(chunk_losses.losses_and_routes, self.model, self.prefix_tokens, params, fitted)
    return chunk_losses.in_batches(read, size, *rows)

  def route(self, windows: Sequence[np.ndarray], lengths: Sequence[int], size: int, row_length: int) -> list[int]:
    """Returns the router's path of each window of `chunk_losses.windows`, in `size` rows of `row_length` at a time.

    `lengths` are the texts' as far as they are known then, for a user-defined router.
    """
    if not isinstance(self.fitted, own_router.OwnRouter):
      packed = chunk_losses.pack_windows(windows, self.prefix_tokens, row_length)
      return self.read(None, packed, size)[1].reshape(-1).tolist()
    z_ND = None
    if self.fitted.uses_features:
      compute = functools.partial(model_lib.features_of_seen, self.model, self.base)
      z_ND = chunk_losses.in_batches(compute, ROWS, *packing.pad(windows, self.prefix_tokens))
    texts = own_router.make_texts(windows, lengths, self.prefix_tokens, self.tokenizer.decode, z_ND)
    return self.fitted.route(texts)[:, 0].tolist()


def read(
  reader: Reader, texts: Sequence[Text], W: int, length: int, first: Sequence[int] | None, known: Known = None
) -> chunk_losses.Excerpts:
  """Reads texts in chunks of W tokens; returns them with the path and the losses of each chunk.

  Args:
    texts: of at least one and at most `length` tokens each.
    length: that they are padded to.
    first: the paths that they begin with; None: the router chooses them.
    known: path -> nats of the token after each token, [N, L]; None: they are computed.
  """
  rows, size = packing.pad([text.tokens for text in texts], length), min(ROWS, len(texts))
  paths = _paths(reader, texts, rows, W, first)

  def nats(path: int | None, chosen: np.ndarray) -> np.ndarray:
    if path is not None and known is not None:
      return known(path)[chosen]
    return reader.read(path, (rows[0][chosen], rows[1][chosen]), size)[0]

  losses = chunk_losses.gather_losses(paths, W, nats)
  chunk_texts = _chunk_texts(reader.tokenizer, texts, W)
  documents = []
  for n, text in enumerate(texts):
    own_losses = chunk_losses.TextLosses(*(nats_NL[n] for nats_NL in losses))
    chunks = list(zip(chunk_texts[n], paths[n], strict=True))
    prefix = reader.prefix_tokens
    documents.append(chunk_losses.make_excerpt(text.name, chunks, len(text.tokens), W, prefix, own_losses))
  return chunk_losses.Excerpts(W, reader.prefix_tokens, reader.by, documents)


def _paths(reader: Reader, texts: Sequence[Text], rows, W: int, first: Sequence[int] | None) -> list[list[int]]:
  """Returns the paths of every text's chunks; see `chunk_losses`."""
  counts, size = [-(-len(text.tokens) // W) for text in texts], min(ROWS, len(texts))
  routed: list[list[int]] = []
  if first is None or reader.by == 'router':
    prefix, asked = reader.prefix_tokens, [1 if reader.by == 'chooser' else count for count in counts]
    seen = [chunk_losses.windows(x.tokens, W, prefix)[:n] for x, n in zip(texts, asked, strict=True)]
    known = [[text.length or len(text.tokens), *range(W, n * W, W)] for text, n in zip(texts, asked, strict=True)]
    windows = list(itertools.chain(*seen))
    lengths = [max(count, len(tokens)) for count, tokens in zip(itertools.chain(*known), windows, strict=True)]
    flat = iter(reader.route(windows, lengths, size, rows[0].shape[1]))
    routed = [list(itertools.islice(flat, n)) for n in asked]
  first = [mine[0] for mine in routed] if first is None else first
  if reader.by == 'chooser':
    choose = functools.partial(chunk_router.choose, reader.model, reader.chooser)
    later = chunk_losses.in_batches(choose, size, *rows)[:, W - 1 :: W].tolist()
  elif reader.by == 'router':
    later = [mine[1:] for mine in routed]
  else:
    later = [[path] * count for path, count in zip(first, counts, strict=True)]
  return [[int(first[n]), *later[n][: count - 1]] for n, count in enumerate(counts)]


def _chunk_texts(tokenizer: Tokenizer, texts: Sequence[Text], W: int) -> list[list[str]]:
  """Returns the text of every chunk of every text; a character whose bytes lie in two chunks goes to the second."""
  texts_by_chunk: list[list[str]] = []
  transcript = Transcript(tokenizer, ())
  for text, following in zip(texts, [*texts[1:], None], strict=True):
    if not text.goes_on:
      transcript = Transcript(tokenizer, ())
    chunk_texts = []
    for start in range(0, len(text.tokens), W):
      for token in text.tokens[start : start + W]:
        transcript.add(token)
      if start + W >= len(text.tokens) and not (following and following.goes_on):
        transcript.close()
      chunk_texts.append(transcript.take(final=True))
    texts_by_chunk.append(chunk_texts)
  return texts_by_chunk


# -- of a run


def write(run: run_lib.Run):
  """Writes excerpts of validation documents for the report; none where all paths are one model."""
  if any(level.axes for level in run.layout.levels):
    run.disk.only_first(lambda: _write(run), 'excerpts')


def _write(run: run_lib.Run):
  s, split = run.settings, run.sequences('validation')
  first, domains = run.last_routes(), run.result('tokenize')['domains']
  chosen, length = choose(run), min(TOKENS, run.eval_len)
  texts = [Text(domains[x.domain], x.tokens[:length]) for x in split.read(chosen)]
  folder = run.workdir / 'evaluation' / 'validation'
  scored = token_losses.read(folder, run.layout.grid.num_paths) if s.evaluate.reroute_every else None
  known: Known = (lambda path: scored.nll[path][chosen, :length]) if scored else None
  excerpts = read(_reader_of_run(run), texts, chunk_tokens(s), length, first[chosen].tolist(), known)
  publishing.write_json(run.workdir / chunk_losses.FILE, metrics_log.plain(excerpts.to_dict()))


def choose(run: run_lib.Run) -> list[int]:
  """Returns indices of validation documents, chosen one by one: the longest of the rarest domain and path."""
  drawn = np.random.default_rng(run.settings.seed).permutation(len(run.sequences('validation')))[:CANDIDATES].tolist()
  sequences = dict(zip(drawn, run.sequences('validation').read(drawn), strict=True))
  paths = run.last_routes()
  kinds = {n: (('path', paths[n]), ('domain', x.domain)) for n, x in sequences.items()}
  lengths = {n: min(TOKENS, len(x.tokens)) for n, x in sequences.items()}
  chosen: list[int] = []
  while len(chosen) < min(DOCUMENTS, len(drawn)):
    seen = collections.Counter(kind for n in chosen for kind in kinds[n])
    left = [n for n in drawn if n not in chosen]
    chosen.append(min(left, key=lambda n: (sum(seen[kind] for kind in kinds[n]), -lengths[n])))
  return chosen


def _reader_of_run(run: run_lib.Run) -> Reader:
  """Makes a reader with the learned chooser if the run re-routes by one, else with its last router, if any."""
  s = run.settings
  is_learned, file = s.evaluate.reroute_every and s.evaluate.chunk_router_steps, 'evaluation/chooser.safetensors'
  chooser = jax.device_put(tensors.read_arrays(run.workdir / file)) if is_learned else None
  fitted = None if is_learned else run.last_router()

  def params(path: int):
    return jax.device_put(module_store.load_path(run.workdir, run.layout, path))

  base = jax.device_put(run.base())
  return Reader(run.model, base, params, fitted, chooser, run.tokenizer, s.routing.prefix_tokens)
