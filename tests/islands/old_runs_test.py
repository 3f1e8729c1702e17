"""Runs that the program had begun before paths' states stayed with their workers (registries of version 3) go on.

`old_runs/` has a config, its text, a workdir of `main` and one of islands with its registry, stopped in the third and
the fourth of six phases, and what the old program makes of them in the end. One level is path-specific.
"""

import json
import math
import pathlib
import subprocess
import sys
import tarfile

import pytest
import repository
import tiny_run

OLD = pathlib.Path(__file__).parent / 'old_runs'


@pytest.fixture
def folder(tmp_path, monkeypatch) -> pathlib.Path:
  """The folder where the runs were begun, as the config's text is named from it."""
  with tarfile.open(OLD / 'runs.tar.xz') as archive:
    archive.extractall(tmp_path, **({'filter': 'data'} if hasattr(tarfile, 'data_filter') else {}))  # since 3.11.4
  monkeypatch.chdir(tmp_path)
  return tmp_path


def perplexity(folder: pathlib.Path) -> float:
  return json.loads((folder / 'report.json').read_text())['perplexity']


def check(folder: pathlib.Path, name: str):
  """The results are those of the old program; other processors round otherwise."""
  expected = json.loads((OLD / 'expected.json').read_text())
  assert math.isclose(perplexity(folder / name), expected['perplexity'], rel_tol=1e-3)


def test_a_workdir_goes_on(folder):
  before = tiny_run.updates(folder / 'main', 'train')
  assert 48 < before < 144
  log = tiny_run.run(folder / 'config.py', pathlib.Path('main'))
  assert f'train {before + 2}/144' in log
  check(folder, 'main')


def test_a_workdir_is_refused_for_what_it_was_not_begun_with(folder):
  log = tiny_run.finish(tiny_run.start(folder / 'config.py', pathlib.Path('main'), '--config.outer.wire=thin'), 2)
  assert 'outer.wire' in log


@pytest.mark.slow
def test_islands_go_on(folder):
  command = [str(repository.ROOT / 'launch' / 'local.py'), '--config=config.py', '--workdir=islands', '--workers=1']
  found = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=tiny_run.PATIENCE_S)
  assert not found.returncode, found.stderr[-4000:]
  check(folder, 'islands')
