"""The examples of the library run as README and docs/library.md say, each a file of its own."""

import os
import subprocess
import sys

import pytest
from repository import ROOT

EXAMPLES = sorted((ROOT / 'examples').glob('library_*.py'))
MAX_LINES = 120


def test_they_are_short():
  assert [file.stem for file in EXAMPLES] == ['library_equinox', 'library_jax', 'library_nnx']
  assert all(len(file.read_text().splitlines()) <= MAX_LINES for file in EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize('example', EXAMPLES, ids=lambda file: file.stem)
def test_an_example_compares_three_ways(example, tmp_path):
  """At equal steps of each path, more paths learn more, even in a few steps."""
  if 'equinox' in example.stem:
    pytest.importorskip('equinox')
  command = [sys.executable, str(example), '--pretrain=30', '--tau=5', '--phases=3']
  env = os.environ | {'PYTHONPATH': str(ROOT)}
  done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, check=True)
  title, *rows = done.stdout.splitlines()
  assert title == 'perplexity per byte after 15 steps of each path'
  found = {name: float(value) for name, value in map(str.split, rows)}
  assert found['DiPaCo'] < found['DiLoCo'] < found['dense'] < 30
  assert (tmp_path / 'library_jax.png').exists() == ('jax' in example.stem)
