"""Weights & Biases as a sink of the curves that TensorBoard shows, by global step. WANDB_* variables configure it.

Points are numbered. The run keeps the next number and the id of its W&B run, so that a point that is written twice has
the same number.
"""

import secrets
from collections.abc import Iterable
from typing import Any

from dipaco_jax.config import settings as settings_lib
from dipaco_jax.core.errors import InputError
from dipaco_jax.processes import stopping
from dipaco_jax.telemetry.curves import Points

SETTLES_S = 30.0  # wandb's process writes points up to 15 s after taking them, and ends with this process


def check():
  """Raises InputError if the user is not logged in."""
  import wandb

  session = wandb.setup(wandb.Settings(silent=True, console='off'))  # silent also suppresses prompts
  if session.settings.mode == 'online' and not wandb.login(prompt=False):
    fix = 'run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline'
    raise InputError(f"config.metrics.sinks='wandb': you are not logged in to Weights & Biases: {fix}")


class Sink:
  """A run of W&B, which starts or resumes with the first row."""

  def __init__(self, settings: settings_lib.Settings, kept: dict[str, Any]):
    self._settings, self._kept = settings, kept
    self._run: Any = None
    kept.setdefault('id', secrets.token_hex(4))
    kept.setdefault('points', 0)

  def write(self, wall_time: float, points: Iterable[Points]):
    """Writes points of curves, measured at `wall_time` in seconds since 1970."""
    if self._run is None:
      self._run = self._begin()
    for step, values in points:
      self._run.log({**values, 'step': step, '_timestamp': wall_time}, step=self._kept['points'])
      self._kept['points'] += 1

  def close(self):
    if self._run is not None:
      self._run.finish()

  def _begin(self) -> Any:
    import wandb

    config = self._settings.metrics
    run = wandb.init(
      id=self._kept['id'], resume='allow', name=config.run, config=self._settings.to_dict(),
      project=config.project,
    )  # fmt: skip
    run.define_metric('*', step_metric='step')
    if not run.offline:
      stopping.say(f'metrics go to {run.url}')
    return run
