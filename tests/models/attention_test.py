"""Kernels compute one function, and its gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dipaco_jax.models import attention, transformer

SHAPE = 2, 256, 3, 64  # B, L, H, K


def inputs():
  keys = jax.random.split(jax.random.key(0), 4)
  q, k, v, weight = (jax.random.normal(key, SHAPE) for key in keys)
  segments_BL = jnp.asarray(np.repeat([[1, 2, 2, 3], [1, 1, 1, 0]], SHAPE[1] // 4, axis=1))  # packed, and padded
  return (q, k, v), segments_BL, weight


def plain(q_BLHK, k_BLHK, v_BLHK, segments_BL):
  """Token by token."""
  out = np.zeros(q_BLHK.shape)
  q, k, v, segments = (np.asarray(x, np.float64) for x in (q_BLHK, k_BLHK, v_BLHK, segments_BL))
  for b, i, h in np.ndindex(q.shape[:3]):
    seen = [j for j in range(i + 1) if segments[b, j] == segments[b, i]]
    scores = k[b, seen, h] @ q[b, i, h] / q.shape[3] ** 0.5
    odds = np.exp(scores - scores.max())
    out[b, i, h] = odds @ v[b, seen, h] / odds.sum()
  return out


KERNELS = {
  'xla': functools.partial(attention.attend, kernel='xla'),
  'splash': functools.partial(attention.splash, interpret=True),
}


@pytest.mark.parametrize('kernel', KERNELS)
def test_kernels_follow_the_equation(kernel):
  qkv, segments_BL, _ = inputs()
  np.testing.assert_allclose(KERNELS[kernel](*qkv, segments_BL), plain(*qkv, segments_BL), atol=2e-5)


def test_gradients_of_the_kernels_agree():
  qkv, segments_BL, weight = inputs()
  found = [
    jax.jit(jax.grad(lambda q, k, v, f=f: jnp.sum(weight * f(q, k, v, segments_BL)), (0, 1, 2)))(*qkv)
    for f in KERNELS.values()
  ]
  for ours, theirs in zip(*found, strict=True):
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_lengths_that_splash_does_not_take_are_computed_too():
  (q, k, v), segments_BL, _ = inputs()
  cut = [x[:, :100] for x in (q, k, v, segments_BL)]
  np.testing.assert_array_equal(attention.attend(*cut, kernel='splash'), attention.attend(*cut, kernel='xla'))


def test_what_the_gradient_of_splash_needs_is_kept():
  (q, k, v), segments_BL, _ = inputs()

  def loops(remat):
    attend = functools.partial(attention.splash, segments_BL=segments_BL, interpret=True)
    again = jax.checkpoint(attend, policy=transformer.REMAT_POLICIES[remat]) if remat else attend
    gradient = jax.jit(jax.grad(lambda q: (again(q, k, v) ** 2).sum()))
    return gradient.lower(q).as_text().count('stablehlo.while')  # of kernels, as plain operations

  assert loops('dots') == loops('') < loops('full')
