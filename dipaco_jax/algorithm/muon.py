"""Muon inside a path: momentum of matrices, made orthogonal (Jordan et al., 2024; MuLoCo, arXiv 2505.23725). Pure.

Each matrix of a block, of R inputs and C outputs, with its heads as one dimension:

    M <- mu M + (1 - mu) G        N = mu M^ + (1 - mu) G^          ^: corrected for bias, as Adam's
    u = 0.2 sqrt(max(R, C)) NewtonSchulz(N)                        5 steps; singular values near 1

0.2 sqrt(max(R, C)) makes the root mean square of u about 0.2, that of Adam's, so that rate and weight decay of AdamW
fit (arXiv 2502.16982). Everything else, as embedding, head and norms, has Adam's u.
"""

import math
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers

ROOT_MEAN_SQUARE = 0.2  # of Adam's moves, in units of the rate
INPUTS_LAST = '/o'  # of attention, [H, K, D]: heads are its inputs


def scale_by_muon(momentum: float, others: optax.GradientTransformation) -> optax.GradientTransformation:
  """Returns the update u: Muon's for matrices of blocks, that of `others` for the rest. Parameters: {name: array}."""

  def scale(update: jax.Array, of: MuonDimensionNumbers) -> jax.Array:
    inputs, outputs = (math.prod(update.shape[i] for i in axes) for axes in of)
    return update * (ROOT_MEAN_SQUARE * math.sqrt(max(inputs, outputs)))

  matrices = optax.chain(
    optax.contrib.scale_by_muon(beta=momentum, weight_dimension_numbers=dimensions),
    optax.stateless(lambda updates, params: jax.tree.map(scale, updates, dimensions(updates))),
  )
  return optax.partition({'muon': matrices, 'others': others}, labels)


def labels(params: dict[str, Any]) -> dict[str, str]:
  """Returns 'muon' for the matrices of blocks, and 'others'."""
  return {name: 'muon' if name.startswith('block_') and x.ndim > 1 else 'others' for name, x in params.items()}


def dimensions(params: dict[str, Any]) -> dict[str, Any]:
  """Returns which dimensions are a matrix's inputs and outputs: the first and the others, of `o` all but the last."""

  def of(name: str, x: jax.Array) -> MuonDimensionNumbers:
    first = x.ndim - 1 if name.endswith(INPUTS_LAST) else 1
    return MuonDimensionNumbers(tuple(range(first)), tuple(range(first, x.ndim)))

  return {name: x if isinstance(x, optax.MaskedNode) else of(name, x) for name, x in params.items()}
