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


def plain(q_BLHK, k_BLGK, v_BLGK, segments_BL, scores=attention.PLAIN):
  """Token by token."""
  out = np.zeros(q_BLHK.shape)
  q, k, v, segments = (np.asarray(x, np.float64) for x in (q_BLHK, k_BLGK, v_BLGK, segments_BL))
  share = q.shape[2] // k.shape[2]
  for b, i, h in np.ndindex(q.shape[:3]):
    first = max(0, i - scores.window + 1) if scores.window else 0
    seen = [j for j in range(first, i + 1) if segments[b, j] == segments[b, i]]
    found = k[b, seen, h // share] @ q[b, i, h] / (scores.query_scale or q.shape[3]) ** 0.5
    if scores.cap:
      found = scores.cap * np.tanh(found / scores.cap)
    odds = np.exp(found - found.max())
    out[b, i, h] = odds @ v[b, seen, h // share] / odds.sum()
  return out


KERNELS = {
  'xla': functools.partial(attention.attend, kernel='xla'),
  'splash': functools.partial(attention.splash, interpret=True),
}


SCORES = [
  attention.PLAIN, attention.Scores(window=70), attention.Scores(window=300), attention.Scores(query_scale=20.0),
  attention.Scores(130, 20.0, 1.5),
]  # fmt: skip


def grouped(qkv):
  """Three queries for each head of keys and values."""
  q_BLHK, k_BLHK, v_BLHK = qkv
  return q_BLHK, k_BLHK[:, :, :1], v_BLHK[:, :, :1]


@pytest.mark.parametrize('kernel', KERNELS)
@pytest.mark.parametrize('scores', SCORES)
def test_kernels_follow_the_equation(kernel, scores):
  qkv, segments_BL, _ = inputs()
  for found in (qkv, grouped(qkv)) if kernel == 'xla' or scores != attention.PLAIN else (qkv,):
    ours = KERNELS[kernel](*found, segments_BL, scores=scores)
    np.testing.assert_allclose(ours, plain(*found, segments_BL, scores), atol=2e-5)


@pytest.mark.parametrize('scores', [attention.PLAIN, SCORES[-1]])
def test_gradients_of_the_kernels_agree(scores):
  qkv, segments_BL, weight = inputs()
  qkv = qkv if scores == attention.PLAIN else grouped(qkv)
  found = [
    jax.jit(jax.grad(lambda q, k, v, f=f: jnp.sum(weight * f(q, k, v, segments_BL, scores=scores)), (0, 1, 2)))(*qkv)
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
