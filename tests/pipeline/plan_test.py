"""What a run will train: tokens by stage, the work after a stage, and the line that announces the stages."""

import pytest

from dipaco_jax.config import choices, dense_control, settings
from dipaco_jax.pipeline import plan


def make(**changes) -> settings.Settings:
  values = {
    'grid': {'a': 4}, 'levels': (('all', '.*', ('a',)),), 'model': {'seq_len': 64},
    'pretrain': {'steps': 100, 'batch_size': 16}, 'routing': {'method': 'kmeans'},
    'train': {'phases': 5, 'steps_per_phase': 10, 'batch_size': 8}, 'evaluate': {'control': True},
  }  # fmt: skip
  return settings.from_dict(values | changes)


def test_tokens_are_those_of_steps_rows_and_paths():
  base, paths, control = 100 * 16 * 64, 5 * 10 * 8 * 64 * 4, 5 * 10 * 8 * 64
  assert plan.training_tokens(make()) == {'pretrain': base, 'train': paths, 'control': control}
  assert plan.later_work(make(), 'pretrain') == pytest.approx((paths + control) / base)
  assert plan.later_work(make(), 'train') == pytest.approx(control / paths)
  assert plan.later_work(make(), 'control') == 0
  sampled = make(train={'phases': 5, 'steps_per_phase': 10, 'batch_size': 8, 'paths_per_phase': 1})
  assert plan.training_tokens(sampled)['train'] == paths / 4
  of_tokens = make(evaluate={'control': True, 'control_budget': 'flops'})
  assert plan.training_tokens(of_tokens)['control'] == paths
  drawn = {'phases': 5, 'steps_per_phase': 10, 'batch_size': 8, 'schedule': ((0, (0, 1)), (3, (1, 2, 3)), (7, (0,)))}
  of_schedule = make(train=drawn)
  assert plan.training_tokens(of_schedule)['train'] == paths / (4 * 5) * (3 * 2 + 2 * 3)
  active = [choices.active_paths(of_schedule.train, 4, 0, phase).sum() for phase in range(5)]
  assert sum(active) == dense_control.count_path_phases(of_schedule)
  assert plan.later_work(make(pretrain={'steps': 0}), 'pretrain') == 0


def test_the_control_is_announced_if_it_is_trained():
  assert plan.describe(make(), {'tokenize'}) == (
    'stages: tokenize [done], pretrain (100 steps), route, train (4 paths, 5 phases of 10 steps), '
    'dense control (50 steps; config.evaluate.control), evaluate'
  )
  assert 'control' not in plan.describe(make(evaluate={'control': False}), ())
