"""What the monitor feeds sinks: the rows of metrics.jsonl, phase by phase, and by whoever was the monitor before."""

import contextlib
import json
import sys

import pytest
from island_fixtures import machine, one_device, prepared  # noqa: F401
from one_process import changed, close

from dipaco_jax.config import extension
from dipaco_jax.islands import live_metrics, monitor, run_history
from dipaco_jax.storage import user_modules
from dipaco_jax.telemetry import metrics_log

SOURCE = """
import json, pathlib

class Sink:
  def __init__(self, config):
    self.rows = open(pathlib.Path(config.project) / f'{config.run}.jsonl', 'a')

  def write(self, row):
    print(json.dumps(row), file=self.rows, flush=True)

  def close(self):
    self.rows.close()
"""


def without_time(rows):
  return [{name: value for name, value in row.items() if name != 'time'} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize('stream', ['off', 'on'])
def test_sinks_get_the_rows_of_the_record(machine, prepared, tmp_path, one_device, monkeypatch, stream):  # noqa: F811
  (tmp_path / 'island_sink.py').write_text(SOURCE)
  monkeypatch.syspath_prepend(tmp_path)  # after the file: what a folder holds is remembered by Python
  user_modules.trust(['island_sink'])
  monkeypatch.setattr(monitor, 'LOOK_S', 0.01)
  sinks = dict(sinks=('island_sink:Sink',), project=str(tmp_path))
  run = machine.begin(prepared, tmp_path / 'run', changed(machine.settings, outer=dict(stream=stream), metrics=sinks))
  run.live(tmp_path / 'run')
  recorded = list(metrics_log.read_rows(tmp_path / 'run'))
  assert not (tmp_path / 'run' / 'events').exists()
  for _ in range(2):  # the second monitor finds that all was said
    made = run.island(tmp_path / 'run')
    monitor.watch(made)
    close(made)
  got = [json.loads(line) for line in (tmp_path / 'run.jsonl').read_text().splitlines()]
  assert without_time(got) == without_time(recorded) and {row['kind'] for row in got} >= {'step', 'phase'}
  sys.modules.pop('island_sink')
  extension.load.cache_clear()
  told_while_paths_trained(run.island(tmp_path / 'run'), recorded, monkeypatch)


def told_while_paths_trained(made, recorded, monkeypatch):
  """While paths train, rows are those of the phases that are complete."""
  complete, facts = [], made.registry.facts
  real = run_history.is_complete
  monkeypatch.setattr(made.registry, 'facts', lambda kind, *a, **b: [] if kind == 'finished' else facts(kind, *a, **b))
  monkeypatch.setattr(run_history, 'is_complete', lambda i, phase: phase in complete and real(i, phase))
  with contextlib.closing(live_metrics.follow(made)) as rows:
    assert next(rows) is None
    for phase in range(2):
      complete.append(phase)
      got = list(iter(lambda: next(rows), None))
      expected = [row for row in recorded if row['phase'] - (row['kind'] == 'phase') == phase]
      assert without_time(got) == without_time(expected) and got[-1]['kind'] == 'phase'
      assert [row['updates'] for row in got] == sorted(row['updates'] for row in got)
  close(made)
