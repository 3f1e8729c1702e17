"""Rotary embedding (arXiv 2104.09864) in Llama's layout, and its scaling for longer contexts than in pretraining.

Dimensions i and i + K/2 of a head turn together, by position * f_i with f_i = base^(-2i/K). In a text of the original
length L a pair turns r_i = L f_i / 2 pi times. For texts that are s times as long

    linear   f_i / s                                                                           (arXiv 2306.15595)
    llama3   g_i f_i + (1 - g_i) f_i / s,    g_i = clip((r_i - low) / (high - low), 0, 1)      (arXiv 2407.21783)
    yarn     g_i f_i + (1 - g_i) f_i / s,    g_i = 1 - clip((i - a) / (b - a), 0, 1)           (arXiv 2309.00071)

with a, b the dimensions, cut to integers, that turn `high` and `low` times; and yarn multiplies turned queries and
keys by 0.1 ln(s) + 1.

Dimensions: B batch, L length, H heads, K head size.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dipaco_jax.config import settings


class Angles(NamedTuple):
  """Angles by which `rotate` turns pairs of dimensions; `local` is for blocks with their own base."""

  common: Any
  local: Any


def angles(positions_BL: jax.Array, c: settings.Model) -> Angles:
  """Returns the angles of tokens at these positions, float32 [B, L, K/2]."""
  if c.rope_scaling == 'none':
    common = turned(positions_BL, c.rope_base, c.head_dim)
  else:
    common = positions_BL[..., None].astype(jnp.float32) * frequencies(c).astype(np.float32)
  return Angles(common, turned(positions_BL, c.rope_local_base, c.head_dim) if c.rope_local_base else common)


def looked_up(positions_BL: jax.Array, c: settings.Model) -> Angles:
  """Returns the sines and cosines of the same angles, from a table; positions are less than L.

  For CPUs, which take long for a sine. XLA would compute those of all tokens in every operation that needs them.
  """
  table = _table(c, positions_BL.shape[1])
  return jax.tree.map(lambda x_LK2: jnp.take(x_LK2, positions_BL, axis=0, mode='clip'), table)


@functools.lru_cache(maxsize=16)
def _table(c: settings.Model, length: int) -> Angles:
  """Returns (sines, cosines) of positions below `length`, [L, K/2] each, to the bit as a program would compute them."""

  def turns() -> Angles:
    return jax.tree.map(lambda x_LK2: (jnp.sin(x_LK2), jnp.cos(x_LK2)), angles(jnp.arange(length), c))

  with jax.ensure_compile_time_eval():
    return jax.tree.map(np.asarray, jax.jit(turns)())


def turned(positions_BL: jax.Array, base: float, head_dim: int) -> jax.Array:
  """Returns position * base^(-2i/K) for i in [0, K/2): float32 [B, L, K/2]."""
  inverse_K2 = base ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
  return positions_BL[..., None].astype(jnp.float32) * inverse_K2


def frequencies(c: settings.Model) -> np.ndarray:
  """Returns the scaled frequencies, float64 [K/2]."""
  f_K2 = c.rope_base ** (-np.arange(0, c.head_dim, 2) / c.head_dim)
  kept_K2 = _kept(c, f_K2)
  return f_K2 * kept_K2 + f_K2 / c.rope_factor * (1 - kept_K2)


def _kept(c: settings.Model, f_K2: np.ndarray) -> np.ndarray:
  """Returns g, the share of each frequency that is not scaled: [K/2]."""
  if c.rope_scaling == 'linear':
    return np.zeros_like(f_K2)
  if c.rope_scaling == 'llama3':
    turns_K2 = c.rope_original_len * f_K2 / (2 * math.pi)
    return np.clip((turns_K2 - c.rope_low) / (c.rope_high - c.rope_low), 0, 1)

  def dimension(turns: float) -> float:
    return c.head_dim * math.log(c.rope_original_len / (turns * 2 * math.pi)) / (2 * math.log(c.rope_base))

  a, b = max(math.floor(dimension(c.rope_high)), 0), min(math.ceil(dimension(c.rope_low)), c.head_dim - 1)
  return 1 - np.clip((np.arange(len(f_K2)) - a) / max(b - a, 0.001), 0, 1)


def gain(c: settings.Model) -> float:
  """Returns the factor of rotated queries and keys."""
  if c.rope_scaling != 'yarn':
    return 1.0
  return c.rope_attention or (0.1 * math.log(c.rope_factor) + 1 if c.rope_factor > 1 else 1.0)


def rotate(x_BLHK: jax.Array, angles: Any, gain: float = 1.0) -> jax.Array:
  """Turns the pairs of every head by angles, [B, L, K/2], or by their sines and cosines."""
  sin_BLK2, cos_BLK2 = angles if isinstance(angles, tuple) else (jnp.sin(angles), jnp.cos(angles))
  sin_BL1K2, cos_BL1K2 = sin_BLK2[:, :, None], cos_BLK2[:, :, None]
  if gain != 1:
    sin_BL1K2, cos_BL1K2 = sin_BL1K2 * gain, cos_BL1K2 * gain
  a_BLHK2, b_BLHK2 = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
  turned = (a_BLHK2 * cos_BL1K2 - b_BLHK2 * sin_BL1K2, b_BLHK2 * cos_BL1K2 + a_BLHK2 * sin_BL1K2)
  return jnp.concatenate(turned, -1).astype(x_BLHK.dtype)
