"""Weights & Biases (offline) and MLflow, fed by a process that is killed and starts again: one run in each, no gaps."""

import importlib.util
import json
import os
import pathlib
import signal
import struct
import subprocess
import sys
import time

import psutil
import pytest
import repository

from dipaco_jax.telemetry import curves, metrics_log, sink_mlflow, sinks

pytestmark = pytest.mark.slow  # sinks_test.py has what is ours of it

# Two paths take turns; in its first life, the process is killed after the first's turn of the second phase.
PROGRAM = """
import json, os, pathlib, signal, sys, time
from dipaco_jax.config import settings
from dipaco_jax.telemetry import metrics_log, sinks

workdir, is_killed = pathlib.Path(sys.argv[1]), sys.argv[2] == 'yes'
made = sinks.make(settings.from_dict({'metrics': {'sinks': ('wandb', 'mlflow'), 'project': 'mine'}}), 'my_run')
with metrics_log.Metrics(workdir) as rows, sinks.fed(made, lambda: sinks.follow(workdir), sinks.in_workdir(workdir)):
  rows.rewind('train', 0 if is_killed else 8)
  for phase in range(0 if is_killed else 1, 3):
    for path in range(2):
      for step in range(1, 5):
        at = 8 * phase + 4 * path + step
        values = dict(step=4 * phase + step, paths=[path], paths_in_phase=2, loss=[1 / at], phase=phase)
        rows.write('step', 'train', at, **values)
      if is_killed and (phase, path) == (1, 0):
        while json.loads((workdir / 'sinks' / 'mlflow.json').read_text())['rows'].get('train', [0])[0] < at:
          time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    at = 8 * phase + 8
    rows.write('phase', 'train', at, step=4 * phase + 4, phase=phase + 1, loss_by_path=[0.5, None])
    rows.write('evaluation', 'train', at, step=4 * phase + 4, perplexity=9.0, perplexity_by_domain={'a (b)': 7.0})
"""
BLOCK, HEADER = 32_768, 7  # bytes of a block, and of what is before the file, and before each piece of a record


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> pathlib.Path:
  """Where both libraries keep what they were given; the run is below."""
  for name in sinks.BUILT_IN:
    if importlib.util.find_spec(name) is None:
      pytest.skip(f'{name} is not installed')
  found = tmp_path_factory.mktemp('sinks')
  assert feed(found, 'yes').returncode == -signal.SIGKILL
  done = feed(found, 'no')
  assert done.returncode == 0 and 'metrics.sinks' not in done.stderr, done.stderr
  return found


def environment(folder) -> dict[str, str]:
  mlflow = {'MLFLOW_TRACKING_URI': f'file:{folder}/mlflow', 'MLFLOW_ALLOW_FILE_STORE': 'true'}
  return mlflow | {'MLFLOW_DISABLE_TELEMETRY': 'true', 'WANDB_MODE': 'offline', 'WANDB_DIR': str(folder)}


def feed(folder, is_killed: str) -> subprocess.CompletedProcess:
  env = os.environ | {'PYTHONPATH': str(repository.ROOT)} | environment(folder)
  command = [sys.executable, '-c', PROGRAM, str(folder / 'run'), is_killed]
  return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)


def points(folder) -> dict[tuple[str, int], float]:
  """{(curve, step): value} of metrics.jsonl."""
  of = curves.CurvesOfStages()
  found = (point for row in metrics_log.read_rows(folder / 'run') for point in of.points(row))
  return {(name, step): value for step, values in found for name, value in values.items()}


def test_mlflow_has_one_run_with_each_point_once(folder, monkeypatch):
  for name, value in environment(folder).items():
    monkeypatch.setenv(name, value)
  from mlflow.tracking import MlflowClient

  client = MlflowClient()
  [run] = client.search_runs([client.get_experiment_by_name('mine').experiment_id])
  assert run.info.status == 'FINISHED' and run.info.run_name == 'my_run' and run.data.params['train.phases'] == '427'
  found = {}
  for curve in {curve for curve, _ in points(folder)}:
    for metric in client.get_metric_history(run.info.run_id, sink_mlflow.name_of(curve)):
      assert (curve, metric.step) not in found
      found[curve, metric.step] = metric.value
  assert found == points(folder)


def test_wandb_has_one_run_with_each_point(folder):
  files = sorted(folder.glob('wandb/offline-run-*/*.wandb'))
  assert len(files) == 2 and len({file.name for file in files}) == 1  # one id
  found, numbers = {}, {}
  for file in files:
    last = -1
    for values in history(file):
      number, step = values.pop('_step'), values.pop('step')
      values = {name: value for name, value in values.items() if name[0] != '_'}
      assert number > last
      assert numbers.setdefault(number, (step, values)) == (step, values)  # where both have it, it is the same
      found |= {(name, step): value for name, value in values.items()}
      last = number
  assert found == points(folder) and sorted(numbers) == list(range(len(numbers)))


def history(file: pathlib.Path):
  """Points of a .wandb file, which is a log in LevelDB's format with records of W&B's protocol."""
  from wandb.proto import wandb_internal_pb2

  data, at, parts = file.read_bytes(), HEADER, b''
  while at + HEADER <= len(data):
    if BLOCK - at % BLOCK < HEADER:
      at += BLOCK - at % BLOCK
      continue
    _, length, kind = struct.unpack_from('<IHB', data, at)
    parts += data[at + HEADER : at + HEADER + length]
    at += HEADER + length
    if kind in (1, 4):  # whole, or its last piece
      record, parts = wandb_internal_pb2.Record.FromString(parts), b''
      if record.WhichOneof('record_type') == 'history':
        yield {item.key or '/'.join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def test_nothing_of_theirs_is_left_running(folder):
  def left():
    found = (process.info['environ'] or {} for process in psutil.process_iter(['environ']))
    return [values for values in found if values.get('WANDB_DIR') == str(folder)]

  deadline = time.monotonic() + 10
  while left() and time.monotonic() < deadline:
    time.sleep(0.1)
  assert not left()
