"""Causal attention within segments, softmax(q k^T / sqrt(K)) v, in which H / G queries share a head of keys and values.

The root may be that of another number; scores may be capped, c tanh(x / c), and seen within a window only. Kernels:

splash   JAX's in Pallas, on TPU: blocks above the diagonal are never computed, and no [L, L] scores are in memory
flash    ours in Pallas, on GPU in 16 bits: the same, and blocks of other segments are not computed either
cudnn    JAX's on GPU in 16 bits, with an [L, L] mask
blocked  ours in plain operations, for CPU: keys after a block of queries are left out, and its weights kept
xla      anywhere, with an [L, L] mask
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from dipaco_jax.models import blocked, flash
from dipaco_jax.models.products import into_float32
from dipaco_jax.models.scores import PLAIN, Scores

LANES = 128  # of a TPU; splash takes multiples of it as lengths
BLOCKS = (512, 256, LANES)  # tokens in a block: the first that divides the length


class Cache(NamedTuple):
  """Keys and values of earlier tokens, [B, G, S, K] each."""

  keys: Array
  values: Array


def attend_cached(
  q_BLHK: Array,
  k_BLGK: Array,
  v_BLGK: Array,
  positions_BL: Array,
  segments_BL: Array,
  cache: Cache | None,
  kernel: str,
  scores: Scores = PLAIN,
) -> tuple[Array, Cache]:
  """Returns attention, [B, L, H, K], and the cache with these tokens: of whole rows, or of one more token of each text.

  Args:
    q_BLHK, k_BLGK, v_BLGK, segments_BL, kernel, scores: as of `attend`.
    positions_BL: of the tokens.
    cache: of earlier tokens, with L = 1; None: the rows are whole, and the cache returned has S = L.
  """
  k_BGLK, v_BGLK = k_BLGK.swapaxes(1, 2), v_BLGK.swapaxes(1, 2)
  if cache is None:
    return attend(q_BLHK, k_BLGK, v_BLGK, segments_BL, kernel, scores), Cache(k_BGLK, v_BGLK)
  position_B = positions_BL[:, 0]
  cache = Cache(put(cache.keys, k_BGLK, position_B, 2), put(cache.values, v_BGLK, position_B, 2))
  return attend_to_cache(q_BLHK, *cache, position_B, scores), cache


def put(cache: Array, new: Array, position_B: Array, axis: int = 1) -> Array:
  """Returns a cache with new values, of one position, at the position of each text along `axis`.

  A single row is written twice: one update XLA for CPU fuses into its readers, and copies the cache at every step.
  """
  B, count = cache.shape[0], max(2, cache.shape[0])
  rows = jnp.arange(count, dtype=jnp.int32) % B
  new, place = jnp.take(new, 0, axis)[rows], position_B[rows]
  at = cache.at[(rows, *[slice(None)] * (axis - 1), place)]
  return at.set(new.astype(cache.dtype), indices_are_sorted=True, unique_indices=B > 1, mode='clip')


def attend(
  q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, segments_BL: Array, kernel: str, scores: Scores = PLAIN
) -> Array:
  """Returns attention, [B, L, H, K].

  Args:
    q_BLHK, k_BLGK, v_BLGK: queries, keys and values; G divides H.
    segments_BL: segment ids; tokens attend to earlier ones of their own segment, which lie next to each other.
    kernel: `attention` of settings.Model. 'xla' stands in where 'splash' (lengths that are no multiple of LANES) or
      'flash' (`flash.takes`) cannot compute it, nor 'flash', 'cudnn' and 'blocked' capped scores.
    scores: how queries and keys are scored.
  """
  length = q_BLHK.shape[1]
  if kernel == 'splash' and length % LANES == 0:
    return splash(q_BLHK, k_BLGK, v_BLGK, segments_BL, scores)
  if kernel == 'flash' and flash.takes(q_BLHK) and not scores.cap:
    return flash.flash(q_BLHK, k_BLGK, v_BLGK, segments_BL, scores)
  if kernel == 'blocked' and not scores.cap:
    return blocked.blocked(q_BLHK, k_BLGK, v_BLGK, segments_BL, scores.window, scores.factor(q_BLHK.shape[3]))
  same_BLL = segments_BL[:, :, None] == segments_BL[:, None, :]
  seen_LL = jnp.tril(jnp.ones((length, length), bool))
  if 0 < scores.window < length:
    seen_LL &= ~jnp.tril(seen_LL, -scores.window)
  mask_B1LL = (same_BLL & seen_LL)[:, None]
  if scores.cap:
    return _capped(q_BLHK, k_BLGK, v_BLGK, mask_B1LL, scores)
  options: Any = {'implementation': 'cudnn' if kernel == 'cudnn' else 'xla'}
  if scores.query_scale:
    options['scale'] = scores.factor(q_BLHK.shape[3])
  return jax.nn.dot_product_attention(q_BLHK, k_BLGK, v_BLGK, mask=mask_B1LL, **options)


def _capped(q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, mask_B1LL: Array, scores: Scores) -> Array:
  """Returns attention with capped scores; letters M are keys, R the queries of a head of keys."""
  q_BLGRK = _grouped(q_BLHK, k_BLGK.shape[2])
  found_BGRLM = into_float32('BLGRK,BMGK->BGRLM', q_BLGRK, k_BLGK)
  found_BGRLM = _cap(found_BGRLM * scores.factor(q_BLHK.shape[3]), scores.cap)
  weights_BGRLM = jax.nn.softmax(jnp.where(mask_B1LL[:, :, None], found_BGRLM, -jnp.inf)).astype(v_BLGK.dtype)
  return jnp.einsum('BGRLM,BMGK->BLGRK', weights_BGRLM, v_BLGK).reshape(q_BLHK.shape)


def _grouped(q_BLHK: Array, groups: int) -> Array:
  """Returns queries by the head of keys that they share, [B, L, G, R, K]."""
  B, L, H, K = q_BLHK.shape
  return q_BLHK.reshape(B, L, groups, H // groups, K)


def _cap(scores: Array, cap: float) -> Array:
  return cap * jnp.tanh(scores / cap) if cap else scores


def attend_to_cache(q_B1HK: Array, k_BGSK: Array, v_BGSK: Array, position_B: Array, scores: Scores = PLAIN) -> Array:
  """Returns attention of one token of each text to positions 0 to `position` of a cache, [B, 1, H, K]."""
  q_B1GRK = _grouped(q_B1HK * scores.factor(q_B1HK.shape[-1]), k_BGSK.shape[1])
  found_BGRS = into_float32('BLGRK,BGSK->BGRS', q_B1GRK, k_BGSK)
  places_S, last_B1 = jnp.arange(k_BGSK.shape[2]), position_B[:, None]
  seen_BS = places_S <= last_B1
  if scores.window:
    seen_BS &= places_S > last_B1 - scores.window
  found_BGRS = jnp.where(seen_BS[:, None, None], _cap(found_BGRS, scores.cap), -jnp.inf)
  weights_BGRS = jax.nn.softmax(found_BGRS).astype(v_BGSK.dtype)
  return jnp.einsum('BGRS,BGSK->BGRK', weights_BGRS, v_BGSK).reshape(q_B1HK.shape)


def splash(
  q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, segments_BL: Array, scores: Scores = PLAIN, interpret: bool = False
) -> Array:
  """Returns attention by JAX's splash kernel; `interpret` runs it as plain operations, without a TPU."""
  from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

  _, length, heads, size = q_BLHK.shape
  kernel = _splash_kernel(length, heads, scores.window, scores.cap, interpret)
  q_BHLK, k_BGLK, v_BGLK = (x.swapaxes(1, 2) for x in (q_BLHK * scores.factor(size), k_BLGK, v_BLGK))
  return jax.vmap(kernel)(q_BHLK, k_BGLK, v_BGLK, SegmentIds(segments_BL, segments_BL)).swapaxes(1, 2)


def block_size(length: int) -> int:
  """Returns the number of tokens in a block of splash."""
  return next(b for b in BLOCKS if length % b == 0)


@functools.lru_cache
def _splash_kernel(length: int, heads: int, window: int, cap: float, interpret: bool) -> Any:
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as lib,
    splash_attention_mask as masks,
  )

  options: Any = dict.fromkeys(('block_q', 'block_kv', 'block_q_dkv', 'block_kv_dkv'), block_size(length))
  options |= dict.fromkeys(('q_layout', 'k_layout', 'v_layout'), lib.QKVLayout.SEQ_MINOR)
  sizes = lib.BlockSizes(**options, use_fused_bwd_kernel=True)
  shape = (length, length)
  one = masks.LocalMask(shape, (window - 1, 0), 0) if 0 < window < length else masks.CausalMask(shape)
  mask = masks.MultiHeadMask([one] * heads)
  with jax.ensure_compile_time_eval():  # a cached kernel must not hold tracers
    return lib.make_splash_mha_single_device(
      mask,
      block_sizes=sizes,
      interpret=interpret,
      residual_checkpoint_name=flash.RESIDUALS,
      attn_logits_soft_cap=cap or None,
    )
