"""The account of a run's time: it continues from the recorded one, and counts the time lost by a kill."""

import json
import signal
import subprocess
import sys
import time

import pytest

from dipaco_jax.core.errors import InputError
from dipaco_jax.processes import stopping, time_use
from dipaco_jax.telemetry import time_account

SLACK_S = 0.5  # of a busy machine


@pytest.fixture(autouse=True)
def unmeasured():
  time_use.end()
  yield
  time_use.end()


def signals(received: int = 0) -> stopping.Signals:
  found = stopping.Signals(lambda number: None)
  found.received = received
  return found


def change(workdir, **fields):
  """Changes what the last process has noted, whose seal then goes."""
  file = workdir / time_account.FILE
  found = json.loads(file.read_text()) | fields
  del found['seal']
  file.write_text(json.dumps(found))


def test_a_run_continues_with_the_account_and_the_time_after_a_kill_is_lost(tmp_path):
  with time_account.kept(tmp_path, signals()) as account:
    time_use.enter('train', time_use.INNER)
    time.sleep(0.05)
    account.note_for_report(False)
    first = time_account.read(tmp_path)
  assert first['train']['inner'] >= 0.05 and time_use.present() is None
  change(tmp_path, paused=False, until=time.time() - 10)
  with time_account.kept(tmp_path, signals()):
    time_use.enter('evaluate', time_use.EVALUATE)
  found = time_account.read(tmp_path)
  assert found['train']['inner'] >= first['train']['inner']
  assert 10 <= found['train']['lost'] < 10 + SLACK_S  # it was in the stage `train` that the process was killed


@pytest.mark.parametrize(
  ('error', 'received', 'is_pause'),
  [
    (None, 0, True),
    (KeyboardInterrupt, signal.SIGINT, True),
    (KeyboardInterrupt, signal.SIGTERM, False),
    (InputError, 0, True),
    (RuntimeError, 0, False),
  ],
)
def test_the_time_until_the_next_start_is_lost_unless_the_user_asked_for_the_end(tmp_path, error, received, is_pause):
  try:
    with time_account.kept(tmp_path, signals(received)):
      time_use.enter('tokenize', time_use.STAGES)
      if error:
        raise error
  except (KeyboardInterrupt, InputError, RuntimeError):
    pass
  noted = json.loads((tmp_path / time_account.FILE).read_text())
  assert noted['paused'] == is_pause
  change(tmp_path, until=time.time() - 100)
  with time_account.kept(tmp_path, signals()):
    time_use.enter('tokenize', time_use.STAGES)
  assert (time_account.read(tmp_path)['tokenize'].get('lost', 0) > 99) == (not is_pause)


@pytest.mark.parametrize(('number', 'is_pause'), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_process_that_ends_at_once_notes_why(tmp_path, number, is_pause):
  program = f"""
import os, pathlib, signal, time
from dipaco_jax.telemetry import time_account
from dipaco_jax.processes import time_use
from dipaco_jax.processes import stopping
with stopping.listening() as signals, time_account.kept(pathlib.Path({str(tmp_path)!r}), signals):
  time_use.enter('tokenize', time_use.STAGES)
  os.kill(os.getpid(), {int(number)})
  time.sleep(30)
"""
  done = subprocess.run([sys.executable, '-c', program], timeout=60)
  assert done.returncode == 128 + number
  assert json.loads((tmp_path / time_account.FILE).read_text())['paused'] == is_pause


def test_a_finished_run_that_is_reported_again_takes_no_more_time(tmp_path):
  with time_account.kept(tmp_path, signals()):
    time_use.enter('evaluate', time_use.EVALUATE)
  before = (tmp_path / time_account.FILE).read_bytes()
  with time_account.kept(tmp_path, signals()) as account:
    account.note_for_report(True)
  assert (tmp_path / time_account.FILE).read_bytes() == before


def test_what_the_report_has_is_the_last_that_is_noted(tmp_path):
  with time_account.kept(tmp_path, signals()) as account:
    time_use.enter('evaluate', time_use.EVALUATE)
    account.note_for_report(True)
    told = time_account.read(tmp_path)
    time.sleep(0.02)
  assert time_account.read(tmp_path) == told and json.loads((tmp_path / time_account.FILE).read_text())['paused']


def test_what_is_not_as_it_was_written_is_not_known(tmp_path):
  with time_account.kept(tmp_path, signals()):
    time_use.enter('tokenize', time_use.STAGES)
  file = tmp_path / time_account.FILE
  file.write_text(file.read_text().replace('tokenize', 'train'))
  assert time_account.read(tmp_path) == {}
  file.write_text('[]')
  assert time_account.read(tmp_path) == time_account.read(tmp_path / 'nothing') == {}


@pytest.mark.parametrize(
  'fields',
  [
    {'seconds': []},
    {'seconds': {'train': 1}},
    {'seconds': {'train': {'inner': '1'}}},
    {'seconds': {'train': {'inner': float('nan')}}},
    {'until': None},
    {'stage': []},
  ],
)
def test_an_account_that_is_none_is_not_known(fields, tmp_path):
  with time_account.kept(tmp_path, signals()):
    time_use.enter('tokenize', time_use.STAGES)
  assert time_account.read(tmp_path)
  change(tmp_path, **fields)
  assert time_account.read(tmp_path) == {}
  with time_account.kept(tmp_path, signals()):
    time_use.enter('train', time_use.STAGES)
