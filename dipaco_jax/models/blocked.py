"""Causal attention in plain operations: blocks of queries against the keys that they can see, for CPUs.

Half of the scores are never computed, or more where a window hides them, and no [L, L] scores are in memory at once.
With q, k, v of one head, p the weights and d. the gradient of what follows, for each block of queries:

    p = softmax(q k^T f)      o = p v      ds = p (do v^T - sum(o do)) f
    dq = ds k                 dk = ds^T q  dv = p^T do

Weights are kept for the backward pass, in the dtype of q. Products are computed into float32.

Dimensions as in attention.py; R queries share a head of keys and values, Q is a block's queries, M its keys.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import Array

from dipaco_jax.models.products import into_float32

BLOCKS = 8  # of queries, at most
MIN_QUERIES = 64  # in a block


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def blocked(q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, segments_BL: Array, window: int, factor: float) -> Array:
  """Returns attention, [B, L, H, K].

  Args:
    q_BLHK, k_BLGK, v_BLGK, segments_BL: as of `attention.attend`.
    window: tokens that a token sees, itself included; 0: all before it.
    factor: of products of queries and keys.
  """
  return _forward(q_BLHK, k_BLGK, v_BLGK, segments_BL, window, factor)[0]


def _forward(
  q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, segments_BL: Array, window: int, factor: float
) -> tuple[Array, tuple]:
  k_BGLK, v_BGLK = k_BLGK.swapaxes(1, 2), v_BLGK.swapaxes(1, 2)
  q_BGRLK = _by_group(q_BLHK, k_BGLK.shape[1])
  weights, outputs = [], []
  for queries, keys in spans(q_BLHK.shape[1], window):
    scores_BGRQM = into_float32('BGRQK,BGMK->BGRQM', q_BGRLK[:, :, :, queries], k_BGLK[:, :, keys]) * factor
    seen_BQM = _seen(segments_BL, queries, keys, window)
    p_BGRQM = jax.nn.softmax(jnp.where(seen_BQM[:, None, None], scores_BGRQM, -jnp.inf)).astype(q_BLHK.dtype)
    weights.append(p_BGRQM)
    outputs.append(into_float32('BGRQM,BGMK->BGRQK', p_BGRQM, v_BGLK[:, :, keys]).astype(q_BLHK.dtype))
  o_BGRLK = jnp.concatenate(outputs, 3)
  return _by_token(o_BGRLK), (q_BGRLK, k_BGLK, v_BGLK, o_BGRLK, weights)


def _backward(window: int, factor: float, kept: tuple, do_BLHK: Array) -> tuple[Array, Array, Array, None]:
  q_BGRLK, k_BGLK, v_BGLK, o_BGRLK, weights = kept
  do_BGRLK = _by_group(do_BLHK, k_BGLK.shape[1])
  inner_BGRL1 = (o_BGRLK.astype(jnp.float32) * do_BGRLK.astype(jnp.float32)).sum(-1, keepdims=True)
  dq = []
  dk_BGLK = jnp.zeros(k_BGLK.shape, jnp.float32)
  dv_BGLK = jnp.zeros(v_BGLK.shape, jnp.float32)
  for (queries, keys), p_BGRQM in zip(spans(do_BLHK.shape[1], window), weights, strict=True):
    q_BGRQK, do_BGRQK = q_BGRLK[:, :, :, queries], do_BGRLK[:, :, :, queries]
    dp_BGRQM = into_float32('BGRQK,BGMK->BGRQM', do_BGRQK, v_BGLK[:, :, keys])
    ds_BGRQM = p_BGRQM.astype(jnp.float32) * (dp_BGRQM - inner_BGRL1[:, :, :, queries]) * factor
    ds_BGRQM = ds_BGRQM.astype(p_BGRQM.dtype)
    dq.append(into_float32('BGRQM,BGMK->BGRQK', ds_BGRQM, k_BGLK[:, :, keys]).astype(q_BGRLK.dtype))
    dk_BGLK = dk_BGLK.at[:, :, keys].add(into_float32('BGRQM,BGRQK->BGMK', ds_BGRQM, q_BGRQK))
    dv_BGLK = dv_BGLK.at[:, :, keys].add(into_float32('BGRQM,BGRQK->BGMK', p_BGRQM, do_BGRQK))
  dk_BLGK, dv_BLGK = (x.astype(k_BGLK.dtype).swapaxes(1, 2) for x in (dk_BGLK, dv_BGLK))
  return _by_token(jnp.concatenate(dq, 3)), dk_BLGK, dv_BLGK, None


blocked.defvjp(_forward, _backward)


def spans(length: int, window: int) -> Iterator[tuple[slice, slice]]:
  """Yields the tokens of each block of queries, and those that any of them may see."""
  size = max(MIN_QUERIES, -(-length // BLOCKS))
  for start in range(0, length, size):
    end = min(length, start + size)
    yield slice(start, end), slice(max(0, start - window + 1) if window else 0, end)


def _seen(segments_BL: Array, queries: slice, keys: slice, window: int) -> Array:
  """Returns which keys of a block each of its queries sees, bool [B, Q, M]."""
  back_QM = jnp.arange(queries.start, queries.stop)[:, None] - jnp.arange(keys.start, keys.stop)
  near_QM = (back_QM >= 0) & (back_QM < window) if window else back_QM >= 0
  return (segments_BL[:, queries, None] == segments_BL[:, None, keys]) & near_QM


def _by_group(x_BLHK: Array, groups: int) -> Array:
  """Returns queries by the head of keys that they share, [B, G, R, L, K]."""
  B, L, H, K = x_BLHK.shape
  return x_BLHK.reshape(B, L, groups, H // groups, K).transpose(0, 2, 3, 1, 4)


def _by_token(x_BGRLK: Array) -> Array:
  """Inverts `_by_group`."""
  B, G, R, L, K = x_BGRLK.shape
  return x_BGRLK.transpose(0, 3, 1, 2, 4).reshape(B, L, G * R, K)
