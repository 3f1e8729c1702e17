"""A run is stopped at random moments, its reader goes, its workdir goes: it ends, with everything saved."""

import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import quick_xla
import repository
import small
import tiny_run

from dipaco_jax.training import training_loop

SECONDS = 20.0  # in which a signal ends a run, also where it saves, on a machine that does much else
ENDS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
NUMBERS = [n for n in ENDS if signal.getsignal(n) != signal.SIG_IGN]  # as nohup has it


def test_a_run_that_nobody_listens_to_saves_when_it_is_stopped(tmp_path, monkeypatch):
  job = small.make_job(small.make_programs(small.settings(), 1))
  reading, writing = os.pipe()
  os.close(reading)
  monkeypatch.setattr(sys, 'stderr', os.fdopen(writing, 'w'))
  with pytest.raises(training_loop.Stopped):
    small.train(job, tmp_path, stop=lambda: True)
  with pytest.raises(BrokenPipeError):
    sys.stderr.close()
  folder = tmp_path / 'checkpoints' / job.name
  assert [p.name for p in folder.iterdir()] == ['2']
  assert [p.name for p in folder.with_name('train.sha256').iterdir()] == ['2']


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')  # of what Orbax leaves behind
def test_a_run_whose_checkpoints_go_ends_with_all_its_threads(tmp_path):
  job = small.make_job(small.make_programs(small.settings(checkpoint=dict(every_steps=2)), 1))
  folder = tmp_path / 'checkpoints' / job.name
  before = {*threading.enumerate()}

  def stop():
    if folder.exists():
      shutil.rmtree(folder, ignore_errors=True)
      folder.mkdir()
    return False

  with pytest.raises((OSError, ValueError)):
    small.train(job, tmp_path, stop)
  until = time.monotonic() + 5
  while pools := [t for t in {*threading.enumerate()} - before if 'ThreadPoolExecutor' in t.name and not t.daemon]:
    assert time.monotonic() < until, pools
    time.sleep(0.05)


def ends(process: subprocess.Popen, words: str = '') -> int:
  """Its status; it ends within seconds."""
  began = time.monotonic()
  try:
    _, err = process.communicate(timeout=SECONDS)
  except subprocess.TimeoutExpired:
    os.killpg(process.pid, signal.SIGKILL)
    raise
  print(f'ended by {process.returncode} after {time.monotonic() - began:.1f} s')
  assert words in err, err
  return process.returncode


def start(config: pathlib.Path, workdir: pathlib.Path, after: str = '', *options: str) -> subprocess.Popen:
  """The command in a process group of its own, as a shell's pipeline starts it."""
  command = f'{sys.executable} -m dipaco_jax.main --config={config} --workdir={workdir} {" ".join(options)}'
  env = os.environ | {'PYTHONPATH': str(repository.ROOT), 'JAX_PLATFORMS': 'cpu'}
  env['XLA_FLAGS'] = quick_xla.on(1)
  env.pop('JAX_COMPILATION_CACHE_DIR', None)
  line = f'set -o pipefail; {command} {after}' if after else f'exec {command}'
  pipe = subprocess.PIPE
  return subprocess.Popen(['bash', '-c', line], env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def newest(workdir: pathlib.Path) -> int:
  return max((int(p.name) for p in (workdir / 'checkpoints' / 'train').glob('*') if p.name.isdigit()), default=0)


@pytest.fixture
def workdir(tmp_path, undisturbed):
  shutil.copytree(tiny_run.cache_of(undisturbed), tiny_run.cache_of(tmp_path / 'run'))
  return tmp_path / 'run'


def reached(process: subprocess.Popen, workdir: pathlib.Path, updates: int):
  deadline = time.monotonic() + tiny_run.PATIENCE_S
  while tiny_run.updates(workdir, 'train') < updates:
    assert process.poll() is None and time.monotonic() < deadline
    time.sleep(0.01)


@pytest.mark.slow
def test_ctrl_c_to_a_pipeline(workdir, undisturbed):
  process = start(undisturbed.parent / 'config.py', workdir, f'2>&1 | tee {workdir}.log', '--config.train.phases=40')
  reached(process, workdir, 50)
  os.killpg(process.pid, signal.SIGINT)
  ends(process)
  assert newest(workdir) >= 50 and (workdir / 'checkpoints' / 'train.sha256' / str(newest(workdir))).exists()


@pytest.mark.slow
def test_nobody_reads(workdir, undisturbed):
  process = start(undisturbed.parent / 'config.py', workdir, '2>&1 | head -1')
  process.communicate(timeout=tiny_run.PATIENCE_S)
  assert process.returncode == 0 and tiny_run.modules_sha256(workdir) == tiny_run.modules_sha256(undisturbed)


@pytest.mark.slow
def test_the_workdir_goes(workdir, undisturbed):
  process = start(undisturbed.parent / 'config.py', workdir, '', '--config.train.phases=40')
  reached(process, workdir, 20)
  shutil.rmtree(workdir, ignore_errors=True)
  assert ends(process, 'is gone; run the same command again') == 75


@pytest.mark.slow
def test_signals_at_random_moments(workdir, undisturbed, request):
  """Each ends it, with its status; and what it comes to in the end is what it would have come to."""
  draw, config, whole = random.Random(10), undisturbed.parent / 'config.py', tiny_run.modules_sha256(undisturbed)
  tries, finished = request.config.getoption('--stops'), 0
  while tries:
    process, moment, number = start(config, workdir), draw.uniform(0.05, 8), draw.choice(NUMBERS)
    try:
      process.communicate(timeout=moment)
      assert process.returncode == 0
    except subprocess.TimeoutExpired:
      process.send_signal(number)
      # Python itself, as it starts, and ends, leaves signals to the system.
      assert ends(process) in (128 + number, -number, 0), (moment, number)
      tries -= 1
    if (workdir / 'report.json').exists():
      assert tiny_run.modules_sha256(workdir) == whole
      shutil.rmtree(workdir)
      finished += 1
  print(f'{finished} runs came to their ends')
  tiny_run.finish(tiny_run.start(config, workdir))
  assert tiny_run.modules_sha256(workdir) == whole
