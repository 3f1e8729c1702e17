"""Texts that grow together under one path, STEPS tokens in a dispatch.

B and S (see `decoding`) are powers of two, so that the number of compiled programs is bounded.
"""

import functools
from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np

from dipaco_jax.data.tokenizer import Transcript
from dipaco_jax.inference.request import Request
from dipaco_jax.inference.trained_run import Path
from dipaco_jax.models import decoding
from dipaco_jax.models.transformer import Params, Transformer

STEPS = 4  # tokens in one dispatch
MIN_CAPACITY = 128  # positions in a cache


class Text:
  """A request and the text that continues it."""

  def __init__(self, request: Request, transcript: Transcript, turn: int = 0):
    self.request = request
    self.transcript = transcript
    self.turn = turn
    self.tokens = list(request.tokens)  # with the prompt
    self.paths: list[int] = []  # one after another
    self.num_writers = 0  # how many of them have written: the last one may have been chosen only
    self.scores: tuple[float, ...] = ()  # the router's for each path, if it made the first choice
    self.finished = ''  # or why: 'stop', 'length', 'cancelled' or 'error'
    self.set_limit()

  @property
  def end(self) -> int:
    """The greatest length that the request allows, prompt included."""
    return len(self.request.tokens) + self.request.max_tokens

  @property
  def num_new(self) -> int:
    """The number of tokens added to the prompt."""
    return len(self.tokens) - len(self.request.tokens)

  def set_limit(self):
    """Sets the length up to which the text stays on its path: the end of its chunk, or of the text."""
    W = self.request.reroute_every
    self.limit = min(self.end, (len(self.tokens) // W + 1) * W) if W else self.end

  def add(self, token: int, end_ids: Collection[int]):
    """Appends a token, unless it is one of those that end a text."""
    if self.finished:
      return
    self.num_writers = len(self.paths)
    if self.request.until_eos and token in end_ids:
      self.finish('stop')
      return
    self.tokens.append(token)
    self.transcript.add(token)
    if self.transcript.stopped:
      self.finish('stop')
    elif len(self.tokens) == self.end:
      self.finish('length')

  def finish(self, why: str):
    """Ends the text, unless it has ended, for a reason of `finished`."""
    self.finished = self.finished or why
    self.transcript.close()


class Batch:
  """Texts that grow under one path; `members[i]` is in row i of the state, or None if the row is free."""

  def __init__(self, path: Path, text: Text, row: decoding.Texts):
    self.path, self.state = path, row
    self.members: list[Text | None] = [text]

  @property
  def count(self) -> int:
    return sum(text is not None for text in self.members)

  def join(self, text: Text, row: decoding.Texts):
    """Adds a text, in a free row or in a new one."""
    num_rows = len(self.members) if None in self.members else 2 * len(self.members)
    self._resize(num_rows, power_of_two(max(map(self._capacity, (self.state, row))), MIN_CAPACITY))
    index = self.members.index(None)
    self.state = _insert(self.state, row, jnp.int32(index))
    self.members[index] = text

  @property
  def num_left(self) -> int:
    """The greatest number of tokens until all texts have left."""
    return max(text.limit - len(text.tokens) for text in self.members if text)

  def row(self, text: Text) -> decoding.Texts:
    rows = jnp.asarray([self.members.index(text)])
    return _rearrange(self.path.model, self.state, rows, self._capacity(self.state))

  def leave(self, text: Text):
    self.members[self.members.index(text)] = None

  def advance(self) -> list[Text]:
    """Adds up to STEPS tokens to each text; returns the texts that are finished, or are to be routed again."""
    longest = max(len(text.tokens) for text in self.members if text)
    capacity = _with_slack(self._capacity(self.state), power_of_two(longest + STEPS, MIN_CAPACITY))
    self._resize(_with_slack(len(self.members), power_of_two(self.count, 1)), capacity)
    self.state, tokens = _advance(self.path.model, self.path.params, self.state)
    for text, mine in zip(self.members, np.asarray(tokens).T.tolist(), strict=True):
      if text:
        for token in mine[: text.limit - len(text.tokens)]:
          text.add(token, self.path.tokenizer.end_ids)
    return [text for text in self.members if text and (text.finished or len(text.tokens) >= text.limit)]

  def _capacity(self, texts: decoding.Texts) -> int:
    return decoding.capacity(self.path.model, texts.cache)

  def _resize(self, num_rows: int, capacity: int):
    """Makes the state `num_rows` rows of `capacity` positions, rows in use first."""
    if not (num_positions := self._capacity(self.state)):
      capacity = 0  # nothing has positions
    if (num_rows, capacity) == (len(self.members), num_positions):
      return
    used = [i for i, text in enumerate(self.members) if text]
    rows = jnp.asarray((used + [0] * num_rows)[:num_rows])
    self.state = _rearrange(self.path.model, self.state, rows, capacity)
    self.members = ([self.members[i] for i in used] + [None] * num_rows)[:num_rows]


def _with_slack(size: int, needed: int) -> int:
  """Returns `size` unless it is too small or at least four times the required size, to limit compilations."""
  return size if needed <= size < 4 * needed else needed


def power_of_two(number: int, least: int) -> int:
  """Returns the smallest power of two that is not less than either number."""
  return 1 << (max(number, least) - 1).bit_length()


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _advance(model: Transformer, params: Params, texts: decoding.Texts):
  return decoding.advance(model, params, texts, STEPS)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _rearrange(model: Transformer, texts: decoding.Texts, rows, S: int) -> decoding.Texts:
  """Returns rows of a batch with S positions."""
  texts = texts._replace(cache=decoding.resize(model, texts.cache, S))
  return jax.tree.map(lambda x: jnp.take(x, rows, axis=0), texts)


@functools.partial(jax.jit, donate_argnums=0)
def _insert(texts: decoding.Texts, row: decoding.Texts, index) -> decoding.Texts:
  """Writes a row over that at `index`; positions that it does not have stay as they are."""
  return jax.tree.map(
    lambda x, new: jax.lax.dynamic_update_slice(x, new, (index, *[jnp.int32(0)] * (x.ndim - 1))), texts, row
  )
