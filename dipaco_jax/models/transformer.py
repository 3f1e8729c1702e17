"""The transformer of a path: decoder-only, in Llama's shape, so that any Llama engine can load a trained path.

RMSNorm, rotary embedding, SwiGLU, no biases, tied or untied head. Parameters are float32, computation is in `dtype`.
The patterns of levels match the parameters' names, which are stable:

    embed/tokens                 [V, D]
    block_<n>/attention_norm/scale [D]     block_<n>/attention/{q,k,v} [D, H, K]     block_<n>/attention/o [H, K, D]
    block_<n>/mlp_norm/scale     [D]       block_<n>/mlp/{gate,up}     [D, F]        block_<n>/mlp/down    [F, D]
    final_norm/scale             [D]       head/kernel                 [D, V] (untied only)

Dimensions: B batch, L length, D width, H heads, K head size, F MLP width, V vocabulary, N layers.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn, traverse_util

from dipaco_jax.core import settings
from dipaco_jax.models import attention, flash

Params = dict[str, jax.Array]  # flat: name to array


def scaled_normal(scale: float, fan_in: int) -> nn.initializers.Initializer:
  """Returns a normal initializer of standard deviation scale / sqrt(fan_in)."""
  return nn.initializers.normal(scale / math.sqrt(fan_in))


class RMSNorm(nn.Module):
  """x / sqrt(mean(x^2) + epsilon) * scale, in float32."""

  epsilon: float

  @nn.compact
  def __call__(self, x_BLD: jax.Array) -> jax.Array:
    scale_D = self.param('scale', nn.initializers.ones, (x_BLD.shape[-1],))
    x32_BLD = x_BLD.astype(jnp.float32)
    inverse_BL1 = jax.lax.rsqrt(jnp.mean(x32_BLD**2, -1, keepdims=True) + self.epsilon)
    return (x32_BLD * inverse_BL1 * scale_D).astype(x_BLD.dtype)


def positions(segments_BL: jax.Array) -> jax.Array:
  """Returns the position of every token in its own segment, from 0: [B, L]."""
  return jax.lax.broadcasted_iota(jnp.int32, segments_BL.shape, 1) - flash.segment_starts(segments_BL)


def rotate(x_BLHK: jax.Array, angles_BLK2: jax.Array) -> jax.Array:
  """Applies the rotary embedding (arXiv 2104.09864) in Llama's layout: it rotates dimensions i and i + K/2 together."""
  sin_BL1K2, cos_BL1K2 = jnp.sin(angles_BLK2)[:, :, None], jnp.cos(angles_BLK2)[:, :, None]
  a_BLHK2, b_BLHK2 = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
  turned = (a_BLHK2 * cos_BL1K2 - b_BLHK2 * sin_BL1K2, b_BLHK2 * cos_BL1K2 + a_BLHK2 * sin_BL1K2)
  return jnp.concatenate(turned, -1).astype(x_BLHK.dtype)


def rotary_angles(positions_BL: jax.Array, head_dim: int, base: float) -> jax.Array:
  """Returns position * base^(-2i/K) for i in [0, K/2): float32 [B, L, K/2]."""
  inverse_K2 = base ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
  return positions_BL[..., None].astype(jnp.float32) * inverse_K2


class Attention(nn.Module):
  """Projections before and after attention; between them stands `attention.attend` or a cache."""

  config: settings.Model
  dtype: jnp.dtype

  def setup(self) -> None:
    c, D = self.config, self.config.width
    self.q, self.k, self.v = (self.param(n, scaled_normal(1, D), (D, c.num_heads, c.head_dim)) for n in 'qkv')
    residual = 1 / math.sqrt(2 * c.num_layers)
    self.o = self.param('o', scaled_normal(residual, c.num_heads * c.head_dim), (c.num_heads, c.head_dim, D))

  def qkv(self, x_BLD: jax.Array, angles_BLK2: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries, keys and values, [B, L, H, K] each, the first two with rotary embedding."""
    weights = (w.astype(self.dtype) for w in (self.q, self.k, self.v))
    q_BLHK, k_BLHK, v_BLHK = (jnp.einsum('BLD,DHK->BLHK', x_BLD, w_DHK) for w_DHK in weights)
    return rotate(q_BLHK, angles_BLK2), rotate(k_BLHK, angles_BLK2), v_BLHK

  def out(self, attended_BLHK: jax.Array) -> jax.Array:
    """Returns the output projection, [B, L, D]."""
    return jnp.einsum('BLHK,HKD->BLD', attended_BLHK, self.o.astype(self.dtype))


class MLP(nn.Module):
  """SwiGLU: (silu(x gate) * (x up)) down (arXiv 2002.05202)."""

  config: settings.Model
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x_BLD: jax.Array) -> jax.Array:
    c, D, F = self.config, self.config.width, self.config.mlp_dim
    gate_DF, up_DF = (self.param(name, scaled_normal(1, D), (D, F)).astype(self.dtype) for name in ('gate', 'up'))
    down_FD = self.param('down', scaled_normal(1 / math.sqrt(2 * c.num_layers), F), (F, D)).astype(self.dtype)
    h_BLF = nn.silu(jnp.einsum('BLD,DF->BLF', x_BLD, gate_DF)) * jnp.einsum('BLD,DF->BLF', x_BLD, up_DF)
    return jnp.einsum('BLF,FD->BLD', h_BLF, down_FD)


class Block(nn.Module):
  """x + attention(norm(x)), causal and never crossing a segment; then x + mlp(norm(x))."""

  config: settings.Model
  dtype: jnp.dtype

  def setup(self) -> None:
    c = self.config
    self.attention_norm, self.attention = RMSNorm(c.norm_epsilon), Attention(c, self.dtype)
    self.mlp_norm, self.mlp = RMSNorm(c.norm_epsilon), MLP(c, self.dtype)

  def __call__(self, x_BLD: jax.Array, angles_BLK2: jax.Array, segments_BL: jax.Array) -> jax.Array:
    q_BLHK, k_BLHK, v_BLHK = self.qkv(x_BLD, angles_BLK2)
    return self.out(x_BLD, attention.attend(q_BLHK, k_BLHK, v_BLHK, segments_BL, self.config.attention))

  def qkv(self, x_BLD: jax.Array, angles_BLK2: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries, keys and values, [B, L, H, K] each."""
    return self.attention.qkv(self.attention_norm(x_BLD), angles_BLK2)

  def out(self, x_BLD: jax.Array, attended_BLHK: jax.Array) -> jax.Array:
    """Returns the hidden state after the block, [B, L, D]."""
    x_BLD = x_BLD + self.attention.out(attended_BLHK)
    return x_BLD + self.mlp(self.mlp_norm(x_BLD))


REMAT_POLICIES = {
  'full': jax.checkpoint_policies.nothing_saveable,
  'dots': jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(flash.RESIDUALS),
  ),
}


class Transformer(nn.Module):
  """Maps tokens to the hidden state after the last block, from which features [2.4] and logits are computed."""

  config: settings.Model
  vocab_size: int
  dtype: jnp.dtype

  def setup(self) -> None:
    c = self.config
    block = nn.remat(Block, policy=REMAT_POLICIES[c.remat]) if c.remat in REMAT_POLICIES else Block
    self.embed = Embedding(self.vocab_size, c.width, self.dtype)
    self.blocks = [block(c, self.dtype, name=f'block_{n}') for n in range(c.num_layers)]
    self.final_norm = RMSNorm(c.norm_epsilon)
    self.head = None if c.tied else Head(self.vocab_size, c.width)

  def __call__(self, tokens_BL: jax.Array, segments_BL: jax.Array) -> jax.Array:
    """Returns x_BLD, before the final norm; `segments` number a row's packed sequences from 1, and 0 is padding."""
    angles_BLK2 = rotary_angles(positions(segments_BL), self.config.head_dim, self.config.rope_base)
    x_BLD = self.embed(tokens_BL)
    if self.config.layers == 'scanned' and not self.is_initializing():
      return self._scanned(x_BLD, angles_BLK2, segments_BL)
    for block in self.blocks:
      x_BLD = block(x_BLD, angles_BLK2, segments_BL)
    return x_BLD

  def _scanned(self, x_BLD: jax.Array, angles_BLK2: jax.Array, segments_BL: jax.Array) -> jax.Array:
    """Scans one block over stacked matrices, which compiles N times faster than N blocks but copies the matrices."""
    c, block = self.config, Block(self.config, self.dtype, parent=None)
    params = (self.variables['params'][f'block_{n}'] for n in range(c.num_layers))
    stacked = jax.tree.map(lambda *xs: jnp.stack([x.astype(self.dtype) if x.ndim > 1 else x for x in xs]), *params)

    def one(x_BLD: jax.Array, params: Any) -> tuple[Any, None]:
      return block.apply({'params': params}, x_BLD, angles_BLK2, segments_BL), None

    if c.remat in REMAT_POLICIES:
      one = jax.checkpoint(one, policy=REMAT_POLICIES[c.remat], prevent_cse=False)  # a scan's body is compiled alone
    return jax.lax.scan(one, x_BLD, stacked)[0]

  def logit_factors(self, tokens_BL: jax.Array, segments_BL: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the factors of the logits: the normed hidden state [B, L, D] and the head [D, V], in compute dtype."""
    return self.norm_and_head(self(tokens_BL, segments_BL))

  def norm_and_head(self, x_BLD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the factors of the logits, from the hidden state after the last block."""
    x_BLD = self.final_norm(x_BLD)
    head_DV = self.embed.tokens.T if self.head is None else self.head.kernel
    return x_BLD, head_DV.astype(self.dtype)


class Embedding(nn.Module):
  """A [V, D] table of embeddings."""

  vocab_size: int
  width: int
  dtype: jnp.dtype

  def setup(self) -> None:
    self.tokens = self.param('tokens', scaled_normal(1, self.width), (self.vocab_size, self.width))

  def __call__(self, tokens_BL: jax.Array) -> jax.Array:
    return jnp.take(self.tokens, tokens_BL, axis=0).astype(self.dtype)


class Head(nn.Module):
  """The [D, V] matrix of an untied head."""

  vocab_size: int
  width: int

  def setup(self) -> None:
    self.kernel = self.param('kernel', scaled_normal(1, self.width), (self.width, self.vocab_size))


def make_model(config: settings.Model, vocab_size: int) -> Transformer:
  """Makes the model; settings that are 'auto' are chosen by the device at hand."""
  config = for_device(config, jax.default_backend())
  return Transformer(config, vocab_size, jnp.dtype(config.dtype))


def for_device(config: settings.Model, platform: str) -> settings.Model:
  """Replaces 'auto' in a config by what it means on 'cpu', 'tpu' or the 'gpu' at hand."""
  dtype = 'float32' if platform == 'cpu' else 'bfloat16'
  kernel = 'splash' if platform == 'tpu' else 'flash' if platform == 'gpu' and flash.runs_here() else 'xla'
  layers = 'scanned' if platform == 'tpu' else 'unrolled'
  chosen = {'dtype': dtype, 'attention': kernel, 'layers': layers}
  unset: Any = {name: x for name, x in chosen.items() if getattr(config, name) == 'auto'}
  return dataclasses.replace(config, **unset)


def init(model: Transformer, key: jax.Array) -> Params:
  """Returns fresh parameters, flat and in the order of their names."""
  blank = jnp.zeros((1, 8), jnp.int32)
  nested = jax.jit(functools.partial(model.init, method=Transformer.logit_factors))(key, blank, blank)['params']
  return dict(sorted(traverse_util.flatten_dict(nested, sep='/').items()))


def shapes(model: Transformer) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the shapes and dtypes of the parameters, without computing them."""
  return jax.eval_shape(lambda: init(model, jax.random.key(0)))


def variables(params: Params) -> Any:
  """Nests flat parameters into the variables that Flax's `apply` takes."""
  return {'params': traverse_util.unflatten_dict(params, sep='/')}


def hidden(model: Transformer, params: Params, tokens_BL: jax.Array, segments_BL: jax.Array) -> jax.Array:
  """Returns the hidden state after the last block, [B, L, D]."""
  return jnp.asarray(model.apply(variables(params), tokens_BL, segments_BL))


def logit_factors(model: Transformer, params: Params, tokens_BL: jax.Array, segments_BL: jax.Array) -> Any:
  """Returns the normed hidden state [B, L, D] and the head [D, V], whose product is the logits."""
  return model.apply(variables(params), tokens_BL, segments_BL, method=Transformer.logit_factors)


def features(model: Transformer, params: Params, tokens_BL: jax.Array) -> jax.Array:
  """Returns z = g(x), the mean of the last block's output over the tokens given, the prefix's [2.4]: float32 [B, D]."""
  return hidden(model, params, tokens_BL, jnp.ones_like(tokens_BL)).astype(jnp.float32).mean(axis=1)
