"""Sines and cosines from a table, against those that a program computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import shapes_of_families
import small

from dipaco_jax.models import loss, rotary, transformer

POSITIONS = jnp.asarray([[0, 1, 2, 0, 1, 2, 3, 4, 0, 1], [*range(10)]])


@pytest.mark.parametrize('family', ['llama2', 'llama3', 'qwen2', 'gemma3'])
def test_a_table_gives_the_same_bits(family):
  c = small.settings(model={'width': 16, 'num_heads': 2, 'head_dim': 8, **shapes_of_families.FAMILIES[family]}).model
  x_BLHK = jax.random.normal(jax.random.key(0), (2, 10, 3, 8))
  for name in rotary.Angles._fields:
    computed = jax.jit(lambda x, p, of=name: rotary.rotate(x, getattr(rotary.angles(p, c), of), rotary.gain(c)))
    from_table = jax.jit(lambda x, p, of=name: rotary.rotate(x, getattr(rotary.looked_up(p, c), of), rotary.gain(c)))
    np.testing.assert_array_equal(from_table(x_BLHK, POSITIONS), computed(x_BLHK, POSITIONS))


def test_training_on_cpus_computes_no_sine():
  c = small.settings().model
  made = transformer.make_model(c, small.VOCAB)
  params = transformer.init(made, jax.random.key(0))
  tokens, segments = jnp.zeros((2, c.seq_len), jnp.int32), jnp.ones((2, c.seq_len), jnp.int32)
  text = str(jax.make_jaxpr(jax.grad(lambda p: loss.path_loss(made, 0, p, tokens, segments)[0]))(params))
  assert ' dot_general' in text and ' sin ' not in text and ' cos ' not in text
