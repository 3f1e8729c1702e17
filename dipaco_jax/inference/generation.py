"""Requests become texts: each is routed, grows with others on its path, and may choose a path again on the way.

With a request's `reroute_every` W the token at place i is predicted by the path r_i that is chosen by the tokens before
the chunk that it is in [2.4.3]:

    r_i = router(first tokens)                     i < W, or no W
    r_i = chooser(tokens before floor(i / W) * W)  else

the chooser being the learned one [7.2.2] where the run has it, else the router on the last tokens. When the path
changes, the cache is computed anew from the lowest block that differs, and no more.
"""

import collections
import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dipaco_jax.core.errors import InputError
from dipaco_jax.data.detokenizer import Transcript
from dipaco_jax.inference import trained_run as trained_lib
from dipaco_jax.inference.batch import Batch, Text
from dipaco_jax.inference.request import Request, check
from dipaco_jax.models import decoding
from dipaco_jax.models.transformer import Params, Transformer
from dipaco_jax.routing import chunk_router

LEAST_LENGTH = 16  # of tokens read at one time


class Engine:
  """Continues texts, those of one path together, with no more than `max_paths` paths in memory."""

  def __init__(self, run: trained_lib.Trained, max_paths: int = 4, max_batch: int = 8, version: int | None = None):
    self.run, self.max_paths, self.max_batch, self.version = run, max_paths, max_batch, version
    self.waiting: list[Text] = []
    self.moving: dict[Text, tuple[decoding.Texts, trained_lib.Marks]] = {}  # from a path to another
    self.batches: collections.OrderedDict[int, Batch] = collections.OrderedDict()  # the next to advance first
    self.paths: collections.OrderedDict[int, trained_lib.Path] = collections.OrderedDict()  # the last used last
    self.closed: tuple[int, int] | None = None  # a path, and a text's turn: younger ones may not join that path
    self.max_length = run.settings.model.seq_len
    self.reread = self.reread_whole = 0  # tokens times blocks, at changes of path; what they are without a cache
    self._turns = itertools.count()

  def check(self, request: Request):
    """Raises InputError that names what is wrong with the request; any thread may call it."""
    check(request, self.max_length)
    if request.path is not None:
      self.run.number(request.path)
    elif self.run.layout.grid.num_paths > 1:
      self.run.router  # noqa: B018  # raises where there is none
    if not 0 <= min(request.tokens) <= max(request.tokens) < self.run.tokenizer.vocab_size:
      raise InputError(f'prompt: token {max(request.tokens)} is none of the {self.run.tokenizer.vocab_size} there are')

  def start(self, request: Request) -> Text:
    """Its turn comes in `step`; raises InputError that names what is wrong with the request."""
    self.check(request)
    text = Text(request, Transcript(self.run.tokenizer, request.tokens, request.stop), next(self._turns))
    self.waiting.append(text)
    return text

  def cancel(self, text: Text):
    """It gets no more tokens, and its place is free."""
    self._end(text, 'cancelled')

  @property
  def busy(self) -> bool:
    """Whether a text is not finished."""
    return bool(self.waiting or self.moving or self.batches)

  def step(self):
    """Lets in whom there is room for, and grows the texts of one path, each path in its turn.

    What fails is raised; the texts that it happened to are finished with 'error', and the others go on.
    """
    while self.admit():
      pass
    self.advance()

  def generate(self, requests: Sequence[Request]) -> list[Text]:
    """All of them, to their ends."""
    texts = [self.start(request) for request in requests]
    while self.busy:
      self.step()
    return texts

  def admit(self) -> bool:
    """Reads a text, the oldest for which there is room on its path, so that it has its first token; whether one was."""
    for text in sorted([*self.waiting, *self.moving], key=lambda text: text.turn):
      if len(self.batches) >= self.max_paths and all(b.count >= self.max_batch for b in self.batches.values()):
        break
      with self._blamed([text]):
        text.paths = text.paths or [self._choice(text)]
        if (path := self._room(text)) is not None:
          self._enter(text, path)
          return True
    self._close()
    return False

  def advance(self) -> int:
    """Grows the texts of one path, each path in its turn; how many there were."""
    if not self.batches:
      return 0
    number, batch = next(iter(self.batches.items()))
    self.batches.move_to_end(number)
    members = [text for text in batch.members if text]
    with self._blamed(members):
      ready = batch.advance()
    for text in ready:
      with self._blamed([text]):
        if not text.finished:
          self._go_on(text, batch.row(text), batch.path)
        batch.leave(text)
    self._drop_empty()
    return len(members)

  def _enter(self, text: Text, path: trained_lib.Path):
    if text in self.moving:
      row, old = self.moving.pop(text)
      self._join(path, text, self.moved(text, row, old, path))
      return
    self.waiting.remove(text)
    row = self.read(text, path)
    text.add(int(row.token[0]), self.run.tokenizer.eos_id)
    if not text.finished:
      self._go_on(text, row, path)

  def _go_on(self, text: Text, row: decoding.Texts, path: trained_lib.Path):
    """With its row under its path, or under another, if it is to choose now."""
    if len(text.tokens) < text.limit:
      self._join(path, text, row)
      return
    text.set_limit()
    if (number := self._choice(text)) != path.number:
      text.paths.append(number)
    self.moving[text] = (row, path.marks)

  @contextlib.contextmanager
  def _blamed(self, texts: Sequence[Text]) -> Iterator[None]:
    """What fails in here is the end of these texts alone."""
    try:
      yield
    except Exception:
      for text in texts:
        self._end(text, 'error')
      raise

  def _end(self, text: Text, why: str):
    text.finish(why)
    self.waiting = [other for other in self.waiting if other is not text]
    self.moving.pop(text, None)
    for batch in self.batches.values():
      if text in batch.members:
        batch.leave(text)
    self._drop_empty()

  def _close(self):
    """Where a text waits for a place in memory for its path, the path that is done soonest is closed to younger texts:
    paths that are in memory, and asked for all the time, would keep it for ever."""
    kept_out = [text for text in (*self.waiting, *self.moving) if text.paths and text.paths[-1] not in self.batches]
    self.closed = None
    if kept_out and self.batches:
      soonest = min(self.batches, key=lambda number: self.batches[number].left)
      self.closed = soonest, min(text.turn for text in kept_out)

  def _join(self, path: trained_lib.Path, text: Text, row: decoding.Texts):
    if path.number in self.batches:
      self.batches[path.number].join(text, row)
    else:
      self.batches[path.number] = Batch(path, text, row)

  def _room(self, text: Text) -> trained_lib.Path | None:
    """Its path, loaded; None where that is full, or closed to it, or where all paths in memory are at work."""
    number = text.paths[-1]
    if number in self.batches:
      open_to_it = self.closed is None or self.closed[0] != number or text.turn < self.closed[1]
      return self.batches[number].path if open_to_it and self.batches[number].count < self.max_batch else None
    if number not in self.paths:
      idle = [other for other in self.paths if other not in self.batches]
      if len(self.paths) >= self.max_paths:
        if not idle:
          return None
        del self.paths[idle[0]]
      self.paths[number] = self.run.path(number, self.version)
    self.paths.move_to_end(number)
    return self.paths[number]

  def _choice(self, text: Text) -> int:
    """r_i for the next token; see above."""
    W, tokens = text.request.reroute_every, text.tokens
    known = len(tokens) // W * W if W else 0
    if text.request.path is not None or self.run.layout.grid.num_paths == 1:
      return text.request.path or 0
    if known and self.run.chooser is not None:
      return self._chosen(tokens[:known])
    prefix = self.run.settings.routing.prefix_tokens
    return self.run.router.path(tokens[max(0, known - prefix) : known] if known else tokens[:prefix])

  def _chosen(self, tokens: Sequence[int]) -> int:
    padded = _padded(tokens, self.max_length)
    made = self.run.router.model
    return int(chunk_router.choose(made, self.run.chooser, padded, np.ones_like(padded))[0, len(tokens) - 1])

  def read(self, text: Text, path: trained_lib.Path) -> decoding.Texts:
    """A row with the prompt in its cache, and with its first token."""
    r = text.request
    draw = decoding.Draw(
      jnp.full(1, r.seed, jnp.uint32),
      jnp.full(1, r.temperature, jnp.float32),
      jnp.full(1, r.top_k, jnp.int32),
      jnp.full(1, r.top_p, jnp.float32),
    )
    tokens_1L, length = _padded(r.tokens, self.max_length), np.int32(len(r.tokens))
    return _begin(path.model, self._keep, path.params, tokens_1L, length, jnp.full(1, text.limit), draw)

  def moved(self, text: Text, row: decoding.Texts, old: trained_lib.Marks, new: trained_lib.Path) -> decoding.Texts:
    """The row as if all of the text had been read under the new path."""
    row, first = row._replace(end=jnp.full(1, text.limit)), new.first_difference(old)
    self.reread += (new.model.config.num_layers - first) * (len(text.tokens) - 1)
    self.reread_whole += new.model.config.num_layers * (len(text.tokens) - 1)
    if first < new.model.config.num_layers:
      row = _reread(new.model, self._keep, first, new.params, row, _padded(text.tokens[:-1], self.max_length))
    return row

  @functools.cached_property
  def _keep(self) -> tuple[int, ...]:
    """The lowest block of each level, from which on paths may differ."""
    N = self.run.settings.model.num_layers
    lowest: dict[str, int] = {}
    for name, level in self.run.layout.owner.items():
      lowest[level.name] = min(lowest.get(level.name, N), trained_lib.block_of(name, N))
    return tuple(sorted({*lowest.values()} - {0, N}))

  def _drop_empty(self):
    for number in [number for number, batch in self.batches.items() if not batch.count]:
      del self.batches[number]


def bucket(length: int) -> int:
  """The smallest of eight lengths in each octave, from LEAST_LENGTH on, that is not less."""
  step = max(LEAST_LENGTH, 1 << max(0, (length - 1).bit_length() - 4))
  return -(-length // step) * step


def _padded(tokens: Sequence[int], max_length: int) -> np.ndarray:
  """[1, L] int32."""
  padded = np.zeros((1, min(bucket(len(tokens)), max_length)), np.int32)
  padded[0, : len(tokens)] = tokens
  return padded


@functools.partial(jax.jit, static_argnums=(0, 1))
def _begin(model: Transformer, keep, params: Params, tokens_1L, length, end_1, draw: decoding.Draw) -> decoding.Texts:
  cache, logits_1V = decoding.prefill(model, params, decoding.embedded(model, params, tokens_1L), length, 0, None, keep)
  place_1 = length[None]
  return decoding.Texts(cache, decoding.drawn(logits_1V, draw, place_1), place_1, end_1, draw)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _reread(model: Transformer, keep, first: int, params: Params, row: decoding.Texts, tokens_1L) -> decoding.Texts:
  """A row's cache computed anew from block `first` on."""
  L = tokens_1L.shape[1]
  below = decoding.cut(row.cache, L)
  x_1LD = below.entering[first] if first else decoding.embedded(model, params, tokens_1L)
  return row._replace(cache=decoding.prefill(model, params, x_1LD, row.place[0], first, below, keep)[0])
