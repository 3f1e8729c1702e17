"""Kernels compute one function, and its gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slow

from dipaco_jax.models import attention, blocked, transformer

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
  'blocked': functools.partial(attention.attend, kernel='blocked'),
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
@pytest.mark.parametrize('scores', slow.all_but(SCORES, SCORES[-1]))
def test_kernels_follow_the_equation(kernel, scores):
  qkv, segments_BL, _ = inputs()
  for found in (qkv, grouped(qkv)) if kernel != 'splash' or scores != attention.PLAIN else (qkv,):
    ours = KERNELS[kernel](*found, segments_BL, scores=scores)
    np.testing.assert_allclose(ours, plain(*found, segments_BL, scores), atol=2e-5)


@pytest.mark.parametrize('scores', slow.all_but([attention.PLAIN, SCORES[1], SCORES[-1]], SCORES[-1]))
def test_gradients_of_the_kernels_agree(scores):
  qkv, segments_BL, weight = inputs()
  qkv = qkv if scores == attention.PLAIN else grouped(qkv)
  found = [
    jax.jit(jax.grad(lambda q, k, v, f=f: jnp.sum(weight * f(q, k, v, segments_BL, scores=scores)), (0, 1, 2)))(*qkv)
    for f in KERNELS.values()
  ]
  for of_xla, *others in zip(*found, strict=True):
    for ours in others:
      np.testing.assert_allclose(ours, of_xla, atol=1e-4)


@pytest.mark.parametrize('window', [0, 1, 70])
@pytest.mark.parametrize('length', [1, 63, 65, 600])
def test_blocks_hold_all_that_is_seen_and_little_more(length, window):
  computed = np.zeros((length, length), int)
  for queries, keys in blocked.spans(length, window):
    computed[queries, keys] += 1
  seen = np.tril(np.ones((length, length), int))
  seen = seen - np.tril(seen, -window) if window else seen
  assert computed.max() == 1 and (computed >= seen).all()
  assert length < 600 or computed.sum() <= (0.57 if window == 0 else 0.25) * length**2


@pytest.mark.parametrize('length', slow.all_but([1, 63, 100, 256], 100))
def test_blocks_of_any_length_follow_the_equation(length):
  (q, k, v), segments_BL, _ = inputs()
  cut = [x[:, :length] for x in (q, k, v, segments_BL)]
  np.testing.assert_allclose(KERNELS['blocked'](*cut), plain(*cut), atol=2e-5)


def test_no_bit_of_another_segment_or_of_a_later_token_is_seen_by_blocks():
  (q, k, v), segments_BL, _ = inputs()
  before = KERNELS['blocked'](q, k, v, segments_BL)
  other = (segments_BL == 2)[..., None, None] | (jnp.arange(SHAPE[1]) >= 200)[:, None, None]
  after = KERNELS['blocked'](*(jnp.where(other, 1e6, x) for x in (q, k, v)), segments_BL)
  np.testing.assert_array_equal(np.where(other, 0, before), np.where(other, 0, after))


def test_blocks_in_16_bits_are_close():
  (q, k, v), segments_BL, weight = inputs()

  def gradients(dtype, kernel):
    loss = lambda *qkv: jnp.sum(weight * KERNELS[kernel](*(x.astype(dtype) for x in qkv), segments_BL))  # noqa: E731
    return jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)

  for ours, theirs in zip(gradients('bfloat16', 'blocked'), gradients('float32', 'xla'), strict=True):
    # the factors' rounding, 2^-9 each, in sums of two products in a row
    assert np.linalg.norm(ours - theirs) < 4 * 2**-9 * np.linalg.norm(theirs)


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
