"""A check of a user-defined block before training, on small rows with known dependencies.

Perplexity would be wrong without a word where a token sees later ones or another segment, and so would generated text
where a cache gives something else than the whole text.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from dipaco_jax.core.errors import InputError
from dipaco_jax.models import block as block_lib, decoding, transformer
from dipaco_jax.models.transformer import Transformer

LENGTH = 12  # tokens of a row
LATER = 3  # the first token that is changed
SECOND = 6  # the first token of the second segment
READ = np.array([12, 12, 12, 4, 5, 7])  # tokens of each row that are read at one time, before others come one by one
GROWN = 3  # the first row whose tokens come so
STEPS = 2
NOISE = 0.02  # added to fresh parameters, because zeros among them may hide the parameters behind them
NEAR = 0.05  # relative to the output of a block, because a TPU computes float32 products in bfloat16


class Rows(NamedTuple):
  """Inputs of a block: three rows of two segments, two of which differ partly from the first, then texts."""

  x_BLD: jax.Array
  positions_BL: jax.Array
  segments_BL: jax.Array


def check(model: Transformer) -> None:
  """Raises InputError if a block cannot be a path's, or does not keep to what `block` says."""
  name = f'config.{block_lib.NAME}={model.config.block!r}'
  for parameter, x in transformer.shapes(model).items():
    if x.dtype != jnp.float32:
      raise InputError(f'{name}: {parameter} is {x.dtype}: parameters should be float32')
  decoding.position_axes(model)
  rows, rng = _rows(model), np.random.default_rng(1)
  for block in block_lib.blocks(model.config)[: block_lib.period(model.config)]:
    with block_lib.blaming(model.config):
      fresh = jax.jit(block.init)(jax.random.key(0), *rows)
    variables = jax.tree.map(lambda x: x + NOISE * rng.normal(size=x.shape).astype('f'), fresh)
    for problem, difference in _differences(model, block, variables, rows).items():
      if difference > NEAR:  # NaN is no fault: the parameters are drawn
        raise InputError(f'{name}: {problem}')


def _rows(model: Transformer) -> Rows:
  x_BLD = np.random.default_rng(0).normal(size=(len(READ), LENGTH, model.config.width))
  x_BLD[1:GROWN] = x_BLD[0]
  x_BLD[1, LATER:] *= -1
  x_BLD[2, :SECOND] *= -1
  segments_BL = np.ones((len(READ), LENGTH), np.int32)
  segments_BL[:GROWN, SECOND:] = 2
  segments = jnp.asarray(segments_BL)
  return Rows(jnp.asarray(x_BLD, model.dtype), transformer.positions(segments), segments)


def _differences(model: Transformer, block: nn.Module, variables: Any, rows: Rows) -> dict[str, float]:
  """Returns {problem: error relative to the output of the block}."""

  @jax.jit
  def run(*args: Any) -> Any:
    return block_lib.call(model.config, lambda *a: block.apply(variables, *a), *args)

  found_BLD = _float(run(*rows)[0])
  is_read_BL = jnp.arange(LENGTH) < READ[:, None]
  cache, grown = run(*rows._replace(segments_BL=jnp.where(is_read_BL, rows.segments_BL, 0)))[1], []
  for n in range(STEPS):
    place_B1 = jnp.asarray(np.minimum(READ + n, LENGTH - 1)[:, None], jnp.int32)
    x_B1D, expected_B1D = (jnp.take_along_axis(x, place_B1[..., None], 1) for x in (rows.x_BLD, found_BLD))
    out_B1D, cache = run(x_B1D, place_B1, jnp.ones_like(place_B1), cache)
    grown.append(_float(out_B1D)[GROWN:] - expected_B1D[GROWN:])
  scale = np.abs(found_BLD - _float(rows.x_BLD)).max() or 1.0
  changes = {
    'a token sees later ones': found_BLD[1, :LATER] - found_BLD[0, :LATER],
    'a token sees other segments': found_BLD[2, SECOND:] - found_BLD[0, SECOND:],
    'a text that is continued with its cache differs from one without': np.stack(grown),
  }
  return {problem: float(np.abs(change).max()) / scale for problem, change in changes.items()}


def _float(x: jax.Array) -> np.ndarray:
  return np.asarray(x.astype(jnp.float32))
