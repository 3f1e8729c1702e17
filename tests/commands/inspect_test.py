"""The command `inspect`: which path reads what, in a terminal and as a page."""

import os
import subprocess
import sys

import parsed_page
import pytest
import quick_xla
import slow
import tiny_run
from repository import ROOT

from dipaco_jax.algorithm.grid import Grid
from dipaco_jax.inference import excerpts, trained_run
from dipaco_jax.reports import excerpt_views


def run(*options: str, given: bytes = b'', status: int = 0) -> tuple[str, str]:
  """Returns what the command prints and what it logs."""
  env = os.environ | {'XLA_FLAGS': quick_xla.FLAGS, 'PYTHONPATH': str(ROOT)}
  command = [sys.executable, '-m', 'dipaco_jax.inspect', *options]
  done = subprocess.run(command, env=env, input=given, capture_output=True, timeout=tiny_run.PATIENCE_S)
  assert done.returncode == status, done.stderr.decode()
  return done.stdout.decode(), done.stderr.decode()


def test_a_text_is_read_in_a_terminal_and_on_a_page(undisturbed, tmp_path):
  words = 'aeiou yoye eaei bcd. ' * 8 + '<script>\n'
  out, err = run(
    f'--workdir={undisturbed}', '--file=-', '--every=16', f'--html={tmp_path / "x.html"}', given=words.encode()
  )
  found = excerpts.of_text(trained_run.TrainedRun(str(undisturbed)), words, 16, None, None)
  assert out == excerpt_views.to_text(found, Grid({'a': 2, 'b': 2}), False) + '\n' and not err
  page = parsed_page.Page((tmp_path / 'x.html').read_text())
  assert not page.fetched and 'script' not in page.tags and page.tags.count('h1') == 1
  assert out.count('[path ') == page.tags.count('sup')


WRONG = [
  (['--text=x'], '--workdir=DIR'),
  (['--workdir=x'], 'give a text: --text=WORDS or --file=FILE'),
  (['--workdir=x', '--text=x', '--file=x'], 'give a text: --text=WORDS or --file=FILE'),
  (['--workdir=x', '--file=/nowhere'], '--file=/nowhere: No such file'),
  (['--workdir=x', '--file=/dev/zero'], '--file=/dev/zero is a pipe or a device: write its content to a file'),
  (['--workdir=x', f'--file={sys.executable}'], 'is not UTF-8'),
  (['--workdir=x', '--text=x', '--every=0'], '--every=0 should be a whole number, 1 or more'),
  (['--workdir=x', '--text=x', '--html=/proc'], '--html=/proc cannot be written: name a file'),
  (['--workdir=/nowhere', '--text=x'], '--workdir=/nowhere: there is no run'),
]


@pytest.mark.parametrize('options, words', slow.all_but(WRONG, WRONG[1], WRONG[4], WRONG[5]))
def test_wrong_input_is_one_line(options, words):
  out, err = run(*options, status=2)
  assert words in err and err.count('\n') == 1 and not out


def test_nobody_loses_pythons_inspect():
  """Not even who runs a file in the package's folder, which Python then searches first."""
  done = subprocess.run(
    [sys.executable, '-c', 'import inspect; print(inspect.signature(print))'],
    cwd=ROOT / 'dipaco_jax',
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert done.returncode == 0, done.stderr
