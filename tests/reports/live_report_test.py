"""The page that is written while a run trains: by another process, which training neither waits for nor depends on."""

import contextlib
import os
import pathlib
import subprocess
import sys
import time

import pytest
import repository
import synthetic

from dipaco_jax.reports import live_report
from dipaco_jax.telemetry import metrics_log

PATIENCE_S = 120


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  """Of a run that is halfway through its training."""
  place = tmp_path_factory.mktemp('live') / 'run'
  synthetic.make(place, (('a', 2), ('b', 2)), phases=4, stages=3)
  return place


def wait(page: live_report.LiveReport) -> int:
  return page._child.wait(PATIENCE_S)


@pytest.mark.slow
def test_a_child_writes_the_page_and_no_more(workdir):
  before = {p.name for p in workdir.iterdir()}
  with contextlib.closing(live_report.LiveReport(workdir, every_s=0)) as page:
    started = time.monotonic()
    page.write_if_due()
    assert time.monotonic() - started < 2  # nobody waits
    child = page._child
    page.write_if_due()
    assert page._child is child, 'one at a time'
    assert wait(page) == 0
    text = (workdir / 'report.html').read_text()
    assert 'phase 2 of 4 is done. Written at' in text and 'This page reloads every 60 s.' in text
    assert text.count('<meta http-equiv="refresh" content="60">') == 1
    assert text.index('http-equiv="refresh"') < text.index('</head>')
    assert {p.name for p in workdir.iterdir()} == before | {'report.html'}
    page.write_if_due()
    took_s = page._every_s * live_report.SHARE
    assert 0 < took_s < PATIENCE_S and page._child is None, 'what takes long is not done at once again'


def test_the_child_finds_the_package_from_any_folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(live_report, 'PROGRAM', 'import os, sys; open(sys.argv[1], "w").write(os.environ["PYTHONPATH"])')
  assert live_report.start_child(tmp_path / 'seen').wait(PATIENCE_S) == 0
  assert (tmp_path / 'seen').read_text().split(os.pathsep)[0] == str(repository.ROOT)


@pytest.mark.slow
def test_a_child_whose_run_was_killed_writes_nothing(tmp_path):
  """The folder may be gone by then, and must not come back, or belong to a process that has been started since."""
  place = tmp_path / 'run'
  synthetic.make(place, (('a', 2), ('b', 2)), phases=4, stages=3)
  run = 'import os, sys; from dipaco_jax.reports import live_report; pid = live_report.start_child(sys.argv[1]).pid'
  killed = f'{run}; print(pid, flush=True); os._exit(1)'
  done = subprocess.run([sys.executable, '-c', killed, place], capture_output=True, text=True)
  deadline = time.monotonic() + PATIENCE_S
  while pathlib.Path('/proc', done.stdout.strip()).exists():
    assert time.monotonic() < deadline
    time.sleep(0.05)
  assert not (place / 'report.html').exists()


def test_nothing_is_written_just_after_the_start(workdir):
  with contextlib.closing(live_report.LiveReport(workdir)) as page:
    page.write_if_due()
    assert page._child is None


@pytest.mark.slow
def test_a_page_that_cannot_be_written_is_a_warning(tmp_path, caplog):
  synthetic.make(tmp_path, stages=0)
  with contextlib.closing(live_report.LiveReport(tmp_path, every_s=0)) as page:
    for _ in range(2):
      page.write_if_due()
      assert wait(page) == 1
    page.write_if_due()
  assert len(caplog.messages) == 1 and f'dipaco_jax.report --workdir={tmp_path}` says why' in caplog.messages[0]


def test_no_process_to_be_had_is_a_warning(tmp_path, caplog, monkeypatch):
  monkeypatch.setattr(live_report.sys, 'executable', '/nowhere/python')
  page = live_report.LiveReport(tmp_path, every_s=0)
  page.write_if_due()
  page.write_if_due()
  page.close()
  assert len(caplog.messages) == 1 and '/nowhere/python' in caplog.messages[0]


def test_what_is_closed_writes_no_more(workdir):
  page = live_report.LiveReport(workdir, every_s=0)
  page.write_if_due()
  child = page._child
  page.close()
  assert child.returncode == -9


def test_it_is_due_when_the_row_of_an_evaluation_is_there(tmp_path):
  seen = []
  for writes in (True, False):
    with metrics_log.Metrics(tmp_path, writes, lambda: seen.append(len(list(metrics_log.read_rows(tmp_path))))) as rows:
      rows.write('step', 'train', 1, loss=[1.0])
      rows.write('evaluation', 'train', 2, perplexity=3.0)
  assert seen == [2]
