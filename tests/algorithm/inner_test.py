"""The learning rate at known points, one step and many, clipping."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slow
import small
from jax.sharding import PartitionSpec as P

from dipaco_jax.algorithm import inner
from dipaco_jax.config import choices, settings
from dipaco_jax.models import loss as loss_lib

CONFIG = settings.Inner(learning_rate=0.4, warmup_steps=10, final_fraction=0.05)


def rate(step, **changes):
  return float(choices.make_schedule(dataclasses.replace(CONFIG, **changes), 100, 40, 0.0)(jnp.int32(step)))


@pytest.mark.parametrize('step, expected', [
  (0, 0.4 / 10 * 1.0), (4, 0.4 / 2 * (0.05 + 0.95 * (1 + np.cos(np.pi * 0.04)) / 2)),
  (9, 0.4 * (0.05 + 0.95 * (1 + np.cos(np.pi * 0.09)) / 2)), (50, 0.4 * 0.525), (100, 0.02), (1000, 0.02),
])  # fmt: skip
def test_learning_rate_at_known_points(step, expected):
  assert rate(step) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
  'step, expected', [(9, 0.4), (79, 0.4), (80, 0.4), (90, 0.4 * 0.525), (100, 0.02), (1000, 0.02)]
)
def test_wsd_is_constant_and_linear_in_its_last_fifth(step, expected):
  assert rate(step, schedule='wsd') == pytest.approx(expected, rel=1e-6)


def test_learning_rate_warms_up_again_after_pretraining():
  plain = [rate(step) for step in range(60)]
  again = [rate(step, rewarm_steps=5) for step in range(60)]
  assert again[:40] == plain[:40] and again[44:] == plain[44:]
  for k in range(5):
    assert again[40 + k] == pytest.approx(plain[40 + k] * (k + 1) / 5, rel=1e-6)


def test_paths_may_have_a_learning_rate_of_their_own():
  of_paths = choices.make_schedule(CONFIG, 100, 40, 0.1)
  steps = jnp.arange(60)
  expected = [rate(step) / (4 if step >= 40 else 1) for step in range(60)]
  np.testing.assert_allclose(of_paths(steps), expected, rtol=1e-6)


def test_no_warmup_starts_at_the_top():
  assert rate(0, warmup_steps=0) == pytest.approx(0.4)


def gradient_of(grads):
  """A `Gradient` that is given."""
  norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads.values()))
  return lambda params, tokens, segments: (jnp.float32(1.5), grads, norm)


PARAMS = {'matrix': jnp.full((2, 2), 2.0), 'scale': jnp.full(2, 2.0)}
GRADS = {'matrix': jnp.full((2, 2), 3.0), 'scale': jnp.full(2, -4.0)}


def one_step(config, grads=GRADS):
  made = choices.make_inner(config, 100, 0, 0.0)
  return inner.step(made, gradient_of(grads), PARAMS, made.init(PARAMS), (None, None), jnp.int32(20))


def test_first_step_of_adamw_is_the_sign_and_decays_matrices_only():
  config = dataclasses.replace(CONFIG, clip_norm=0.0, weight_decay=0.1)
  params, _, metrics = one_step(config)
  eta = rate(20)
  np.testing.assert_allclose(params['matrix'], 2 - eta * (1 + 0.1 * 2), rtol=1e-6)
  np.testing.assert_allclose(params['scale'], 2 + eta, rtol=1e-6)
  expected = {'loss': 1.5, 'grad_norm': (4 * 9 + 2 * 16) ** 0.5, 'learning_rate': eta, 'skipped': 0}
  assert {k: float(v) for k, v in metrics.items()} == pytest.approx(expected)


@pytest.mark.parametrize('clip', [0.5, 1000.0])
def test_clipping_is_by_the_global_norm(clip):
  params, _, metrics = one_step(dataclasses.replace(CONFIG, optimizer='sgd', clip_norm=clip))
  norm = 68**0.5
  assert float(metrics['grad_norm']) == pytest.approx(norm)
  np.testing.assert_allclose(params['matrix'], 2 - rate(20) * 3 * min(1, clip / norm), rtol=1e-6)


def test_frozen_parameters_have_no_update_no_decay_and_no_gradient():
  config = dataclasses.replace(CONFIG, frozen='^mat')
  params, _, _ = one_step(config)
  assert (params['matrix'] == PARAMS['matrix']).all() and (params['scale'] != PARAMS['scale']).all()
  loss = lambda params, x: (x * params['matrix'].sum() * params['scale'].sum(), jnp.float32(1))  # noqa: E731
  _, grads, norm = inner.gradient(inner.without_gradients(loss, '^mat'), 0, PARAMS, jnp.ones(()))
  assert not grads['matrix'].any() and norm == pytest.approx(float(jnp.sqrt(jnp.sum(grads['scale'] ** 2)))) and norm > 0


def test_a_gradient_of_zero_is_no_nan():
  params, _, _ = one_step(dataclasses.replace(CONFIG, weight_decay=0.0), jax.tree.map(jnp.zeros_like, GRADS))
  small.assert_close(params, PARAMS, 0)


def test_a_batch_without_targets_is_no_nan():
  compute = functools.partial(
    inner.gradient, lambda params, tokens, segments: (0.0 * params['scale'].sum(), jnp.float32(0)), 0
  )
  loss, grads, norm = compute(PARAMS, None, None)
  assert loss == 0 and norm == 0 and all(np.isfinite(g).all() for g in grads.values())


def test_gradient_is_of_the_mean_over_targets():
  compute = functools.partial(
    inner.gradient, lambda params, tokens, segments: (6 * params['scale'].sum(), jnp.float32(3)), 0
  )
  loss, grads, norm = compute(PARAMS, None, None)
  assert float(loss) == 8 and (np.asarray(grads['scale']) == 2).all() and float(norm) == pytest.approx(8**0.5)


def test_steps_are_single_steps_in_a_row():
  made = choices.make_inner(CONFIG, 100, 0, 0.0)

  def compute(params, tokens, segments):
    grads = {name: x * tokens.mean() for name, x in params.items()}
    return tokens.sum(), grads, jnp.float32(1)

  tokens = jnp.arange(12.0).reshape(3, 2, 2)
  params, state, expected = PARAMS, made.init(PARAMS), []
  for k in range(3):
    params, state, found = inner.step(made, compute, params, state, (tokens[k], tokens[k]), jnp.int32(7 + k))
    expected.append(found)
  together = inner.steps(made, compute, PARAMS, made.init(PARAMS), (tokens, tokens), jnp.int32(7))
  small.assert_close(together[:2], (params, state), 3 * 12 * small.EPS)  # three roundings of values below 12
  for name in inner.METRICS:
    np.testing.assert_allclose(together[2][name], [m[name] for m in expected], rtol=1e-6)


def test_a_gradient_over_devices_is_that_of_all_rows():
  """Rows lie on two devices, which have targets of unequal weight; one parameter is whole on both, the other split."""

  def loss(params, x_BD, weight_B):
    return jnp.sum(weight_B * (x_BD @ params['w'] + params['b'][0]) ** 2), jnp.sum(weight_B)

  params = {'b': np.full(1, 0.5, 'f'), 'w': np.arange(4, dtype='f')}
  batch = np.random.default_rng(0).normal(0, 1, (4, 4)).astype('f'), np.array([1, 0, 1, 1], 'f')
  dims, specs = {'b': None, 'w': 0}, {'b': P(), 'w': P('data')}
  over_data = functools.partial(inner.gradient_over_data, loss, dims, 0)
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ('data',))
  split = (specs, P('data'), P('data')), (P(), specs, P())
  found = jax.jit(jax.shard_map(over_data, mesh=mesh, in_specs=split[0], out_specs=split[1], check_vma=False))(
    params, *batch
  )
  small.assert_close(found, jax.jit(functools.partial(inner.gradient, loss, 0))(params, *batch), 1e-5)


@pytest.mark.parametrize('rows, part', slow.but([(4, 4), (2, 2), (3, 2), (1, 1), (9, 4)], (4, 4), (2, 2), (1, 1)))
def test_gradients_of_parts_add_up(rows, part):
  made, seen = small.make_programs(small.settings()), set()
  loss, params = functools.partial(loss_lib.path_loss, made.model, 8), small.base(made.model)

  def watched(params, tokens_BL, segments_BL):
    seen.add(len(tokens_BL))
    return loss(params, tokens_BL, segments_BL)

  batch = small.batch(0, 0)
  expected, found = (
    jax.jit(functools.partial(inner.gradient, *how))(params, *batch) for how in ((loss, 0), (watched, rows))
  )
  assert seen == {part}
  for ours, theirs in zip(found, expected, strict=True):
    small.assert_close({'x': ours}, {'x': theirs}, 1e-5)
