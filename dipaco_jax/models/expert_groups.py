"""MLPs of groups of rows: each pair of a token and an expert is a row, and rows are sorted by their expert.

A group may have any number of rows, also none, so that no token is dropped. On TPUs, jax.lax.ragged_dot multiplies the
groups, and a kernel that comes with JAX computes the gradients of matrices [arXiv 2211.15841]. On CPUs, where
ragged_dot would multiply all rows by all experts, each group is cut into blocks of a few sizes. On GPUs, XLA may do as
it would on CPUs: this has not been measured. JAX cannot vectorize the gradients of ragged_dot by vmap, those of blocks
it can.

Dimensions: D width, E experts, M pairs, P places of the sorted pairs, B rows of a block, F MLP width.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

from dipaco_jax.models.layers import GATES, Weights
from dipaco_jax.models.products import into_float32

PRODUCTS = 'products of experts'  # their name, by which remat='dots' keeps them
TILES = 512, 256, 128  # rows of a tile of the kernel for TPUs
INTERPRET = False  # whether that kernel is computed with plain operations, for tests
LARGEST, SIZES = 1024, 5  # blocks of rows that a CPU multiplies by the matrices of one expert: most rows, and sizes


class Groups(NamedTuple):
  """Where the pairs of a token and an expert are if they are sorted by expert, and groups begin at whole blocks."""

  pairs_P: jax.Array  # the pair at each place, or M where there is none
  places_M: jax.Array  # the place of each pair
  firsts_E: jax.Array  # the place at which each group begins
  sizes_E: jax.Array  # pairs of each group


def group(experts_M: jax.Array, num_experts: int, block: int) -> Groups:
  """Sorts pairs by their expert, [M]; each group begins at a multiple of `block`."""
  order_M = jnp.argsort(experts_M, stable=True)
  sizes_E = (experts_M[:, None] == jnp.arange(num_experts)).sum(0, dtype=jnp.int32)
  sorted_firsts_E = jnp.cumsum(sizes_E) - sizes_E
  padded_E = -(-sizes_E // block) * block
  firsts_E = jnp.cumsum(padded_E) - padded_E
  places_M = jnp.argsort(order_M) + (firsts_E - sorted_firsts_E)[experts_M]
  num_places = len(experts_M) + num_experts * (block - 1)
  places_P = jnp.arange(-(-num_places // block) * block)
  expert_P = (places_P[:, None] >= firsts_E[1:]).sum(1)
  within_P = places_P - firsts_E[expert_P]
  at_P = jnp.minimum(sorted_firsts_E[expert_P] + within_P, len(experts_M) - 1)
  pairs_P = jnp.where(within_P < sizes_E[expert_P], order_M[at_P], len(experts_M))
  return Groups(pairs_P, places_M, firsts_E, sizes_E)


@jax.custom_vjp
def rearranged(x_MD: jax.Array, to_P: jax.Array, back_M: jax.Array) -> jax.Array:
  """Returns x[to], with zeros where `to` is no row of x; x itself is at `back`, once each.

  So the gradient is a look-up too, in place of a sum in an order that nobody knows.
  """
  return jnp.take(x_MD, to_P, axis=0, mode='fill', fill_value=0)


def _forward(x_MD: jax.Array, to_P: jax.Array, back_M: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return rearranged(x_MD, to_P, back_M), (to_P, back_M)


def _backward(places: tuple[jax.Array, jax.Array], g_PD: jax.Array) -> tuple[jax.Array, None, None]:
  _, back_M = places
  return jnp.take(g_PD, back_M, axis=0, mode='fill', fill_value=0), None, None


rearranged.defvjp(_forward, _backward)


def apply_experts(
  x_MD: jax.Array, experts_M: jax.Array, experts: list[Weights], activation: str, method: str, wide: bool = False
) -> jax.Array:
  """Returns MLP_e(x) of each pair, [M, D], computed in the dtype of x.

  Args:
    x_MD: the hidden state of each pair's token.
    experts_M: the expert of each pair.
    experts: all experts' matrices.
    activation: of the gate.
    method: 'ragged', 'megablox' or 'blocked', as `model.experts`.
    wide: products of 16 bits are computed into float32, by 'blocked'.
  """
  blocks = block_sizes(len(experts_M) // len(experts)) if method == 'blocked' else (1,)
  groups = group(experts_M, len(experts), blocks[-1])
  x_PD = rearranged(x_MD, groups.pairs_P, groups.places_M)
  if method == 'blocked':
    y_PD = _blockwise(activation, wide, blocks, x_PD, groups, experts)
  else:
    multiply = _multiply if method == 'megablox' and _tile(len(x_PD)) else jax.lax.ragged_dot
    gate_EDF, up_EDF, down_EFD = (jnp.stack([w.astype(x_MD.dtype) for w in ws]) for ws in zip(*experts, strict=True))
    gate_PF, up_PF = (checkpoint_name(multiply(x_PD, w_EDF, groups.sizes_E), PRODUCTS) for w_EDF in (gate_EDF, up_EDF))
    y_PD = checkpoint_name(multiply(GATES[activation](gate_PF) * up_PF, down_EFD, groups.sizes_E), PRODUCTS)
  return rearranged(y_PD, groups.places_M, groups.pairs_P)


def _tile(num_rows: int) -> int:
  """Returns the rows of a tile of the kernel, which have to divide all rows, or 0 if there are none."""
  return next((rows for rows in TILES if num_rows % rows == 0), 0)


@jax.custom_vjp
def _multiply(x_PD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
  """Returns jax.lax.ragged_dot, whose gradient of w XLA for TPUs would compute from all rows for each expert."""
  return jax.lax.ragged_dot(x_PD, w_EDF, sizes_E)


def _multiply_forward(x_PD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> tuple[jax.Array, Any]:
  return jax.lax.ragged_dot(x_PD, w_EDF, sizes_E), (x_PD, w_EDF, sizes_E)


def _multiply_backward(kept: Any, dy_PF: jax.Array) -> tuple[jax.Array, jax.Array, None]:
  x_PD, w_EDF, sizes_E = kept
  dx_PD = jax.lax.ragged_dot(dy_PF, w_EDF.swapaxes(1, 2), sizes_E)
  tiling = _tile(len(x_PD)), *(min(TILES[0], size) for size in w_EDF.shape[1:])
  return dx_PD, tgmm(x_PD.T, dy_PF, sizes_E, w_EDF.dtype, tiling, interpret=INTERPRET), None


_multiply.defvjp(_multiply_forward, _multiply_backward)


def block_sizes(mean_rows: int) -> tuple[int, ...]:
  """Returns the rows of blocks, largest first, for groups of about `mean_rows`.

  A CPU multiplies few large blocks faster than many small ones, and the last block of a group is partly empty. So each
  size is half of the one before.
  """
  largest = max(1, min(LARGEST, 1 << mean_rows.bit_length() >> 1))
  return tuple(largest >> i for i in range(SIZES) if largest >> i)


def _over_blocks(
  groups: Groups, expert: Any, blocks: Sequence[int], compute: Callable[[Any, int, Any], Any], carry: Any
) -> Any:
  """Calls compute(place, rows, carry) for the blocks of a group: of each size as many as fit; the last is padded."""
  place, left = groups.firsts_E[expert], groups.sizes_E[expert]
  for rows in blocks:
    count = left // rows if rows > blocks[-1] else -(-left // rows)
    one = functools.partial(_call_block, compute, place, rows)
    carry = jax.lax.fori_loop(0, count, one, carry)
    place, left = place + count * rows, left - count * rows
  return carry


def _over_experts(groups: Groups, add: Callable[[Any, Any], Any], carry: Any) -> Any:
  """Calls add(expert, carry) for all experts that a token has chosen."""

  def one(e: Any, carry: Any) -> Any:
    is_chosen = jnp.minimum(groups.sizes_E[e], 1)  # a loop works on its arrays in place, a conditional copies them
    return jax.lax.fori_loop(0, is_chosen, lambda _, carry: add(e, carry), carry)

  return jax.lax.fori_loop(0, len(groups.sizes_E), one, carry)


def _call_block(compute: Callable[[Any, int, Any], Any], first: Any, rows: int, j: Any, carry: Any) -> Any:
  return compute(first + j * rows, rows, carry)


def _pick(experts: list[Weights], expert: Any, dtype: Any) -> Weights:
  """Returns the matrices of an expert. Nothing is stacked, and `expert` is no batch under vmap."""
  weights = jax.lax.switch(expert, [lambda ws=ws: ws for ws in experts])
  return tuple(w.astype(dtype) for w in weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _blockwise(
  activation: str, wide: bool, blocks: tuple[int, ...], x_PD: jax.Array, groups: Groups, experts: list[Weights]
) -> jax.Array:
  """Returns the MLPs of groups of rows."""
  return _blockwise_forward(activation, wide, blocks, x_PD, groups, experts)[0]


def _blockwise_forward(
  activation: str, wide: bool, blocks: tuple[int, ...], x_PD: jax.Array, groups: Groups, experts: list[Weights]
) -> tuple[jax.Array, Any]:

  def add_expert(e: Any, results: Any) -> Any:
    gate_DF, up_DF, down_FD = _pick(experts, e, x_PD.dtype)

    def compute(place: Any, rows: int, results: Any) -> Any:
      x_BD = jax.lax.dynamic_slice_in_dim(x_PD, place, rows)
      gate_BF, up_BF = (_product('BD,DF->BF', x_BD, w_DF, wide) for w_DF in (gate_DF, up_DF))
      y_BD = _product('BF,FD->BD', GATES[activation](gate_BF) * up_BF, down_FD, wide)
      parts = zip(results, (y_BD, gate_BF, up_BF), strict=True)
      return tuple(jax.lax.dynamic_update_slice_in_dim(whole, part, place, 0) for whole, part in parts)

    return _over_blocks(groups, e, blocks, compute, results)

  between_PF = jnp.zeros((len(x_PD), experts[0][0].shape[1]), x_PD.dtype)
  results = jnp.zeros_like(x_PD), between_PF, between_PF
  y_PD, *between = (checkpoint_name(x, PRODUCTS) for x in _over_experts(groups, add_expert, results))
  return y_PD, (x_PD, groups, experts, between)


def _blockwise_backward(activation: str, wide: bool, blocks: tuple[int, ...], kept: Any, dy_PD: jax.Array) -> tuple:
  x_PD, groups, experts, (gate_PF, up_PF) = kept

  def add_expert(e: Any, carry: Any) -> Any:
    dx_PD, gradients = carry
    gate_DF, up_DF, down_FD = _pick(experts, e, x_PD.dtype)

    def compute(place: Any, rows: int, carry: Any) -> Any:
      dx_PD, own = carry
      x_BD, dy_BD, gate_BF, up_BF = (
        jax.lax.dynamic_slice_in_dim(a, place, rows) for a in (x_PD, dy_PD, gate_PF, up_PF)
      )
      hidden_BF, to_both = jax.vjp(lambda gate, up: GATES[activation](gate) * up, gate_BF, up_BF)
      dgate_BF, dup_BF = to_both(_product('BD,FD->BF', dy_BD, down_FD, wide))
      dx_BD = _product('BF,DF->BD', dgate_BF, gate_DF, wide) + _product('BF,DF->BD', dup_BF, up_DF, wide)
      factors = (x_BD, dgate_BF), (x_BD, dup_BF), (hidden_BF, dy_BD)
      own = tuple(g + into_float32('BX,BY->XY', x, y) for g, (x, y) in zip(own, factors, strict=True))
      return jax.lax.dynamic_update_slice_in_dim(dx_PD, dx_BD, place, 0), own

    fresh = tuple(jnp.zeros(w.shape, jnp.float32) for w in experts[0])
    dx_PD, own = _over_blocks(groups, e, blocks, compute, (dx_PD, fresh))
    return dx_PD, tuple(g.at[e].set(x) for g, x in zip(gradients, own, strict=True))

  start = tuple(jnp.zeros((len(experts), *w.shape), jnp.float32) for w in experts[0])
  dx_PD, gradients = _over_experts(groups, add_expert, (jnp.zeros_like(x_PD), start))
  of_experts = [tuple(g[e].astype(w.dtype) for g, w in zip(gradients, ws, strict=True)) for e, ws in enumerate(experts)]
  return dx_PD, None, of_experts


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)


def _product(spec: str, x: jax.Array, y: jax.Array, wide: bool) -> jax.Array:
  """Returns einsum(spec, x, y) in the dtype of x."""
  return into_float32(spec, x, y).astype(x.dtype) if wide else jnp.einsum(spec, x, y)
