"""Two processes of a job, joined by jax.distributed, agree with one; each reads its own paths' shards and no others."""

import os
import pathlib
import re
import socket
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


@pytest.fixture(scope='module')
def joined(undisturbed, tmp_path_factory):
  """(workdir of a run by two processes, the paths whose shards each has been seen to hold open while training)."""
  workdir, port = tmp_path_factory.mktemp('two') / 'run', free_port()
  options = ['--distributed', f'--coordinator=localhost:{port}', '--num_processes=2']
  config = undisturbed.parent / 'config.py'
  processes = [tiny_run.start(config, workdir, *options, f'--process_id={i}') for i in range(2)]
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
