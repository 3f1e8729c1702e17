"""Decoding of one path token by token: the key-value cache, and sampling of the next token. Pure.

A token's keys and values depend only on it and on earlier tokens: they are computed once and kept [arXiv 1911.02150].
Where the path may change [2.4.3], the hidden states that enter some blocks are kept too. If two paths first differ in
block n, then all below n is the same, and computing blocks n and up once for all tokens turns the cache of one path
into that of the other.

For one text a cache may have two equal rows: with one row XLA for CPU fuses the update into its readers and copies the
cache at every step. (Two rows of everything would be slower still: a matrix times one row is fastest.)

Dimensions: B texts, L tokens given at one time, S positions in a cache, D width, H heads, G heads of
keys and values, K head size, V vocabulary.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dipaco_jax.models import attention, rotary
from dipaco_jax.models.layers import layer
from dipaco_jax.models.transformer import Block, Params, Transformer, variables


class Cache(NamedTuple):
  """Keys, values and hidden states of earlier tokens, for B texts; or for one text, in both of two rows."""

  keys: tuple[jax.Array, ...]  # by block, [B, G, S, K]
  values: tuple[jax.Array, ...]
  entering: Mapping[int, jax.Array]  # {block: hidden state that enters it, [B, S, D]}


Blocks = tuple[int, ...]
EMPTY = Cache((), (), {})


class SamplingParams(NamedTuple):
  """Sampling parameters of each of B texts."""

  seed: jax.Array  # [B] uint32: the token at position n is drawn by (seed, n), whatever the batch and the path
  temperature: jax.Array  # [B]; 0 takes the likeliest token
  top_k: jax.Array  # [B] int32: sample among so many likeliest tokens; 0 for all
  top_p: jax.Array  # [B]: sample among the fewest likeliest tokens of this total probability


class Texts(NamedTuple):
  """B texts that grow together under one path."""

  cache: Cache
  token: jax.Array  # [B] int32: the newest, not yet in the cache
  position: jax.Array  # [B] int32: that token's, from 0; also the number of tokens in the cache
  end: jax.Array  # [B] int32: the position where the text ends
  sampling: SamplingParams


def embed(model: Transformer, params: Params, tokens_BL: jax.Array) -> jax.Array:
  """Returns the hidden state that enters block 0, [B, L, D]."""
  return jnp.asarray(model.apply(variables(params), tokens_BL, method=Transformer.embedded))


def prefill(
  model: Transformer, params: Params, x_BLD: jax.Array, length: jax.Array, first: int, below: Cache, keep: Blocks
) -> tuple[Cache, jax.Array]:
  """Computes blocks `first` and up for tokens 0 to L - 1 of each text at one time.

  Args:
    model, params: the path.
    x_BLD: hidden state that enters block `first`; from `embed`, or kept in a cache.
    length: number of the L tokens that count, int32; later ones are padding, to be overwritten.
    first: the lowest block to compute.
    below: the cache of the blocks below `first`, with S = L; EMPTY if first = 0.
    keep: blocks whose input is kept.

  Returns:
    A cache with S = L, and the logits of the next token, float32 [B, V].
  """
  keys, values = list(below.keys[:first]), list(below.values[:first])
  entering = {n: x for n, x in below.entering.items() if n < first}
  segments_BL = jnp.broadcast_to((jnp.arange(x_BLD.shape[1]) < length).astype(jnp.int32), x_BLD.shape[:2])
  angles = rotary.angles(jnp.arange(x_BLD.shape[1])[None], model.config)
  for n in range(first, model.config.num_layers):
    if n in keep:
      entering[n] = x_BLD
    block = _block(model, params, n)
    q_BLHK, k_BLGK, v_BLGK = block('qkv', x_BLD, angles)
    x_BLD = block('out', x_BLD, block('attend', q_BLHK, k_BLGK, v_BLGK, segments_BL))
    keys.append(k_BLGK.swapaxes(1, 2))
    values.append(v_BLGK.swapaxes(1, 2))
  last_B1D = jax.lax.dynamic_slice_in_dim(x_BLD, length - 1, 1, axis=1)
  return Cache(tuple(keys), tuple(values), entering), _logits(model, params, last_B1D)


def step(model: Transformer, params: Params, texts: Texts) -> tuple[Cache, jax.Array]:
  """Returns the cache with each text's newest token, and the logits of the next token, float32 [B, V]."""
  cache, position_B, B = texts.cache, texts.position, len(texts.token)
  keys, values, entering, rows = [], [], dict(cache.entering), functools.partial(_rows, len(texts.cache.keys[0]))
  x_B1D = embed(model, params, texts.token[:, None])
  angles = rotary.angles(position_B[:, None], model.config)
  for n in range(model.config.num_layers):
    if n in entering:
      entering[n] = _put(entering[n], rows(x_B1D), rows(position_B))
    block = _block(model, params, n)
    q_B1HK, k_B1GK, v_B1GK = block('qkv', x_B1D, angles)
    keys.append(_put_heads(cache.keys[n], rows(k_B1GK.swapaxes(1, 2)), rows(position_B)))
    values.append(_put_heads(cache.values[n], rows(v_B1GK.swapaxes(1, 2)), rows(position_B)))
    seen = keys[n], values[n], rows(position_B), block('scores')
    x_B1D = block('out', x_B1D, attention.attend_to_cache(rows(q_B1HK), *seen)[:B])
  return Cache(tuple(keys), tuple(values), entering), _logits(model, params, x_B1D)


def sample(logits_BV: jax.Array, sampling: SamplingParams, position_B: jax.Array) -> jax.Array:
  """Draws the token at `position` of each text, [B] int32.

  p_v = softmax_v(logits / temperature) over the tokens that top_k and top_p leave; the likeliest at temperature 0
  """
  likeliest_B, is_random_B = logits_BV.argmax(-1).astype(jnp.int32), sampling.temperature > 0
  draw = functools.partial(jax.vmap(_sample_one), logits_BV, sampling, position_B)
  drawn_B = jax.lax.cond(is_random_B.any(), draw, lambda: likeliest_B)
  return jnp.where(is_random_B, drawn_B, likeliest_B)


def _sample_one(logits_V: jax.Array, sampling: SamplingParams, position: jax.Array) -> jax.Array:
  scaled_V = logits_V / jnp.maximum(sampling.temperature, 1e-6)
  falling_V = jnp.sort(scaled_V, descending=True)
  p_V = jax.nn.softmax(falling_V)
  before_V = jnp.cumsum(p_V) - p_V  # probability of the likelier tokens
  ranks_V = jnp.arange(len(logits_V))
  kept_V = (before_V < sampling.top_p) & ((sampling.top_k == 0) | (ranks_V < sampling.top_k)) | (ranks_V == 0)
  least = jnp.min(jnp.where(kept_V, falling_V, jnp.inf))
  key = jax.random.fold_in(jax.random.key(sampling.seed), position)
  return jax.random.categorical(key, jnp.where(scaled_V >= least, scaled_V, -jnp.inf)).astype(jnp.int32)


def advance(model: Transformer, params: Params, texts: Texts, num_steps: int) -> tuple[Texts, jax.Array]:
  """Adds `num_steps` tokens to each text, or fewer up to its end: returns the texts and the tokens [num_steps, B].

  A text that has ended repeats its last token.
  """

  def add_token(texts: Texts, _: None) -> tuple[Texts, jax.Array]:
    cache, logits_BV = step(model, params, texts)
    going_B = texts.position + 1 < texts.end
    token_B = jnp.where(going_B, sample(logits_BV, texts.sampling, texts.position + 1), texts.token)
    texts = texts._replace(cache=cache, token=token_B, position=texts.position + going_B)
    return texts, token_B

  return jax.lax.scan(add_token, texts, length=num_steps)


def resize(cache: Cache, num_positions: int) -> Cache:
  """Returns a cache of so many positions: the first ones, or all and then some of 0."""

  def one(x: jax.Array, axis: int) -> jax.Array:
    more = num_positions - x.shape[axis]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, more if i == axis else 0, 0) for i in range(x.ndim)])

  keys, values = (tuple(one(x, 2) for x in blocks) for blocks in (cache.keys, cache.values))
  return Cache(keys, values, {n: one(x, 1) for n, x in cache.entering.items()})


def _block(model: Transformer, params: Params, n: int) -> Callable[..., Any]:
  """Returns a function that calls a method of block n: (name, arguments...)."""
  prefix = f'block_{n}/'
  found = variables({name.removeprefix(prefix): x for name, x in params.items() if name.startswith(prefix)})
  block = Block(model.config, model.dtype, layer(model.config, n), parent=None)
  return lambda method, *args: block.apply(found, *args, method=method)


def _logits(model: Transformer, params: Params, x_B1D: jax.Array) -> jax.Array:
  x_B1D, head_DV = model.apply(variables(params), x_B1D, method=Transformer.norm_and_head)
  return jnp.einsum('BLD,DV->BLV', x_B1D, head_DV, preferred_element_type=jnp.float32)[:, 0]


def _rows(count: int, x: jax.Array) -> jax.Array:
  """Repeats a single row to the number of rows in the cache."""
  return jnp.broadcast_to(x, (count, *x.shape[1:]))


# (x [B, S, D] or [B, G, S, K], new [B, 1, D] or [B, G, 1, K], position [B]) -> x with `new` at the position
_put, _put_heads = (jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=i)) for i in (0, 1))
