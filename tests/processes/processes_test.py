"""How one of several processes ends: by what status, and with what words."""

import os
import subprocess
import sys

import pytest
import slow
from ports import free_port

from dipaco_jax.processes import processes

JOINED = """
import sys
import jax
from dipaco_jax.processes import processes
from dipaco_jax.config import settings
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
ALL_DEVICES = "  assert jax.config.values['jax_cuda_visible_devices'] == 'all'"
THEIRS = "  raise RuntimeError('[external/gloo/transport] Connection closed by peer')"


@pytest.mark.parametrize('program, status, words', slow.but([
  ('  sys.exit()', 0, ''), ('  sys.exit(3)', 3, ''), (OURS, 0, "method='gloo': choose one of"),
  (THEIRS, processes.GONE, 'another process of the run is gone ([external'),
], ('  sys.exit()', 0, ''), (OURS, 0, "method='gloo': choose one of")))  # fmt: skip
def test_status(program, status, words):
  made = JOINED.replace('{port}', str(free_port())) + program
  done = subprocess.run([sys.executable, '-c', made], capture_output=True, text=True, timeout=120)
  assert done.returncode == status and words in done.stdout + done.stderr, done.stderr


def test_a_process_has_all_devices_of_its_host_under_slurm():
  """JAX alone would give each task of a step one device, by its number on the node."""
  step = {
    'SLURM_JOB_ID': '1',
    'SLURM_STEP_NODELIST': 'n0',
    'SLURM_NTASKS': '1',
    'SLURM_PROCID': '0',
    'SLURM_LOCALID': '0',
  }
  made = JOINED.replace('{port}', str(free_port())) + ALL_DEVICES
  done = subprocess.run(
    [sys.executable, '-c', made], capture_output=True, text=True, timeout=120, env=os.environ | step
  )
  assert done.returncode == 0, done.stderr


def test_a_file_does_not_get_the_number_of_a_closed_stream(tmp_path):
  code = (
    'import sys\nfrom dipaco_jax.processes import processes\nwith processes.ending():\n'
    f"  with open({str(tmp_path / 'data')!r}, 'w') as file:\n    print(sys.stdout.isatty(), file.fileno(), file=file)"
  )
  closed = f'exec {sys.executable} -c "$0" <&- >&- 2>&-'
  assert subprocess.run(['sh', '-c', closed, code], timeout=60).returncode == 0
  assert (tmp_path / 'data').read_text() == 'False 3\n'


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='Linux has it')
@pytest.mark.parametrize('size', [10, 100_000])
@pytest.mark.parametrize('unbuffered', ['', '1'], ids=['buffered', 'unbuffered'])
def test_a_full_standard_output_is_one_line(size, unbuffered):
  code = f"from dipaco_jax.processes import processes\nwith processes.ending():\n  print('x' * {size})"
  with open('/dev/full', 'w') as full:
    done = subprocess.run(
      [sys.executable, '-c', code],
      stdout=full,
      stderr=subprocess.PIPE,
      text=True,
      timeout=60,
      env=os.environ | {'PYTHONUNBUFFERED': unbuffered},
    )
  assert done.returncode == 1 and done.stderr.count('\n') == 1, done.stderr
  assert done.stderr.startswith('dipaco_jax: standard output: No space left on device; ')
