"""Scripts of experiments/ as processes, at the size of tests."""

import os
import pathlib
import subprocess
import sys
import time

import quick_xla
import repository
import tiny_run


def start(folder: pathlib.Path, *options: str, script: str = 'methods.py') -> subprocess.Popen:
  """A script in a session of its own, with its runs; one device: the tests' eight share its cores."""
  env = os.environ | {'XLA_FLAGS': quick_xla.FLAGS}
  places = {'data': folder / 'text.jsonl', 'workdir': folder / 'runs', 'results': folder / 'results'}
  flags = [f'--{name}={place}' for name, place in places.items()]
  command = [sys.executable, str(repository.ROOT / 'experiments' / script), '--size=test', *flags, *options]
  pipe = subprocess.PIPE
  return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def finish(process: subprocess.Popen) -> tuple[str, str]:
  out, err = process.communicate(timeout=tiny_run.PATIENCE_S)
  assert process.returncode == 0, err
  return out, err


def wait_for(process: subprocess.Popen, folder: pathlib.Path, pattern: str):
  deadline = time.monotonic() + tiny_run.PATIENCE_S
  while not list(folder.glob(pattern)):
    assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
    time.sleep(0.01)
