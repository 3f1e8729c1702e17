"""Invariant 6: stopped at any point, by whatever, and started again: the same modules, to the bit."""

import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import time
import urllib.request

import jax
import numpy as np
import ports
import pytest
import small
import tiny_run

from dipaco_jax.storage import files
from dipaco_jax.telemetry import metrics_log
from dipaco_jax.training import training_loop

SINK = """
import json, os

class Sink:
  def __init__(self, config):
    self.rows = open(f'{os.environ["PYTHONPATH"].split(os.pathsep)[-1]}/{config.run}.jsonl', 'a')

  def write(self, row):
    print(json.dumps(row), file=self.rows, flush=True)

  def close(self):
    self.rows.close()
"""


def test_a_job_that_stops_after_every_dispatch_ends_with_the_same_bits(tmp_path):
  levels = ('ends', 'embed|final', ()), ('blocks', 'block', ('a',))
  job = small.make_job(small.make_programs(small.settings({'a': 2}, levels, train=dict(phases=2))))
  expected = small.fetched(small.train(job, tmp_path / 'undisturbed').modules)
  for _ in range(2 * 2 * 2):  # phases, paths in turn, dispatches
    with pytest.raises(training_loop.Stopped):
      small.train(job, tmp_path / 'stopped', stop=lambda: True)
  found = small.fetched(small.train(job, tmp_path / 'stopped').modules)
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def start(config, workdir, *options):
  return tiny_run.start(
    config, workdir, tiny_run.CONTROL, '--config.checkpoint.every_steps=8', *options, own_cache=True
  )


def rows(workdir):
  """What metrics.jsonl says of every update, without the clock's part."""
  clock = {'time', 'tokens_per_s', 'inner_s', 'outer_s'}
  return [{k: v for k, v in row.items() if k not in clock} for row in metrics_log.read_rows(workdir)]


def assert_same(workdir, undisturbed):
  assert tiny_run.modules_sha256(workdir) == tiny_run.modules_sha256(undisturbed)
  key = lambda row: (['pretrain', 'train', 'control'].index(row['stage']), row['updates'])  # noqa: E731
  assert sorted(rows(workdir), key=key) == sorted(rows(undisturbed), key=key)
  reports = [json.loads((w / 'report.json').read_text()) for w in (workdir, undisturbed)]
  same = 'perplexity control_perplexity perplexity_by_path perplexity_by_domain train_tokens parameters_total'
  for name in same.split():
    assert reports[0][name] == reports[1][name]


@pytest.fixture
def workdir(tmp_path, undisturbed):
  """A fresh one, but for what XLA compiled, which a run that was stopped has too."""
  shutil.copytree(tiny_run.cache_of(undisturbed), tiny_run.cache_of(tmp_path / 'run'))
  return tmp_path / 'run'


def exists(path: pathlib.Path):
  return path.exists


@pytest.mark.slow
def test_killed_in_every_stage(workdir, undisturbed, tmp_path, monkeypatch):
  (tmp_path / 'own_sink.py').write_text(SINK)
  monkeypatch.setenv('PYTHONPATH', str(tmp_path))
  sink = '--config.metrics.sinks=tensorboard,own_sink:Sink'
  draw = random.Random(6)
  early, late = draw.randrange(1, 40), draw.randrange(41, 80)
  checkpoints = workdir / 'checkpoints' / 'train'
  moments = [
    exists(draw.choice([workdir / 'tokenizer.model', workdir / 'sequences'])),
    lambda at=draw.randrange(1, 11): tiny_run.updates(workdir, 'pretrain') >= at,
    exists(draw.choice([workdir / 'stages' / 'pretrain.json', workdir / 'routing' / '0', workdir / 'shards' / '0'])),
    lambda: tiny_run.updates(workdir, 'train') >= early,
    # Into the writing of a checkpoint, or of a version.
    lambda: tiny_run.updates(workdir, 'train') > early and any(checkpoints.glob('*tmp*')),
    lambda: tiny_run.updates(workdir, 'train') >= late and any(workdir.glob('.version-*')),
    lambda: tiny_run.updates(workdir, 'control') >= 4,  # of 24, so that the last process trains too
  ]
  began = time.monotonic()
  for moment in moments:
    said = tiny_run.stop_when(start(undisturbed.parent / 'config.py', workdir, sink), moment, signal.SIGKILL)
    assert 'corrupt' not in said  # to begin anew would give the same bits too
  half = files.beside(workdir / 'stages' / 'evaluate.json')  # as one leaves it who is killed while writing
  half.write_bytes(b'{"di')
  port = ports.free_port()
  last = start(undisturbed.parent / 'config.py', workdir, sink, '--profile=34:1', f'--metrics_port={port}')
  told = ask_until_it_ends(last, f'http://127.0.0.1:{port}/metrics')
  assert all(f'dipaco_train_{name}' in told for name in ('step ', 'tokens_total ', 'goodput_ratio '))
  assert 'corrupt' not in (said := tiny_run.finish(last)) and 'cover 34 to 34' in said
  check_time(workdir, time.monotonic() - began)
  assert_same(workdir, undisturbed)
  check_sink(workdir, tmp_path / 'run.jsonl', len(moments))
  assert not half.exists()


def ask_until_it_ends(process, url: str) -> str:
  """The longest answer to Prometheus while the process runs."""
  told, deadline = '', time.monotonic() + tiny_run.PATIENCE_S
  while process.poll() is None and time.monotonic() < deadline:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
      told = max(told, answer.read().decode(), key=len)
    time.sleep(0.2)
  return told


def check_time(workdir, wall_s: float):
  """Every second from the first process's start to the last one's end has a cause; what was made again is lost."""
  found = json.loads((workdir / 'report.json').read_text())['seconds']
  assert 0.98 * wall_s <= sum(s for seconds in found.values() for s in seconds.values()) <= 1.005 * wall_s
  assert min(found['train']['lost'], found['pretrain']['inner'], found['train']['inner']) > 0


def check_sink(workdir, file, kills):
  """A sink has got each row once, but for those that it was being given as the process was killed."""
  key = lambda row: (row['stage'], row['updates'], row['kind'])  # noqa: E731
  got = [key(json.loads(line)) for line in file.read_text().splitlines()]
  assert list(dict.fromkeys(got)) == [key(row) for row in metrics_log.read_rows(workdir)]
  assert len(got) - len({*got}) <= kills


def newest(workdir):
  """The directory of the newest checkpoint of training, and its largest file."""
  found = (p for p in (workdir / 'checkpoints' / 'train').iterdir() if p.name.isdigit())
  checkpoint = max(found, key=lambda p: int(p.name))
  return checkpoint, tiny_run.largest(checkpoint)


def truncate(file):
  os.truncate(file, file.stat().st_size // 2)


def garble(file):
  data = bytearray(file.read_bytes())
  data[len(data) // 4 : len(data) // 2] = random.Random(0).randbytes(len(data) // 2 - len(data) // 4)
  file.write_bytes(data)


@pytest.mark.slow
def test_stopped_by_signals_and_checkpoints_gone_bad(workdir, undisturbed):
  config, draw = undisturbed.parent / 'config.py', random.Random(7)

  def go_on_until(stage, at, number):
    moment = lambda: tiny_run.updates(workdir, stage) >= at  # noqa: E731
    return tiny_run.stop_when(start(config, workdir), moment, number)

  assert 'stopped' in go_on_until('pretrain', draw.randrange(1, 9), signal.SIGTERM)
  go_on_until('train', draw.randrange(10, 35), signal.SIGINT)
  for damage, at in ((truncate, draw.randrange(45, 60)), (garble, draw.randrange(70, 85))):
    bad, file = newest(workdir)
    damage(file)
    said = go_on_until('train', at, signal.SIGTERM)
    assert f'checkpoint {bad.absolute()} is corrupt' in said and 'using the one before it' in said
  tiny_run.finish(start(config, workdir))
  assert_same(workdir, undisturbed)


@pytest.mark.slow
def test_one_run_per_workdir(workdir, undisturbed):
  config = undisturbed.parent / 'config.py'
  first = start(config, workdir)
  try:
    while not (workdir / 'tokenizer.model').exists():
      assert first.poll() is None
    second = tiny_run.finish(start(config, workdir), status=2)
    *waiting, said = second.strip().split('\n')
    assert f'in use by process {first.pid}' in said
    assert all(line.startswith(('loading JAX', 'devices: ', 'looking ')) for line in waiting)
    assert first.poll() is None
  finally:
    first.kill()
    first.communicate()
