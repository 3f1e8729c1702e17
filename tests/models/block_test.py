"""Custom blocks: a copy of the built-in block trains bit for bit the same; a wrong block is an error in one line."""

import dataclasses

import jax
import numpy as np
import own_modules
import pytest
import repository
import slow
import small

from dipaco_jax.core.errors import InputError
from dipaco_jax.models import block, block_check, loss, product_flops, transformer
from dipaco_jax.telemetry import performance

MODEL = small.settings(model={'dtype': 'float32', 'num_layers': 3}).model
OURS = (repository.ROOT / 'dipaco_jax' / 'models' / 'block.py').read_text()
LINEAR = """
import flax.linen as nn
import jax.numpy as jnp
from dipaco_jax.models import layers

class Block(nn.Module):
  config: object

  @nn.compact
  def __call__(self, x, positions, segments, cache=None):
    w = self.param('w', layers.scaled_normal(1, x.shape[-1]), (x.shape[-1],) * 2)
    CHANGE

def make(config, n):
  return Block(config)
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
  return lambda source: own_modules.write(tmp_path, monkeypatch, source)


def model_with(name: str, **changes) -> transformer.Transformer:
  own = f'{name}:make' if name else ''
  return transformer.make_model(dataclasses.replace(MODEL, block=own, **changes), small.VOCAB)


def loss_and_gradient(model, params):
  tokens, segments = small.batch(0, 0)
  return jax.jit(jax.value_and_grad(lambda p: loss.path_loss(model, 8, p, tokens, segments)[0]))(params)


@pytest.mark.slow
@pytest.mark.parametrize('changes', slow.but([
  {}, {'layers': 'scanned', 'window': 8, 'full_every': 2}, {'remat': 'dots', 'num_kv_heads': 1, 'qk_norm': 'head'},
], {}, {'layers': 'scanned', 'window': 8, 'full_every': 2}))  # fmt: skip
def test_a_copy_of_our_block_trains_bit_for_bit_the_same(write, changes):
  ours, copy = model_with('', **changes), model_with(write(OURS), **changes)
  assert type(block.blocks(copy.config)[0]) is not block.Block
  jax.tree.map(np.testing.assert_array_equal, *(transformer.init(m, jax.random.key(0)) for m in (ours, copy)))
  params = small.base(ours)
  jax.tree.map(np.testing.assert_array_equal, *(loss_and_gradient(m, params) for m in (ours, copy)))
  block_check.check(copy)


def test_flops_of_a_copy_equal_our_formula(write):
  name = write(OURS)
  for changes in ({}, {'num_kv_heads': 1, 'norms': 'both', 'attention_cap': 5.0}):
    ours, copy = model_with('', **changes).config, model_with(name, **changes).config
    assert performance.flops_per_token(copy, 50, 24) == performance.flops_per_token(ours, 50, 24)


def test_a_scan_counts_as_often_as_it_runs():
  def run(x):
    return jax.lax.scan(lambda x, w: (x @ w, None), x, np.ones((5, 4, 4), 'f'))[0]

  assert product_flops.of_jaxpr(jax.make_jaxpr(run)(np.ones((3, 4), 'f'))) == 5 * 2 * 3 * 4 * 4


def test_blocks_repeat_after_their_period(write):
  assert block.period(model_with('', window=8, full_every=2, num_layers=6).config) == 2
  assert block.period(model_with('', window=8, full_every=5, no_rope_every=4, num_layers=3).config) == 1
  name = write(OURS.replace('layer(config, n))', 'layer(config, n)._replace(window=n % 4))'))
  assert block.period(model_with(name, num_layers=6).config) == 4


KEEP = [(s, t) for s in (own_modules.RECURRENT, own_modules.examples()['my_block.py']) for t in ('float32', 'bfloat16')]


@pytest.mark.parametrize(
  'source, dtype', slow.but(KEEP, KEEP[1], KEEP[2], KEEP[3]), ids=['0-32', '0-16', '1-32', '1-16']
)
def test_a_block_that_follows_the_rules_is_accepted(write, source, dtype):
  model = model_with(write(source), dtype=dtype)
  block_check.check(model)
  _, gradient = loss_and_gradient(model, small.base(model))
  assert all(np.abs(x).max() > 0 for x in gradient.values())


@pytest.mark.slow
def test_scanned_and_unrolled_layers_have_the_same_gradients(write):
  name = write(own_modules.examples()['my_block.py'])
  unrolled, scanned = (model_with(name, layers=layers) for layers in ('unrolled', 'scanned'))
  params = small.base(unrolled)
  small.assert_close(loss_and_gradient(unrolled, params)[1], loss_and_gradient(scanned, params)[1], 1e-3)


@pytest.mark.parametrize('change, message', [
  ('return x @ w', r'should return the hidden state and a cache, not \w+'),
  ('return (x @ w)[:, 1:], ()', r'the former float32\[1, 8, 16\] as it was given, not float32\[1, 7, 16\]'),
  ('return x @ w[1:], ()', r'raises TypeError.* \(line 12 of .*own_.*py\)'),
  ('return x + (x @ w).cumsum(1)[:, ::-1], ()', 'a token sees later ones'),
  ('return x + (x @ w).cumsum(1), ()', 'a token sees other segments'),
  ('return x, jnp.zeros((x.shape[1], 2))', r'should have B texts in front.*: with B=3, L=8 one is \[8, 2\]'),
  ('return x, jnp.zeros((len(x), 2 if cache is None else 3))', r'the latter float32\[6, 2\] as it was given'),
  ('return x + (x @ w if cache is None else x), ()', 'is continued with its cache differs from one without'),
  ("self.variable('stats', 'mean', lambda: x[0, 0]); return x @ w, ()", 'variables other than parameters, stats'),
  ("self.param('half', lambda key: jnp.ones(3, jnp.bfloat16)); return x @ w, ()", 'block_0/half is bfloat16'),
])  # fmt: skip
def test_a_wrong_block_is_an_error_in_one_line(write, change, message):
  with pytest.raises(InputError, match=rf"^config.model.block='own_\w+:make'.*{message}"):
    block_check.check(model_with(write(LINEAR.replace('CHANGE', change))))


def test_a_function_that_is_no_module_is_rejected(write):
  with pytest.raises(InputError, match='should return a module of Flax'):
    transformer.shapes(model_with(write('def make(config, n):\n  return lambda x: x\n')))
