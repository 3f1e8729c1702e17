"""How one of several processes ends: by what status, and with what words."""

import subprocess
import sys

import pytest
from ports import free_port

from dipaco_jax.training import processes

JOINED = """
import sys
import jax
from dipaco_jax.training import processes
from dipaco_jax.core import settings
jax.config.update('jax_platforms', 'cpu')
processes.join('localhost:{port}', 1, 0)
with processes.together():
"""
OURS = """
  try:
    settings.from_dict({'routing': {'method': 'gloo'}})
  except ValueError as e:
    processes.end_if_another_is_gone(e)
    print(e)
"""
THEIRS = "  raise RuntimeError('[external/gloo/transport] Connection closed by peer')"


@pytest.mark.parametrize('program, status, words', [
  ('  sys.exit()', 0, ''), ('  sys.exit(3)', 3, ''), (OURS, 0, "method='gloo': choose one of"),
  (THEIRS, processes.GONE, 'another process of the run is gone ([external'),
], ids=['exit', 'exit 3', 'ours', 'theirs'])  # fmt: skip
def test_status(program, status, words):
  made = JOINED.replace('{port}', str(free_port())) + program
  done = subprocess.run([sys.executable, '-c', made], capture_output=True, text=True, timeout=120)
  assert done.returncode == status and words in done.stdout + done.stderr, done.stderr
