"""Runs of an earlier version, whose text has no digests of its documents, are rejected by one line before any work.

`old_runs/` has a config, its text, a workdir of `main` and one of islands with its registry, stopped in the third and
the fourth of six phases.
"""

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


def test_a_workdir_is_rejected_before_any_work(folder):
  log = tiny_run.finish(tiny_run.start(folder / 'config.py', pathlib.Path('main')), 2)
  assert '--workdir=main was begun by an earlier version' in log and 'training the paths' not in log


@pytest.mark.slow
def test_a_workdir_is_refused_for_what_it_was_not_begun_with(folder):
  log = tiny_run.finish(tiny_run.start(folder / 'config.py', pathlib.Path('main'), '--config.outer.wire=thin'), 2)
  assert 'outer.wire' in log


@pytest.mark.slow
def test_islands_are_rejected_before_any_work(folder):
  command = [str(repository.ROOT / 'launch' / 'local.py'), '--config=config.py', '--workdir=islands', '--workers=1']
  found = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=tiny_run.PATIENCE_S)
  assert found.returncode and 'was begun by an earlier version' in found.stderr, found.stderr[-4000:]
