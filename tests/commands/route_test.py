"""The command's options; a router at work is in serving/route_server_test."""

import json
import subprocess
import sys

import made_run
import pytest
from repository import ROOT


def command(*options: str) -> subprocess.CompletedProcess:
  line = [sys.executable, '-m', 'dipaco_jax.route', *options]
  return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
  'options, words',
  [
    ([], 'name a run with --workdir=DIR'),
    (['--workdir=x'], 'name the file that says where the engines are with --engines=engines.json'),
    (['--workdir=x', '--engines=/nowhere'], '--engines=/nowhere: No such file or directory; name a file'),
    (['--workdir=x', '--engines=/dev/zero'], '--engines=/dev/zero is a pipe or a device: write its content to a file'),
    (['--workdir=x', '--engines=x', '--max_open=0'], '--max_open=0 should be 1 or more'),
    (['--workdir=x', '--engines=x', '--timeout_s=0'], '--timeout_s=0.0 should be 1 or more'),
  ],
)
def test_wrong_options_are_errors_in_one_line(options, words):
  done = command(*options)
  assert done.returncode == 2 and words in done.stderr, done.stderr
  assert done.stderr.startswith('dipaco_jax: ') and done.stderr.count('\n') == 1


@pytest.mark.slow
def test_a_path_without_an_engine_is_reported_before_anything_is_loaded(tmp_path):
  workdir, file = tmp_path / 'run', tmp_path / 'engines.json'
  made_run.write(workdir, made_run.settings())
  (workdir / 'base' / 'params.safetensors').unlink()  # nobody comes to read it
  file.write_text(json.dumps({'paths': {'0': ['http://10.0.0.1:8000/v1']}}))
  done = command(f'--workdir={workdir}', f'--engines={file}', '--port=0')
  words = f'--engines={file}: path 1 has no engine, and 2 more have none: name one, or set "fallback"'
  assert done.returncode == 2 and words in done.stderr, done.stderr
  assert done.stderr.count('\n') == 1
