"""Levels of a single path: the state that the path keeps of them, and screening without other levels."""

import excluded_path
import numpy as np
import one_process
import pytest
from one_process import with_settings

from dipaco_jax.core.errors import Diverged
from dipaco_jax.islands import (
  lineage,
  outer_weights,
  own_levels,
  path_exchange,
  path_state,
  path_steps,
  schedule,
)
from dipaco_jax.islands.path_state import Own, PathState
from dipaco_jax.registry.registry import Fact

made = one_process.made
OWN = (('shared', 'embed|block_0|final', ()), ('own', 'block_1', ('a', 'b')))
APART = (('all', '.*', ('a', 'b')),)


def weights(of, x: float) -> dict[str, np.ndarray]:
  return {name: np.full(of.shapes[name].shape, x, 'f') for level in of.layout.levels if level.name in of.own_levels
          for name in of.layout.names(level)}  # fmt: skip


@pytest.mark.parametrize('loss', [None, np.inf])
def test_a_state_without_a_finite_loss_is_kept_within_a_phase(loss, made):
  of = with_settings(made, levels=OWN)
  arrays = PathState({}, {}, own=Own(weights(of, 1.0), {}, {}, {}, 0, loss)).to_arrays()
  assert lineage.is_finite(arrays)
  found = path_state.own_from_arrays(path_state.own_alone(arrays))
  assert found.best_loss is None and not found.best_version and {*found.weights} == {*weights(of, 1.0)}


def test_a_replay_knows_the_losses_of_phases_that_it_leaves_out(made, monkeypatch):
  monkeypatch.setattr(path_exchange, 'parameters_before', lambda *_: {})  # of shared modules
  of = with_settings(made, levels=OWN, train=dict(phases=9))
  of.registry.put([own_levels.evaluation_fact(3, v, loss, 1.0) for v, loss in ((5, 0.5), (6, 2.0), (7, 1.0))])
  of.registry.put([excluded_path.exclusion(of, 3, t, 'w') for t in (6, 7)])
  carried = Own(weights(of, 6.0), {}, {}, weights(of, 3.0), 3, 1.5).to_arrays()  # after phase 5: it had noted version 5
  found = path_exchange.whole(of, 3, 8, carried).own
  assert found.best_version == 7 and found.best_loss == 1.0
  assert all((x == 6.0).all() for x in found.best.values())
  before = path_exchange.whole(of, 3, 6, carried).own
  assert before.best_version == 3


def test_a_path_without_shared_levels_is_not_excluded_for_ever(made, monkeypatch):
  of = with_settings(made, levels=APART, train=dict(phases=9), outer=dict(max_excluded=2))
  monkeypatch.setattr(outer_weights, 'path_weights', lambda *_: np.ones(4))
  of.registry.put([Fact('module', key, v, 'm', 'c' * 64, {}) for key in of.all_modules() for v in range(9)])
  state = PathState({}, {}, own=Own(weights(of, 1.0), {}, {}, {}))
  state = state._replace(params=own_levels.weights(state))
  for phase in (4, 5):
    own_levels.take_step(of, 3, phase, state, path_steps.planned(of, phase), 'bad')
    of.registry.put([excluded_path.exclusion(of, 3, phase, 'w')])
  with pytest.raises(Diverged, match='3 phases in a row'):
    own_levels.take_step(of, 3, 6, state, path_steps.planned(of, 6), 'bad')


def test_the_checkpoint_of_a_path_without_shared_levels_tells_what_its_modules_became():
  """By it a held state is known: one of a worker that has excluded the path is not that of another that has not."""
  before, stepped = (Fact('module', 'all/0-0', 1, 'm', x * 64, {}) for x in 'ab')
  made = [schedule.checkpoint_fact(0, 0, {}, {}, own_modules=[fact]).sha256 for fact in (before, stepped)]
  assert made[0] != made[1] and schedule.checkpoint_fact(0, 0, {}, {}).sha256 not in made


def test_of_a_version_between_ends_of_rounds_only_the_own_modules_that_are_pointed_at_are_objects(made):
  of = with_settings(made, levels=OWN, train=dict(phases=9))
  best = [0, 5, 9, 5]  # by path
  for version, expected in ((5, {'own/0-1', 'own/1-1'}), (4, set()), (9, {'own/0-0', 'own/0-1', 'own/1-0', 'own/1-1'})):
    facts = [Fact('module', key, version, 'm', 'c' * 64, {}) for key in of.all_modules()]
    assert {fact.key for fact in facts if of.is_chosen(fact, best)} == expected | {'shared/shared'}
