"""The GPU's attention is that of the equation at every border of documents; here without a GPU."""

import functools
import types

import absent_gpu
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slow

from dipaco_jax.config import settings
from dipaco_jax.models import attention, flash, transformer

LENGTH = 256


def packed(*borders: int, padding: int = 0) -> np.ndarray:
  """Segment ids [L] of documents that end at the borders and at the end, before the padding."""
  segments = 1 + sum((np.arange(LENGTH) >= border).astype(np.int32) for border in borders)
  return np.where(np.arange(LENGTH) < LENGTH - padding, segments, 0)


def inputs(rows, heads: int, groups: int, size: int, dtype=jnp.bfloat16):
  """(q, k, v), segment ids and the output's gradient."""
  draw = functools.partial(np.random.default_rng(0).normal)
  shape = len(rows), LENGTH, heads, size
  q, do = (jnp.asarray(draw(size=shape), dtype) for _ in range(2))
  k, v = (jnp.asarray(draw(size=(*shape[:2], groups, size)), dtype) for _ in range(2))
  return (q, k, v), jnp.asarray(np.stack(rows)), do


def with_gradients(attend, qkv, do):
  out, back = jax.vjp(attend, *qkv)
  return out, *back(do.astype(out.dtype))


def expected(qkv, segments_BL, do, scores=attention.PLAIN):
  """Of the masked reference, in float32; queries that share a head of keys have a copy each."""

  def attend(q_BLHK, k_BLGK, v_BLGK):
    k_BLHK, v_BLHK = (jnp.repeat(x, q_BLHK.shape[2] // x.shape[2], axis=2) for x in (k_BLGK, v_BLGK))
    return attention.attend(q_BLHK, k_BLHK, v_BLHK, segments_BL, 'xla', scores)

  return with_gradients(attend, [x.astype(jnp.float32) for x in qkv], do)


def check(rows, heads=1, groups=1, size=16, scores=attention.PLAIN):
  qkv, segments_BL, do = inputs(rows, heads, groups, size)
  found = with_gradients(lambda *qkv: flash.flash(*qkv, segments_BL, scores, interpret=True), qkv, do)
  for ours, theirs in zip(found, expected(qkv, segments_BL, do, scores), strict=True):
    np.testing.assert_allclose(np.asarray(ours, np.float32), theirs, atol=0.05)


@pytest.mark.slow
def test_no_token_sees_another_document_wherever_the_border_is():
  check([packed(border) for border in (*range(1, LENGTH, 11), 63, 64, 65, 127, 128, 129)])


@pytest.mark.slow
def test_many_short_documents_and_padding():
  check([packed(*range(1, 64)), packed(1, 33, 34, 100, padding=29), packed(padding=255), packed(64, 128, 192)])


@pytest.mark.parametrize(('heads', 'groups', 'size'), slow.all_but([(4, 2, 32), (4, 1, 64), (2, 2, 128)], (4, 2, 32)))
def test_queries_share_heads_of_keys_and_values(heads, groups, size):
  check([packed(70, 200), packed(padding=10)], heads, groups, size)


@pytest.mark.parametrize('window', slow.all_but([1, 40, 64, 65, 200, 1000], 65))
def test_no_token_sees_what_is_behind_its_window(window):
  check([packed(70, 200), packed(padding=10)], 2, 1, scores=attention.Scores(window, 37.0))


def test_a_document_does_not_depend_on_its_neighbours_to_the_bit():
  (q, k, v), segments_BL, _ = inputs([packed(70, 200)], 2, 2, 16)
  other = [x.at[:, :70].set(7.0).at[:, 200:].set(-7.0) for x in (q, k, v)]
  ours, theirs = (flash.flash(*qkv, segments_BL, interpret=True)[:, 70:200] for qkv in ((q, k, v), other))
  np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (ours, theirs)))


@pytest.mark.parametrize(
  ('length', 'size', 'dtype', 'taken'),
  [(256, 64, 'bfloat16', True), (256, 64, 'float16', True), (256, 64, 'float32', False), (200, 64, 'bfloat16', False),
   (256, 48, 'bfloat16', False)],
)  # fmt: skip
def test_what_it_does_not_take_is_computed_with_a_mask(length, size, dtype, taken):
  q = jnp.zeros((1, length, 1, size), dtype)
  segments_BL = jnp.ones((1, length), jnp.int32)
  text = absent_gpu.lowered(lambda q: attention.attend(q, q, q, segments_BL, 'flash'), q)
  assert ('triton' in text) == taken


@pytest.mark.parametrize(
  ('capability', 'kernel'), [('7.5', 'xla'), ('8.0', 'flash'), ('12.0', 'flash'), ('gfx942', 'flash')]
)
def test_auto_is_not_the_kernel_on_gpus_that_triton_does_not_know(monkeypatch, capability, kernel):
  monkeypatch.setattr(jax, 'local_devices', lambda: [types.SimpleNamespace(compute_capability=capability)])
  assert transformer.for_device(settings.Model(), 'gpu').attention == kernel


def test_on_a_gpu_training_uses_the_kernels_forward_and_backward():
  (q, k, v), segments_BL, do = inputs([packed(70)], 2, 2, 64)

  def both(*qkv):
    return with_gradients(lambda *x: attention.attend(*x, segments_BL, 'flash'), qkv, do)

  text = absent_gpu.lowered(both, q, k, v)
  assert all(f'{kernel}_kernel' in text for kernel in ('forward', 'dq', 'dkv'))
  assert f'{LENGTH}x{LENGTH}' not in text  # no mask and no scores


@pytest.mark.slow
def test_what_the_gradient_needs_is_kept():
  qkv, segments_BL, _ = inputs([packed(70)], 1, 1, 16)

  def loops(remat):
    attend = functools.partial(flash.flash, segments_BL=segments_BL, interpret=True)
    again = jax.checkpoint(attend, policy=transformer.REMAT_POLICIES[remat]) if remat else attend
    gradient = jax.jit(jax.grad(lambda q, k, v: (again(q, k, v).astype(jnp.float32) ** 2).sum(), (0, 1, 2)))
    return gradient.lower(*qkv).compile().as_text().count(' while(')  # XLA drops what nobody uses

  assert loops('dots') == loops('') < loops('full')
