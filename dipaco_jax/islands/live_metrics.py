"""Rows of metrics that the monitor of an islands run sends to sinks: those of metrics.jsonl, phase by phase."""

import time

from dipaco_jax.islands import run_history
from dipaco_jax.islands.island import Island
from dipaco_jax.telemetry import metrics_log, sinks


def follow(island: Island) -> sinks.Rows:
  """Yields rows from facts while paths train, and the rest from metrics.jsonl, which the evaluator makes at the end."""
  pointers, phase = run_history.Pointers(island), 0
  while not island.registry.facts('finished'):
    while run_history.is_complete(island, phase):
      phase_history = run_history.read_phase(island, pointers, phase)
      for row in run_history.rows_of_phase(island, phase, phase_history):
        yield metrics_log.plain(row | {'time': time.time()})
      phase += 1
    yield None
  for line in bytes(island.storage.fetch('metrics.jsonl')).splitlines(keepends=True):
    if written := metrics_log.from_line(line):
      yield written
  while True:
    yield None
