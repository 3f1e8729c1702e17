"""The options of the command and its greeting. serving/http_server_test tests a running server."""

import shlex
import subprocess
import sys

import pytest
import slow
from repository import ROOT

from dipaco_jax import serve

WRONG = [
  ([], 'name a run with --workdir=DIR'),
  (['--workdir=x', '--max_batch=0'], '--max_batch=0 should be 1 or more'),
  (['--workdir=x', '--port=65536'], '--port=65536 should be from 0 to 65535'),
  (['--workdir=x', '--grace_s=-1'], '--grace_s=-1.0 should be 0 or more'),
  (['--workdir=x', '--grace_s=nan'], '--grace_s=nan should be 0 or more'),
  (['--workdir=/nowhere', '--port=0'], 'there is no run here'),
]


@pytest.mark.parametrize('options, message', slow.all_but(WRONG, WRONG[0]))
def test_wrong_options_are_an_error_in_one_line(options, message):
  command = [sys.executable, '-m', 'dipaco_jax.serve', *options]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
  assert done.returncode == 2 and message in done.stderr, done.stderr
  assert done.stderr.startswith('dipaco_jax: ') and done.stderr.count('\n') == 1


def test_the_greeting_escapes_the_name():
  greeting = serve.greeting("it's\x1b[31m", [0, 1, 2, 3], 'http://127.0.0.1:8000')
  assert '\x1b' not in greeting and 'path-0 to path-3' in greeting
  curl = shlex.split(greeting.splitlines()[1])
  assert curl[:2] == ['curl', 'http://127.0.0.1:8000/v1/completions'] and curl[-1].startswith('{"model": "it\'s')


def test_the_greeting_names_the_path_of_an_owners_store():
  greeting = serve.greeting('court', [1], 'http://127.0.0.1:8000', is_store=True)
  assert 'its path is court/path-1;' in greeting and '"model": "court/path-1"' in greeting
