"""Arrays of a path on their way to the device: modules, checks of their shapes and numbers, and logits."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dipaco_jax.config import settings as settings_lib
from dipaco_jax.core import printable
from dipaco_jax.core.errors import InputError
from dipaco_jax.models import transformer
from dipaco_jax.storage import tensors


class Module(dict[str, jax.Array]):
  """A module's parameters; `sha256` is the digest of the object from which they were read."""

  sha256: str
  fault = ''  # problem of its numbers

  def __repr__(self) -> str:
    return f'<module of {sum(x.size for x in self.values()):,} parameters: {", ".join(self)}>'


def lowest_block(name: str, num_layers: int) -> int:
  """Returns the lowest block whose output a parameter changes: 0 for the embedding, N for those above all blocks."""
  part = name.partition('/')[0]
  return int(part.removeprefix('block_')) if part.startswith('block_') else 0 if part == 'embed' else num_layers


def check(params: Mapping[str, np.ndarray | jax.Array], model: settings_lib.Model, where: str) -> int:
  """Returns the rows of the embedding; raises InputError if the parameters are not those of a model."""
  rows = next(iter(np.shape(params.get('embed/tokens', 0))), 0)
  shapes = {name: np.shape(x) for name, x in params.items()}
  expected = shapes_of(model, max(1, rows))
  wrong = (name for name in sorted({*expected, *shapes}) if expected.get(name) != shapes.get(name))
  if (name := next(wrong, None)) is not None:
    difference = f'{name} is {shapes.get(name, "missing")} and should be {expected.get(name, "no parameter")}'
    raise InputError(f'{where}: {printable.name(difference)}, by config.model: these are not the files of this run')
  return rows


@functools.lru_cache(4)
def shapes_of(model: settings_lib.Model, rows: int) -> dict[str, tuple[int, ...]]:
  return {name: x.shape for name, x in transformer.shapes(transformer.make_model(model, rows)).items()}


def find_fault(arrays: Mapping[str, np.ndarray], file: str) -> str:
  """Says which numbers of a file are not finite, or '' if all are."""
  name = tensors.find_not_finite(arrays)
  problem = 'holds NaN or infinities, so that nothing it computes has a meaning: use another version or path'
  return f'{file}: {printable.name(name)} {problem}' if name else ''


def on_device(arrays: dict[str, np.ndarray], model: transformer.Transformer) -> dict[str, Any]:
  """Puts arrays on the device; matrices in the model's dtype, in which they are used, but for those of routers."""
  rounded = {name for name, x in arrays.items() if x.ndim > 1 and not transformer.is_router(name)}
  return {name: jnp.asarray(x, model.dtype if name in rounded else x.dtype) for name, x in arrays.items()}


@functools.partial(jax.jit, static_argnums=0)
def logits(model: transformer.Transformer, params: transformer.Params, tokens_BL: jax.Array) -> jax.Array:
  x_BLD, head_DV = transformer.logit_factors(model, params, tokens_BL, jnp.ones_like(tokens_BL))
  return jnp.einsum('BLD,DV->BLV', x_BLD, head_DV, preferred_element_type=jnp.float32)
