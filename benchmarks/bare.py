"""The inner loop as a careful engineer writes it straight in JAX and Optax: what the product is measured against.

The same model and optimizer, sharing no code with it. Parameters are a plain nested dict.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax


class Config(NamedTuple):
  """What shapes alone don't tell."""

  dtype: jnp.dtype = jnp.dtype('float32')
  rope_base: float = 10_000.0
  epsilon: float = 1e-6
  prefix: int = 32  # targets before this place of their sequence don't count
  remat: bool = False
  attention: str | None = None  # of jax.nn.dot_product_attention; None is XLA's own


def from_flat(params):
  """A nested dict from {'block_0/attention/q': ...}; the numbered blocks become a list."""
  pick = {
    'attention_norm': 'attention_norm/scale', 'q': 'attention/q', 'k': 'attention/k', 'v': 'attention/v',
    'o': 'attention/o', 'mlp_norm': 'mlp_norm/scale', 'gate': 'mlp/gate', 'up': 'mlp/up', 'down': 'mlp/down',
  }  # fmt: skip
  num_layers = sum(name.endswith('attention/q') for name in params)
  blocks = [{k: params[f'block_{n}/{v}'] for k, v in pick.items()} for n in range(num_layers)]
  head = {'head': params['head/kernel']} if 'head/kernel' in params else {}
  return {'embed': params['embed/tokens'], 'blocks': blocks, 'norm': params['final_norm/scale'], **head}


def rms_norm(x, scale, epsilon):
  x32 = x.astype(jnp.float32)
  return (x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), -1, keepdims=True) + epsilon) * scale).astype(x.dtype)


def places(segments):
  """Place of each token in its segment."""
  index = jnp.arange(segments.shape[1])
  first = jnp.concatenate([jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], 1)
  return index - jax.lax.cummax(jnp.where(first, index, 0), axis=1)


def rope(x, sin, cos):
  a, b = jnp.split(x.astype(jnp.float32), 2, -1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def block(config, p, x, sin, cos, mask):
  p = jax.tree.map(lambda w: w.astype(config.dtype) if w.ndim > 1 else w, p)
  h = rms_norm(x, p['attention_norm'], config.epsilon)
  q, k, v = (jnp.einsum('bld,dhk->blhk', h, p[name]) for name in 'qkv')
  h = jax.nn.dot_product_attention(rope(q, sin, cos), rope(k, sin, cos), v, mask=mask, implementation=config.attention)
  x += jnp.einsum('blhk,hkd->bld', h, p['o'])
  h = rms_norm(x, p['mlp_norm'], config.epsilon)
  return x + (jax.nn.silu(h @ p['gate']) * (h @ p['up'])) @ p['down']


def mean_loss(config, params, tokens, segments):
  """Mean cross-entropy of the targets that count, from the full logits."""
  length, head_dim = tokens.shape[1], params['blocks'][0]['q'].shape[-1]
  place = places(segments)
  angles = place[..., None, None] * config.rope_base ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
  sin, cos = jnp.sin(angles), jnp.cos(angles)
  mask = (segments[:, :, None] == segments[:, None, :]) & jnp.tril(jnp.ones((length, length), bool))
  x = params['embed'][tokens].astype(config.dtype)
  one = functools.partial(block, config)
  for p in params['blocks']:
    x = (jax.checkpoint(one) if config.remat else one)(p, x, sin, cos, mask[:, None])
  x = rms_norm(x, params['norm'], config.epsilon)
  head = params['head'] if 'head' in params else params['embed'].T
  logits = jnp.einsum('bld,dv->blv', x[:, :-1], head.astype(config.dtype), preferred_element_type=jnp.float32)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
  counts = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0) & (place[:, :-1] + 1 >= config.prefix)
  return jnp.sum(losses * counts) / jnp.maximum(counts.sum(), 1)


def optimizer(learning_rate, b1, b2, epsilon, weight_decay, clip_norm):
  """Clipping, then AdamW that decays matrices only; `learning_rate` maps steps to rates."""
  return optax.chain(
    optax.clip_by_global_norm(clip_norm),
    optax.adamw(
      learning_rate,
      b1,
      b2,
      epsilon,
      weight_decay=weight_decay,
      mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    ),
  )


def make(config: Config, transformation):
  """`(one, many)`: jitted `(params, state, tokens, segments) -> (params, state, losses)`; many scans over [k, B, L]."""

  def one(params, state, tokens, segments):
    loss, grads = jax.value_and_grad(functools.partial(mean_loss, config))(params, tokens, segments)
    updates, state = transformation.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  def many(params, state, tokens, segments):
    def body(carry, rows):
      *carry, loss = one(*carry, *rows)
      return tuple(carry), loss

    (params, state), losses = jax.lax.scan(body, (params, state), (tokens, segments))
    return params, state, losses

  return jax.jit(one, donate_argnums=(0, 1)), jax.jit(many, donate_argnums=(0, 1))
