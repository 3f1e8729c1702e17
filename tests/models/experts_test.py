"""Mixtures of experts: groups of any size, gradients, the router's losses, which hold in any placement of rows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slow
import small

from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.models import expert_groups, experts, loss, transformer
from dipaco_jax.telemetry import performance

D, F, E = 12, 20, 4
MIXTURE = {'num_experts': 4, 'experts_per_token': 2, 'dtype': 'float32'}


def weights(num_experts=E):
  draw = np.random.default_rng(0).normal
  return [tuple(draw(size=shape).astype('f') for shape in ((D, F), (D, F), (F, D))) for _ in range(num_experts)]


def naive(x_MD, ws, chosen):
  """Row after row."""
  rows = [(jax.nn.silu(x_D @ ws[e][0]) * (x_D @ ws[e][1])) @ ws[e][2] for x_D, e in zip(x_MD, chosen, strict=True)]
  return jnp.stack(rows)


@pytest.mark.parametrize('block', [1, 4, 16])
def test_pairs_are_sorted_and_groups_begin_at_blocks(block):
  chosen = np.random.default_rng(1).choice([0, 2, 3], 50)
  groups = jax.jit(expert_groups.group, static_argnums=(1, 2))(jnp.asarray(chosen), E, block)
  assert groups.sizes_E.tolist() == [np.sum(chosen == e) for e in range(E)]
  assert not (np.asarray(groups.firsts_E) % block).any() and len(groups.pairs_P) % block == 0
  for pair, place in enumerate(groups.places_M):
    assert groups.pairs_P[place] == pair
    assert 0 <= place - groups.firsts_E[chosen[pair]] < groups.sizes_E[chosen[pair]]
  assert (np.asarray(groups.pairs_P) == 50).sum() == len(groups.pairs_P) - 50


@pytest.mark.parametrize('method', ['blocked', 'ragged', 'megablox'])
@pytest.mark.parametrize('which', ['some', 'one', 'few'])
def test_groups_give_values_and_gradients_of_single_rows(method, which, monkeypatch):
  monkeypatch.setattr(expert_groups, 'INTERPRET', True)  # of the kernel for TPUs
  rng = np.random.default_rng(2)
  chosen = {'some': rng.choice([0, 2, 3], 128), 'one': np.full(40, 1), 'few': np.array([3, 0, 3])}[which]
  x_MD, out_MD = rng.normal(size=(2, len(chosen), D)).astype('f')
  grouped = lambda x, ws: expert_groups.apply_experts(x, jnp.asarray(chosen), ws, 'silu', method)  # noqa: E731
  found, back = jax.vjp(jax.jit(grouped), x_MD, weights())
  expected, expected_back = jax.vjp(functools.partial(naive, chosen=chosen), x_MD, weights())
  terms = F * D * float(jnp.abs(expected).max())
  np.testing.assert_allclose(found, expected, atol=small.EPS * terms)
  for x, y in zip(jax.tree.leaves(back(out_MD)), jax.tree.leaves(expected_back(out_MD)), strict=True):
    np.testing.assert_allclose(x, y, atol=small.EPS * F * len(chosen) * max(1, float(jnp.abs(y).max())))


def test_a_step_for_tpus_multiplies_no_row_by_all_experts():
  """XLA's own gradient of ragged_dot would, with a mask of rows by experts."""
  c = small.settings(model=MIXTURE | {'seq_len': 128, 'dtype': 'bfloat16'}).model
  made = transformer.make_model(dataclasses.replace(c, experts='megablox', attention='xla'), small.VOCAB)
  tokens = jax.ShapeDtypeStruct((2, 128), np.int32)
  step = jax.jit(jax.grad(lambda p, tokens: loss.path_loss(made, 8, p, tokens, jnp.ones_like(tokens))[0]))
  text = step.trace(transformer.shapes(made), tokens).lower(lowering_platforms=('tpu',)).as_text()
  assert text.count('call @tgmm') == 3 * c.num_layers and 'tpu_custom_call' in text


def test_blocks_of_paths_together_are_those_one_by_one():
  rng = np.random.default_rng(3)
  chosen_PM, x_PMD = rng.integers(0, E, (3, 60)), rng.normal(size=(3, 60, D)).astype('f')
  run = lambda x, chosen: expert_groups.apply_experts(x, chosen, weights(), 'silu', 'blocked')  # noqa: E731
  together = jax.jit(jax.vmap(run))(x_PMD, chosen_PM)
  for path in range(3):
    np.testing.assert_allclose(together[path], run(x_PMD[path], chosen_PM[path]), rtol=1e-5, atol=1e-4)


def test_products_of_16_bits_are_nearly_those_of_32():
  rng = np.random.default_rng(4)
  chosen, x_MD = rng.integers(0, E, 60), rng.normal(size=(60, D)).astype('f')
  of = lambda x, wide: expert_groups.apply_experts(x, chosen, weights(), 'silu', 'blocked', wide)  # noqa: E731
  expected = np.asarray(of(x_MD, False))
  found = of(jnp.asarray(x_MD, jnp.bfloat16), True)
  assert found.dtype == jnp.bfloat16
  assert np.abs(np.asarray(found, 'f') - expected).max() < 0.05 * np.abs(expected).max()
  gradient = jax.grad(lambda ws: expert_groups.apply_experts(
    jnp.asarray(x_MD, jnp.bfloat16), chosen, ws, 'silu', 'blocked', True).astype('f').sum())(weights())  # fmt: skip
  assert {x.dtype for x in jax.tree.leaves(gradient)} == {np.dtype('f')}


def test_balance_is_one_for_equal_choices_and_grows():
  counts_BL = np.ones((1, 8), 'f')
  equal_BLE = np.tile(np.eye(E, dtype='f') * 1e-3, (1, 2, 1))
  _, chosen = experts.choose(jnp.asarray(equal_BLE), 1, False)
  np.testing.assert_allclose(experts.balance(jnp.asarray(equal_BLE), chosen, counts_BL), 1, rtol=1e-5)
  one_BLE = np.zeros((1, 8, E), 'f') + np.array([9, 0, 0, 0], 'f')
  _, chosen = experts.choose(jnp.asarray(one_BLE), 1, False)
  assert experts.balance(jnp.asarray(one_BLE), chosen, counts_BL) > 3.9
  np.testing.assert_allclose(experts.square_z(jnp.zeros((1, 8, E)), counts_BL), np.log(E) ** 2, rtol=1e-6)


def model(**changes) -> transformer.Transformer:
  c = small.settings(model=MIXTURE | {'balance_loss': 0.5, 'router_z_loss': 0.1} | changes).model
  return transformer.make_model(c, small.VOCAB)


def gradient(made, rows=slice(None), params=None):
  tokens, segments = (x[rows] for x in small.batch(0, 0))
  compute = jax.value_and_grad(lambda p: loss.path_loss(made, 8, p, tokens, segments), has_aux=True)
  return jax.jit(compute)(small.base(made) if params is None else params)


def test_losses_of_the_router_are_in_the_gradient_alone():
  made, plain = model(), model(balance_loss=0.0, router_z_loss=0.0)
  (nll, targets), found = gradient(made)
  (expected_nll, _), expected = gradient(plain)
  assert nll == expected_nll and targets > 0

  def added(params):
    tokens, segments = small.batch(0, 0)
    _, losses_B = transformer.logit_factors_and_losses(made, params, tokens, segments)
    return (losses_B * loss.targets(jnp.asarray(tokens), jnp.asarray(segments), 8)[1].sum(1)).sum()

  more = jax.grad(added)(small.base(made))
  assert np.abs(more['block_0/mlp/router']).max() > 1e-3
  small.assert_close(found, {name: expected[name] + more[name] for name in found}, 2e-4)


@pytest.mark.parametrize('changes', [{'layers': 'scanned'}, {'remat': 'full'}, {'layers': 'scanned', 'num_layers': 3}])
def test_losses_of_the_router_hold_where_blocks_are_scanned(changes):
  layers = {'num_layers': changes.get('num_layers', 2)}
  small.assert_close(gradient(model(**changes))[1], gradient(model(**layers))[1], 2e-4)


def test_losses_of_the_router_are_sums_over_rows():
  made = model()
  parts = [gradient(made, slice(i, i + 2))[1] for i in (0, 2)]
  small.assert_close({n: parts[0][n] + parts[1][n] for n in parts[0]}, gradient(made)[1], 2e-4)


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [{'data': 2}, {'data': 2, 'shard_states': True}])
def test_two_devices_inside_a_path_agree_with_one(mesh, tmp_path):
  trained = []
  for devices, options in ((1, {}), (8, mesh)):
    changes = MIXTURE | {'balance_loss': 0.1, 'router_z_loss': 0.01}
    s = small.settings({'a': 4}, small.ONE_LEVEL, mesh=options, model=changes)
    state = small.train(small.make_job(small.make_programs(s, devices)), tmp_path / str(devices))
    trained.append(small.fetched(state.modules))
  small.assert_close(*trained, 1e-4)


@pytest.mark.parametrize('fields, words', slow.all_but([
  ({'num_experts': 2, 'experts_per_token': 3}, 'experts_per_token=3 is more than there are'),
  ({'num_experts': 2, 'experts_per_token': 1, 'normalize_gates': True}, 'the router would learn nothing'),
  ({'balance_loss': 0.1}, 'balance_loss=0.1 requires config.model.num_experts'),
  ({'shared_expert_dim': 8}, 'shared_expert_dim=8 requires config.model.num_experts'),
]))  # fmt: skip
def test_wrong_configs(fields, words):
  with pytest.raises(InputError, match=words):
    small.settings(model=fields)


def test_flops_are_those_of_a_token_s_experts_and_the_router():
  dense = settings.Model(mlp_dim=300)
  mixture = dataclasses.replace(dense, mlp_dim=100, num_experts=8, experts_per_token=2, shared_expert_dim=100)
  more = performance.flops_per_token(mixture, 100, 64) - performance.flops_per_token(dense, 100, 64)
  assert more == 6 * dense.num_layers * dense.width * 8
