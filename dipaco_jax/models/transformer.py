"""The decoder-only transformer of a path, in the shapes of common model families (`huggingface/families`).

Its blocks are those of `block`, or user-defined ones. Parameters are float32, computation is in `dtype`. The patterns
of levels match the parameters' names, which are stable:

    embed/tokens                   [V, D]
    block_<n>/attention_norm/scale [D]     block_<n>/attention/q       [D, H, K]     block_<n>/attention/{k,v} [D, G, K]
    block_<n>/mlp_norm/scale       [D]     block_<n>/attention/o       [H, K, D]
    final_norm/scale               [D]     block_<n>/mlp/{gate,up}     [D, F]        block_<n>/mlp/down        [F, D]
    head/kernel                    [D, V]  of an untied head

and, where the config has them, in a block

    attention/{q,k,v}_bias         [H K] or [G K]      attention_post_norm/scale   mlp_post_norm/scale   [D]
    attention/{q,k}_norm/scale     [K], or [H K] and [G K]
    mlp/router                     [D, E]; mlp/expert_<e>/{gate,up,down} in place of mlp/{gate,up,down}
    mlp/shared/{gate,up} [D, S]    mlp/shared/down [S, D]

Dimensions: B batch, L length, D width, H heads, G heads of keys and values, K head size, F MLP width, E experts,
S width of a shared expert, V vocabulary, N layers.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn, traverse_util

from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.models import block as block_lib, expert_groups, experts, flash
from dipaco_jax.models.layers import make_norm, scaled_normal

Params = dict[str, jax.Array]  # flat: name to array


def positions(segments_BL: jax.Array) -> jax.Array:
  """Returns the position of every token in its own segment, from 0: [B, L]."""
  return jax.lax.broadcasted_iota(jnp.int32, segments_BL.shape, 1) - flash.segment_starts(segments_BL)


REMAT_POLICIES = {
  'full': jax.checkpoint_policies.nothing_saveable,
  'dots': jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(flash.RESIDUALS, expert_groups.PRODUCTS),
  ),
}


class Transformer(nn.Module):
  """Maps tokens to the hidden state after the last block, from which features [2.4] and logits are computed."""

  config: settings.Model
  vocab_size: int
  dtype: jnp.dtype

  def setup(self) -> None:
    c = self.config
    self.embed = Embedding(self.vocab_size, c.width, self.dtype, c.embed_scale)
    numbered = enumerate(block_lib.blocks(c))
    self.blocks = [block.clone(name=f'block_{n}', parent=self) for n, block in numbered]
    self.final_norm = make_norm(c)
    self.head = None if c.tied else Head(self.vocab_size, c.width)

  def __call__(self, tokens_BL: jax.Array, segments_BL: jax.Array) -> jax.Array:
    """Returns x_BLD, before the final norm.

    `segments` number a row's packed sequences from 1, and 0 is padding; of tokens that are given they are negative.
    """
    segments_BL = jnp.abs(segments_BL)
    x_BLD, places = self.embed(tokens_BL), (positions(segments_BL), segments_BL)
    if self.config.layers == 'scanned' and not self.is_initializing():
      return self._scanned(x_BLD, *places)
    run: Any = functools.partial(_output, self.config)
    if self.config.remat in REMAT_POLICIES:
      run = nn.remat(run, policy=REMAT_POLICIES[self.config.remat])
    for block in self.blocks:
      x_BLD = run(block, x_BLD, *places)
    return x_BLD

  def _scanned(self, x_BLD: jax.Array, positions_BL: jax.Array, segments_BL: jax.Array) -> jax.Array:
    """Scans one period of blocks over stacked matrices; the rest of the last period follows, block by block.

    Compilation is faster by the number of periods, but matrices are copied.
    """
    c = self.config
    every = block_lib.period(self.config)
    blocks = block_lib.blocks(self.config)
    params = [self.variables['params'].get(f'block_{n}', {}) for n in range(c.num_layers)]
    num_scanned = c.num_layers // every * every if every < c.num_layers else 0

    def one(x_BLD: Any, params: Sequence[Any]) -> tuple[Any, jax.Array | None]:
      sown = dict[str, Any]()
      for n, (block, mine) in enumerate(zip(blocks, params, strict=False)):
        run = functools.partial(_apply, block, mine, sown, f'block_{n}')
        x_BLD = _output(c, run, x_BLD, positions_BL, segments_BL)
      return x_BLD, experts.total(sown)

    if c.remat in REMAT_POLICIES:
      one = jax.checkpoint(one, policy=REMAT_POLICIES[c.remat], prevent_cse=False)  # a scan's body is compiled alone
    losses: list[Any] = []
    if num_scanned:
      stacked = [self._stacked(params[n:num_scanned:every]) for n in range(every)]
      x_BLD, losses_PB = jax.lax.scan(one, x_BLD, stacked)
      losses += [] if losses_PB is None else [losses_PB.sum(0)]
    if num_scanned < c.num_layers:
      x_BLD, losses_B = one(x_BLD, params[num_scanned:])
      losses += [losses_B]
    if (losses_B := experts.total(losses)) is not None:
      experts.sow(self, losses_B)
    return x_BLD

  def _stacked(self, params: Sequence[Any]) -> Any:
    """Returns the parameters of several blocks as one, matrices in compute dtype, but for those of routers."""

    def stack(at: Any, *xs: jax.Array) -> jax.Array:
      is_rounded = xs[0].ndim > 1 and not is_router(at[-1].key)
      return jnp.stack([x.astype(self.dtype) if is_rounded else x for x in xs])

    return jax.tree_util.tree_map_with_path(stack, *params)

  def embedded(self, tokens_BL: jax.Array) -> jax.Array:
    """Returns the hidden state that enters block 0, [B, L, D]."""
    return self.embed(tokens_BL)

  def logit_factors(
    self, tokens_BL: jax.Array, segments_BL: jax.Array, head_dtype: Any = None
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the factors of the logits: the normed hidden state [B, L, D] and the head [D, V], in compute dtype.

    The head is in `head_dtype` if that is given: its gradient is then, too.
    """
    return self.norm_and_head(self(tokens_BL, segments_BL), head_dtype)

  def norm_and_head(self, x_BLD: jax.Array, head_dtype: Any = None) -> tuple[jax.Array, jax.Array]:
    """Returns the factors of the logits, from the hidden state after the last block."""
    x_BLD = self.final_norm(x_BLD)
    head_DV = self.embed.tokens.T if self.head is None else self.head.kernel
    return x_BLD, head_DV.astype(head_dtype or self.dtype)


def _output(config: settings.Model, block: Any, *args: jax.Array) -> jax.Array:
  """Returns the hidden state after a block, without its cache."""
  return block_lib.call(config, block, *args)[0]


def is_router(name: str) -> bool:
  """Returns whether a parameter is the matrix of a router, which is used in float32."""
  return name.split('/')[-1] == 'router'


def _apply(block: Any, params: Any, sown: dict[str, Any], name: str, *args: Any) -> Any:
  """Returns what a block returns; what it adds to the loss is put into `sown`."""
  outputs, sown[name] = block.apply({'params': params}, *args, mutable=[experts.LOSSES])
  return outputs


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
  """Replaces 'auto' in a config by its meaning on 'cpu', 'tpu' or this 'gpu'."""
  dtype = 'float32' if platform == 'cpu' else 'bfloat16'
  gpus = 'flash' if platform == 'gpu' and flash.runs_here() else 'xla'
  kernel = {'tpu': 'splash', 'cpu': 'blocked'}.get(platform, gpus)
  layers = 'scanned' if platform == 'tpu' else 'unrolled'
  products = 'float32' if platform == 'cpu' else 'bfloat16'
  experts_by = {'tpu': 'megablox', 'cpu': 'blocked'}.get(platform, 'ragged')
  chosen = {
    'dtype': dtype, 'attention': kernel, 'layers': layers, 'product_dtype': products, 'experts': experts_by,
  }  # fmt: skip
  unset: Any = {name: x for name, x in chosen.items() if getattr(config, name) == 'auto'}
  return dataclasses.replace(config, **unset)


def init(model: Transformer, key: jax.Array) -> Params:
  """Returns fresh parameters, flat and sorted by name; raises InputError if a block cannot be initialized so."""
  blank = jnp.zeros((1, 8), jnp.int32)
  initialized = jax.jit(functools.partial(model.init, method=Transformer.logit_factors))(key, blank, blank)
  if more := {*initialized} - {'params'}:
    problem = f'has variables other than parameters, {", ".join(sorted(more))}: no path keeps them'
    raise InputError(f'config.{block_lib.NAME}={model.config.block!r} {problem}')
  return dict(sorted(traverse_util.flatten_dict(initialized['params'], sep='/').items()))


def shapes(model: Transformer) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the shapes and dtypes of the parameters, without computing them."""
  return dict(_traced_shapes(model))


@functools.cache
def _traced_shapes(model: Transformer) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns what `shapes` does; a process asks for the same model several times, and tracing takes long."""
  return jax.eval_shape(lambda: init(model, jax.random.key(0)))


def variables(params: Params) -> Any:
  """Nests flat parameters into the variables that Flax's `apply` takes."""
  return {'params': traverse_util.unflatten_dict(params, sep='/')}


def hidden(model: Transformer, params: Params, tokens_BL: jax.Array, segments_BL: jax.Array) -> jax.Array:
  """Returns the hidden state after the last block, [B, L, D]."""
  return jnp.asarray(model.apply(variables(params), tokens_BL, segments_BL))


def logit_factors(
  model: Transformer, params: Params, tokens_BL: jax.Array, segments_BL: jax.Array, head_dtype: Any = None
) -> Any:
  """Returns the normed hidden state [B, L, D] and the head [D, V], whose product is the logits."""
  return model.apply(variables(params), tokens_BL, segments_BL, head_dtype, method=Transformer.logit_factors)


def logit_factors_and_losses(
  model: Transformer, params: Params, tokens_BL: jax.Array, segments_BL: jax.Array
) -> tuple[Any, jax.Array | None]:
  """Returns the factors of the logits, the head as float32, and the losses of each row's routers, [B], or None."""
  arguments = variables(params), tokens_BL, segments_BL, jnp.float32
  factors, more = model.apply(*arguments, method=Transformer.logit_factors, mutable=[experts.LOSSES])
  return factors, experts.total(more)


def features(model: Transformer, params: Params, tokens_BL: jax.Array) -> jax.Array:
  """Returns z = g(x), the mean of the last block's output over the tokens given, the prefix's [2.4]: float32 [B, D]."""
  return hidden(model, params, tokens_BL, jnp.ones_like(tokens_BL)).astype(jnp.float32).mean(axis=1)


@functools.partial(jax.jit, static_argnums=0)
def features_of_seen(model: Transformer, params: Params, tokens_BL: jax.Array, seen_BL: jax.Array) -> jax.Array:
  """Returns z of texts that may be shorter than the prefix, of tokens with `seen` 1, 0 behind them: float32 [B, D]."""
  x_BLD = hidden(model, params, tokens_BL, seen_BL).astype(jnp.float32)
  return (x_BLD * seen_BL[..., None]).sum(axis=1) / jnp.maximum(seen_BL.sum(axis=1, keepdims=True), 1)
