"""The transformer of a path: decoder-only, in the shapes of the families that engines know (`huggingface/families`).

RMSNorm, rotary embedding, a gated MLP, tied or untied head. Parameters are float32, computation is in `dtype`. The
patterns of levels match the parameters' names, which are stable:

    embed/tokens                   [V, D]
    block_<n>/attention_norm/scale [D]     block_<n>/attention/q       [D, H, K]     block_<n>/attention/{k,v} [D, G, K]
    block_<n>/mlp_norm/scale       [D]     block_<n>/attention/o       [H, K, D]
    final_norm/scale               [D]     block_<n>/mlp/{gate,up}     [D, F]        block_<n>/mlp/down        [F, D]
    head/kernel                    [D, V]  of an untied head

and, where the config has them, in a block

    attention/{q,k,v}_bias         [H K] or [G K]      attention_post_norm/scale   mlp_post_norm/scale   [D]
    attention/{q,k}_norm/scale     [K], or [H K] and [G K]

Dimensions: B batch, L length, D width, H heads, G heads of keys and values, K head size, F MLP width, V vocabulary,
N layers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn, traverse_util

from dipaco_jax.core import settings
from dipaco_jax.models import attention, flash, rotary
from dipaco_jax.models.layers import Layer, layer, period

Params = dict[str, jax.Array]  # flat: name to array


def scaled_normal(scale: float, fan_in: int) -> nn.initializers.Initializer:
  """Returns a normal initializer of standard deviation scale / sqrt(fan_in)."""
  return nn.initializers.normal(scale / math.sqrt(fan_in))


class RMSNorm(nn.Module):
  """x / sqrt(mean(x^2) + epsilon) * scale, in float32, over the last dimension; or * (1 + scale)."""

  epsilon: float
  from_one: bool = False

  @nn.compact
  def __call__(self, x_BLD: jax.Array) -> jax.Array:
    fresh = nn.initializers.zeros if self.from_one else nn.initializers.ones
    scale_D = self.param('scale', fresh, (x_BLD.shape[-1],))
    x32_BLD = x_BLD.astype(jnp.float32)
    inverse_BL1 = jax.lax.rsqrt(jnp.mean(x32_BLD**2, -1, keepdims=True) + self.epsilon)
    return (x32_BLD * inverse_BL1 * (1 + scale_D if self.from_one else scale_D)).astype(x_BLD.dtype)


def make_norm(c: settings.Model) -> RMSNorm:
  """Returns a norm of the kind that a model has everywhere."""
  return RMSNorm(c.norm_epsilon, c.norm_from_one)


def positions(segments_BL: jax.Array) -> jax.Array:
  """Returns the position of every token in its own segment, from 0: [B, L]."""
  return jax.lax.broadcasted_iota(jnp.int32, segments_BL.shape, 1) - flash.segment_starts(segments_BL)


class Attention(nn.Module):
  """Projections before and after attention; between them stands `attention.attend` or a cache."""

  config: settings.Model
  dtype: jnp.dtype
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

  def qkv(self, x_BLD: jax.Array, angles: rotary.Angles) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries, keys and values, [B, L, H or G, K] each, the first two normed and turned."""
    weights = (w.astype(self.dtype) for w in (self.q, self.k, self.v))
    found = [jnp.einsum('BLD,DHK->BLHK', x_BLD, w_DHK) for w_DHK in weights]
    for i, bias in enumerate(self.biases):
      found[i] += bias.astype(self.dtype).reshape(found[i].shape[2:])
    q_BLHK, k_BLGK, v_BLGK = found
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

  def out(self, attended_BLHK: jax.Array) -> jax.Array:
    """Returns the output projection, [B, L, D]."""
    return jnp.einsum('BLHK,HKD->BLD', attended_BLHK, self.o.astype(self.dtype))


GATES: dict[str, Callable[[jax.Array], jax.Array]] = {
  'silu': nn.silu,
  'gelu': functools.partial(nn.gelu, approximate=True),
}


class MLP(nn.Module):
  """SwiGLU: (silu(x gate) * (x up)) down; or with gelu (arXiv 2002.05202)."""

  config: settings.Model
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x_BLD: jax.Array) -> jax.Array:
    c, D, F = self.config, self.config.width, self.config.mlp_dim
    gate_DF, up_DF = (self.param(name, scaled_normal(1, D), (D, F)).astype(self.dtype) for name in ('gate', 'up'))
    down_FD = self.param('down', scaled_normal(1 / math.sqrt(2 * c.num_layers), F), (F, D)).astype(self.dtype)
    gate_BLF = GATES[c.activation](jnp.einsum('BLD,DF->BLF', x_BLD, gate_DF))
    return jnp.einsum('BLF,FD->BLD', gate_BLF * jnp.einsum('BLD,DF->BLF', x_BLD, up_DF), down_FD)


class Block(nn.Module):
  """x + attention(norm(x)), causal and never crossing a segment; then x + mlp(norm(x)).

  With `norms` 'after' it is x + norm(attention(x)), with 'both' x + norm(attention(norm(x))); the MLP likewise.
  """

  config: settings.Model
  dtype: jnp.dtype
  layer: Layer

  def setup(self) -> None:
    c = self.config
    if c.norms != 'after':
      self.attention_norm, self.mlp_norm = make_norm(c), make_norm(c)
    if c.norms != 'before':
      self.attention_post_norm, self.mlp_post_norm = make_norm(c), make_norm(c)
    self.attention, self.mlp = Attention(c, self.dtype, self.layer), MLP(c, self.dtype)

  def __call__(self, x_BLD: jax.Array, angles: rotary.Angles, segments_BL: jax.Array) -> jax.Array:
    q_BLHK, k_BLGK, v_BLGK = self.qkv(x_BLD, angles)
    return self.out(x_BLD, self.attend(q_BLHK, k_BLGK, v_BLGK, segments_BL))

  def attend(self, q_BLHK: jax.Array, k_BLGK: jax.Array, v_BLGK: jax.Array, segments_BL: jax.Array) -> jax.Array:
    """Returns attention of whole texts, [B, L, H, K]."""
    return attention.attend(q_BLHK, k_BLGK, v_BLGK, segments_BL, self.config.attention, self.scores())

  def scores(self) -> attention.Scores:
    """Returns how queries and keys of this block are scored."""
    return attention.Scores(self.layer.window, self.config.query_scale, self.config.attention_cap)

  def qkv(self, x_BLD: jax.Array, angles: rotary.Angles) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries [B, L, H, K], and keys and values, [B, L, G, K] each."""
    return self.attention.qkv(x_BLD if self.config.norms == 'after' else self.attention_norm(x_BLD), angles)

  def out(self, x_BLD: jax.Array, attended_BLHK: jax.Array) -> jax.Array:
    """Returns the hidden state after the block, [B, L, D]."""
    norms, added_BLD = self.config.norms, self.attention.out(attended_BLHK)
    x_BLD = x_BLD + (added_BLD if norms == 'before' else self.attention_post_norm(added_BLD))
    added_BLD = self.mlp(x_BLD if norms == 'after' else self.mlp_norm(x_BLD))
    return x_BLD + (added_BLD if norms == 'before' else self.mlp_post_norm(added_BLD))


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
    self.embed = Embedding(self.vocab_size, c.width, self.dtype, c.embed_scale)
    self.blocks = [block(c, self.dtype, layer(c, n), name=f'block_{n}') for n in range(c.num_layers)]
    self.final_norm = make_norm(c)
    self.head = None if c.tied else Head(self.vocab_size, c.width)

  def __call__(self, tokens_BL: jax.Array, segments_BL: jax.Array) -> jax.Array:
    """Returns x_BLD, before the final norm; `segments` number a row's packed sequences from 1, and 0 is padding."""
    angles, x_BLD = rotary.angles(positions(segments_BL), self.config), self.embed(tokens_BL)
    if self.config.layers == 'scanned' and not self.is_initializing():
      return self._scanned(x_BLD, angles, segments_BL)
    for block in self.blocks:
      x_BLD = block(x_BLD, angles, segments_BL)
    return x_BLD

  def _scanned(self, x_BLD: jax.Array, angles: rotary.Angles, segments_BL: jax.Array) -> jax.Array:
    """Scans one period of blocks over stacked matrices; what is left of the last period follows, block by block.

    That compiles as many times faster as there are periods, but copies the matrices.
    """
    c, every = self.config, period(self.config)
    params = [self.variables['params'][f'block_{n}'] for n in range(c.num_layers)]
    whole = c.num_layers // every * every

    def one(x_BLD: Any, params: Sequence[Any]) -> tuple[Any, None]:
      for n, mine in enumerate(params):
        x_BLD = Block(c, self.dtype, layer(c, n), parent=None).apply({'params': mine}, x_BLD, angles, segments_BL)
      return x_BLD, None

    if c.remat in REMAT_POLICIES:
      one = jax.checkpoint(one, policy=REMAT_POLICIES[c.remat], prevent_cse=False)  # a scan's body is compiled alone
    if whole:
      x_BLD = jax.lax.scan(one, x_BLD, [self._stacked(params[n:whole:every]) for n in range(every)])[0]
    return one(x_BLD, params[whole:])[0] if whole < c.num_layers else x_BLD

  def _stacked(self, params: Sequence[Any]) -> Any:
    """Returns the parameters of several blocks as one, matrices in compute dtype."""
    return jax.tree.map(lambda *xs: jnp.stack([x.astype(self.dtype) if x.ndim > 1 else x for x in xs]), *params)

  def embedded(self, tokens_BL: jax.Array) -> jax.Array:
    """Returns the hidden state that enters block 0, [B, L, D]."""
    return self.embed(tokens_BL)

  def logit_factors(self, tokens_BL: jax.Array, segments_BL: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the factors of the logits: the normed hidden state [B, L, D] and the head [D, V], in compute dtype."""
    return self.norm_and_head(self(tokens_BL, segments_BL))

  def norm_and_head(self, x_BLD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the factors of the logits, from the hidden state after the last block."""
    x_BLD = self.final_norm(x_BLD)
    head_DV = self.embed.tokens.T if self.head is None else self.head.kernel
    return x_BLD, head_DV.astype(self.dtype)


class Embedding(nn.Module):
  """A [V, D] table of embeddings, times sqrt(D) if it is `scaled`."""

  vocab_size: int
  width: int
  dtype: jnp.dtype
  scaled: bool

  def setup(self) -> None:
    self.tokens = self.param('tokens', scaled_normal(1, self.width), (self.vocab_size, self.width))

  def __call__(self, tokens_BL: jax.Array) -> jax.Array:
    x_BLD = jnp.take(self.tokens, tokens_BL, axis=0).astype(self.dtype)
    return x_BLD * jnp.asarray(math.sqrt(self.width), self.dtype) if self.scaled else x_BLD


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


@functools.partial(jax.jit, static_argnums=0)
def features_of_seen(model: Transformer, params: Params, tokens_BL: jax.Array, seen_BL: jax.Array) -> jax.Array:
  """Returns z of texts that may be shorter than the prefix, of tokens with `seen` 1, 0 behind them: float32 [B, D]."""
  x_BLD = hidden(model, params, tokens_BL, seen_BL).astype(jnp.float32)
  return (x_BLD * seen_BL[..., None]).sum(axis=1) / jnp.maximum(seen_BL.sum(axis=1, keepdims=True), 1)
