"""Metrics of a process for Prometheus, on this machine only, at --metrics_port.

Training does no work for it: a thread of the server reads the state of training for each request. An error there is an
error of the answer, not of the run.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from dipaco_jax.core.errors import InputError
from dipaco_jax.processes import time_use
from dipaco_jax.telemetry import performance

HOST = '127.0.0.1'
GAUGES = {  # of `Reading.numbers`: name and help
  'phase': ('phase', 'The phase that is trained, from 1.'),
  'step': ('step', 'The last global step; of a worker, its step of the phase.'),
  'loss': ('loss_nats', 'The mean training loss of the last dispatch.'),
  'tokens_per_s': ('tokens_per_second', 'Training tokens a second.'),
}
COUNTERS = {
  'tokens': ('tokens', 'Training tokens of the stage.'),
  'compilations': ('compilations', 'Programs compiled, or taken from the cache.'),
  'tasks_done': ('tasks_done', 'Tasks that this role has done.'),
}


class Reading(NamedTuple):
  """What there is to tell now."""

  doing: str  # the stage of a run, or the task of a role; '': none
  numbers: Mapping[str, float | None]  # by the names above; others are left out
  seconds: Mapping[str, time_use.Seconds]  # by stage and cause


class MetricsServer:
  """Answers at http://127.0.0.1:PORT/metrics; `read` provides the metrics as soon as there are any."""

  def __init__(self):
    self.read: Callable[[], Reading] | None = None

  def collect(self) -> Iterator[Any]:
    """Yields families of metrics: prometheus_client's protocol of a collector."""
    from prometheus_client import core

    if not self.read:
      return
    state = self.read()
    stage = core.GaugeMetricFamily('dipaco_train_stage', '1 for the stage or task that is worked on.', labels=['stage'])
    stage.add_metric([state.doing], 1)
    yield stage
    for families, make in ((GAUGES, core.GaugeMetricFamily), (COUNTERS, core.CounterMetricFamily)):
      for name, (called, help_text) in families.items():
        if (value := state.numbers.get(name)) is not None:
          yield make(f'dipaco_train_{called}', help_text, value=value)
    help_text = 'Wall time by stage and cause.'
    seconds = core.CounterMetricFamily('dipaco_train_seconds', help_text, labels=['stage', 'cause'])
    for place, by_cause in state.seconds.items():
      for cause, spent in by_cause.items():
        seconds.add_metric([place, cause], spent)
    yield seconds
    if (goodput := time_use.goodput(state.seconds.get('train', {}))) is not None:
      yield core.GaugeMetricFamily('dipaco_train_goodput_ratio', 'Share of steps in the time of training.', goodput)
    yield self._memory(core)

  def _memory(self, core: Any) -> Any:
    import jax

    peaks = {'process': performance.process_peak_bytes(), 'device': performance.device_peak_bytes(jax.local_devices())}
    memory = core.GaugeMetricFamily('dipaco_train_peak_memory_bytes', 'The most in use so far.', labels=['of'])
    for of, peak in peaks.items():
      if peak is not None:
        memory.add_metric([of], peak)
    return memory


def serve(port: int) -> tuple[MetricsServer, str]:
  """Starts to answer; returns the server and its URL. Raises InputError if it cannot."""
  try:
    import prometheus_client
  except ImportError as e:
    raise InputError(f'{e.name} is missing, which --metrics_port needs: pip install "dipaco_jax[serve]"') from e
  collector, registry = MetricsServer(), prometheus_client.CollectorRegistry()
  registry.register(collector)
  try:
    server, _ = prometheus_client.start_http_server(port, HOST, registry)
  except (OSError, OverflowError) as e:
    reason = getattr(e, 'strerror', None) or e
    raise InputError(f'--metrics_port={port}: {reason}; choose another, or 0 for any free port') from e
  return collector, f'http://{HOST}:{server.server_port}/metrics'
