"""Requests become texts: each is routed, grows with others on its path, and may choose a path again on the way.

With a request's `reroute_every` W the token at place i is predicted by the path r_i that is chosen by the tokens before
the chunk that it is in [2.4.3]:

    r_i = router(first tokens)                     i < W, or no W
    r_i = chooser(tokens before floor(i / W) * W)  else

the chooser being the learned one [7.2.2] where the run has it, else the router on the last tokens. When the path
changes, the cache is computed anew from the lowest block that differs, and no more.
"""

import collections
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dipaco_jax import chunk_router, decode
from dipaco_jax import trained as trained_lib
from dipaco_jax.batch import Batch, Text
from dipaco_jax.model import Params, Transformer
from dipaco_jax.request import Request, check
from dipaco_jax.transcript import Transcript

LEAST_LENGTH = 16  # of tokens read at one time


class Engine:
  """Continues texts, those of one path together, with no more than `max_paths` paths in memory."""

  def __init__(self, run: trained_lib.Trained, max_paths: int = 4, max_batch: int = 8, version: int | None = None):
    self.run, self.max_paths, self.max_batch, self.version = run, max_paths, max_batch, version
    self.waiting: list[Text] = []
    self.moving: list[tuple[Text, decode.Texts, trained_lib.Path]] = []  # to another path, when there is room
    self.batches: collections.OrderedDict[int, Batch] = collections.OrderedDict()  # the next to advance first
    self.paths: collections.OrderedDict[int, trained_lib.Path] = collections.OrderedDict()  # the last used last
    self.max_length = run.settings.model.seq_len
    self.reread = self.reread_whole = 0  # tokens times blocks, at changes of path; what they are without a cache

  def start(self, request: Request) -> Text:
    """Its turn comes in `step`; raises ValueError that names what is wrong with the request."""
    check(request, self.max_length)
    if request.path is not None:
      self.run.number(request.path)
    if not 0 <= min(request.tokens) <= max(request.tokens) < self.run.tokenizer.vocab_size:
      raise ValueError(f'prompt: token {max(request.tokens)} is none of the {self.run.tokenizer.vocab_size} there are')
    text = Text(request, Transcript(self.run.tokenizer, request.tokens, request.stop))
    self.waiting.append(text)
    return text

  def cancel(self, text: Text):
    """It gets no more tokens, and its place is free."""
    text.finish('cancelled')
    self.waiting = [other for other in self.waiting if other is not text]
    self.moving = [entry for entry in self.moving if entry[0] is not text]
    for batch in self.batches.values():
      if text in batch.members:
        batch.leave(text)
    self._drop_empty()

  @property
  def busy(self) -> bool:
    """Whether a text is not finished."""
    return bool(self.waiting or self.moving or self.batches)

  def step(self):
    """Lets in whom there is room for, and grows the texts of one path, each path in its turn."""
    self._admit()
    if not self.batches:
      return
    number, batch = next(iter(self.batches.items()))
    self.batches.move_to_end(number)
    for text in batch.advance():
      row = batch.leave(text)
      if not text.finished:
        self._go_on(text, row, batch.path)
    self._drop_empty()

  def generate(self, requests: Sequence[Request]) -> list[Text]:
    """All of them, to their ends."""
    texts = [self.start(request) for request in requests]
    while self.busy:
      self.step()
    return texts

  def _admit(self):
    """Texts that change their path, then those that begin, as far as there is room on their paths."""
    moving, self.moving = self.moving, []
    for text, row, old in moving:
      if (path := self._room(text.paths[-1])) is None:
        self.moving.append((text, row, old))
      else:
        self._join(path, text, self._moved(text, row, old, path))
    waiting, self.waiting = self.waiting, []
    for text in waiting:
      text.paths = text.paths or [self._choice(text)]
      if (path := self._room(text.paths[0])) is None:
        self.waiting.append(text)
        continue
      row = self._begun(text, path)
      text.add(int(row.token[0]), self.run.tokenizer.eos_id)
      if not text.finished:
        self._go_on(text, row, path)

  def _go_on(self, text: Text, row: decode.Texts, path: trained_lib.Path):
    """With its row under its path, or under another, if it is to choose now."""
    if len(text.tokens) < text.limit:
      self._join(path, text, row)
      return
    text.set_limit()
    if (number := self._choice(text)) != path.number:
      text.paths.append(number)
    self.moving.append((text, row, path))

  def _join(self, path: trained_lib.Path, text: Text, row: decode.Texts):
    if path.number in self.batches:
      self.batches[path.number].join(text, row)
    else:
      self.batches[path.number] = Batch(path, text, row)

  def _room(self, number: int) -> trained_lib.Path | None:
    """The path, loaded; None where its batch is full, or where all paths in memory are at work."""
    if number in self.batches:
      return self.batches[number].path if self.batches[number].count < self.max_batch else None
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
    if text.request.path is not None:
      return text.request.path
    if known and self.run.chooser is not None:
      return self._chosen(tokens[:known])
    prefix = self.run.settings.routing.prefix_tokens
    return self.run.router.path(tokens[max(0, known - prefix) : known] if known else tokens[:prefix])

  def _chosen(self, tokens: Sequence[int]) -> int:
    padded = _padded(tokens, self.max_length)
    made = self.run.router.model
    return int(chunk_router.choose(made, self.run.chooser, padded, np.ones_like(padded))[0, len(tokens) - 1])

  def _begun(self, text: Text, path: trained_lib.Path) -> decode.Texts:
    """A row with the prompt in its cache, and with its first token."""
    r = text.request
    draw = decode.Draw(
      jnp.full(1, r.seed, jnp.uint32), jnp.full(1, r.temperature), jnp.full(1, r.top_k), jnp.full(1, r.top_p)
    )
    tokens_1L, length = _padded(r.tokens, self.max_length), np.int32(len(r.tokens))
    return _begin(path.model, self._keep, path.params, tokens_1L, length, jnp.full(1, text.limit), draw)

  def _moved(self, text: Text, row: decode.Texts, old: trained_lib.Path, new: trained_lib.Path) -> decode.Texts:
    """The row as if all of the text had been read under the new path."""
    row, first = row._replace(end=jnp.full(1, text.limit)), old.first_difference(new)
    self.reread += (new.model.config.num_layers - first) * (len(text.tokens) - 1)
    self.reread_whole += new.model.config.num_layers * (len(text.tokens) - 1)
    if first < new.model.config.num_layers:
      row = _reread(new.model, self._keep, first, new.params, row, _padded(text.tokens[:-1], self.max_length))
    return row

  @functools.cached_property
  def _keep(self) -> tuple[int, ...]:
    """The lowest block of each level, from which on paths may differ."""
    levels: dict[str, list[int]] = {}
    for name, level in self.run.layout.owner.items():
      levels.setdefault(level.name, []).append(int(name.split('/')[0][6:]) if name.startswith('block_') else 0)
    return tuple(sorted({min(blocks) for blocks in levels.values()} - {0}))

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
def _begin(model: Transformer, keep, params: Params, tokens_1L, length, end_1, draw: decode.Draw) -> decode.Texts:
  cache, logits_1V = decode.prefill(model, params, decode.embedded(model, params, tokens_1L), length, 0, None, keep)
  place_1 = length[None]
  return decode.Texts(cache, decode.drawn(logits_1V, draw, place_1), place_1, end_1, draw)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _reread(model: Transformer, keep, first: int, params: Params, row: decode.Texts, tokens_1L) -> decode.Texts:
  """A row's cache computed anew from block `first` on."""
  L = tokens_1L.shape[1]
  below = decode.cut(row.cache, L)
  x_1LD = below.entering[first] if first else decode.embedded(model, params, tokens_1L)
  return row._replace(cache=decode.prefill(model, params, x_1LD, row.place[0], first, below, keep)[0])
