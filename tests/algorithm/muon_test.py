"""Muon against plain numpy: Newton-Schulz, momentum with its bias corrected, which parameters it has, and its scale."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dipaco_jax.algorithm import muon
from dipaco_jax.config import choices, settings

CONFIG = settings.Inner(optimizer='muon', weight_decay=0.1)
SHAPES = {
  'embed/tokens': (20, 8), 'head/kernel': (8, 20), 'final_norm/scale': (8,), 'block_0/attention/q': (8, 2, 4),
  'block_0/attention/o': (2, 4, 8), 'block_0/mlp/gate': (8, 24), 'block_1/mlp/down': (24, 8),
  'block_1/mlp_norm/scale': (8,),
}  # fmt: skip
MATRICES = {
  'block_0/attention/q': (8, 8),
  'block_0/attention/o': (8, 8),
  'block_0/mlp/gate': (8, 24),
  'block_1/mlp/down': (24, 8),
}


def drawn(seed):
  return {
    n: jax.random.normal(jax.random.fold_in(jax.random.key(seed), i), s) for i, (n, s) in enumerate(SHAPES.items())
  }


def newton_schulz(x):
  """Five steps of the quintic iteration, smaller side first."""
  if x.shape[0] > x.shape[1]:
    return newton_schulz(x.T).T
  x = x / np.linalg.norm(x)
  for _ in range(5):
    product = x @ x.T
    x = 3.4445 * x + (-4.7750 * product + 2.0315 * product @ product) @ x
  return x


def test_two_steps_of_a_matrix():
  params, made = drawn(0), choices.make_transformation(CONFIG)
  state, mu = made.init(params), 0.95
  moments = {name: np.zeros(shape) for name, shape in MATRICES.items()}
  for t in (1, 2):
    grads = drawn(t)
    updates, state = made.update(grads, state, params)
    for name, shape in MATRICES.items():
      g = np.asarray(grads[name], np.float64).reshape(shape)
      moments[name] = mu * moments[name] + (1 - mu) * g
      ahead = mu * moments[name] / (1 - mu ** (t + 1)) + (1 - mu) * g / (1 - mu**t)
      expected = 0.2 * np.sqrt(max(shape)) * newton_schulz(ahead) + 0.1 * np.asarray(params[name]).reshape(shape)
      # Five iterations multiply a rounding by their slope at 0, 3.4445, each.
      np.testing.assert_allclose(np.reshape(updates[name], shape), expected, atol=3.4445**5 * 2**-22)


def test_all_else_is_adams():
  params, grads = drawn(0), drawn(1)
  other = choices.make_transformation(settings.Inner(weight_decay=0.1))
  made = choices.make_transformation(CONFIG)
  (mine, _), (theirs, _) = (t.update(grads, t.init(params), params) for t in (made, other))
  for name in SHAPES.keys() - MATRICES.keys():
    np.testing.assert_array_equal(mine[name], theirs[name])


def test_the_root_mean_square_is_that_of_adam_for_every_shape():
  """Singular values end within [0.68, 1.13]; of an [R, C] matrix there are min(R, C), so that u's is 0.2 of theirs."""
  made, grads = choices.make_transformation(settings.Inner(optimizer='muon', weight_decay=0.0)), drawn(1)
  updates, _ = made.update(grads, made.init(grads), grads)
  for name in MATRICES:
    assert float(jnp.sqrt(jnp.mean(updates[name] ** 2))) == pytest.approx(0.2, rel=0.35)


def test_which_dimensions_are_inputs():
  found = muon.dimensions({name: jnp.zeros(SHAPES[name]) for name in MATRICES})
  assert found['block_0/attention/q'] == ((0,), (1, 2)) and found['block_0/attention/o'] == ((0, 1), (2,))
