"""Texts that grow together under one path, as many tokens in a dispatch as there are steps.

Shapes are bucketed, so that the number of programs is bounded: B and S are powers of two; see `decode`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dipaco_jax.data.detokenizer import Transcript
from dipaco_jax.inference import trained_run as trained_lib
from dipaco_jax.inference.request import Request
from dipaco_jax.models import decoding
from dipaco_jax.models.transformer import Params, Transformer

STEPS = 4  # tokens in one dispatch
LEAST_PLACES = 128  # in a cache


class Text:
  """A request and what has come of it; `finished` is 'stop', 'length', 'cancelled' or 'error' in the end."""

  def __init__(self, request: Request, transcript: Transcript, turn: int = 0):
    self.request, self.transcript, self.turn = request, transcript, turn
    self.tokens = list(request.tokens)  # with the prompt
    self.paths: list[int] = []  # one after another
    self.finished = ''
    self.set_limit()

  @property
  def end(self) -> int:
    """Its length at most."""
    return len(self.request.tokens) + self.request.max_tokens

  def set_limit(self):
    """The length up to which its path stays: to the end of the chunk."""
    W = self.request.reroute_every
    self.limit = min(self.end, (len(self.tokens) // W + 1) * W) if W else self.end

  def add(self, token: int, eos_id: int):
    """One token more, unless it is finished."""
    if self.finished:
      return
    if self.request.until_eos and token == eos_id:
      self.finish('stop')
      return
    self.tokens.append(token)
    self.transcript.add(token)
    if self.transcript.stopped:
      self.finish('stop')
    elif len(self.tokens) == self.end:
      self.finish('length')

  def finish(self, why: str):
    self.finished = self.finished or why
    self.transcript.close()


class Batch:
  """Texts that grow under one path; `members[i]` is in row i of the state, None where the row is free."""

  def __init__(self, path: trained_lib.Path, text: Text, row: decoding.Texts):
    self.path, self.state = path, row
    self.members: list[Text | None] = [text]

  @property
  def count(self) -> int:
    return sum(text is not None for text in self.members)

  def join(self, text: Text, row: decoding.Texts):
    """One more, in a free row or in a new one."""
    num_rows = len(self.members) if None in self.members else 2 * len(self.members)
    self._fit(num_rows, power_of_two(max(_places(self.state), _places(row)), LEAST_PLACES))
    index = self.members.index(None)
    self.state = _insert(self.state, row, jnp.int32(index))
    self.members[index] = text

  @property
  def left(self) -> int:
    """Tokens at most until all of its texts leave."""
    return max(text.limit - len(text.tokens) for text in self.members if text)

  def row(self, text: Text) -> decoding.Texts:
    """A copy of its row."""
    return _arranged(self.state, jnp.asarray([self.members.index(text)]), _places(self.state), 1)

  def leave(self, text: Text):
    """Its row is free."""
    self.members[self.members.index(text)] = None

  def advance(self) -> list[Text]:
    """STEPS tokens more for each at most; the texts that are finished, or are to be routed again."""
    longest = max(len(text.tokens) for text in self.members if text)
    places = _held(_places(self.state), power_of_two(longest + STEPS, LEAST_PLACES))
    self._fit(_held(len(self.members), power_of_two(self.count, 1)), places)
    self.state, tokens = _advance(self.path.model, self.path.params, self.state)
    for text, mine in zip(self.members, np.asarray(tokens).T.tolist(), strict=True):
      if text:
        for token in mine[: text.limit - len(text.tokens)]:
          text.add(token, self.path.tokenizer.eos_id)
    return [text for text in self.members if text and (text.finished or len(text.tokens) >= text.limit)]

  def _fit(self, num_rows: int, places: int):
    """So many rows, those in use first, of so many places."""
    keys, cache_rows = self.state.cache.keys[0], max(2, num_rows)
    if (num_rows, cache_rows, places) == (len(self.members), len(keys), keys.shape[2]):
      return
    used = [i for i, text in enumerate(self.members) if text]
    self.state = _arranged(self.state, jnp.asarray((used + [0] * num_rows)[:num_rows]), places, cache_rows)
    self.members = ([self.members[i] for i in used] + [None] * num_rows)[:num_rows]


def _held(held: int, needed: int) -> int:
  """As before, unless that is too little, or four times what is needed."""
  return held if needed <= held < 4 * needed else needed


def power_of_two(number: int, least: int) -> int:
  """The smallest power of two that is not less than either."""
  return 1 << (max(number, least) - 1).bit_length()


def _places(texts: decoding.Texts) -> int:
  """S."""
  return texts.cache.keys[0].shape[2]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _advance(model: Transformer, params: Params, texts: decoding.Texts):
  return decoding.advance(model, params, texts, STEPS)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _arranged(texts: decoding.Texts, rows, places: int, cache_rows: int) -> decoding.Texts:
  """Rows of a batch in another order, with more places or fewer behind; a lone one twice in the cache, if asked."""
  in_cache = jnp.broadcast_to(rows, (cache_rows,)) if len(rows) == 1 else rows
  cache = jax.tree.map(
    lambda x: jnp.take(x, in_cache, axis=0), decoding.longer(decoding.cut(texts.cache, places), places)
  )
  others = (jax.tree.map(lambda x: jnp.take(x, rows, axis=0), x) for x in texts[1:])
  return decoding.Texts(cache, *others)


@functools.partial(jax.jit, donate_argnums=0)
def _insert(texts: decoding.Texts, row: decoding.Texts, index) -> decoding.Texts:
  """A row in its place; what lies behind its own places is what was there."""
  return jax.tree.map(
    lambda x, new: jax.lax.dynamic_update_slice(x, new, (index, *[jnp.int32(0)] * (x.ndim - 1))), texts, row
  )
