"""local.py restarts silent roles, unless the registry is away, and ends all roles when it ends."""

import contextlib
import functools
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import line
import object_server
import pytest
import repository
import slow
import sqlalchemy as sa
from repository import ROOT

from dipaco_jax import local
from dipaco_jax.command_line import supervision
from dipaco_jax.core import errors
from dipaco_jax.data import corpus
from dipaco_jax.islands import roles
from dipaco_jax.registry import registry as registry_lib, registry_schema
from dipaco_jax.storage import object_store

ENV = os.environ | {'PYTHONPATH': str(ROOT)}
BEATS = """
import sys, time
from dipaco_jax.registry import registry
db = registry.Registry(sys.argv[1])
while True:
  db.beat('worker-0', 'worker', {})
  time.sleep(0.2)
"""
PARENT = """
import os, subprocess, sys, time
child = 'import sys; from dipaco_jax.processes import stopping as s; print("follows", flush=True); '
child += 's.end_with_parent(int(sys.argv[1]))'
subprocess.Popen([sys.executable, '-c', child, str(os.getpid())])
time.sleep(60)
"""


# local.py with sleeping roles and without a registry.
WAITS = """
import subprocess, sys
from dipaco_jax import local
from dipaco_jax.command_line import supervision
from dipaco_jax.islands import roles

class Sleeper(supervision.Role):
  def start(self):
    process = subprocess.Popen(['sleep', '60'], start_new_session=True)
    print(process.pid, flush=True)
    return process

url, folder = sys.argv[1:]
supervision.Role, local.check, roles.resume = Sleeper, lambda *args: url, lambda *args: 0
sys.argv = ['local.py', '--config=no.py', f'--workdir={folder}']
sys.exit(local.main())
"""


@pytest.fixture
def db(tmp_path):
  registry = registry_lib.Registry(f'sqlite:///{tmp_path}/registry.db', lease_s=1)
  yield registry
  registry.close()


def wait_for(condition):
  until = time.monotonic() + 60
  while not condition():
    assert time.monotonic() < until
    time.sleep(0.05)


@pytest.mark.slow
def test_a_stalled_role_is_restarted(db, tmp_path, monkeypatch, capfd):
  monkeypatch.setenv('PYTHONPATH', str(ROOT))
  monkeypatch.setattr(supervision, 'PAUSE_S', 0.1)
  role = supervision.Role('worker-0', [sys.executable, '-c', BEATS, f'sqlite:///{tmp_path}/registry.db'], tmp_path)
  thread = threading.Thread(target=supervision.supervise, args=([role], db))
  thread.start()
  try:
    wait_for(db.roles)
    first = role.process
    time.sleep(supervision.STALLED * db.lease_s + 2)
    assert role.process is first
    first.send_signal(signal.SIGSTOP)
    wait_for(lambda: role.process is not first)
    assert first.returncode == -signal.SIGKILL and role.process.poll() is None
    wait_for(lambda: db.roles()[0]['silent_s'] < 1)
  finally:
    db.put([registry_lib.Fact('finished', '', 0, '', '', {'perplexity': 1.0})])
    thread.join()
    supervision.stop([role])
  assert 'local.py: worker-0 did not respond for 1' in capfd.readouterr().err


def test_no_role_counts_as_silent_while_the_registry_is_away(db):
  silence = supervision.Silence(db)
  db.beat('worker-0', 'worker', {})
  time.sleep(0.3)
  assert 0.3 <= silence.by_role()['worker-0'] < 10
  silence.asked -= supervision.AWAY_S
  silence.since -= 100
  assert silence.by_role()['worker-0'] == 0


def test_roles_end_when_their_parent_ends():
  with subprocess.Popen([sys.executable, '-c', PARENT], env=ENV, stdout=subprocess.PIPE) as process:
    assert process.stdout.readline() == b'follows\n'
    process.kill()
    began = time.monotonic()
    assert process.stdout.read() == b'' and time.monotonic() - began < 20  # the child holds the pipe open, too


@pytest.mark.parametrize('kind', ['another version', 'away'])
def test_a_registry_that_cannot_be_used_is_an_error_in_one_line(kind, db, tmp_path, monkeypatch, capsys):
  with db._db._engine.begin() as connection:
    connection.execute(sa.update(registry_schema.SCHEMA).values(version=99))
  url = f'sqlite:///{tmp_path}/registry.db' if kind != 'away' else f'postgresql://me@/x?host={tmp_path}'
  monkeypatch.setattr(local, 'check', lambda options, rest: url)
  monkeypatch.setattr(roles, 'Registry', functools.partial(registry_lib.Registry, patience_s=0))
  monkeypatch.setattr(sys, 'argv', ['local.py', '--config=no.py', f'--workdir={tmp_path}'])
  monkeypatch.setenv(local.registry_url.VARIABLE, '')
  before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
  try:
    status = local.main()
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
  error = capsys.readouterr().err
  assert error.startswith('local.py: the registry ') and error.count('\n') == 1
  assert status == (local.command.TRY_AGAIN if kind == 'away' else 2)


@pytest.mark.parametrize(
  'fault, status, message',
  [
    ('reset', 75, 's3://bucket/run/registry.id: .*; run it again when it is back'),
    ('forbidden', 2, 's3://bucket/run/registry.id: .*403 Forbidden'),
    ('', 75, 'text.txt: no answer; run it again'),
  ],
)
def test_files_that_cannot_be_read_are_an_error_in_one_line(fault, status, message, monkeypatch, capsys):
  def check_readable(data):
    raise errors.Unavailable('text.txt: no answer; run it again')

  monkeypatch.setattr(corpus, 'check_readable', check_readable)
  monkeypatch.setattr(roles, 'open_storage', functools.partial(object_store.open_storage, patience_s=0))
  monkeypatch.setattr(sys, 'argv', ['local.py', f'--config={ROOT}/configs/tiny.py', '--workdir=s3://bucket/run'])
  with line.Line(9) as wire:
    wire.faults = [fault or 'absent'] * 99
    for name, value in object_server.environment(f'http://127.0.0.1:{wire.port}').items():
      monkeypatch.setenv(name, value)
    assert local.main() == status
  assert re.fullmatch(f'local.py: {message}.*\n', capsys.readouterr().err)


@pytest.mark.slow
@pytest.mark.parametrize('number', slow.but([signal.SIGINT, signal.SIGTERM], signal.SIGTERM))
def test_a_signal_ends_it_while_the_registry_is_away(number, tmp_path):
  command = [sys.executable, '-c', WAITS, f'postgresql://me@/x?host={tmp_path}', str(tmp_path)]
  env = repository.environment(__file__)
  with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
    pids = [int(process.stdout.readline()) for _ in range(5)]
    try:
      assert 'the registry does not answer' in process.stderr.readline()
      process.send_signal(number)
      assert process.wait(10) == 128 + number
      assert process.stderr.read().endswith('local.py: stopped; run the same command to resume\n')
      assert not any(os.path.exists(f'/proc/{pid}') for pid in pids)
    finally:
      process.kill()
      for pid in pids:
        with contextlib.suppress(ProcessLookupError):
          os.kill(pid, signal.SIGKILL)


def test_a_role_is_restarted_where_the_folder_of_logs_was_removed(tmp_path):
  (logs := tmp_path / 'logs').mkdir()
  role = supervision.Role('worker-0', ['false'], logs)
  shutil.rmtree(logs)
  for count in range(2, supervision.FAILURES + 2):
    role.process.wait()
    assert role.restart() == '' and len(role.starts) == count
  role.process.wait()
  shutil.rmtree(logs)
  assert role.restart().startswith('worker-0 ended with status 1: ')


@pytest.mark.parametrize('terminal', [False, True])
def test_an_output_that_nobody_reads_ends_nothing(terminal):
  class Closed(io.StringIO):
    def flush(self):
      raise BrokenPipeError

  screen = supervision.Screen(Closed())
  screen.terminal = terminal
  screen.show(['tasks so far: none'])
  supervision.stopping.write('it goes on', screen.stream)


def test_each_worker_has_a_gpu_of_its_own_and_other_roles_have_the_cpu(tmp_path, monkeypatch):
  gpus, started = [{'CUDA_VISIBLE_DEVICES': str(i)} for i in range(3)], {}
  monkeypatch.setattr(local.worker_devices, 'environments', lambda named: gpus)
  monkeypatch.setattr(local, 'check', lambda options, rest: f'sqlite:///{tmp_path}/registry.db')
  monkeypatch.setattr(roles, 'resume', lambda *args: 0)
  monkeypatch.setattr(supervision.Role, 'start', lambda role: started.update({role.name: role.env}))
  monkeypatch.setattr(supervision, 'supervise', lambda *args: 1)
  monkeypatch.setattr(supervision, 'stop', lambda running: None)
  monkeypatch.setattr(supervision, 'interruptible', contextlib.nullcontext)
  monkeypatch.setenv(local.registry_url.VARIABLE, '')
  options = ['--config=no.py', f'--workdir={tmp_path}', '--backups=1']
  monkeypatch.setattr(sys, 'argv', ['local.py', *options])
  assert local.main() == 1
  cpu = {'JAX_PLATFORMS': 'cpu'}
  workers = dict(zip(('worker-0', 'worker-1', 'backup-0'), gpus, strict=True))
  assert started == dict.fromkeys(('monitor-0', 'outer-0', 'evaluator-0'), cpu) | workers


def test_more_workers_than_gpus_are_rejected(monkeypatch, capsys):
  monkeypatch.setattr(local.worker_devices, 'environments', lambda named: [{'CUDA_VISIBLE_DEVICES': '0'}])
  monkeypatch.setattr(sys, 'argv', ['local.py', '--config=no.py', '--workdir=/nowhere', '--workers=2'])
  assert local.main() == 2
  assert '--workers=2: each worker needs a device of its own, and this machine has 1 GPU; ' in capsys.readouterr().err


def test_a_replay_with_other_modules_has_status_1(capsys):
  outcome = {'perplexity': 9.0, 'perplexity_interval': [8.0, 10.0], 'changes': []}
  assert supervision.tell_outcome(outcome, 'local.py') == 0
  assert supervision.tell_outcome(outcome | {'differing': []}, 'local.py') == 0
  assert supervision.tell_outcome(outcome | {'differing': [['low/0', 1], ['low/1', 1]]}, 'local.py') == 1
  assert '2 versions of modules differ from those of the run, first low/0 in version 1' in capsys.readouterr().err
