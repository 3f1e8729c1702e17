"""A block of a path: attention, then an MLP or a mixture of experts; or a user-defined block (`config.model.block`).

A block is a Flax module that is called in two ways, and returns the hidden state and its cache, any pytree of arrays:

    block(x_BLD, positions_BL, segments_BL)           whole rows; the cache is of their tokens
    block(x_B1D, positions_B1, segments_B1, cache)    one more token of each text, and the cache with it

In the first, tokens of a segment number their positions from 0 and see no other segment; segment 0 is padding. Arrays
of a cache are [B, ...], and grow with L along one dimension at most. Those that do have S positions later, of which a
text's first ones are its own; others are a state after the newest token, as of a recurrence.

Dimensions: B batch, L length, D width, H heads, G heads of keys and values, K head size.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from dipaco_jax.config import extension, settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.models import attention, experts, rotary
from dipaco_jax.models.layers import MLP, Layer, RMSNorm, is_wide, layer, make_norm, scaled_normal
from dipaco_jax.models.products import product

NAME = 'model.block'  # the field


class Attention(nn.Module):
  """Projections before and after attention."""

  config: settings.Model
  layer: Layer

  def setup(self) -> None:
    c, D = self.config, self.config.width
    heads = {'q': c.num_heads, 'k': c.num_kv_heads or c.num_heads, 'v': c.num_kv_heads or c.num_heads}
    self.q, self.k, self.v = (self.param(n, scaled_normal(1, D), (D, heads[n], c.head_dim)) for n in 'qkv')
    residual = 1 / math.sqrt(2 * c.num_layers)
    self.o = self.param('o', scaled_normal(residual, c.num_heads * c.head_dim), (c.num_heads, c.head_dim, D))
    bias = nn.initializers.zeros
    self.biases = [self.param(f'{n}_bias', bias, (heads[n] * c.head_dim,)) for n in 'qkv' if c.qkv_bias]
    if c.qk_norm != 'none':
      self.q_norm, self.k_norm = make_norm(c), make_norm(c)

  def __call__(
    self, x_BLD: jax.Array, positions_BL: jax.Array, segments_BL: jax.Array, cache: Any
  ) -> tuple[jax.Array, attention.Cache]:
    c = self.config
    angles = rotary.looked_up if cache is None and is_wide(c) else rotary.angles
    q_BLHK, k_BLGK, v_BLGK = self.qkv(x_BLD, angles(positions_BL, c))
    scores = attention.Scores(self.layer.window, c.query_scale, c.attention_cap)
    attended_BLHK, cache = attention.attend_cached(
      q_BLHK, k_BLGK, v_BLGK, positions_BL, segments_BL, cache, c.attention, scores
    )
    return product('BLHK,HKD->BLD', attended_BLHK, self.o, is_wide(c)), cache

  def qkv(self, x_BLD: jax.Array, angles: rotary.Angles) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries, keys and values, [B, L, H or G, K] each, the first two normed and turned."""
    wide = is_wide(self.config)
    projected = [product('BLD,DHK->BLHK', x_BLD, w_DHK, wide) for w_DHK in (self.q, self.k, self.v)]
    for i, bias in enumerate(self.biases):
      projected[i] += bias.astype(self.config.dtype).reshape(projected[i].shape[2:])
    q_BLHK, k_BLGK, v_BLGK = projected
    if self.config.qk_norm != 'none':
      q_BLHK, k_BLGK = self._normed(self.q_norm, q_BLHK), self._normed(self.k_norm, k_BLGK)
    if self.layer.turns:
      turn = (angles.local, 1.0) if self.layer.has_local_base else (angles.common, rotary.gain(self.config))
      q_BLHK, k_BLGK = rotary.rotate(q_BLHK, *turn), rotary.rotate(k_BLGK, *turn)
    return q_BLHK, k_BLGK, v_BLGK

  def _normed(self, norm: RMSNorm, x_BLHK: jax.Array) -> jax.Array:
    """Returns the norm of each head, or of all heads together."""
    if self.config.qk_norm == 'head':
      return norm(x_BLHK)
    return norm(x_BLHK.reshape(*x_BLHK.shape[:2], -1)).reshape(x_BLHK.shape)


class Block(nn.Module):
  """x + attention(norm(x)), causal and never crossing a segment; then x + mlp(norm(x)).

  With `norms` 'after' it is x + norm(attention(x)), with 'both' x + norm(attention(norm(x))); the MLP likewise.
  """

  config: settings.Model
  layer: Layer

  def setup(self) -> None:
    c = self.config
    if c.norms != 'after':
      self.attention_norm, self.mlp_norm = make_norm(c), make_norm(c)
    if c.norms != 'before':
      self.attention_post_norm, self.mlp_post_norm = make_norm(c), make_norm(c)
    self.attention = Attention(c, self.layer)
    self.mlp: Any = experts.Mixture(c) if c.num_experts else MLP(c)

  def __call__(
    self, x_BLD: jax.Array, positions_BL: jax.Array, segments_BL: jax.Array, cache: Any = None
  ) -> tuple[jax.Array, attention.Cache]:
    norms = self.config.norms
    normed_BLD = x_BLD if norms == 'after' else self.attention_norm(x_BLD)
    added_BLD, cache = self.attention(normed_BLD, positions_BL, segments_BL, cache)
    x_BLD = x_BLD + (added_BLD if norms == 'before' else self.attention_post_norm(added_BLD))
    normed_BLD = x_BLD if norms == 'after' else self.mlp_norm(x_BLD)
    added_BLD = self.mlp(normed_BLD, segments_BL) if self.config.num_experts else self.mlp(normed_BLD)
    return x_BLD + (added_BLD if norms == 'before' else self.mlp_post_norm(added_BLD)), cache


def make(config: settings.Model, n: int) -> Block:
  """Makes block n."""
  return Block(config, layer(config, n))


@functools.lru_cache
def blocks(config: settings.Model) -> tuple[nn.Module, ...]:
  """Makes the blocks of a model, unbound; raises InputError if the user's cannot be made."""
  own, numbers = config.block, range(config.num_layers)
  new_blocks = [extension.make(NAME, own, config, n) if own else make(config, n) for n in numbers]
  if not all(isinstance(block, nn.Module) for block in new_blocks):
    raise InputError(f'config.{NAME}={own!r} should return a module of Flax, flax.linen.Module')
  return tuple(block.clone(parent=None, name=None) for block in new_blocks)


def period(config: settings.Model) -> int:
  """Returns the number of blocks after which they repeat."""
  all_blocks = blocks(config)
  with blaming(config):
    return next(p for p in range(1, len(all_blocks) + 1) if all_blocks[p:] == all_blocks[:-p])


def call(
  config: settings.Model,
  block: Callable[..., Any],
  x_BLD: jax.Array,
  positions_BL: jax.Array,
  segments_BL: jax.Array,
  cache: Any = None,
) -> tuple[jax.Array, Any]:
  """Calls a block; raises InputError if the user's fails, or returns something else than it should."""
  with blaming(config):
    outputs = block(x_BLD, positions_BL, segments_BL, cache)
  if config.block:
    _check(config, outputs, x_BLD, cache)
  return outputs


def blaming(config: settings.Model) -> contextlib.AbstractContextManager[None]:
  """Names the config field in errors that the user's block raises."""
  return extension.blaming(NAME, config.block) if config.block else contextlib.nullcontext()


def _check(config: settings.Model, outputs: Any, x_BLD: jax.Array, cache: Any) -> None:
  requirement = f'config.{NAME}={config.block!r} should return the hidden state and a cache'
  if not isinstance(outputs, tuple) or len(outputs) != 2:
    raise InputError(f'{requirement}, not {type(outputs).__name__}')
  if (got := _described(outputs[0])) != (expected := _described(x_BLD)):
    raise InputError(f'{requirement}, the former {expected} as it was given, not {got}')
  if cache is not None and (got := _described(outputs[1])) != (expected := _described(cache)):
    raise InputError(f'{requirement}, the latter {expected} as it was given, not {got}')


def _described(tree: Any) -> str:
  """Returns a description of the structure, shapes and dtypes of arrays."""
  described = jax.tree.map(lambda x: f'{jnp.result_type(x)}{[*jnp.shape(x)]}', tree)
  return str(described).replace("'", '')
