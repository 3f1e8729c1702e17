"""The learned chooser: its labels by hand, its head, and that it learns what the last tokens tell."""

import dataclasses

import jax
import numpy as np
import pytest
import small

from dipaco_jax.config import settings
from dipaco_jax.models import transformer
from dipaco_jax.routing import chunk_policies, chunk_router

PATHS, ROWS, LENGTH = 4, 16, 24
CONFIG = settings.Inner(learning_rate=0.01, weight_decay=0.01, warmup_steps=1000, decay_steps=1)


def make(tied: bool = True) -> transformer.Transformer:
  return transformer.make_model(settings.Model(32, 2, 2, 16, 48, LENGTH, tied), small.VOCAB)


def draw(seed: int, rows: int = ROWS):
  """Tokens, segments and token losses: the path that suits a target is told by the token two before it."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, small.VOCAB, (rows, LENGTH)).astype(np.int32)
  segments = np.ones_like(tokens)
  segments[:, 20:] = np.arange(rows)[:, None] % 2  # half of the rows are shorter
  best_NL = np.roll(tokens, 1, axis=1) % PATHS
  nll_PNL = np.where(best_NL == np.arange(PATHS)[:, None, None], 1.0, 3.0) + rng.uniform(0, 0.1, (PATHS, rows, LENGTH))
  inside_NL = np.pad(segments, ((0, 0), (0, 1)))[:, 1:] > 0
  return tokens * segments, segments, list((nll_PNL * inside_NL).astype('f'))


@pytest.mark.parametrize('horizon', [0, 1, 5, LENGTH, 100])
def test_labels_by_hand(horizon, monkeypatch):
  monkeypatch.setattr(chunk_policies, 'BLOCK_BYTES', 4 * PATHS * LENGTH * 3)  # three at a time
  nll = [np.random.default_rng(path).gamma(2, 1, (7, LENGTH)).astype('f') for path in range(PATHS)]
  found = chunk_router.labels(nll, horizon)
  assert found.dtype == np.int32
  for n in range(7):
    for j in range(LENGTH):
      end = j + horizon if horizon else LENGTH
      sums = [sum(map(float, nll[path][n, j:end])) for path in range(PATHS)]
      assert found[n, j] == np.argmin(sums), (n, j)


@pytest.mark.parametrize('horizon', [0, 5])
def test_a_path_that_has_diverged_is_no_label(horizon):
  """From where it has; a token that no path has finite losses for has none."""
  nll = [np.random.default_rng(path).gamma(2, 1, (3, LENGTH)).astype('f') for path in range(3)]
  without = [nll[path].copy() for path in (0, 2)]
  nll[1][:] = np.nan
  nll[0][1, 9] = np.inf
  for of_path in nll:
    of_path[2, 4] = np.nan
  found = chunk_router.labels(nll, horizon)
  expected = np.array([0, 2])[chunk_router.labels(without, horizon)]
  reach = horizon or LENGTH
  expected[1, max(0, 9 - reach + 1) : 10] = 2
  expected[2, max(0, 4 - reach + 1) : 5] = chunk_router.NONE
  np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_what_has_no_label_has_no_loss():
  made = make()
  tokens, segments, nll = draw(0)
  params, labels = chunk_router.init_params(small.base(made), PATHS), chunk_router.labels(nll)
  _, count = chunk_router.loss(made, params, tokens, segments, labels)
  labels[:, :3] = chunk_router.NONE
  nats, fewer = chunk_router.loss(made, params, tokens, segments, labels)
  assert fewer == count - 3 * ROWS
  np.testing.assert_allclose(nats / fewer, np.log(PATHS), rtol=ROWS * LENGTH * small.EPS)


def test_a_new_chooser_likes_all_paths_as_well():
  made = make()
  tokens, segments, nll = draw(0)
  params = chunk_router.init_params(small.base(made), PATHS)
  logits = chunk_router.logits(made, params, tokens, segments)
  assert logits.shape == (ROWS, LENGTH, PATHS) and not logits.any()
  nats, count = chunk_router.loss(made, params, tokens, segments, chunk_router.labels(nll))
  assert count == ROWS // 2 * (LENGTH - 1) + ROWS // 2 * (20 - 1)
  np.testing.assert_allclose(nats / count, np.log(PATHS), rtol=ROWS * LENGTH * small.EPS)


@pytest.mark.parametrize('tied', [True, False])
def test_logits_are_the_head_on_the_normed_hidden_state(tied):
  made = make(tied)
  base = small.base(made)
  tokens, segments, _ = draw(0)
  x_BLD, _ = transformer.logit_factors(made, base, tokens, segments)
  kernel_DP = np.random.default_rng(0).normal(size=(32, PATHS)).astype('f')
  params = chunk_router.init_params(base, PATHS) | {chunk_router.KERNEL: kernel_DP}
  assert 'head/kernel' not in params
  expected = np.asarray(x_BLD) @ kernel_DP
  # Sums over width, of products of a few times 1.
  np.testing.assert_allclose(chunk_router.logits(made, params, tokens, segments), expected, atol=100 * 32 * small.EPS)
  np.testing.assert_array_equal(chunk_router.choose(made, params, tokens, segments), expected.argmax(-1))


def test_padding_has_no_loss():
  made = make()
  tokens, segments, nll = draw(0)
  labels = chunk_router.labels(nll)
  kernel_DP = np.random.default_rng(0).normal(size=(32, PATHS)).astype('f')
  params = chunk_router.init_params(small.base(made), PATHS) | {chunk_router.KERNEL: kernel_DP}
  nats, _ = chunk_router.loss(made, params, tokens, segments, labels)
  others = np.where(segments == 0, (labels + 1) % PATHS, labels)
  assert float(chunk_router.loss(made, params, tokens, segments, others)[0]) == float(nats)
  assert float(chunk_router.loss(made, params, tokens, segments, (labels + 1) % PATHS)[0]) != float(nats)


def batch(step: int):
  tokens, segments, nll = draw(step)
  return tokens, segments, chunk_router.labels(nll, 1)


@pytest.mark.slow
def test_it_learns_what_the_last_tokens_tell():
  made = make()
  start = chunk_router.init_params(transformer.init(made, jax.random.key(0)), PATHS)
  params, losses = chunk_router.train(made, start, batch, 110, CONFIG)
  assert losses.shape == (110,) and losses[0] == pytest.approx(np.log(PATHS), rel=1e-5)
  tokens, segments, nll = draw(1000, 200)
  chosen = np.asarray(chunk_router.choose(made, params, tokens, segments))
  # Not the first token, before which there is none; not a last one, which none follows.
  followed = np.pad(segments, ((0, 0), (0, 1)))[:, 2:] > 0
  right = (chosen == chunk_router.labels(nll, 1))[:, 1:][followed]
  print(losses[::20], right.mean())
  assert right.mean() > 0.9


@pytest.mark.slow
def test_equal_arguments_give_equal_bits_and_are_not_used_up():
  made = make()
  start = chunk_router.init_params(small.base(made), PATHS)
  one, two = (chunk_router.train(made, start, batch, 3, CONFIG) for _ in range(2))
  small.assert_close(one, two, 0)
  assert all((one[0][name] != x).any() for name, x in start.items())


def test_it_is_trained_where_parameters_of_paths_are_frozen():
  frozen = settings.Inner(frozen='^(?!.*mlp/router)', optimizer='muon')
  assert chunk_router.of_chooser(frozen) == chunk_router.of_chooser(dataclasses.replace(frozen, frozen=''))
