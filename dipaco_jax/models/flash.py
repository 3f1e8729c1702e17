"""Flash attention (arXiv 2205.14135, 2307.08691) for GPUs in Pallas, through Triton: causal, within segments.

Segments lie one after the other in a row, so that a query i sees the keys from its segment's start to itself,

    o_i = sum_j p_ij v_j,    p_ij = exp(s q_i.k_j - lse_i),    lse_i = log sum_j exp(s q_i.k_j),    start_i <= j <= i,

with s = K^-1/2, and start_i a window back at most. Blocks above the diagonal and before start_i are not computed, and
no [L, L] scores are in memory. Of the gradient do,

    dv_j = sum_i p_ij do_i    ds_ij = p_ij (do_i.v_j - do_i.o_i)    dq_i = s sum_j ds_ij k_j    dk_j = s sum_i ds_ij q_i

Letters: Q queries and C keys of a block; B, L, H, K as in `attention`; G heads of keys and values.
"""

import functools
import importlib.util
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

from dipaco_jax.models.scores import PLAIN, Scores

RESIDUALS = 'attention'  # name of the residuals that a kernel's gradient needs beside q, k and v
HIDDEN = -1e30  # the score of a key that is not seen; finite, so that a block without seen keys gives no NaN


class Blocks(NamedTuple):
  """A kernel's blocks of queries and keys, its warps, and how many loads are in flight."""

  queries: int
  keys: int
  warps: int
  stages: int


# The fastest of 7 and 10 on an H100, for heads of 64 at 1,024 tokens and of 128 at 2,048.
FORWARD = Blocks(64, 64, 4, 3)
BACKWARD_KEYS = Blocks(32, 64, 4, 3)
BACKWARD_QUERIES = Blocks(64, 32, 4, 3)
LENGTHS = 128  # lengths are multiples of it, and it is one of every block


def takes(q_BLHK: Array) -> bool:
  """Returns whether the kernels support queries of this shape and type."""
  _, length, _, size = q_BLHK.shape
  return length % LENGTHS == 0 and size in (16, 32, 64, 128) and q_BLHK.dtype in (jnp.bfloat16, jnp.float16)


def runs_here() -> bool:
  """Returns whether this version of JAX and the GPU at hand can run the kernels.

  XLA compiles Triton for compute capability 8.0 (Ampere) and newer; JAX 0.11 announces the end of Pallas for Triton.
  """
  capability = re.fullmatch(r'(\d+)\.\d+', str(getattr(jax.local_devices()[0], 'compute_capability', '')))
  new_enough = not capability or int(capability[1]) >= 8
  return new_enough and importlib.util.find_spec('jax.experimental.pallas.triton') is not None


class Spans(NamedTuple):
  """The keys that each query sees, and the queries that see each key: both form a span in the row."""

  starts_BL: Array  # first key that a query sees; the last one is its own
  ends_BL: Array  # end of the queries that see a key; the first one is its own


class Run(NamedTuple):
  """Options with which kernels are run."""

  scale: float  # s
  interpret: bool  # with plain operations, without a GPU


def flash(
  q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, segments_BL: Array, scores: Scores = PLAIN, interpret: bool = False
) -> Array:
  """Returns attention, [B, L, H, K], in the type of q.

  Args:
    q_BLHK: queries, of a shape and type that `takes` accepts.
    k_BLGK, v_BLGK: keys and values; G divides H, and H / G queries share a head of these.
    segments_BL: segment ids; those of a segment are next to each other.
    scores: how queries and keys are scored; a cap is not supported.
    interpret: computes with plain operations, without a GPU.
  """
  run = Run(scores.factor(q_BLHK.shape[3]), interpret)
  return _attention(q_BLHK, k_BLGK, v_BLGK, _spans(segments_BL, scores.window), run)


def _spans(segments_BL: Array, window: int) -> Spans:
  starts_BL = segment_starts(segments_BL)
  ends_BL = segments_BL.shape[1] - segment_starts(segments_BL[:, ::-1])[:, ::-1]
  if window:
    index_L = jnp.arange(segments_BL.shape[1], dtype=jnp.int32)
    starts_BL = jnp.maximum(starts_BL, index_L - window + 1)
    ends_BL = jnp.minimum(ends_BL, index_L + window)
  return Spans(starts_BL, ends_BL)


def segment_starts(segments_BL: Array) -> Array:
  """Returns the place in its row where each token's segment starts: int32 [B, L]."""
  index_BL = jax.lax.broadcasted_iota(jnp.int32, segments_BL.shape, 1)
  previous_BL = jnp.pad(segments_BL, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
  return jax.lax.cummax(jnp.where(segments_BL != previous_BL, index_BL, 0), axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, spans: Spans, run: Run) -> Array:
  return _forward(q_BLHK, k_BLGK, v_BLGK, spans, run)[0]


def _forward(q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, spans: Spans, run: Run) -> tuple[Array, tuple]:
  B, L, H, _ = q_BLHK.shape
  args = (q_BLHK, k_BLGK, v_BLGK, spans.starts_BL)
  out = (jax.ShapeDtypeStruct(q_BLHK.shape, q_BLHK.dtype), jax.ShapeDtypeStruct((B, H, L), jnp.float32))
  results = _call(_forward_kernel, FORWARD, 'queries', args, out, run)
  o_BLHK, lse_BHL = (checkpoint_name(x, RESIDUALS) for x in results)
  return o_BLHK, (q_BLHK, k_BLGK, v_BLGK, spans, o_BLHK, lse_BHL)


def _backward(run: Run, residuals: tuple, do_BLHK: Array) -> tuple:
  q_BLHK, k_BLGK, v_BLGK, (starts_BL, ends_BL), o_BLHK, lse_BHL = residuals
  delta_BHL = jnp.einsum('BLHK,BLHK->BHL', do_BLHK, o_BLHK, preferred_element_type=jnp.float32)
  args = (q_BLHK, k_BLGK, v_BLGK, starts_BL, do_BLHK, lse_BHL, delta_BHL)
  out = jax.ShapeDtypeStruct(q_BLHK.shape, q_BLHK.dtype)
  (dq_BLHK,) = _call(_dq_kernel, BACKWARD_QUERIES, 'queries', args, (out,), run)
  dk_BLHK, dv_BLHK = _call(_dkv_kernel, BACKWARD_KEYS, 'keys', (*args, ends_BL), (out, out), run)
  return dq_BLHK, _sum_groups(dk_BLHK, k_BLGK), _sum_groups(dv_BLHK, v_BLGK), None


_attention.defvjp(_forward, _backward)


def _sum_groups(dx_BLHK: Array, x_BLGK: Array) -> Array:
  """Sums the gradients of the queries that share a head of keys or values."""
  if dx_BLHK.shape == x_BLGK.shape:
    return dx_BLHK
  B, L, G, K = x_BLGK.shape
  return dx_BLHK.reshape(B, L, G, -1, K).astype(jnp.float32).sum(3).astype(x_BLGK.dtype)


def _call(kernel: Callable, blocks: Blocks, over: str, args: tuple, out: tuple, run: Run) -> tuple:
  """Runs a kernel for every block of queries or keys of every row and head; it sees its own row and head."""
  from jax.experimental.pallas import triton

  B, L, H, K = args[0].shape
  size = getattr(blocks, over)

  def spec(x: Any, length: int) -> pl.BlockSpec:
    place = (lambda i: i) if length < L else (lambda i: 0)
    if x.ndim == 2:  # [B, L]
      return pl.BlockSpec((None, L), lambda i, b, h: (b, 0))
    if x.ndim == 3:  # [B, H, L]
      return pl.BlockSpec((None, None, length), lambda i, b, h: (b, h, place(i)))
    group = H // x.shape[2]
    return pl.BlockSpec((None, length, None, K), lambda i, b, h: (b, place(i), h // group, 0))

  return pl.pallas_call(
    functools.partial(kernel, blocks=blocks, scale=run.scale),
    grid=(L // size, B, H),
    in_specs=[spec(x, L) for x in args],
    out_specs=[spec(x, size) for x in out],
    out_shape=out,
    compiler_params=None if run.interpret else triton.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
    interpret=run.interpret,
    name=kernel.__name__.strip('_'),
  )(*args)


def _dot(a: Array, b: Array) -> Array:
  return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _scores(seen: Array, products: Array, scale: float) -> Array:
  """The scores that keys are seen with, to base 2, as is all inside the kernels."""
  return jnp.where(seen, products * (scale * math.log2(math.e)), HIDDEN)


def _span(block: Any, size: int) -> tuple[Any, Array]:
  """The slice of a block of tokens, and their places."""
  return pl.ds(block * size, size), block * size + jnp.arange(size)


def _forward_kernel(*refs: Any, blocks: Blocks, scale: float) -> None:
  q_ref, k_ref, v_ref, starts_ref, o_ref, lse_ref = refs
  own, query_Q = _span(pl.program_id(0), blocks.queries)
  q_QK, start_Q = q_ref[own, :], starts_ref[own]

  def add(block: Array, carry: Any) -> Any:
    o_QK, top_Q, sum_Q = carry
    span, key_C = _span(block, blocks.keys)
    seen_QC = (key_C[None] <= query_Q[:, None]) & (key_C[None] >= start_Q[:, None])
    score_QC = _scores(seen_QC, _dot(q_QK, k_ref[span, :].T), scale)
    new_top_Q = jnp.maximum(top_Q, score_QC.max(1))
    p_QC, shrink_Q = jnp.exp2(score_QC - new_top_Q[:, None]), jnp.exp2(top_Q - new_top_Q)
    o_QK = o_QK * shrink_Q[:, None] + _dot(p_QC.astype(v_ref.dtype), v_ref[span, :])
    return o_QK, new_top_Q, sum_Q * shrink_Q + p_QC.sum(1)

  none_Q = jnp.zeros(blocks.queries, jnp.float32)
  start = (jnp.zeros(q_QK.shape, jnp.float32), none_Q + HIDDEN, none_Q)
  o_QK, top_Q, sum_Q = _over_keys(add, start, starts_ref, blocks)
  o_ref[...] = (o_QK / sum_Q[:, None]).astype(o_ref.dtype)
  lse_ref[...] = top_Q + jnp.log2(sum_Q)


def _over_keys(add: Callable, carry: Any, starts_ref: Any, blocks: Blocks) -> Any:
  """Folds the blocks of keys that any of this program's queries sees: from its first one's segment to the diagonal."""
  first = pl.program_id(0) * blocks.queries
  end = jax.lax.div(first + blocks.queries + blocks.keys - 1, blocks.keys)
  return jax.lax.fori_loop(jax.lax.div(starts_ref[first], blocks.keys), end, add, carry)


def _dq_kernel(*refs: Any, blocks: Blocks, scale: float) -> None:
  q_ref, k_ref, v_ref, starts_ref, do_ref, lse_ref, delta_ref, dq_ref = refs
  own, query_Q = _span(pl.program_id(0), blocks.queries)
  q_QK = q_ref[own, :]
  do_QK = do_ref[own, :]
  start_Q = starts_ref[own]
  lse_Q, delta_Q = lse_ref[own], delta_ref[own]

  def add(block: Array, dq_QK: Array) -> Array:
    span, key_C = _span(block, blocks.keys)
    k_CK = k_ref[span, :]
    seen_QC = (key_C[None] <= query_Q[:, None]) & (key_C[None] >= start_Q[:, None])
    score_QC = _scores(seen_QC, _dot(q_QK, k_CK.T), scale)
    ds_QC = jnp.exp2(score_QC - lse_Q[:, None]) * (_dot(do_QK, v_ref[span, :].T) - delta_Q[:, None])
    return dq_QK + _dot(ds_QC.astype(k_CK.dtype), k_CK)

  dq_QK = _over_keys(add, jnp.zeros(q_QK.shape, jnp.float32), starts_ref, blocks)
  dq_ref[...] = (dq_QK * scale).astype(dq_ref.dtype)


def _dkv_kernel(*refs: Any, blocks: Blocks, scale: float) -> None:
  q_ref, k_ref, v_ref, starts_ref, do_ref, lse_ref, delta_ref, ends_ref, dk_ref, dv_ref = refs
  own, key_C = _span(pl.program_id(0), blocks.keys)
  k_CK, v_CK = k_ref[own, :], v_ref[own, :]

  def add(block: Array, carry: Any) -> Any:
    dk_CK, dv_CK = carry
    span, query_Q = _span(block, blocks.queries)
    q_QK, do_QK = q_ref[span, :], do_ref[span, :]
    seen_CQ = (key_C[:, None] <= query_Q[None]) & (key_C[:, None] >= starts_ref[span][None])
    score_CQ = _scores(seen_CQ, _dot(k_CK, q_QK.T), scale)
    p_CQ = jnp.exp2(score_CQ - lse_ref[span][None])
    ds_CQ = p_CQ * (_dot(v_CK, do_QK.T) - delta_ref[span][None])
    return dk_CK + _dot(ds_CQ.astype(q_QK.dtype), q_QK), dv_CK + _dot(p_CQ.astype(do_QK.dtype), do_QK)

  first = pl.program_id(0) * blocks.keys
  end = ends_ref[first + blocks.keys - 1]  # of the segment of the last key
  zeros_CK = jnp.zeros(k_CK.shape, jnp.float32)
  begin, stop = jax.lax.div(first, blocks.queries), jax.lax.div(end + blocks.queries - 1, blocks.queries)
  dk_CK, dv_CK = jax.lax.fori_loop(begin, stop, add, (zeros_CK, zeros_CK))
  dk_ref[...], dv_ref[...] = (dk_CK * scale).astype(dk_ref.dtype), dv_CK.astype(dv_ref.dtype)
