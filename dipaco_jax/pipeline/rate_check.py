"""Checks before any work that the learning rate of a run becomes as high as its config says."""

import dataclasses
import logging

from dipaco_jax.algorithm import inner
from dipaco_jax.config import choices, extension, settings as settings_lib, training_sections
from dipaco_jax.core.errors import InputError
from dipaco_jax.processes import processes

LEAST_SHARE = 0.5  # of the learning rate that is asked for; a warm-up over half of a cosine reaches 0.54 of it


def check_rates(s: settings_lib.Settings) -> None:
  """Logs how the schedule fits the run. Raises InputError if its learning rate stays far below the config's."""
  if extension.is_reference(s.inner.schedule):
    if find_highest(s) <= 0:
      raise InputError(f'config.inner.schedule={s.inner.schedule!r} is 0 at all {s.num_steps} steps of the run')
    return
  _check_warmup(s)
  _check_rewarm(s)
  _check_end(s)


def find_highest(s: settings_lib.Settings, first: int = 0) -> float:
  """Returns the highest learning rate of a run, of its global steps from `first` on."""
  return inner.highest_rate(_schedule(s), first, s.num_steps)


def _schedule(s: settings_lib.Settings):
  return choices.make_inner_of_run(s).learning_rate


def _with_inner(s: settings_lib.Settings, **changes) -> settings_lib.Settings:
  """Returns the settings with a peak rate of 1 in all steps, and other changes of the section `inner`."""
  changed = dataclasses.replace(s.inner, learning_rate=1.0, **changes)
  return dataclasses.replace(s, inner=changed, train=dataclasses.replace(s.train, learning_rate=0.0))


def _check_warmup(s: settings_lib.Settings) -> None:
  steps, asked = s.inner.warmup(s.decay_steps), s.inner.warmup_steps
  share = find_highest(_with_inner(s, rewarm_steps=0))
  if share < LEAST_SHARE:
    what = f'config.inner.warmup_steps={asked}' if asked >= 0 else f'a warm-up of {steps} steps'
    what += f' with config.inner.decay_steps={s.inner.decay_steps}' if s.inner.decay_steps else ''
    fix = f'set {"it" if asked >= 0 else "config.inner.warmup_steps"} to {max(1, s.num_steps // 10)} or less'
    raise InputError(
      f'{what} reaches only {share:.0%} of config.inner.learning_rate in the {s.num_steps} steps of the run: {fix}'
    )
  if asked < 0 and steps < training_sections.MOST_WARMUP_STEPS and processes.is_first():
    message = (
      'the learning rate warms up in a tenth of the schedule, %d of %d steps; config.inner.warmup_steps changes that'
    )
    logging.warning(message, steps, s.decay_steps)


def _check_rewarm(s: settings_lib.Settings) -> None:
  if not s.inner.rewarm_steps:
    return
  again, without = (find_highest(_with_inner(s, rewarm_steps=n), s.pretrain.steps) for n in (s.inner.rewarm_steps, 0))
  if again < LEAST_SHARE * without:
    path_steps = s.num_steps - s.pretrain.steps
    raise InputError(
      f'config.inner.rewarm_steps={s.inner.rewarm_steps}: the paths reach only {again / without:.0%} of the learning '
      f'rate in their {path_steps} steps: set it to {max(1, path_steps // 10)} or less'
    )


def _check_end(s: settings_lib.Settings) -> None:
  """Checks the steps after the schedule's end, which have its final rate."""
  if (behind := s.num_steps - s.decay_steps) <= 0:
    return
  if not s.inner.final_fraction:
    raise InputError(
      f'config.inner.decay_steps={s.inner.decay_steps}: the learning rate is 0 in the last {behind} of {s.num_steps} '
      f'steps: raise it to {s.num_steps}, or set 0 for the whole run'
    )
  if processes.is_first():
    message = 'config.inner.decay_steps=%d: the last %d of %d steps are trained at the lowest learning rate'
    logging.warning(message, s.inner.decay_steps, behind, s.num_steps)
