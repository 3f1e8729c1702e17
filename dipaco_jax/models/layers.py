"""Parts of blocks: RMSNorm, a gated MLP, initializers, and the differences between blocks."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from dipaco_jax.config import settings
from dipaco_jax.models.products import product

Weights = tuple[jax.Array, jax.Array, jax.Array]  # gate and up, [D, F], and down, [F, D], of an MLP


class Layer(NamedTuple):
  """What differs from block to block."""

  window: int  # tokens that a token sees, itself included; 0: all before it
  has_local_base: bool  # of its rotary embedding
  turns: bool  # queries and keys, by rotary embedding


def layer(c: settings.Model, n: int) -> Layer:
  """Returns the properties of block n."""
  window = 0 if c.full_every and (n + 1) % c.full_every == 0 else c.window
  turns = not c.no_rope_every or (n + 1) % c.no_rope_every != 0
  return Layer(window, bool(window and c.rope_local_base), turns)


def scaled_normal(scale: float, fan_in: int) -> nn.initializers.Initializer:
  """Returns a normal initializer of standard deviation scale / sqrt(fan_in)."""
  return nn.initializers.normal(scale / math.sqrt(fan_in))


class RMSNorm(nn.Module):
  """x / sqrt(mean(x^2) + epsilon) * scale, in float32, over the last dimension; or * (1 + scale)."""

  epsilon: float
  from_one: bool = False

  @nn.compact
  def __call__(self, x_BLD: jax.Array) -> jax.Array:
    fresh = nn.initializers.zeros if self.from_one else nn.initializers.ones
    scale_D = self.param('scale', fresh, (x_BLD.shape[-1],))
    x32_BLD = x_BLD.astype(jnp.float32)
    inverse_BL1 = jax.lax.rsqrt(jnp.mean(x32_BLD**2, -1, keepdims=True) + self.epsilon)
    return (x32_BLD * inverse_BL1 * (1 + scale_D if self.from_one else scale_D)).astype(x_BLD.dtype)


def make_norm(c: settings.Model) -> RMSNorm:
  """Returns a norm with the options of the model."""
  return RMSNorm(c.norm_epsilon, c.norm_from_one)


GATES: dict[str, Callable[[jax.Array], jax.Array]] = {
  'silu': nn.silu,
  'gelu': functools.partial(nn.gelu, approximate=True),
}


def is_wide(c: settings.Model) -> bool:
  """Returns whether products of 16 bits are computed into float32."""
  return c.product_dtype == 'float32'


@jax.custom_vjp
def together(tree: Any) -> Any:
  """Returns its arguments; all their gradients are computed before any of them is used.

  In a scanned block, XLA for TPUs puts products that are the gradients of matrices last, whatever else comes before;
  their operands leave vector memory until then.
  """
  return tree


def _forward(tree: Any) -> tuple[Any, None]:
  return tree, None


def _backward(_: None, gradients: Any) -> tuple[Any]:
  return (jax.lax.optimization_barrier(gradients),)


together.defvjp(_forward, _backward)


def mlp_weights(module: nn.Module, c: settings.Model, F: int) -> Weights:
  """Makes or reads the parameters gate and up, [D, F], and down, [F, D], of a module."""
  D = c.width
  gate_DF, up_DF = (module.param(name, scaled_normal(1, D), (D, F)) for name in ('gate', 'up'))
  return gate_DF, up_DF, module.param('down', scaled_normal(1 / math.sqrt(2 * c.num_layers), F), (F, D))


class MLP(nn.Module):
  """SwiGLU: (silu(x gate) * (x up)) down; or with gelu (arXiv 2002.05202)."""

  config: settings.Model
  dim: int = 0  # F; 0: config.mlp_dim

  @nn.compact
  def __call__(self, x_BLD: jax.Array) -> jax.Array:
    c = self.config
    gate_DF, up_DF, down_FD = mlp_weights(self, c, self.dim or c.mlp_dim)
    joined = together if c.layers == 'scanned' else tuple
    x_BLD, gate_DF, up_DF = joined((x_BLD, gate_DF, up_DF))
    gate_BLF, up_BLF = (product('BLD,DF->BLF', x_BLD, w_DF, is_wide(c)) for w_DF in (gate_DF, up_DF))
    gate_BLF, up_BLF, down_FD = joined((gate_BLF, up_BLF, down_FD))
    return product('BLF,FD->BLD', GATES[c.activation](gate_BLF) * up_BLF, down_FD, is_wide(c))
