"""The inner loop as a careful engineer writes it straight in JAX and Optax: what the product is measured against.

The same model and optimizer, sharing no code with it. Parameters are a plain nested dict. What other families of models
have is written out too; Llama's program has none of it.
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
  # Of families: as fields of config.model are called.
  norms: str = 'before'
  norm_from_one: bool = False
  qk_norm: str = 'none'
  gelu: bool = False
  embed_scale: bool = False
  query_scale: float = 0.0
  window: int = 0
  full_every: int = 0
  local_base: float = 0.0
  no_rope_every: int = 0
  stretched: tuple[float, ...] = ()  # Llama 3's rotary embedding: factor, original length, low, high


def config_of(m, prefix, attention=None) -> Config:
  """What a bare loop has to know of the product's `config.model`, which has no experts."""
  assert not m.num_experts, 'the bare loop has no mixtures'
  computed = jnp.dtype(m.dtype), m.rope_base, m.norm_epsilon, prefix, m.remat != 'none', attention
  of_family = m.norms, m.norm_from_one, m.qk_norm, m.activation == 'gelu', m.embed_scale, m.query_scale
  stretched = (m.rope_factor, m.rope_original_len, m.rope_low, m.rope_high) if m.rope_scaling != 'none' else ()
  return Config(*computed, *of_family, m.window, m.full_every, m.rope_local_base, m.no_rope_every, stretched)


PICK = {
  'attention_norm': 'attention_norm/scale', 'q': 'attention/q', 'k': 'attention/k', 'v': 'attention/v',
  'o': 'attention/o', 'mlp_norm': 'mlp_norm/scale', 'gate': 'mlp/gate', 'up': 'mlp/up', 'down': 'mlp/down',
  'q_bias': 'attention/q_bias', 'k_bias': 'attention/k_bias', 'v_bias': 'attention/v_bias',
  'q_norm': 'attention/q_norm/scale', 'k_norm': 'attention/k_norm/scale',
  'attention_post_norm': 'attention_post_norm/scale', 'mlp_post_norm': 'mlp_post_norm/scale',
}  # fmt: skip


def from_flat(params):
  """A nested dict from {'block_0/attention/q': ...}; the numbered blocks become a list."""
  num_layers = sum(name.endswith('attention/q') for name in params)
  blocks = [{k: params[x] for k, v in PICK.items() if (x := f'block_{n}/{v}') in params} for n in range(num_layers)]
  head = {'head': params['head/kernel']} if 'head/kernel' in params else {}
  return {'embed': params['embed/tokens'], 'blocks': blocks, 'norm': params['final_norm/scale'], **head}


def rms_norm(config, x, scale):
  x32 = x.astype(jnp.float32)
  scale = 1 + scale if config.norm_from_one else scale
  return (x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), -1, keepdims=True) + config.epsilon) * scale).astype(x.dtype)


def places(segments):
  """Place of each token in its segment."""
  index = jnp.arange(segments.shape[1])
  first = jnp.concatenate([jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], 1)
  return index - jax.lax.cummax(jnp.where(first, index, 0), axis=1)


def rope(x, sin, cos):
  a, b = jnp.split(x.astype(jnp.float32), 2, -1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def qkv(config, p, h):
  """Queries, keys and values with what the family does to them, before they are turned."""
  q, k, v = (jnp.einsum('bld,dhk->blhk', h, p[name]) for name in 'qkv')
  if 'q_bias' in p:
    q, k, v = (x + p[f'{n}_bias'].astype(x.dtype).reshape(x.shape[2:]) for n, x in zip('qkv', (q, k, v), strict=True))
  if config.qk_norm == 'head':
    q, k = rms_norm(config, q, p['q_norm']), rms_norm(config, k, p['k_norm'])
  elif config.qk_norm == 'all':
    q, k = (
      rms_norm(config, x.reshape(*x.shape[:2], -1), p[f'{n}_norm']).reshape(x.shape) for n, x in (('q', q), ('k', k))
    )
  return q, k, v


def block(config, p, x, turn, mask):
  """`turn` is the sine and cosine, or None."""
  p = jax.tree.map(lambda w: w.astype(config.dtype) if w.ndim > 1 else w, p)
  norm = functools.partial(rms_norm, config)
  q, k, v = qkv(config, p, x if config.norms == 'after' else norm(x, p['attention_norm']))
  if turn is not None:
    q, k = rope(q, *turn), rope(k, *turn)
  scale = config.query_scale**-0.5 if config.query_scale else None
  h = jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale, implementation=config.attention)
  h = jnp.einsum('blhk,hkd->bld', h, p['o'])
  x += h if config.norms == 'before' else norm(h, p['attention_post_norm'])
  h = x if config.norms == 'after' else norm(x, p['mlp_norm'])
  gate = jax.nn.gelu(h @ p['gate'], approximate=True) if config.gelu else jax.nn.silu(h @ p['gate'])
  h = (gate * (h @ p['up'])) @ p['down']
  return x + (h if config.norms == 'before' else norm(h, p['mlp_post_norm']))


def turns(place, base, head_dim, stretched=()):
  """Sine and cosine of every token's pairs."""
  frequency = base ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
  if stretched:
    factor, original, low, high = stretched
    kept = jnp.clip((original * frequency / (2 * jnp.pi) - low) / (high - low), 0, 1)
    frequency = frequency * kept + frequency / factor * (1 - kept)
  angles = place[..., None, None] * frequency
  return jnp.sin(angles), jnp.cos(angles)


def mean_loss(config, params, tokens, segments):
  """Mean cross-entropy of the targets that count, from the full logits."""
  length, head_dim = tokens.shape[1], params['blocks'][0]['q'].shape[-1]
  place = places(segments)
  common = turns(place, config.rope_base, head_dim, config.stretched)
  mask = (segments[:, :, None] == segments[:, None, :]) & jnp.tril(jnp.ones((length, length), bool))
  near = mask & ~jnp.tril(jnp.ones((length, length), bool), -config.window) if config.window else mask
  local = turns(place, config.local_base, head_dim) if config.local_base else common
  x = params['embed'][tokens].astype(config.dtype)
  if config.embed_scale:
    x *= jnp.asarray(x.shape[-1] ** 0.5, x.dtype)
  one = functools.partial(block, config)
  for n, p in enumerate(params['blocks'], 1):
    is_full = not config.window or (config.full_every and n % config.full_every == 0)
    turn = None if config.no_rope_every and n % config.no_rope_every == 0 else common if is_full else local
    x = (jax.checkpoint(one) if config.remat else one)(p, x, turn, (mask if is_full else near)[:, None])
  x = rms_norm(config, x, params['norm'])
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
