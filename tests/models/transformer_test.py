"""The transformer against the same in numpy; packing, remat, dtypes, names."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import plain_transformer
import pytest
import shapes_of_families
import slow
import small

from dipaco_jax.models import transformer

CONFIG = small.settings().model
# Sums of up to 64 float32 products, a handful of them in a row, of values below 10.
CLOSE = 10 * 64 * small.EPS


def tokens_of(num, length, seed=0):
  return np.random.default_rng(seed).integers(0, small.VOCAB, (num, length)).astype(np.int32)


@pytest.fixture(scope='module')
def made():
  return transformer.make_model(CONFIG, small.VOCAB)


@pytest.fixture(scope='module')
def params(made):
  return small.base(made)


@pytest.fixture(scope='module')
def hidden(made):
  return jax.jit(functools.partial(transformer.hidden, made))


def test_hidden_states_are_those_of_numpy(params, hidden):
  tokens = tokens_of(2, 24)
  found = hidden(params, tokens, np.ones_like(tokens))
  for row in range(2):
    np.testing.assert_allclose(found[row], plain_transformer.hidden(params, tokens[row], CONFIG), atol=CLOSE)


@pytest.mark.parametrize('family', shapes_of_families.FAMILIES | shapes_of_families.MORE)
@pytest.mark.parametrize('layers', slow.but(['unrolled', 'scanned'], 'unrolled'))
def test_families_follow_their_equations(family, layers):
  """5 blocks: of those that repeat after two one is left."""
  changes = (shapes_of_families.FAMILIES | shapes_of_families.MORE)[family]
  made = transformer.make_model(dataclasses.replace(CONFIG, num_layers=5, layers=layers, **changes), small.VOCAB)
  params, tokens = small.base(made), tokens_of(1, 24)
  segments = np.repeat([1, 2], [20, 4])[None]
  found = jax.jit(functools.partial(transformer.hidden, made))(params, tokens, segments)
  for part in (slice(0, 20), slice(20, 24)):
    expected = plain_transformer.hidden(params, tokens[0, part], made.config)
    np.testing.assert_allclose(found[0, part], expected, atol=CLOSE * np.abs(expected).max())


def test_a_packed_sequence_is_as_if_alone(params, hidden):
  tokens = tokens_of(1, 24)
  segments = np.repeat([1, 2, 3, 0], [9, 7, 5, 3])[None]
  found = hidden(params, tokens, segments)
  for segment in (1, 2, 3):
    (where,) = np.nonzero(segments[0] == segment)
    alone = plain_transformer.hidden(params, tokens[0, where], CONFIG)
    np.testing.assert_allclose(found[0, where], alone, atol=CLOSE)


def test_no_token_sees_a_later_one(params, hidden):
  tokens = tokens_of(1, 24)
  changed = tokens.copy()
  changed[0, 15:] = (changed[0, 15:] + 1) % small.VOCAB
  before, after = (np.asarray(hidden(params, t, np.ones_like(t))) for t in (tokens, changed))
  np.testing.assert_array_equal(before[0, :15], after[0, :15])
  assert (before[0, 15:] != after[0, 15:]).any(1).all()


def test_positions_restart_with_every_segment():
  segments = np.array([[1, 1, 1, 2, 2, 3, 0, 0], [5, 5, 5, 5, 5, 5, 5, 5]])
  np.testing.assert_array_equal(transformer.positions(segments), [[0, 1, 2, 0, 1, 0, 0, 1], range(8)])


def test_features_are_the_mean_of_the_last_block(made, params):
  tokens = tokens_of(3, 8)
  found = jax.jit(functools.partial(transformer.features, made))(params, tokens)
  assert found.shape == (3, CONFIG.width) and found.dtype == jnp.float32
  for row in range(3):
    expected = plain_transformer.hidden(params, tokens[row], CONFIG).mean(0)
    np.testing.assert_allclose(found[row], expected, atol=CLOSE)


@pytest.mark.parametrize('tied', [True, False])
def test_logits_are_those_of_numpy(tied):
  made = transformer.make_model(dataclasses.replace(CONFIG, tied=tied, num_layers=1), small.VOCAB)
  params, tokens = small.base(made), tokens_of(1, 16)
  assert ('head/kernel' in params) != tied
  x_BLD, head_DV = jax.jit(functools.partial(transformer.logit_factors, made))(params, tokens, np.ones_like(tokens))
  log_p = jax.nn.log_softmax(x_BLD[0] @ head_DV)
  expected = plain_transformer.nll(params, tokens[0], made.config)
  np.testing.assert_allclose(-log_p[np.arange(15), tokens[0, 1:]], expected, atol=10 * CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize('changes, words', [
  ({'remat': 'full'}, ['remat']), ({'remat': 'dots'}, ['remat']),
  ({'layers': 'scanned'}, ['scan[', 'optimization_barrier']),
  ({'layers': 'scanned', 'remat': 'full'}, ['scan[', 'remat', 'optimization_barrier']),
])  # fmt: skip
def test_how_it_is_computed_changes_no_gradient(changes, words, made, params):
  tokens = tokens_of(1, 16)

  def gradient(made):
    square = lambda params: (transformer.hidden(made, params, tokens, np.ones_like(tokens)) ** 2).mean()  # noqa: E731
    return jax.jit(jax.grad(square))

  again = transformer.make_model(dataclasses.replace(CONFIG, **changes), small.VOCAB)
  for word in ('scan[', 'remat', 'optimization_barrier'):
    assert (word in str(jax.make_jaxpr(gradient(again))(params))) == (word in words)
    assert word not in str(jax.make_jaxpr(gradient(made))(params))
  small.assert_close(gradient(again)(params), gradient(made)(params), CLOSE)


def test_bfloat16_computes_in_it_and_keeps_parameters(made, params, hidden):
  half = transformer.make_model(dataclasses.replace(CONFIG, dtype='bfloat16'), small.VOCAB)
  assert {x.dtype for x in transformer.shapes(half).values()} == {jnp.dtype('float32')}
  tokens = tokens_of(1, 16)
  found = jax.jit(functools.partial(transformer.hidden, half))(params, tokens, np.ones_like(tokens))
  assert found.dtype == jnp.bfloat16
  expected = np.asarray(hidden(params, tokens, np.ones_like(tokens)))
  # 8 bits, for each of some ten roundings in a row, relative to the state's size.
  error = np.sqrt(((found.astype('f') - expected) ** 2).mean() / (expected**2).mean())
  assert 1e-5 < error < 10 * 2**-8


def test_auto_is_float32_on_a_cpu(made):
  assert made.dtype == jnp.float32 and CONFIG.dtype == 'auto'


def test_fresh_parameters_have_the_documented_shapes_and_scales(made):
  params = transformer.init(made, jax.random.key(0))
  assert list(params) == sorted(params) == list(transformer.shapes(made))
  assert {n: x.shape for n, x in params.items()} == {n: x.shape for n, x in transformer.shapes(made).items()}
  for name, fan_in, scale in (
    ('embed/tokens', 16, 1),
    ('block_1/attention/q', 16, 1),
    ('block_0/attention/o', 16, 0.5),
    ('block_0/mlp/down', 24, 0.5),
  ):
    expected = scale / fan_in**0.5
    # 5 standard errors of the deviation of as many normal draws as there are elements.
    assert params[name].std() == pytest.approx(expected, rel=5 / (2 * params[name].size) ** 0.5), name
  assert (params['final_norm/scale'] == 1).all()
  other = transformer.init(made, jax.random.key(1))
  assert not np.array_equal(params['embed/tokens'], other['embed/tokens'])


def test_shapes_are_traced_once_and_each_caller_has_a_dict_of_its_own(monkeypatch):
  model = transformer.make_model(small.settings(model={'width': 24}).model, small.VOCAB)
  first = transformer.shapes(model)
  monkeypatch.setattr(transformer, 'init', None)
  again = transformer.shapes(model)
  assert again == first
  first.clear()
  assert transformer.shapes(model) == again
