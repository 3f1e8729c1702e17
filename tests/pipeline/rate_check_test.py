"""A run with a learning rate that stays far below the config's is rejected; automatic values are logged."""

import pytest

from dipaco_jax.config import settings
from dipaco_jax.pipeline import rate_check
from dipaco_jax.storage import user_modules


def given(pretrain: int = 20, path: int = 80, learning_rate: float = 0.0, **inner) -> settings.Settings:
  train = {'phases': 1, 'steps_per_phase': path, 'learning_rate': learning_rate}
  return settings.from_dict({'pretrain': {'steps': pretrain}, 'train': train, 'inner': inner})


@pytest.mark.parametrize('pretrain, path, warmup', [(20, 80, 10), (0, 100, 10), (24_000, 64_050, 1000), (5, 0, 1)])
def test_a_warmup_that_is_not_set_fits_the_run(pretrain, path, warmup, caplog):
  s = given(pretrain, path or 5)
  assert s.inner.warmup(s.decay_steps) == warmup
  rate_check.check_rates(s)
  assert rate_check.find_highest(s) > 0.9 * s.inner.learning_rate
  said = [record.getMessage() for record in caplog.records]
  words = f'the learning rate warms up in a tenth of the schedule, {warmup} of {s.decay_steps} steps'
  assert said == ([f'{words}; config.inner.warmup_steps changes that'] if warmup < 1000 else [])


def test_a_warmup_that_is_set_stays_and_nothing_is_said(caplog):
  s = given(warmup_steps=20)
  rate_check.check_rates(s)
  assert s.inner.warmup(s.decay_steps) == 20 and not caplog.records


@pytest.mark.parametrize(
  'inner, message',
  [
    ({'warmup_steps': 1000}, 'config.inner.warmup_steps=1000 is longer than the 100 steps of the run'),
    ({'warmup_steps': 100}, 'config.inner.warmup_steps=100 reaches only '),
    (
      {'warmup_steps': 90},
      'of config.inner.learning_rate in the 100 steps of the run: set it to 10 or less',
    ),
    ({'rewarm_steps': 81}, 'config.inner.rewarm_steps=81 is longer than the 80 steps of a path'),
    ({'rewarm_steps': 80}, 'config.inner.rewarm_steps=80: the paths reach only'),
    ({'warmup_steps': 40, 'decay_steps': 30}, 'config.inner.decay_steps=30 is below config.inner.warmup_steps=40'),
    ({'warmup_steps': 25, 'decay_steps': 30}, 'config.inner.warmup_steps=25 with config.inner.decay_steps=30 reaches'),
    ({'decay_steps': 88_000}, 'a warm-up of 1000 steps with config.inner.decay_steps=88000 reaches only 10%'),
    (
      {'decay_steps': 50, 'final_fraction': 0.0},
      'config.inner.decay_steps=50: the learning rate is 0 in the last 50 of',
    ),
  ],
)
def test_a_rate_that_stays_low_is_rejected(inner, message):
  with pytest.raises(ValueError) as info:
    rate_check.check_rates(given(**inner))
  assert message in str(info.value) and '\n' not in str(info.value)


def test_steps_behind_the_end_of_the_cosine_are_logged(caplog):
  rate_check.check_rates(given(warmup_steps=5, decay_steps=60))
  assert [record.getMessage() for record in caplog.records] == [
    'config.inner.decay_steps=60: the last 40 of 100 steps are trained at the lowest learning rate'
  ]


def test_without_decay_a_long_warmup_reaches_the_rate():
  rate_check.check_rates(given(warmup_steps=100, final_fraction=1.0))


def test_paths_have_a_rate_of_their_own():
  s = given(learning_rate=0.1, warmup_steps=2)
  assert rate_check.find_highest(s) == pytest.approx(0.1 * 0.9, rel=0.02)


@pytest.mark.parametrize('rate, message', [('0.0', 'is 0 at all 100 steps'), ('step * 1e-3', '')])
def test_a_user_defined_schedule(rate, message, tmp_path, monkeypatch):
  name = f'schedule_of_{len(rate)}'
  lines = ['import jax.numpy as jnp', 'def make(config):', '  assert config.warmup_steps == 10']
  lines += [f'  return lambda step: jnp.asarray({rate}, jnp.float32)']
  (tmp_path / f'{name}.py').write_text('\n'.join(lines))
  monkeypatch.syspath_prepend(tmp_path)
  user_modules.trust([name])
  s = given(schedule=f'{name}:make')
  if message:
    with pytest.raises(ValueError, match=message):
      rate_check.check_rates(s)
  else:
    rate_check.check_rates(s)
    assert rate_check.find_highest(s) == pytest.approx(0.099)
