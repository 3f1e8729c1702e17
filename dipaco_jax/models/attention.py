"""Causal attention within segments, softmax(q k^T / sqrt(K)) v, by one of these kernels:

splash   JAX's in Pallas, on TPU: blocks above the diagonal are never computed, and no [L, L] scores are in memory
flash    ours in Pallas, on GPU in 16 bits: the same, and blocks of other segments are not computed either
cudnn    JAX's on GPU in 16 bits, with an [L, L] mask
xla      anywhere, with an [L, L] mask
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dipaco_jax.models import flash

LANES = 128  # of a TPU; splash takes multiples of it as lengths
BLOCKS = (512, 256, LANES)  # tokens in a block: the first that divides the length


def attend(q_BLHK: Array, k_BLHK: Array, v_BLHK: Array, segments_BL: Array, kernel: str) -> Array:
  """Returns attention, [B, L, H, K].

  Args:
    q_BLHK, k_BLHK, v_BLHK: queries, keys and values.
    segments_BL: segment ids; tokens attend to earlier ones of their own segment, which lie next to each other.
    kernel: `attention` of settings.Model. 'xla' stands in where 'splash' (lengths that are no multiple of LANES) or
      'flash' (`flash.takes`) cannot compute it.
  """
  length = q_BLHK.shape[1]
  if kernel == 'splash' and length % LANES == 0:
    return splash(q_BLHK, k_BLHK, v_BLHK, segments_BL)
  if kernel == 'flash' and flash.takes(q_BLHK):
    return flash.flash(q_BLHK, k_BLHK, v_BLHK, segments_BL)
  same_BLL = segments_BL[:, :, None] == segments_BL[:, None, :]
  mask_B1LL = (same_BLL & jnp.tril(jnp.ones((length, length), bool)))[:, None]
  implementation: Any = 'cudnn' if kernel == 'cudnn' else 'xla'
  return jax.nn.dot_product_attention(q_BLHK, k_BLHK, v_BLHK, mask=mask_B1LL, implementation=implementation)


def attend_to_cache(q_B1HK: Array, k_BHSK: Array, v_BHSK: Array, position_B: Array) -> Array:
  """Returns attention of one token of each text to positions 0 to `position` of a cache, [B, 1, H, K]."""
  q_B1HK = q_B1HK * q_B1HK.shape[-1] ** -0.5
  scores_BHS = jnp.einsum('BLHK,BHSK->BHS', q_B1HK, k_BHSK, preferred_element_type=jnp.float32)
  seen_B1S = jnp.arange(k_BHSK.shape[2]) <= position_B[:, None, None]
  weights_BHS = jax.nn.softmax(jnp.where(seen_B1S, scores_BHS, -jnp.inf)).astype(v_BHSK.dtype)
  return jnp.einsum('BHS,BHSK->BHK', weights_BHS, v_BHSK)[:, None]


def splash(q_BLHK: Array, k_BLHK: Array, v_BLHK: Array, segments_BL: Array, interpret: bool = False) -> Array:
  """Returns attention by JAX's splash kernel; `interpret` runs it as plain operations, without a TPU."""
  from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

  _, length, heads, size = q_BLHK.shape
  kernel = _splash_kernel(length, heads, interpret)
  q_BHLK, k_BHLK, v_BHLK = (x.swapaxes(1, 2) for x in (q_BLHK * size**-0.5, k_BLHK, v_BLHK))
  return jax.vmap(kernel)(q_BHLK, k_BHLK, v_BHLK, SegmentIds(segments_BL, segments_BL)).swapaxes(1, 2)


def block_size(length: int) -> int:
  """Returns the number of tokens in a block of splash."""
  return next(b for b in BLOCKS if length % b == 0)


@functools.lru_cache
def _splash_kernel(length: int, heads: int, interpret: bool) -> Any:
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as lib,
    splash_attention_mask as masks,
  )

  options: Any = dict.fromkeys(('block_q', 'block_kv', 'block_q_dkv', 'block_kv_dkv'), block_size(length))
  options |= dict.fromkeys(('q_layout', 'k_layout', 'v_layout'), lib.QKVLayout.SEQ_MINOR)
  sizes = lib.BlockSizes(**options, use_fused_bwd_kernel=True)
  mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * heads)
  with jax.ensure_compile_time_eval():  # a cached kernel must not hold tracers
    return lib.make_splash_mha_single_device(
      mask, block_sizes=sizes, interpret=interpret, residual_checkpoint_name=flash.RESIDUALS
    )
