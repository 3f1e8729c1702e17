"""Two processes of a job, joined by jax.distributed, agree with one; each reads its own paths' shards and no others.

They agree with each other too: on when to stop, and on which checkpoint to go on from. Where one is killed all end, and
the same commands go on; so do other numbers of processes.
"""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import ports
import pytest
import safetensors.numpy
import small
import tensorstore
import tiny_run

from dipaco_jax.processes import processes as processes_lib
from dipaco_jax.storage import seals

pytestmark = pytest.mark.slow  # its fixture is a whole run, or several

PATHS_OF = ({0, 1}, {2, 3})  # of each process: the mesh has one position of axis a in each


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


def start(config: pathlib.Path, workdir: pathlib.Path, *more: str, count: int = 2, **how) -> list[subprocess.Popen]:
  options = [*more, '--distributed', f'--coordinator=localhost:{ports.free_port()}', f'--num_processes={count}']
  return [tiny_run.start(config, workdir, *options, f'--process_id={i}', **how) for i in range(count)]


@contextlib.contextmanager
def ended(processes: list[subprocess.Popen]):
  """At the end of the block there are none, whatever happens in it."""
  try:
    yield processes
  finally:
    for process in processes:
      process.kill()
      process.communicate()


def look(processes: list[subprocess.Popen], workdir: pathlib.Path, seen: tuple[set[int], ...]):
  """Notes whose shards each holds open, once all of them can be there."""
  if sys.platform == 'linux' and (workdir / 'stages' / 'route.json').exists():
    for process, held in zip(processes, seen, strict=True):
      if process.poll() is None:
        held |= shards_held(process.pid)
  time.sleep(0.01)


def assert_others_end(processes: list[subprocess.Popen], victim: int):
  """At once after one was killed, with one line and a status that says to start all again."""
  began = time.monotonic()
  for process in processes[:victim] + processes[victim + 1 :]:
    said = process.communicate(timeout=processes_lib.HEARTBEAT_S + 30)[1]
    assert process.returncode == processes_lib.GONE, said[-4000:]
    last = [line for line in said.splitlines() if line.startswith('dipaco_jax: another process of the run is gone')]
    assert len(last) == 1 and last[0].endswith('start all of them again') and 'stack trace' not in said
    assert time.monotonic() - began < processes_lib.HEARTBEAT_S / 2
    print(f'ended with {process.returncode} after {time.monotonic() - began:.1f} s: {said[-1500:]}')


@pytest.fixture(scope='module')
def joined(undisturbed, tmp_path_factory):
  """(workdir of a run by two processes, the paths whose shards each has been seen to hold open while training).

  One of them is killed on the way; the same commands go on.
  """
  config, workdir = undisturbed.parent / 'config.py', tmp_path_factory.mktemp('two') / 'run'
  seen: tuple[set[int], set[int]] = (set(), set())
  with ended(start(config, workdir, tiny_run.RARELY)) as processes:
    while not ((workdir / 'checkpoints' / 'train' / '48').exists() and tiny_run.updates(workdir, 'train') > 48):
      assert all(process.poll() is None for process in processes)
      look(processes, workdir, seen)
    processes[1].kill()
    assert_others_end(processes, 1)
  with ended(start(config, workdir, tiny_run.RARELY)) as processes:
    while all(process.poll() is None for process in processes):
      look(processes, workdir, seen)
    for process in processes:
      tiny_run.finish(process)
  return workdir, seen


def assert_same_modules(workdir, undisturbed):
  files = sorted(p.relative_to(undisturbed) for p in (undisturbed / 'modules' / '4').rglob('*.safetensors'))
  assert len(files) == 1 + 2 + 2
  for file in files:
    ours, theirs = (safetensors.numpy.load_file(w / file) for w in (workdir, undisturbed))
    # 36 steps, pretraining included, each errs by the rounding of a parameter, and of a direction that is a sum over a
    # batch's targets; epsilon is 1e-8, so that directions of gradients near it magnify what rounding leaves.
    small.assert_close(ours, theirs, 36 * small.EPS * (2 + 0.01 * 4 * 64) * 100)


def test_same_modules(joined, undisturbed):
  workdir, _ = joined
  for name in ('train', 'validation'):
    np.testing.assert_array_equal(*(np.load(w / 'routing' / '0' / f'{name}.npy') for w in (workdir, undisturbed)))
  assert_same_modules(workdir, undisturbed)


def test_same_sequences_and_shards(joined, undisturbed):
  """Made in parts, by as many processes as there are."""
  for tree in ('sequences', 'shards'):
    ours, theirs = (
      {file.relative_to(w): file.read_bytes() for file in (w / tree).rglob('*') if file.is_file()}
      for w in (joined[0], undisturbed)
    )
    assert ours == theirs
    made = [file for file in ours if file.name != seals.SUMS]
    assert len(made) == {'sequences': 3 * 12 + 1, 'shards': 3 * 3 + 1 + 4 * 3 + 1}[tree]


def test_same_report(joined, undisturbed):
  (ours, theirs) = (tiny_run.record(w, 'evaluate')['result'] for w in (joined[0], undisturbed))
  assert ours['perplexity'] == pytest.approx(theirs['perplexity'], rel=1e-3)
  assert ours['validation_tokens'] == theirs['validation_tokens']
  assert (joined[0] / 'report.json').exists()


@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
def test_each_process_reads_its_own_shards_only(joined):
  assert joined[1] == PATHS_OF


def bytes_written(process: pathlib.Path) -> int:
  """Of arrays, by a process. Its files hold more, by chance: nodes of a B-tree that later ones replaced."""
  store = tensorstore.KvStore.open({'driver': 'ocdbt', 'base': f'file://{process}/'}).result()
  return sum(len(store[key]) for key in store.list().result())


def test_each_process_writes_its_part_of_checkpoints_and_modules(joined):
  arrays = joined[0] / 'checkpoints' / 'train' / '96' / 'arrays'
  sizes = [bytes_written(arrays / f'ocdbt.process_{i}') for i in range(2)]
  assert max(sizes) < 0.6 * sum(sizes)  # what both have is written by one of them
  written = [json.loads((joined[0] / 'modules' / '4' / f'index-{i}.json').read_text()) for i in range(2)]
  assert 'low/0.safetensors' in written[0] and list(written[1]) == ['low/1.safetensors']


def test_each_process_seals_its_share_of_a_checkpoint(joined):
  here, seals = (joined[0] / 'checkpoints' / name / '96' for name in ('train', 'train.sha256'))
  shares = [json.loads((seals / f'{i}.json').read_text()).keys() for i in range(2)]
  written = {str(file.relative_to(here)) for file in here.rglob('*') if file.is_file()}
  assert shares[0] | shares[1] == written and not shares[0] & shares[1] and min(map(len, shares)) > 0.4 * len(written)


def assert_rows_are_there_once(workdir):
  rows = [(r['kind'], r['stage'], r['updates']) for r in small.metrics_log.read_rows(workdir)]
  assert len(rows) == len(set(rows)) and ('phase', 'train', 96) in rows


def test_every_row_of_metrics_is_there_once(joined):
  assert_rows_are_there_once(joined[0])


def test_a_signal_to_one_stops_both_and_both_pass_over_a_corrupt_checkpoint(joined, undisturbed, tmp_path):
  config, workdir = undisturbed.parent / 'config.py', tmp_path / 'run'
  with ended(start(config, workdir)) as processes:
    tiny_run.stop_when(processes[1], lambda: tiny_run.updates(workdir, 'train') >= 40, signal.SIGTERM)
    tiny_run.finish(processes[0], 130)
  found = [p for p in (workdir / 'checkpoints' / 'train').iterdir() if p.name.isdigit()]
  assert len(found) > 1
  bad = max(found, key=lambda p: int(p.name))
  tiny_run.flip_a_bit(tiny_run.largest(bad))
  with ended(start(config, workdir)) as processes:
    for said in [tiny_run.finish(process) for process in processes]:
      assert f'checkpoint {bad.absolute()} is corrupt' in said
  assert tiny_run.modules_sha256(workdir) == tiny_run.modules_sha256(joined[0])


def test_killed_on_one_host_the_run_ends_and_continues(joined, undisturbed, tmp_path):
  config, workdir = undisturbed.parent / 'config.py', tmp_path / 'run'
  for victim, at in ((1, 20), (0, 60)):
    with ended(start(config, workdir)) as processes:
      tiny_run.stop_when(processes[victim], lambda at=at: tiny_run.updates(workdir, 'train') >= at, signal.SIGKILL)
      assert_others_end(processes, victim)
  with ended(start(config, workdir)) as processes:
    for process in processes:
      tiny_run.finish(process)
  assert tiny_run.modules_sha256(workdir) == tiny_run.modules_sha256(joined[0])


def test_other_numbers_of_processes_continue(joined, undisturbed, tmp_path):
  """From the end of a phase, in which a mesh with other positions has the same state."""
  config, workdir = undisturbed.parent / 'config.py', tmp_path / 'run'
  for count, at in ((2, 40), (4, 60), (1, 80)):
    with ended(start(config, workdir, count=count)) as processes:
      tiny_run.stop_when(processes[0], lambda at=at: tiny_run.updates(workdir, 'train') >= at, signal.SIGTERM)
  with ended(start(config, workdir)) as processes:
    for process in processes:
      assert 'it resumes from the end of a phase' in tiny_run.finish(process)
  assert_same_modules(workdir, undisturbed)
  assert_rows_are_there_once(workdir)


def test_one_process_with_as_many_devices_continues_with_the_same_bits(joined, undisturbed, tmp_path):
  config, workdir = undisturbed.parent / 'config.py', tmp_path / 'run'
  with ended(start(config, workdir)) as processes:
    tiny_run.stop_when(processes[0], lambda: tiny_run.updates(workdir, 'train') >= 40, signal.SIGTERM)
  tiny_run.finish(tiny_run.start(config, workdir, devices=2))
  assert tiny_run.modules_sha256(workdir) == tiny_run.modules_sha256(joined[0])


def test_two_devices_each_do_not_wait_for_each_other_for_ever(undisturbed, tmp_path):
  """With two cores and so two threads the runtime stood still after such a resume, each of four times."""
  config, workdir = undisturbed.parent / 'config.py', tmp_path / 'run'
  how = {'devices': 2}  # four paths
  with ended(start(config, workdir, tiny_run.RARELY, '--config.train.phases=40', **how)) as processes:
    tiny_run.stop_when(processes[0], lambda: tiny_run.updates(workdir, 'train') >= 100, signal.SIGKILL)
  with ended(start(config, workdir, tiny_run.RARELY, '--config.train.phases=40', **how)) as processes:
    for process in processes:
      tiny_run.finish(process)
