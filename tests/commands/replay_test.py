"""A run is computed again by the decisions that its facts tell: phases end by time, and a worker is killed."""

import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import quick_xla
import repository
import tiny_run

from dipaco_jax.islands import decisions

# More steps than any machine takes in this time, so that phases end by time.
TIMED = tiny_run.CONTROL, '--config.train.phase_s=0.5', '--config.train.steps_per_phase=2000', '--config.train.phases=4'


pytestmark = pytest.mark.slow


def start(command: str, config: pathlib.Path, workdir: pathlib.Path, *options: str) -> subprocess.Popen:
  env = os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': quick_xla.on(1), 'PYTHONPATH': str(repository.ROOT)}
  argv = [sys.executable, '-m', f'dipaco_jax.{command}', f'--config={config}', f'--workdir={workdir}', *options]
  return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def await_phase(workdir: pathlib.Path):
  """Waits until a phase is done."""
  until = time.monotonic() + tiny_run.PATIENCE_S
  while not list((workdir / 'objects' / 'modules' / '1').rglob('*.safetensors')):
    assert time.monotonic() < until
    time.sleep(0.1)


def kill_worker(workdir: pathlib.Path, name: str):
  """As soon as a phase is done."""
  await_phase(workdir)
  words = f'--workdir={workdir}', f'--name={name}', '--role=worker'
  for folder in pathlib.Path('/proc').glob('[0-9]*'):
    try:
      given = (folder / 'cmdline').read_text().split('\0')
    except OSError:
      continue
    if {*words} <= {*given}:
      os.kill(int(folder.name), signal.SIGKILL)
      return
  raise AssertionError(f'no process has {words}')


def test_a_killed_run_of_timed_phases_is_computed_again_to_the_bit(tmp_path):
  config = tiny_run.write_config(tmp_path)
  first = start('local', config, tmp_path / 'run', '--workers=2', *TIMED)
  kill_worker(tmp_path / 'run', 'worker-0')
  out, _ = first.communicate(timeout=tiny_run.PATIENCE_S)
  assert first.returncode == 0, out
  facts = tmp_path / 'run' / decisions.FILE
  steps = [taken for *_, taken in json.loads(facts.read_text())['steps']]
  assert len({*steps}) > 1, 'all phases had as many steps'
  report = json.loads((tmp_path / 'run' / 'report.json').read_text())
  assert sum(report['steps_by_path']) == sum(steps)
  assert report['control_steps'] == 4 * math.ceil(sum(steps) / 4 / len(report['steps_by_path']))

  again = start('local', config, tmp_path / 'again', '--workers=1', *TIMED, f'--replay={facts}')
  check(again, tmp_path / 'again', tmp_path / 'run')
  registry = f'sqlite:///{tmp_path}/run/registry.db'
  check(start('main', config, tmp_path / 'one', *TIMED, f'--replay={registry}'), tmp_path / 'one', tmp_path / 'run')


def test_one_process_that_is_killed_goes_on(tmp_path):
  """And it says with status 1 which modules are others than those of the run."""
  config = tiny_run.write_config(tmp_path)
  first = start('local', config, tmp_path / 'run', '--workers=1', '--config.train.phases=2')
  out, _ = first.communicate(timeout=tiny_run.PATIENCE_S)
  assert first.returncode == 0, out
  facts = tmp_path / 'run' / decisions.FILE
  options = '--config.train.phases=2', f'--replay={facts}'
  killed = start('main', config, tmp_path / 'again', *options)
  await_phase(tmp_path / 'again')
  killed.kill()
  killed.communicate()
  check(start('main', config, tmp_path / 'again', *options), tmp_path / 'again', tmp_path / 'run')

  decided = json.loads(facts.read_text())
  decided['modules'][0][2] = 'f' * 64
  facts.write_text(json.dumps(decided))
  other = start('main', config, tmp_path / 'other', *options)
  out, _ = other.communicate(timeout=tiny_run.PATIENCE_S)
  assert other.returncode == 1, out
  assert '1 version of modules differs from those of the run, first ' in out


def check(again: subprocess.Popen, workdir: pathlib.Path, of: pathlib.Path):
  """Waits for a replay, which ends with the modules of the run in the folder `of`."""
  out, _ = again.communicate(timeout=tiny_run.PATIENCE_S)
  assert again.returncode == 0, out
  reports = [json.loads((folder / 'report.json').read_text()) for folder in (of, workdir)]
  assert reports[0]['modules_sha256'] == reports[1]['modules_sha256']
  assert 'to the bit' in (workdir / 'report.html').read_text()
