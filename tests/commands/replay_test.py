"""A run is computed again by the decisions that its facts tell: phases end by time, and a worker is killed."""

import json
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

TIMED = '--config.train.phase_s=1', '--config.train.steps_per_phase=40', '--config.train.phases=4'


def local(config: pathlib.Path, workdir: pathlib.Path, *options: str) -> subprocess.Popen:
  env = os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': quick_xla.on(1), 'PYTHONPATH': str(repository.ROOT)}
  command = [sys.executable, '-m', 'dipaco_jax.local', f'--config={config}', f'--workdir={workdir}', *options]
  return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def kill_worker(workdir: pathlib.Path, name: str):
  """As soon as a phase is done."""
  until = time.monotonic() + tiny_run.PATIENCE_S
  while not list((workdir / 'objects' / 'modules' / '1').rglob('*.safetensors')):
    assert time.monotonic() < until
    time.sleep(0.1)
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


@pytest.mark.slow
def test_a_killed_run_of_timed_phases_is_computed_again_to_the_bit(tmp_path):
  config = tiny_run.write_config(tmp_path)
  first = local(config, tmp_path / 'run', '--workers=2', *TIMED)
  kill_worker(tmp_path / 'run', 'worker-0')
  out, _ = first.communicate(timeout=tiny_run.PATIENCE_S)
  assert first.returncode == 0, out
  facts = tmp_path / 'run' / decisions.FILE
  steps = {taken for *_, taken in json.loads(facts.read_text())['steps']}
  assert len(steps) > 1, 'all phases had as many steps'

  again = local(config, tmp_path / 'again', '--workers=1', *TIMED, f'--replay={facts}')
  out, _ = again.communicate(timeout=tiny_run.PATIENCE_S)
  assert again.returncode == 0, out
  reports = [json.loads((tmp_path / name / 'report.json').read_text()) for name in ('run', 'again')]
  assert reports[0]['modules_sha256'] == reports[1]['modules_sha256']
  assert 'to the bit' in (tmp_path / 'again' / 'report.html').read_text()
