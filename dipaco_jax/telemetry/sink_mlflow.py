"""MLflow as a sink of the curves that TensorBoard shows, by global step. MLFLOW_* variables configure it.

The run keeps the id of its MLflow run, so that it can resume it.
"""

import contextlib
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dipaco_jax.config import fields, settings as settings_lib
from dipaco_jax.telemetry.curves import Points

SETTLES_S = 0.0  # points are in the database or at the server when `write` returns
MOST_METRICS = 1000  # in one call
MOST_PARAMS = 100  # in one call
MOST_CHARACTERS = 500  # of a parameter


def check():
  """Imports the library. Errors of MLFLOW_TRACKING_URI appear when rows are sent."""
  import mlflow.tracking  # noqa: F401

  with contextlib.suppress(ImportError):
    import IPython  # noqa: F401 - MLflow imports it later in a thread; matplotlib fails while it is half imported

  logging.getLogger('urllib3').setLevel(logging.ERROR)  # it logs every attempt


class Sink:
  """A run of MLflow, which starts or resumes with the first row."""

  def __init__(self, settings: settings_lib.Settings, kept: dict[str, Any]):
    self._settings, self._kept = settings, kept
    self._client: Any = None

  def write(self, wall_time: float, points: Iterable[Points]):
    """Writes points of curves, measured at `wall_time` in seconds since 1970."""
    from mlflow.entities import Metric

    if self._client is None:
      self._client = self._begin()
    at_ms = int(1000 * wall_time)
    for step, values in points:
      metrics = [Metric(name_of(curve), value, at_ms, step) for curve, value in values.items()]
      for batch in _split(metrics, MOST_METRICS):
        self._client.log_batch(self._kept['id'], metrics=batch)

  def close(self):
    if self._client is not None:
      self._client.set_terminated(self._kept['id'])

  def _begin(self) -> Any:
    from mlflow.entities import Param
    from mlflow.tracking import MlflowClient

    client, config = MlflowClient(), self._settings.metrics
    if 'id' in self._kept:
      client.update_run(self._kept['id'], 'RUNNING')
      return client
    existing = client.get_experiment_by_name(config.project)
    experiment = existing.experiment_id if existing else client.create_experiment(config.project)
    self._kept['id'] = client.create_run(experiment, run_name=config.run).info.run_id
    values = fields.flatten(self._settings.to_dict())
    params = [Param(name, str(value)[:MOST_CHARACTERS]) for name, value in values.items()]
    for batch in _split(params, MOST_PARAMS):
      client.log_batch(self._kept['id'], params=batch)
    return client


def name_of(curve: str) -> str:
  """Returns a curve's name in MLflow: only characters that it accepts, and one slash, because names may be files."""
  section, _, rest = curve.partition('/')
  return f'{section}/{re.sub(r"[^a-zA-Z0-9_. -]", "_", rest.replace("/", "."))}'


def _split(items: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
  return (items[i : i + most] for i in range(0, len(items), most))
