"""Decoding of one path token by token: the key-value cache, and sampling of the next token. Pure.

The state that a block keeps of a token, such as keys and values, depends only on this and earlier tokens, and is
computed once [arXiv 1911.02150].
If the path may change [2.4.3], the hidden states that enter some blocks are kept too. If two paths first differ in
block n, then all below n is the same, and computing blocks n and up once for all tokens turns the cache of one path
into that of the other.

Dimensions: B texts, L tokens given at one time, S positions in a cache, D width, V vocabulary.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from dipaco_jax.core.errors import InputError
from dipaco_jax.models import attention, block as block_lib
from dipaco_jax.models.transformer import Params, Transformer, variables


class Cache(NamedTuple):
  """Caches of the blocks for the earlier tokens of B texts."""

  blocks: tuple[Any, ...]  # by block, its own cache, see `block`
  entering: Mapping[int, jax.Array]  # {block: hidden state that enters it, [B, S, D]}


Blocks = tuple[int, ...]
EMPTY = Cache((), {})


class Entry(NamedTuple):
  """Where the computation of a prompt begins."""

  x_BLD: jax.Array  # hidden state that enters `block`; from `embed`, or kept in a cache
  block: int = 0  # the lowest block to compute
  below: Cache = EMPTY  # the cache of the blocks below, with S = L


class SamplingParams(NamedTuple):
  """Sampling parameters of each of B texts."""

  seed: jax.Array  # [B] uint32: the token at position n is drawn by (seed, n), independent of batch and path
  temperature: jax.Array  # [B]; 0 takes the likeliest token
  top_k: jax.Array  # [B] int32: number of most likely tokens to sample from; 0 means all
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
  model: Transformer, params: Params, entry: Entry, length: jax.Array, keep: Blocks
) -> tuple[Cache, jax.Array]:
  """Computes blocks `entry.block` and up for tokens 0 to L - 1 of each text at one time.

  Args:
    model, params: the path.
    entry: the lowest block to compute, and what is known below it.
    length: number of the L tokens that count, int32; later ones are padding, to be overwritten.
    keep: blocks whose input is kept.

  Returns:
    A cache with S = L, and the logits of the next token, float32 [B, V].
  """
  x_BLD, first, below = entry
  blocks = [*below.blocks[:first]]
  entering = {n: x for n, x in below.entering.items() if n < first}
  index_BL = jnp.broadcast_to(jnp.arange(x_BLD.shape[1]), x_BLD.shape[:2])
  for n in range(first, model.config.num_layers):
    if n in keep:
      entering[n] = x_BLD
    x_BLD, cache = _call(model, params, n, x_BLD, index_BL, (index_BL < length).astype(jnp.int32))
    blocks.append(cache)
  last_B1D = jax.lax.dynamic_slice_in_dim(x_BLD, length - 1, 1, axis=1)
  return Cache(tuple(blocks), entering), _logits(model, params, last_B1D)


def step(model: Transformer, params: Params, texts: Texts) -> tuple[Cache, jax.Array]:
  """Returns the cache with each text's newest token, and the logits of the next token, float32 [B, V]."""
  cache, position_B = texts.cache, texts.position
  blocks, entering = [], dict(cache.entering)
  x_B1D = embed(model, params, texts.token[:, None])
  for n, below in enumerate(cache.blocks):
    if n in entering:
      entering[n] = attention.put(entering[n], x_B1D, position_B)
    place_B1 = position_B[:, None]
    x_B1D, own = _call(model, params, n, x_B1D, place_B1, jnp.ones_like(place_B1), below)
    blocks.append(own)
  return Cache(tuple(blocks), entering), _logits(model, params, x_B1D)


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
    cache = _of_going(model, texts.cache, cache, going_B)
    token_B = jnp.where(going_B, sample(logits_BV, texts.sampling, texts.position + 1), texts.token)
    texts = texts._replace(cache=cache, token=token_B, position=texts.position + going_B)
    return texts, token_B

  return jax.lax.scan(add_token, texts, length=num_steps)


@functools.lru_cache
def position_axes(model: Transformer) -> tuple[Any, ...]:
  """Returns, by block, along which dimension the arrays of its cache have positions; 0 if one has none.

  Raises InputError if a block's cache is not as it should be.
  """
  period = block_lib.period(model.config)
  axes = [_axes_of(model, block) for block in block_lib.blocks(model.config)[:period]]
  return tuple(axes[n % period] for n in range(model.config.num_layers))


def _axes_of(model: Transformer, block: nn.Module) -> Any:
  B, field = 3, f'config.{block_lib.NAME}={model.config.block!r}'

  def run(*args: Any) -> Any:
    return block.init_with_output(jax.random.key(0), *args)[0]

  def of_length(L: int) -> Any:
    x_BLD, ids_BL = jnp.zeros((B, L, model.config.width), model.dtype), jnp.ones((B, L), jnp.int32)
    return block_lib.call(model.config, run, x_BLD, ids_BL, ids_BL)[1]

  def axis(short: Any, long: Any) -> int:
    dims = [i for i in range(1, short.ndim) if short.shape[i] != long.shape[i]]
    if short.shape[:1] != (B,) or long.ndim != short.ndim or len(dims) > 1:
      requirement = (
        f'B texts in front and L tokens along one dimension at most: with B={B}, L=8 one is {[*short.shape]}'
      )
      raise InputError(f'{field}: arrays of its cache should have {requirement}')
    return dims[0] if dims else 0

  return jax.tree.map(axis, *(jax.eval_shape(functools.partial(of_length, L)) for L in (8, 16)))


def _of_going(model: Transformer, old: Cache, new: Cache, going_B: jax.Array) -> Cache:
  """Returns the new cache; texts that have ended keep their states, as their last token is read again."""

  def one(axis: int, before: jax.Array, after: jax.Array) -> jax.Array:
    return after if axis else jnp.where(going_B.reshape(-1, *[1] * (after.ndim - 1)), after, before)

  return new._replace(blocks=jax.tree.map(one, position_axes(model), old.blocks, new.blocks))


def capacity(model: Transformer, cache: Cache) -> int:
  """Returns S, the positions in a cache; 0 if it has no such arrays."""
  sizes = jax.tree.map(lambda axis, x: x.shape[axis] if axis else 0, position_axes(model), cache.blocks)
  return max([*jax.tree.leaves(sizes), *(x.shape[1] for x in cache.entering.values())], default=0)


def resize(model: Transformer, cache: Cache, num_positions: int) -> Cache:
  """Returns a cache with a number of positions: the first ones, or all, padded with zeros."""

  def one(axis: int, x: jax.Array) -> jax.Array:
    more = num_positions - x.shape[axis] if axis else 0
    return jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, more if i == axis else 0, 0) for i in range(x.ndim)])

  blocks = jax.tree.map(one, position_axes(model), cache.blocks)
  return Cache(blocks, {n: one(1, x) for n, x in cache.entering.items()})


def _call(model: Transformer, params: Params, n: int, *args: Any) -> tuple[jax.Array, Any]:
  """Calls block n: (x, positions, segments[, cache])."""
  prefix = f'block_{n}/'
  block_params = variables({name.removeprefix(prefix): x for name, x in params.items() if name.startswith(prefix)})
  block = block_lib.blocks(model.config)[n]
  return block_lib.call(model.config, functools.partial(block.apply, block_params), *args)


def _logits(model: Transformer, params: Params, x_B1D: jax.Array) -> jax.Array:
  x_B1D, head_DV = model.apply(variables(params), x_B1D, method=Transformer.norm_and_head)
  return jnp.einsum('BLD,DV->BLV', x_B1D, head_DV, preferred_element_type=jnp.float32)[:, 0]
