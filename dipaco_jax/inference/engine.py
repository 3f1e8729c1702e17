"""The engine: routes each request, generates it in a batch with others on its path, and may change its path.

With a request's `reroute_every` W the token at position i is predicted by the path r_i that is chosen by the tokens
before the chunk that it is in [2.4.3]:

    r_i = router(first tokens)                     i < W, or no W
    r_i = chooser(tokens before floor(i / W) * W)  else

the chooser being the learned one [7.2.2] where the run has it, else the router on the last tokens. When the path
changes, the cache is computed again only from the lowest block that differs.
"""

import collections
import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dipaco_jax.core.errors import InputError
from dipaco_jax.data import packing
from dipaco_jax.data.tokenizer import Transcript, token_ids
from dipaco_jax.inference.batch import Batch, Text
from dipaco_jax.inference.path_arrays import lowest_block
from dipaco_jax.inference.request import Request, check_request
from dipaco_jax.inference.trained_run import ModuleMarks, Path, TrainedRun
from dipaco_jax.models import decoding
from dipaco_jax.models.transformer import Params, Transformer
from dipaco_jax.routing import chunk_router

MIN_LENGTH = 16  # tokens; shorter prompts are padded to this


class Engine:
  """Generates texts, those of one path together, with at most `max_paths` paths in memory."""

  def __init__(self, run: TrainedRun, max_paths: int = 4, max_batch: int = 8, version: int | None = None):
    self.run = run
    self.max_paths = max_paths
    self.max_batch = max_batch
    self.version = version
    self.waiting: list[Text] = []
    self.moving: dict[Text, tuple[decoding.Texts, ModuleMarks]] = {}  # from a path to another
    self.batches: collections.OrderedDict[int, Batch] = collections.OrderedDict()  # the next to advance first
    self.paths: collections.OrderedDict[int, Path] = collections.OrderedDict()  # the last used last
    self.closed: tuple[int, int] | None = None  # a path, and a text's turn: younger ones may not join that path
    self.max_length = run.settings.model.seq_len
    # Tokens times blocks that changes of path have computed, and that they would have without a cache.
    self.recomputed = self.recomputed_without_cache = 0
    self._turns = itertools.count()

  def check_request(self, request: Request):
    """Raises InputError if a request is wrong. Any thread may call it."""
    check_request(request, self.max_length)
    if request.path is not None:
      self._check_here(self.run.number(request.path))
    elif self.run.layout.grid.num_paths > 1:
      self.run.router  # noqa: B018  # raises where there is none
    token_ids(self.run.tokenizer, request.tokens)

  def _check_here(self, path: int):
    """Raises InputError, which clients are told, for a path that another owner has."""
    if self.run.settings.data.own_text and path not in self.paths_here:
      here = ', '.join(map(str, self.paths_here)) or 'none, as its owner has left the run, or it has not ended'
      raise InputError(f'path={path}: it is not here; the paths of this store are: {here}')

  @functools.cached_property
  def paths_here(self) -> list[int]:
    return self.run.paths_here

  def start(self, request: Request) -> Text:
    """Queues a text for `step`. Raises InputError if the request is wrong."""
    self.check_request(request)
    text = Text(request, Transcript(self.run.tokenizer, request.tokens, request.stop), next(self._turns))
    self.waiting.append(text)
    return text

  def cancel(self, text: Text):
    self._finish(text, 'cancelled')

  @property
  def busy(self) -> bool:
    return bool(self.waiting or self.moving or self.batches)

  def step(self):
    """Admits the texts for which there is room, and extends those of one path, each path in its turn.

    Raises the error of a text that fails; it is finished with 'error', and the others continue.
    """
    while self.admit():
      pass
    self.advance()

  def generate(self, requests: Sequence[Request]) -> list[Text]:
    """Grows a text for each request until all are finished."""
    texts = [self.start(request) for request in requests]
    while self.busy:
      self.step()
    return texts

  def admit(self) -> bool:
    """Prefills the oldest text whose path has room, up to its first token; returns whether there was one."""
    for text in sorted([*self.waiting, *self.moving], key=lambda text: text.turn):
      if len(self.batches) >= self.max_paths and all(b.count >= self.max_batch for b in self.batches.values()):
        break
      with self._failing([text]):
        text.paths = text.paths or [self._choose_path(text)]
        if (path := self._path_with_room(text)) is not None:
          self._enter(text, path)
          return True
    self._close_a_path()
    return False

  def advance(self) -> int:
    """Grows the texts of one path, each path in its turn; returns how many texts there were."""
    if not self.batches:
      return 0
    number, batch = next(iter(self.batches.items()))
    self.batches.move_to_end(number)
    members = [text for text in batch.members if text]
    with self._failing(members):
      ready = batch.advance()
    for text in ready:
      with self._failing([text]):
        if not text.finished:
          self._continue(text, batch.row(text), batch.path)
        batch.leave(text)
    self._drop_empty()
    return len(members)

  def _enter(self, text: Text, path: Path):
    if text in self.moving:
      row, old = self.moving.pop(text)
      self._join(path, text, self.change_path(text, row, old, path))
      return
    self.waiting.remove(text)
    row = self.prefill(text, path)
    text.add(int(row.token[0]), self.run.tokenizer.end_ids)
    if not text.finished:
      self._continue(text, row, path)

  def _continue(self, text: Text, row: decoding.Texts, path: Path):
    """Lets a text continue under its path; at the end of a chunk, chooses its next path."""
    if len(text.tokens) < text.limit:
      self._join(path, text, row)
      return
    text.set_limit()
    if (number := self._choose_path(text)) != path.number:
      text.paths.append(number)
    self.moving[text] = (row, path.marks)

  @contextlib.contextmanager
  def _failing(self, texts: Sequence[Text]) -> Iterator[None]:
    """Finishes these texts, and no others, with 'error' when the block raises."""
    try:
      yield
    except Exception:
      for text in texts:
        self._finish(text, 'error')
      raise

  def _finish(self, text: Text, why: str):
    text.finish(why)
    self.waiting = [other for other in self.waiting if other is not text]
    self.moving.pop(text, None)
    for batch in self.batches.values():
      if text in batch.members:
        batch.leave(text)
    self._drop_empty()

  def _close_a_path(self):
    """Stops the path that will be free soonest from taking younger texts, while a text waits for its path to be loaded.

    Otherwise paths in memory that are always asked for would never make room for another.
    """
    kept_out = [text for text in (*self.waiting, *self.moving) if text.paths and text.paths[-1] not in self.batches]
    self.closed = None
    if kept_out and self.batches:
      soonest = min(self.batches, key=lambda number: self.batches[number].num_left)
      self.closed = soonest, min(text.turn for text in kept_out)

  def _join(self, path: Path, text: Text, row: decoding.Texts):
    if path.number in self.batches:
      self.batches[path.number].join(text, row)
    else:
      self.batches[path.number] = Batch(path, text, row)

  def _path_with_room(self, text: Text) -> Path | None:
    """Returns the path of a text, loaded; None if it is full or closed to it, or all paths in memory are in use."""
    number = text.paths[-1]
    if number in self.batches:
      is_open = self.closed is None or self.closed[0] != number or text.turn < self.closed[1]
      return self.batches[number].path if is_open and self.batches[number].count < self.max_batch else None
    if number not in self.paths:
      idle = [other for other in self.paths if other not in self.batches]
      if len(self.paths) >= self.max_paths:
        if not idle:
          return None
        del self.paths[idle[0]]
      path = self.run.path(number, self.version)
      path.check_finite()
      self.paths[number] = path
    self.paths.move_to_end(number)
    return self.paths[number]

  def _choose_path(self, text: Text) -> int:
    """Returns r_i for the next token, by the rule in the module docstring."""
    W, tokens = text.request.reroute_every, text.tokens
    known = len(tokens) // W * W if W else 0
    if text.request.path is not None or self.run.layout.grid.num_paths == 1:
      return text.request.path or 0
    if known and self.run.chooser is not None:
      tokens_1L = _padded(tokens[:known], self.max_length)
      chosen_1L = chunk_router.choose(self.run.router.model, self.run.chooser, tokens_1L, np.ones_like(tokens_1L))
      return int(chosen_1L[0, known - 1])
    prefix = self.run.settings.routing.prefix_tokens
    first = text.request.routed_by or tokens
    seen, length = (tokens[max(0, known - prefix) : known], known) if known else (first[:prefix], len(first))
    scores = self.run.router.scores(seen, length)
    if not text.paths:
      text.scores = tuple(scores.tolist())
    return int(scores.argmax())

  def prefill(self, text: Text, path: Path) -> decoding.Texts:
    """Returns a row with the prompt in its cache, and with the first token after it."""
    r = text.request
    values = (r.seed, jnp.uint32), (r.temperature, jnp.float32), (r.top_k, jnp.int32), (r.top_p, jnp.float32)
    sampling = decoding.SamplingParams(*(jnp.full(1, value, dtype) for value, dtype in values))
    tokens_1L = _padded(r.tokens, self.max_length)
    prompt = _Prompt(tokens_1L, np.int32(len(r.tokens)), jnp.full(1, text.limit), sampling)
    return _prefill(path.model, self._keep, path.params, prompt)

  def change_path(self, text: Text, row: decoding.Texts, old: ModuleMarks, new: Path) -> decoding.Texts:
    """Returns the row as if all of the text had been read under the new path."""
    row = row._replace(end=jnp.full(1, text.limit))
    first = new.first_difference(old)
    N = new.model.config.num_layers
    self.recomputed += (N - first) * (len(text.tokens) - 1)
    self.recomputed_without_cache += N * (len(text.tokens) - 1)
    if first < N:
      row = _recompute(new.model, self._keep, first, new.params, row, _padded(text.tokens[:-1], self.max_length))
    return row

  @functools.cached_property
  def _keep(self) -> tuple[int, ...]:
    """The lowest block of each level, from which on paths may differ."""
    N = self.run.settings.model.num_layers
    lowest: dict[str, int] = {}
    for name, level in self.run.layout.owner.items():
      lowest[level.name] = min(lowest.get(level.name, N), lowest_block(name, N))
    return tuple(sorted({*lowest.values()} - {0, N}))

  def _drop_empty(self):
    for number in [number for number, batch in self.batches.items() if not batch.count]:
      del self.batches[number]


def bucket_length(length: int) -> int:
  """Returns the smallest of eight lengths in each octave, from MIN_LENGTH on, that is not less than `length`."""
  step = max(MIN_LENGTH, 1 << max(0, (length - 1).bit_length() - 4))
  return -(-length // step) * step


def _padded(tokens: Sequence[int], max_length: int) -> np.ndarray:
  """Returns tokens, padded to a bucket's length L: [1, L] int32."""
  return packing.pad([np.asarray(tokens)], min(bucket_length(len(tokens)), max_length))[0]


class _Prompt(NamedTuple):
  """The tokens of a text that is to grow, and how."""

  tokens_1L: Any  # padded to a bucket's length
  length: Any  # number of the tokens before the padding
  end_1: Any  # the position where the text ends
  sampling: decoding.SamplingParams


@functools.partial(jax.jit, static_argnums=(0, 1))
def _prefill(model: Transformer, keep: decoding.Blocks, params: Params, prompt: _Prompt) -> decoding.Texts:
  entry = decoding.Entry(decoding.embed(model, params, prompt.tokens_1L))
  cache, logits_1V = decoding.prefill(model, params, entry, prompt.length, keep)
  position_1 = prompt.length[None]
  token_1 = decoding.sample(logits_1V, prompt.sampling, position_1)
  return decoding.Texts(cache, token_1, position_1, prompt.end_1, prompt.sampling)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _recompute(model: Transformer, keep, first: int, params: Params, row: decoding.Texts, tokens_1L) -> decoding.Texts:
  """Computes a row's cache again from block `first` on."""
  L = tokens_1L.shape[1]
  below = decoding.resize(model, row.cache, L)
  x_1LD = below.entering[first] if first else decoding.embed(model, params, tokens_1L)
  entry = decoding.Entry(x_1LD, first, below)
  return row._replace(cache=decoding.prefill(model, params, entry, row.position[0], keep)[0])
