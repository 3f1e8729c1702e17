"""Weights & Biases as a sink: the curves that TensorBoard shows, against the global step. WANDB_* configure it.

Points are numbered, and the numbers kept in the run, with the id of W&B's run: what comes twice has the same number.
"""

import secrets
from collections.abc import Iterable
from typing import Any

from dipaco_jax.config import settings as settings_lib
from dipaco_jax.core.errors import InputError
from dipaco_jax.processes import stopping
from dipaco_jax.telemetry.curves import Points

SETTLES_S = 30.0  # its own process writes what it has taken after up to 15 s, and is gone with this one


def check():
  """Raises InputError where nobody is logged in."""
  import wandb

  session = wandb.setup(wandb.Settings(silent=True, console='off'))  # silent, it asks nothing either
  if session.settings.mode == 'online' and not wandb.login(prompt=False):
    fix = 'run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline'
    raise InputError(f"config.metrics.sinks='wandb': you are not logged in to Weights & Biases: {fix}")


class Sink:
  """A run of W&B, which begins with the first row, or goes on."""

  def __init__(self, settings: settings_lib.Settings, kept: dict[str, Any]):
    self._settings, self._kept = settings, kept
    self._run: Any = None
    kept.setdefault('id', secrets.token_hex(4))
    kept.setdefault('points', 0)

  def write(self, wall_time: float, points: Iterable[Points]):
    """Takes points of curves, measured `wall_time` seconds since 1970."""
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
