"""The classifier against scikit-learn, the hidden layer where a line is not enough, calibration to a distribution."""

import jax
import numpy as np
import pytest
import slow
from points import blobs, hidden_like
from sklearn import linear_model

from dipaco_jax.config import settings
from dipaco_jax.routing import classifier, router


def labelled(num: int, width: int, num_paths: int, seed=0) -> tuple[np.ndarray, np.ndarray]:
  """Features far from standard, and labels that a line tells apart but for noise."""
  rng = np.random.default_rng(seed)
  z_ND = hidden_like(num, width, seed) * np.exp(rng.normal(size=width)).astype('f') + 5
  x_ND = (z_ND - z_ND.mean(0)) / z_ND.std(0)
  return z_ND, (x_ND @ rng.normal(size=(width, num_paths)) + rng.gumbel(size=(num, num_paths))).argmax(1)


def fit(z_ND, labels_N, num_paths, key=0, **kwargs) -> router.Router:
  return classifier.fit_classifier(jax.random.key(key), z_ND, labels_N, num_paths, **kwargs)


def fit_weighted(z_ND, labels_N, num_paths, weight_N, l2, tolerance=classifier.TOLERANCE) -> router.Router:
  """Linear, with a weight for each document."""
  mean_D, scale_D = router.standardization(jax.numpy.asarray(z_ND))
  start = classifier.init_weights(jax.random.key(0), z_ND.shape[1], 0, num_paths)
  fitted = classifier.train(start, (z_ND - mean_D) / scale_D, labels_N, weight_N, l2, tolerance=tolerance)
  return classifier.as_router(fitted, mean_D, scale_D)


def nats(fitted, z_ND, labels_N) -> np.ndarray:
  return -np.asarray(jax.nn.log_softmax(router.scores(fitted, z_ND)))[np.arange(len(z_ND)), labels_N]


@pytest.mark.parametrize('weighted', [False, True])
@pytest.mark.parametrize('l2', slow.but([0.1, 1e-3], 0.1))
def test_logistic_regression_is_that_of_sklearn(l2, weighted):
  z_ND, labels_N = labelled(500, 10, 4)
  weight_N = np.random.default_rng(1).uniform(0, 2, 500) if weighted else np.ones(500)
  ours = fit_weighted(z_ND, labels_N, 4, weight_N, l2, 1e-6)
  x_ND = ((z_ND - z_ND.mean(0)) / z_ND.std(0)).astype('d')
  theirs = linear_model.LogisticRegression(C=1 / (l2 * weight_N.sum()), tol=1e-8, max_iter=2000)
  theirs.fit(x_ND, labels_N, weight_N)
  probability_NP = np.asarray(jax.nn.softmax(router.scores(ours, z_ND)))
  # A gradient of 1e-6 over a curvature of l2 or more: weights are within 1e-3, and most directions curve more.
  np.testing.assert_allclose(probability_NP, theirs.predict_proba(x_ND), atol=5e-4)

  def loss(nats_N, w):
    return (weight_N * nats_N).sum() / weight_N.sum() + l2 / 2 * (np.asarray(w, np.float64) ** 2).sum()

  best = loss(-theirs.predict_log_proba(x_ND)[np.arange(500), labels_N], theirs.coef_)
  assert loss(nats(ours, z_ND, labels_N), 2 * ours.centroids) == pytest.approx(best, rel=1e-5)


def test_accuracy_is_the_fraction_of_best_scores_that_are_labels():
  z_ND, labels_N = labelled(500, 10, 4)
  fitted = fit(z_ND, labels_N, 4, l2=[0.01])
  by_hand = np.mean(np.asarray(router.scores(fitted, z_ND)).argmax(1) == labels_N)
  assert classifier.accuracy(fitted, z_ND, labels_N) == pytest.approx(by_hand)
  assert 0.5 < by_hand < 1


@pytest.mark.slow
def test_candidates_are_chosen_by_held_out_documents():
  # Ten times as many dimensions as matter: too little decay fits noise, too much fits nothing.
  z_ND, labels_N = labelled(300, 60, 3)
  noisy_ND = np.concatenate([z_ND, np.random.default_rng(1).normal(size=(300, 540))], 1).astype('f')
  l2 = [100.0, 0.1, 1e-6]
  chosen = fit(noisy_ND, labels_N, 3, l2=l2)
  held = classifier.split(jax.random.split(jax.random.key(0))[1], 300, classifier.HELD_FRACTION)[1]
  weight_N = np.ones(300)
  weight_N[held] = 0
  fitted = [fit_weighted(noisy_ND, labels_N, 3, weight_N, value) for value in l2]
  by_hand = [nats(router, noisy_ND, labels_N)[held].mean() for router in fitted]
  assert np.argmin(by_hand) == 1
  np.testing.assert_array_equal(chosen.centroids, fit(noisy_ND, labels_N, 3, l2=l2[1:2]).centroids)


def crossed(num: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
  """Which of two signs agree: no line tells."""
  z_ND = np.random.default_rng(seed).normal(size=(num, 10)).astype('f')
  return z_ND, (2 * (z_ND[:, 0] > 0) + (z_ND[:, 1] * z_ND[:, 2] > 0)).astype(int)


@pytest.mark.slow
def test_a_hidden_layer_learns_what_no_line_tells():
  z_ND, labels_N = crossed(1000, 0)
  fresh = crossed(1000, 1)
  line, curve = (fit(z_ND, labels_N, 4, hidden=hidden, l2=[0.01]) for hidden in (0, 16))
  assert curve.hidden.shape == (10, 16) and curve.centroids.shape == (4, 16)
  assert classifier.accuracy(line, *fresh) < 0.55
  assert classifier.accuracy(curve, *fresh) > 0.85
  without = curve._replace(hidden_bias=0 * curve.hidden_bias)
  assert nats(curve, z_ND, labels_N).mean() < 0.8 * nats(without, z_ND, labels_N).mean()


@pytest.mark.slow
def test_equal_keys_give_equal_bits():
  z_ND, labels_N = crossed(100, 0)
  one, two, other = (fit(z_ND, labels_N, 4, key, hidden=16, l2=[0.1]) for key in (0, 0, 1))
  for a, b in zip(one, two, strict=True):
    np.testing.assert_array_equal(a, b)
  assert (np.asarray(one.hidden) != np.asarray(other.hidden)).any()


def test_labels_that_are_no_paths_are_rejected():
  with pytest.raises(ValueError, match='labels go from 0 to 3; paths from 0 to 2'):
    fit(np.zeros((4, 2), 'f'), np.arange(4), 3)


def test_split_takes_every_document_once():
  kept, held = classifier.split(jax.random.key(0), 1001, 0.2)
  assert len(held) == 200 and (np.diff(held) > 0).all() and (np.diff(kept) > 0).all()
  np.testing.assert_array_equal(np.sort(np.concatenate([kept, held])), np.arange(1001))
  assert (classifier.split(jax.random.key(1), 1001, 0.2)[1] != held).any()


def skewed(num: int, num_paths: int, kind: str) -> np.ndarray:
  """Scores by which most paths are seldom the best."""
  rng = np.random.default_rng(0)
  own_NP, skill_P = rng.normal(size=(num, num_paths)), 10 * rng.normal(size=num_paths)
  if kind == 'clusters':  # fewer than paths, and tight
    return 5 * rng.normal(size=(10, num_paths))[rng.integers(10, size=num)] + 0.05 * own_NP + skill_P
  if kind == 'topics':
    return 3 * rng.normal(size=(num, 8)) @ rng.normal(size=(8, num_paths)) + skill_P
  return own_NP + skill_P


def frequencies(scores_NP) -> np.ndarray:
  return np.bincount(scores_NP.argmax(1), minlength=scores_NP.shape[1]) / len(scores_NP)


@pytest.mark.parametrize('target', ['even', 'uneven'])
@pytest.mark.parametrize('kind', slow.but(['own', 'topics', 'clusters'], 'own', 'topics'))
def test_no_path_is_empty_once_calibrated(kind, target):
  scores_NP = skewed(4000, 16, kind)
  target_P = np.ones(16) if target == 'even' else np.random.default_rng(1).uniform(0.1, 1, 16)
  assert (frequencies(scores_NP) == 0).sum() >= 3
  found_P = frequencies(scores_NP + np.asarray(classifier.calibration(scores_NP, target_P)))
  wanted_P = target_P / target_P.sum()
  assert abs(found_P - wanted_P).sum() / 2 < 4e-3
  assert (abs(found_P / wanted_P - 1) < 0.1).all()


def test_a_router_of_any_kind_is_calibrated_by_its_bias():
  z_ND = blobs(3000, 8, 3, 0.3)
  fitted = router.fit('product_kmeans', jax.random.key(0), z_ND, (4, 3), settings.Routing())
  fitted = fitted._replace(bias=3 * np.arange(12, dtype='f'))
  found = classifier.calibrate(fitted, z_ND, np.ones(12))
  before_N, after_N = (np.bincount(np.asarray(router.route(r, z_ND))[:, 0], minlength=12) for r in (fitted, found))
  assert min(before_N) == 0 and abs(after_N - 250).max() < 25
  for one, two in zip(fitted[:-1], found[:-1], strict=True):
    np.testing.assert_array_equal(one, two)


def test_scores_that_match_already_are_left():
  scores_NP = skewed(500, 4, 'own')
  scores_NP -= np.sort(scores_NP, 0)[250]
  bias_P = classifier.calibration(scores_NP, np.maximum(frequencies(scores_NP), 1e-9))
  np.testing.assert_array_equal(bias_P, np.zeros(4))


def test_one_path_needs_no_bias():
  np.testing.assert_array_equal(classifier.calibration(np.ones((5, 1)), np.ones(1)), [0])


def test_a_share_of_0_is_rejected():
  with pytest.raises(ValueError, match=r'shares of paths \[1\] are not above 0'):
    classifier.calibration(np.ones((5, 3)), np.array([1, 0, 2]))


def test_shares_are_summed_in_float64():
  """Of an array of JAX too, which would sum in float32, and warn of it."""
  scores_NP, target_P = skewed(500, 4, 'own'), np.arange(1, 5, dtype='f')
  found = [classifier.calibration(scores_NP, target) for target in (target_P, jax.numpy.asarray(target_P))]
  np.testing.assert_array_equal(*found)


def test_features_that_are_not_finite_are_rejected():
  z_ND = np.ones((4, 2), 'f')
  z_ND[1, 1] = np.nan
  with pytest.raises(ValueError, match='features of the base model are not finite'):
    fit(z_ND, np.array([0, 1, 0, 1]), 2)


def losses(num: int, num_paths: int, seed=0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """Features, nats that they explain in part, weights, and which are held."""
  rng = np.random.default_rng(seed)
  z_ND = hidden_like(num, 6, seed) + 3
  x_ND = (z_ND - z_ND.mean(0)) / z_ND.std(0)
  nll_NP = 100 + 4 * x_ND @ rng.normal(size=(6, num_paths)) + rng.gumbel(size=(num, num_paths)) * 3
  return z_ND, nll_NP, rng.uniform(0.5, 1.5, num), rng.random(num) < 0.25


@pytest.mark.slow
@pytest.mark.parametrize('l2', slow.but([0.03, 1e-3], 0.03))
def test_what_is_fitted_to_losses_is_a_minimum_of_what_routes_cost(l2):
  z_ND, nll_NP, weight_N, _ = losses(400, 3)
  fitted, held = classifier.fit_to_losses(z_ND, nll_NP, weight_N, np.zeros(400, bool), [l2])
  assert np.isnan(held)
  x_ND = ((z_ND - z_ND.mean(0)) / z_ND.std(0)).astype('d')
  w_PD = 2 * np.asarray(fitted.centroids, 'd')
  b_P = np.asarray(fitted.bias, 'd') - (w_PD**2).sum(1) / 4
  excess_NP = nll_NP - nll_NP.min(1, keepdims=True)

  def cost(w_PD, b_P):
    """By the docstring's equation, in float64."""
    logits_NP = x_ND @ w_PD.T + b_P
    prob_NP = np.exp(logits_NP - logits_NP.max(1, keepdims=True))
    prob_NP /= prob_NP.sum(1, keepdims=True)
    mean = np.average((prob_NP * excess_NP).sum(1) / excess_NP.mean(), weights=weight_N)
    return mean + l2 / 2 * (w_PD**2).sum()

  least = cost(w_PD, b_P)
  rng = np.random.default_rng(1)
  for scale in (1e-3, 1e-2, 0.1, 1.0):
    for _ in range(20):
      assert cost(w_PD + scale * rng.normal(size=w_PD.shape), b_P + scale * rng.normal(size=3)) > least - 1e-5
  labelled = fit_weighted(z_ND, nll_NP.argmin(1), 3, weight_N, l2)
  centroids = 2 * np.asarray(labelled.centroids, 'd')
  assert least < cost(centroids, np.asarray(labelled.bias, 'd') - (centroids**2).sum(1) / 4)


@pytest.mark.slow
def test_a_few_nats_weigh_more_than_many_labels():
  """Of texts that look alike, two thirds are hardly better off under path 0, and a third far better under path 1."""
  z_ND, num = np.random.default_rng(0).normal(size=(300, 4)).astype('f'), 300
  nll_NP = np.tile([50.0, 50.1], (num, 1))
  nll_NP[::3] = [60.0, 50.0]
  by_label = fit(z_ND, nll_NP.argmin(1), 2, l2=[1.0])
  by_loss, _ = classifier.fit_to_losses(z_ND, nll_NP, np.ones(num), np.zeros(num, bool), [1.0])
  assert (np.asarray(router.route(by_label, z_ND)) == 0).mean() > 0.9
  assert (np.asarray(router.route(by_loss, z_ND)) == 1).mean() > 0.9


def test_the_decay_is_chosen_on_held_sequences_and_their_loss_is_reported():
  z_ND, nll_NP, weight_N, held_N = losses(400, 3)

  def alone(l2):
    """Trained without the held ones: their weight is nothing."""
    return classifier.fit_to_losses(z_ND, nll_NP, np.where(held_N, 0, weight_N), np.zeros(400, bool), [l2])[0]

  def held_nats(fitted):
    paths_N = np.asarray(router.route(fitted, z_ND))[:, 0]
    return np.average(nll_NP[held_N, paths_N[held_N]], weights=weight_N[held_N])

  by_decay = {l2: held_nats(alone(l2)) for l2 in (3.0, 0.01)}
  fitted, told = classifier.fit_to_losses(z_ND, nll_NP, weight_N, held_N, list(by_decay))
  best = min(by_decay, key=lambda l2: by_decay[l2])
  assert by_decay[3.0] != by_decay[0.01] and told == pytest.approx(by_decay[best])
  of_all, _ = classifier.fit_to_losses(z_ND, nll_NP, weight_N, np.zeros(400, bool), [best])
  np.testing.assert_allclose(router.scores(fitted, z_ND), router.scores(of_all, z_ND), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_of_two_paths_what_few_sequences_lose_by_far_counts_in_full():
  """Of texts that look alike, 95% lose a nat under path 1, the others 40 under path 0; half of all excesses are 0."""
  rng, num = np.random.default_rng(0), 2000
  z_ND, few_N = rng.normal(size=(num, 4)).astype('f'), rng.random(num) < 0.05
  nll_NP = 200 + np.stack([np.where(few_N, 40, 0), np.where(few_N, 0, rng.exponential(size=num))], 1)
  held_N = np.arange(num) % 5 == 0
  fitted, told = classifier.fit_to_losses(z_ND, nll_NP, np.ones(num), held_N)
  paths_N = np.asarray(router.route(fitted, z_ND))[:, 0]
  assert (paths_N == 1).mean() > 0.9
  assert told == pytest.approx(nll_NP[held_N, 1].mean(), abs=0.2)  # in nats as they are


@pytest.mark.parametrize('loss', slow.but([np.nan, np.inf], np.inf))
def test_of_two_paths_a_lost_one_takes_no_text(loss):
  z_ND, nll_NP, weight_N, held_N = losses(400, 2)
  nll_NP[:, 1] = loss
  found, told = classifier.fit_to_losses(z_ND, nll_NP, weight_N, held_N)
  assert not np.asarray(router.route(found, z_ND))[:, 0].any() and np.isfinite(told)


@pytest.mark.parametrize('loss', slow.but([np.nan, np.inf, 1e4, 1e7], np.inf, 1e4))
def test_a_path_that_is_lost_takes_no_text_and_hides_nothing(loss):
  z_ND, nll_NP, weight_N, held_N = losses(400, 3)
  _, of_two = classifier.fit_to_losses(z_ND, nll_NP[:, [0, 2]], weight_N, held_N)
  nll_NP[:, 1] = loss
  found, of_three = classifier.fit_to_losses(z_ND, nll_NP, weight_N, held_N)
  assert not (np.asarray(router.route(found, z_ND)) == 1).any()
  assert of_three == pytest.approx(of_two, abs=0.3)
  with pytest.raises(ValueError, match='no loss of any path is finite'):
    classifier.fit_to_losses(z_ND, np.full((200, 3), np.nan), weight_N, held_N)
