"""Runs whose workdir is a bucket, of one process or two: killed, moved to machines with empty disks, and read there."""

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys

import object_server
import ports
import pytest
import repository
import slow
import tiny_run

from dipaco_jax.buckets import bucket_lock
from dipaco_jax.buckets.run_objects import INDEX, TREE
from dipaco_jax.storage import object_store
from dipaco_jax.telemetry import metrics_log


@pytest.fixture(scope='module')
def endpoint():
  with object_server.s3_server() as endpoint:
    yield endpoint


@pytest.fixture(params=slow.but(['s3', 'gs'], 'gs'))
def place(request, endpoint, tmp_path, monkeypatch) -> object_store.Storage:
  """A fresh one, and programs that are compiled already."""
  for name, value in object_server.environment(endpoint).items():
    monkeypatch.setenv(name, value)
  return object_store.open_storage(f'{request.param}://{object_server.BUCKET}{tmp_path}/run')


def scratch(tmp_path: pathlib.Path, number: int) -> str:
  """The option for that of a machine."""
  return f'--scratch={tmp_path}/machine-{number}'


def workdir_of(tmp_path: pathlib.Path, number: int) -> pathlib.Path:
  """The workdir on a machine."""
  return next((tmp_path / f'machine-{number}').glob('*/run'), tmp_path / 'not yet')


def half_uploaded(place: object_store.Storage, folder: str):
  """Whether a tree in this folder has some of its files in the bucket, and no index; or one more is whole, unseen."""
  before: set[str] | None = None  # whole ones, when it was looked first

  def look() -> bool:
    nonlocal before
    names = place.names('')
    trees = {TREE.fullmatch(name)[1] for name in names if name.startswith(f'{folder}/')}
    whole = {tree for tree in trees if f'{tree}{INDEX}' in names}
    before = whole if before is None else before
    return trees != whole or whole != before

  return look


def rows(lines: list[bytes]):
  """What they say of every update, without the clock's part."""
  clock = {'time', 'tokens_per_s', 'inner_s', 'outer_s'}
  found = [{k: v for k, v in metrics_log.from_line(line).items() if k not in clock} for line in lines]
  return sorted(found, key=lambda row: (row['stage'], row['updates'], row['kind']))


def assert_same(place: object_store.Storage, workdir: pathlib.Path, undisturbed: pathlib.Path):
  """The bucket has what the last machine has and what a disk would have, whole and no more."""
  names = place.names('')
  record = json.loads(bytes(place.fetch('stages/train.json')))
  assert record['result']['modules_sha256'] == tiny_run.modules_sha256(undisturbed)
  lines = bytes(place.fetch('metrics.jsonl')).splitlines()
  assert rows(lines) == rows((undisturbed / 'metrics.jsonl').read_bytes().splitlines())
  trees = {found[1] for name in names if (found := TREE.fullmatch(name))}
  assert {f'{tree}{INDEX}' for tree in trees} <= {*names} and bucket_lock.NAME not in names
  folders = 'modules', 'shards', 'routing', 'checkpoints/train', 'control/modules'
  for folder in (name for name in folders if (undisturbed / name).exists()):
    there = {tree.removeprefix(f'{folder}/') for tree in trees if tree.startswith(f'{folder}/')}
    here = {path.name for path in (workdir / folder).iterdir() if TREE.fullmatch(f'{folder}/{path.name}')}
    if folder == 'modules':  # those that older checkpoints name need not have been uploaded
      best = json.loads(bytes(place.fetch('paths/best.json')))['version']
      assert {*map(str, best)} <= there <= here
    elif (
      folder == 'checkpoints/train'
    ):  # one that nobody has fetched stays until the next is there, others are passed over
      assert max(here, key=int) == max(there, key=int) and len(there) <= 2
    else:
      assert here == there


@pytest.mark.slow
def test_killed_and_moved_to_empty_disks(place, undisturbed, tmp_path, request):
  config, machine, draw = undisturbed.parent / 'config.py', 0, random.Random(20)
  options = [tiny_run.CONTROL, '--config.checkpoint.every_steps=8']
  moments = [
    (half_uploaded(place, draw.choice(['sequences', 'shards/base'])), signal.SIGKILL),
    (lambda: tiny_run.updates(workdir_of(tmp_path, machine), 'pretrain') >= 7, signal.SIGKILL),
    (half_uploaded(place, 'checkpoints/train'), signal.SIGKILL),
    (half_uploaded(place, 'modules'), signal.SIGKILL),
    (lambda: tiny_run.updates(workdir_of(tmp_path, machine), 'train') >= 75, signal.SIGTERM),
    (lambda: tiny_run.updates(workdir_of(tmp_path, machine), 'control') >= 10, signal.SIGKILL),
  ]
  for moment, number in moments if request.config.getoption('--slow') else moments[2:3]:
    process = tiny_run.start(config, place.url, scratch(tmp_path, machine), *options)
    tiny_run.stop_when(process, moment, number)
    if draw.random() < 0.8:
      machine += 1
      place.delete(bucket_lock.NAME)  # or the next waits until it is silent
  tiny_run.finish(tiny_run.start(config, place.url, scratch(tmp_path, machine), *options))
  assert_same(place, workdir_of(tmp_path, machine), undisturbed)
  assert f'{place.url}: finished' in command('status', place.url)
  if request.config.getoption('--slow'):
    assert f'{place.url}/report.html' in command('report', place.url)
    assert command('generate', place.url, '--prompt=aei', '--max_tokens=4').startswith('aei')


def command(name: str, url: str, *options: str) -> str:
  """What it prints."""
  env = os.environ | {'PYTHONPATH': str(repository.ROOT), 'JAX_PLATFORMS': 'cpu'}
  line = [sys.executable, '-m', f'dipaco_jax.{name}', f'--workdir={url}', *options]
  done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=120)
  assert done.returncode == 0, done.stderr
  return done.stdout


# -- two processes, which share no disk


def start_two(config: pathlib.Path, url: str, tmp_path: pathlib.Path, *options: str) -> list[subprocess.Popen]:
  together = ['--distributed', f'--coordinator=localhost:{ports.free_port()}', '--num_processes=2']
  return [tiny_run.start(config, url, scratch(tmp_path, k), *options, *together, f'--process_id={k}') for k in range(2)]


def kill_when(processes: list[subprocess.Popen], moment):
  """All at once, as when a job is deleted."""
  try:
    tiny_run.stop_when(processes[0], moment, signal.SIGKILL)
  finally:
    for process in processes:
      process.kill()
    print(*(process.communicate()[1][-4000:] for process in processes[1:]))


def forget(place: object_store.Storage, tmp_path: pathlib.Path, *machines: int):
  """Removes the scratch of machines, and what makes who comes next wait."""
  for number in machines:
    shutil.rmtree(tmp_path / f'machine-{number}', ignore_errors=True)
  place.delete(bucket_lock.NAME)


# What needs files that another process has made: rounds of sharding, token losses, the learned chooser, excerpts.
EVERYTHING = [
  '--config.routing.method=discriminative', '--config.routing.phases_per_round=2',
  '--config.evaluate.reroute_every=(16,)', '--config.evaluate.chunk_router_steps=4',
  '--config.routing.router_fraction=0.2', '--config.checkpoint.every_steps=8', tiny_run.CONTROL,
  '--config.evaluate.refit_router=True',
]  # fmt: skip


@pytest.fixture(scope='module')
def by_two(tmp_path_factory) -> pathlib.Path:
  """The workdir of a run that nothing disturbed, on a disk, by as many devices as two processes have."""
  folder = tmp_path_factory.mktemp('by_two')
  tiny_run.finish(tiny_run.start(tiny_run.write_config(folder), folder / 'run', *EVERYTHING, devices=2))
  return folder / 'run'


@pytest.mark.slow
def test_two_processes_without_a_shared_disk(place, by_two, tmp_path):
  """Killed, with both scratches gone once and one of them once; then read, and gone on with, by one process."""
  config, draw = by_two.parent / 'config.py', random.Random(4)

  def trained(stage: str, updates: int):
    return lambda: tiny_run.updates(workdir_of(tmp_path, 0), stage) >= updates

  for moment, lost in [
    (half_uploaded(place, draw.choice(['sequences', 'shards/base'])), [1]),
    (trained('pretrain', draw.randrange(4, 12)), []),
    (half_uploaded(place, 'checkpoints/train'), [0, 1]),
    (trained('train', draw.randrange(40, 90)), [0]),
    (half_uploaded(place, 'control/modules'), []),
  ]:
    kill_when(start_two(config, place.url, tmp_path, *EVERYTHING), moment)
    forget(place, tmp_path, *lost)
  for process in start_two(config, place.url, tmp_path, *EVERYTHING):
    tiny_run.finish(process)
  assert_same(place, workdir_of(tmp_path, 0), by_two)
  assert f'{place.url}: finished' in command('status', place.url)
  assert command('generate', place.url, '--prompt=aei', '--max_tokens=4').startswith('aei')
