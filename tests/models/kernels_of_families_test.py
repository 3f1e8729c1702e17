"""What a family has is computed by the kernels of TPUs and GPUs, forward and backward: lowered for them, not run."""

import dataclasses

import absent_gpu
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import shapes_of_families
import slow

from dipaco_jax.config import settings
from dipaco_jax.models import attention, flash, layers

LENGTH, SIZE = 256, 64
NAMES = {'splash': ('tpu_custom_call', 'splash_mha_fwd', 'splash_mha_dkv'), 'flash': ('forward_kernel', 'dkv_kernel')}


def blocks(family: str) -> tuple[settings.Model, list[attention.Scores]]:
  """A model of a family, and how its kinds of blocks score."""
  model = dataclasses.replace(settings.Model(num_heads=4, head_dim=SIZE), **shapes_of_families.FAMILIES[family])
  kinds = {layers.layer(model, n).window for n in range(model.num_layers)}
  return model, [attention.Scores(window, model.query_scale, model.attention_cap) for window in sorted(kinds)]


def inputs(model: settings.Model):
  shapes = [(1, LENGTH, heads, SIZE) for heads in (model.num_heads, *(model.num_kv_heads or model.num_heads,) * 2)]
  rng = np.random.default_rng(0)
  return [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]


SEGMENTS = jnp.asarray(np.repeat([[1, 2]], LENGTH // 2, axis=1))


@pytest.mark.parametrize('kernel', NAMES)
@pytest.mark.parametrize('family', slow.all_but(shapes_of_families.FAMILIES, 'llama3', 'gemma3'))
def test_a_family_trains_by_the_kernel(family, kernel):
  model, kinds = blocks(family)

  def total(qkv):
    found = [attention.attend(*qkv, SEGMENTS, kernel, scores) for scores in kinds]
    return sum(x.astype(jnp.float32).sum() for x in found)

  if kernel == 'flash':
    text = absent_gpu.lowered(jax.grad(total), inputs(model))
  else:
    text = jax.jit(jax.grad(total)).trace(inputs(model)).lower(lowering_platforms=('tpu',)).as_text()
  assert all(name in text for name in NAMES[kernel])
  assert f'{LENGTH}x{LENGTH}xbf16' not in text and f'{LENGTH}x{LENGTH}xf32' not in text  # no scores in memory


@pytest.mark.parametrize('family', slow.but(['smollm2', 'gemma3'], 'smollm2'))
def test_interpreted_they_agree(family):
  """Heads that queries share, windows and a scale; each alone is in attention_test.py and flash_test.py."""
  model, kinds = blocks(family)
  qkv = inputs(model)
  for scores in kinds:
    expected = attention.attend(*(x.astype(jnp.float32) for x in qkv), SEGMENTS, 'xla', scores)
    splash = attention.splash(*qkv, SEGMENTS, scores, interpret=True)
    ours = flash.flash(*qkv, SEGMENTS, scores, interpret=True)
    for found in (splash, ours):
      np.testing.assert_allclose(np.asarray(found, np.float32), expected, atol=0.05)
