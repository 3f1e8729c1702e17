"""The chunked loss and its gradients, compared with whole logits, and the tokens that count."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from dipaco_jax.models import loss, transformer

N, D, V = 24, 8, 64


def drawn(dtype='f'):
  rng = np.random.default_rng(0)
  x_ND, head_DV = rng.normal(size=(N, D)), rng.normal(size=(D, V))
  targets_N, weights_N = rng.integers(0, V, N), rng.integers(0, 2, N).astype('f')
  return jnp.asarray(x_ND, dtype), jnp.asarray(head_DV, dtype), targets_N, weights_N


def plain(x_ND, head_DV, targets_N, weights_N):
  log_p = jax.nn.log_softmax((x_ND @ head_DV).astype(jnp.float32))
  return -(log_p[jnp.arange(N), targets_N] * weights_N).sum()


CHUNKS = [(1, 0), (5, 0), (8, 0), (24, 0), (1000, 0), (8, 1), (24, 16), (24, 31), (5, 63), (1000, 1000)]


@pytest.mark.parametrize('chunk, vocab_chunk', CHUNKS)
def test_loss_and_gradients_equal_those_of_whole_logits(chunk, vocab_chunk):
  inputs = drawn()
  found = jax.value_and_grad(lambda *a: 3 * loss.summed_nll(*a, chunk, vocab_chunk), (0, 1))(*inputs)
  expected = jax.value_and_grad(lambda *a: 3 * plain(*a), (0, 1))(*inputs)
  # Gradients are 3 times sums of N or V values below 10; the loss, below 500, is a sum over both.
  small.assert_close(found[1], expected[1], 3 * 10 * V * small.EPS)
  np.testing.assert_allclose(found[0], expected[0], rtol=V * small.EPS)
  np.testing.assert_allclose(loss.summed_nll(*inputs, chunk, vocab_chunk) * 3, expected[0], rtol=V * small.EPS)


@pytest.mark.parametrize('chunk', [5, 24])
def test_scores_equal_those_of_whole_logits(chunk):
  x_ND, head_DV, targets_N, _ = drawn()
  logits_NV = x_ND @ head_DV
  targets_N[::3] = logits_NV.argmax(-1)[::3]
  nll_N, likeliest_N = loss.token_scores(x_ND, head_DV, targets_N, chunk)
  expected_N = [plain(x_ND, head_DV, targets_N, np.eye(N)[n]) for n in range(N)]
  np.testing.assert_allclose(nll_N, expected_N, rtol=0, atol=10 * V * small.EPS)
  np.testing.assert_array_equal(likeliest_N, logits_NV.argmax(-1) == targets_N)
  assert 0 < likeliest_N.sum() < N


def test_gradients_in_bfloat16_are_summed_in_float32():
  x_ND, head_DV, targets_N, weights_N = drawn('bfloat16')
  found = jax.grad(loss.summed_nll, 1)(x_ND, head_DV, targets_N, weights_N, 1)
  assert found.dtype == jnp.bfloat16
  exact = jax.grad(plain, 1)(x_ND.astype('f'), head_DV.astype('f'), targets_N, weights_N)
  # Rounded once at the end and once for each probability, not once for each of the N chunks.
  np.testing.assert_allclose(found.astype('f'), exact, atol=2 * 2**-8 * np.abs(exact).max())


def test_logits_in_16_bits_do_not_make_gradients_less_exact():
  x_ND, head_DV, targets_N, weights_N = drawn('bfloat16')
  args = x_ND, head_DV.astype('f'), targets_N, weights_N
  exact = jax.grad(plain, (0, 1))(x_ND.astype('f'), *args[1:])
  whole, by_parts = (
    jax.grad(functools.partial(loss.summed_nll, chunk=8, vocab_chunk=part), (0, 1))(*args) for part in (0, 16)
  )
  for a, b, c in zip(whole, by_parts, exact, strict=True):
    errors = [np.linalg.norm(x.astype('f') - c) / np.linalg.norm(c) for x in (a, b)]
    assert errors[1] < 1.1 * errors[0] < 0.01


@pytest.mark.parametrize('order', [1, -1])
def test_logits_by_parts_may_be_of_any_size(order):
  x_ND, head_DV, targets_N, weights_N = drawn()
  head_DV = 100 * jnp.abs(head_DV) * jnp.linspace(0, 1, V)[::order]
  inputs = jnp.abs(x_ND), head_DV, targets_N, weights_N
  found, (dx_ND, _) = jax.value_and_grad(loss.summed_nll, (0, 1))(*inputs, 24, 8)
  np.testing.assert_allclose(found, loss.summed_nll(*inputs, 24), rtol=V * small.EPS)
  assert np.isfinite(dx_ND).all()


@pytest.mark.slow
def test_the_gradient_of_the_head_is_not_rounded():
  made = small.make_programs(small.settings(model={'dtype': 'bfloat16', 'tied': False})).model
  params, (tokens, segments) = small.base(made), small.batch(0, 0)
  found_DV = jax.grad(lambda params: loss.path_loss(made, 8, params, tokens, segments)[0])(params)['head/kernel']
  assert (found_DV != found_DV.astype('bfloat16')).mean() > 0.5


@pytest.mark.parametrize(
  'size, vocab_chunk, part', [(64, 0, 64), (64, 16, 16), (64, 31, 16), (62, 30, 62), (61, 16, 61)]
)
def test_logits_of_all_tokens_never_exist(size, vocab_chunk, part):
  """A part has at least half of the requested entries, or all entries."""
  x_ND, head_DV, targets_N, weights_N = drawn()
  inputs = x_ND, head_DV[:, :size], targets_N % size, weights_N
  text = str(jax.make_jaxpr(jax.value_and_grad(lambda *a: loss.summed_nll(*a, 12, vocab_chunk), (0, 1)))(*inputs))
  assert f'[12,{part}]' in text and f'[{N},{size}]' not in text
  assert (f'[12,{size}]' in text) == (part == size)


@pytest.mark.parametrize('size, chunk, expected', [(24, 8, 8), (24, 7, 6), (7, 4, 1), (3, 10, 3)])
def test_the_size_of_a_chunk_divides_the_number_of_tokens(size, chunk, expected):
  pieces = loss.into_chunks(jnp.arange(2 * size).reshape(size, 2), chunk)
  assert pieces.shape == (size // expected, expected, 2)
  np.testing.assert_array_equal(pieces.reshape(size, 2), np.arange(2 * size).reshape(size, 2))


def test_targets_count_inside_a_segment_and_after_the_prefix():
  tokens = np.arange(10, 20)[None]
  segments = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 0, 0]])
  follow, counts = loss.targets(tokens, segments, 2)
  # Targets are tokens 2 and 3 of either sequence: the first two are the prefix, and padding has none.
  np.testing.assert_array_equal(np.flatnonzero(counts), [1, 2, 5, 6])
  np.testing.assert_array_equal(follow[0][counts[0] > 0], [12, 13, 16, 17])


@pytest.mark.parametrize('length, expected', [(32, 0), (33, 1), (40, 8)])
def test_the_prefix_is_32_tokens(length, expected):
  segments = (np.arange(40) < length).astype(int)[None]
  _, counts = loss.targets(np.ones_like(segments), segments, 32)
  assert counts.sum() == expected


def test_path_loss_is_the_sum_of_row_losses():
  made = small.make_programs(small.settings()).model
  params, (tokens, segments) = small.base(made), small.batch(0, 0)
  nll, count = loss.path_loss(made, 8, params, tokens, segments)
  nll_B, count_B = loss.row_losses(made, 8, params, tokens, segments)
  assert nll_B.shape == count_B.shape == (small.ROWS,)
  np.testing.assert_allclose(nll, nll_B.sum(), rtol=small.ROWS * small.LENGTH * small.EPS)
  assert count == count_B.sum() == small.ROWS * (12 + 8)


def test_given_tokens_are_read_and_not_learned():
  made = transformer.make_model(small.settings().model, small.VOCAB)
  params, (tokens, segments) = small.base(made), small.batch(0, 0)
  given = np.random.default_rng(0).random(segments.shape) < 0.5
  marked = np.where(given, -segments, segments)
  hidden_BLD = transformer.hidden(made, params, tokens, segments)
  np.testing.assert_array_equal(transformer.hidden(made, params, tokens, marked), hidden_BLD)
  _, counts_BL = loss.targets(tokens, segments, 8)
  expected_BL = counts_BL * ~np.pad(given, ((0, 0), (0, 1)), constant_values=True)[:, 1:]
  np.testing.assert_array_equal(loss.targets(tokens, marked, 8)[1], expected_BL)
  assert 0 < expected_BL.sum() < counts_BL.sum()
  nll_BL = loss.token_losses(made, params, tokens, segments)
  learned_BL = loss.token_losses(made, params, tokens, marked)
  np.testing.assert_array_equal(learned_BL * expected_BL, nll_BL * expected_BL)
  nll, count = loss.path_loss(made, 8, params, tokens, marked)
  np.testing.assert_allclose(nll, (nll_BL * expected_BL).sum(), rtol=1e-5)
  assert count == expected_BL.sum()
