"""Two processes of a job, joined by jax.distributed, agree with one; each reads its own paths' shards and no others.

They agree with each other too: on when to stop, and on which checkpoint to go on from.
"""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy
import small
import tiny_run

PATHS_OF = ({0, 1}, {2, 3})  # of each process: the mesh has one position of axis a in each


def free_port() -> int:
  with socket.socket() as s:
    s.bind(('localhost', 0))
    return s.getsockname()[1]


def shards_held(pid: int) -> set[int]:
  """Paths whose shards the process has open."""
  held = set()
  for link in pathlib.Path(f'/proc/{pid}/fd').iterdir():
    try:
      target = os.readlink(link)
    except OSError:
      continue
    if match := re.search(r'/shards/0/(\d+)/\w+\.array_record$', target):
      held.add(int(match[1]))
  return held


def start(config: pathlib.Path, workdir: pathlib.Path, *more: str) -> list[subprocess.Popen]:
  options = [*more, '--distributed', f'--coordinator=localhost:{free_port()}', '--num_processes=2']
  return [tiny_run.start(config, workdir, *options, f'--process_id={i}') for i in range(2)]


@pytest.fixture(scope='module')
def joined(undisturbed, tmp_path_factory):
  """(workdir of a run by two processes, the paths whose shards each has been seen to hold open while training)."""
  workdir = tmp_path_factory.mktemp('two') / 'run'
  processes = start(undisturbed.parent / 'config.py', workdir, tiny_run.RARELY)
  seen: tuple[set[int], set[int]] = (set(), set())
  try:
    while all(process.poll() is None for process in processes):
      if sys.platform == 'linux' and (workdir / 'stages' / 'route.json').exists():
        for process, held in zip(processes, seen, strict=True):
          if process.poll() is None:
            held |= shards_held(process.pid)
    for process in processes:
      tiny_run.finish(process)
  finally:
    for process in processes:
      process.kill()
      process.communicate()
  return workdir, seen


def test_same_modules(joined, undisturbed):
  workdir, _ = joined
  for name in ('train', 'validation'):
    np.testing.assert_array_equal(*(np.load(w / 'routing' / '0' / f'{name}.npy') for w in (workdir, undisturbed)))
  files = sorted(p.relative_to(undisturbed) for p in (undisturbed / 'modules' / '4').rglob('*.safetensors'))
  assert len(files) == 1 + 2 + 2
  for file in files:
    ours, theirs = (safetensors.numpy.load_file(w / file) for w in (workdir, undisturbed))
    # 36 steps, pretraining included, each errs by the rounding of a parameter, and of a direction that is a sum over a
    # batch's targets; epsilon is 1e-8, so that directions of gradients near it magnify what rounding leaves.
    small.assert_close(ours, theirs, 36 * small.EPS * (2 + 0.01 * 4 * 64) * 100)


def test_same_report(joined, undisturbed):
  (ours, theirs) = (tiny_run.record(w, 'evaluate')['result'] for w in (joined[0], undisturbed))
  assert ours['perplexity'] == pytest.approx(theirs['perplexity'], rel=1e-3)
  assert ours['validation_tokens'] == theirs['validation_tokens']
  assert (joined[0] / 'report.json').exists()


@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
def test_each_process_reads_its_own_shards_only(joined):
  assert joined[1] == PATHS_OF


def test_every_row_of_metrics_is_there_once(joined):
  rows = [(r['kind'], r['stage'], r['updates']) for r in small.metrics.read_rows(joined[0])]
  assert len(rows) == len(set(rows)) and ('phase', 'train', 48) in rows


@pytest.mark.slow
def test_a_signal_to_one_stops_both_and_both_pass_over_a_corrupt_checkpoint(joined, undisturbed, tmp_path):
  config, workdir = undisturbed.parent / 'config.py', tmp_path / 'run'
  processes = start(config, workdir)
  try:
    tiny_run.stop_when(processes[1], lambda: tiny_run.updates(workdir, 'train') >= 20, signal.SIGTERM)
    tiny_run.finish(processes[0], 130)
    found = [p for p in (workdir / 'checkpoints' / 'train').iterdir() if p.name.isdigit()]
    assert len(found) > 1
    bad = max(found, key=lambda p: int(p.name))
    tiny_run.flip_a_bit(max((f for f in bad.rglob('*') if f.is_file()), key=lambda f: f.stat().st_size))
    processes = start(config, workdir)
    for said in [tiny_run.finish(process) for process in processes]:
      assert f'checkpoint {bad.absolute()} is corrupt' in said
  finally:
    for process in processes:
      process.kill()
      process.communicate()
  assert tiny_run.modules_sha256(workdir) == tiny_run.modules_sha256(joined[0])
