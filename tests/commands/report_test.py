"""The command `report`."""

import os
import subprocess
import sys

import pytest
import repository
import slow
import synthetic

from dipaco_jax import report
from dipaco_jax.core.errors import InputError
from dipaco_jax.storage import seals


def command(*args) -> subprocess.CompletedProcess[str]:
  """Runs the command."""
  env = os.environ | {'PYTHONPATH': str(repository.ROOT)}
  return subprocess.run(
    [sys.executable, '-m', 'dipaco_jax.report', *args], capture_output=True, text=True, env=env, timeout=60
  )


WRONG = [
  ([], '--workdir=DIR'),
  (['--workdir=/nowhere'], 'there is no run here'),
  (['--workdri=x'], '--workdri: there is no such option; did you mean --workdir?'),
  (['x'], "'x' is not an option"),
  (['--workdir=ftp://b/x'], "'ftp://b/x' cannot store objects"),
  (['--workdir=file:///nowhere'], '--workdir=file:///nowhere: there is no run here'),
  (['--workdir=gs://b/x', '--workdir=gs://b/y'], '--out is missing'),
  (['--workdir=x', '--workdir=x'], '--workdir=x is named twice'),
  (['--workdir=x', '--workdir=./x/'], '--workdir=./x/ is named twice'),
  (['--workdir=x,y'], 'name each run by a --workdir of its own'),
  (['--workdir=x', '--out=y'], '--out=y is for several runs'),
]


@pytest.mark.parametrize(('args', 'words'), slow.all_but(WRONG, WRONG[0]))
def test_wrong_input_is_one_line(args, words):
  done = command(*args)
  assert done.returncode == 2 and words in done.stderr and not done.stdout
  assert len(done.stderr.strip().splitlines()) == 1


def test_a_folder_without_a_run_is_named():
  with pytest.raises(InputError, match='there is no run here'):
    report.write('/nowhere')


def test_it_writes_the_page_of_a_run(tmp_path):
  synthetic.make(tmp_path / 'run', **synthetic.RUNS['one_path'])
  done = command(f'--workdir={tmp_path / "run"}')
  assert done.returncode == 0, done.stderr
  assert 'report.html' in done.stdout and (tmp_path / 'run' / 'report.html').exists()


def test_forged_records_are_named(tmp_path):
  synthetic.make(tmp_path, **synthetic.RUNS['one_path'])
  synthetic.write_json(
    tmp_path / 'stages' / 'evaluate.json',
    {'digest': '', 'wall_s': 1, 'result': {'perplexity': '9', 'base_perplexity': '9'}},
  )
  with pytest.raises(seals.Damaged, match=r'metrics\.jsonl or .* holds what no run writes there'):
    report.write(str(tmp_path))
