"""The command `join`: its token is hidden, one line for what is wrong, and what it shows of a run."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import gateways
import one_process
import pytest
from repository import ROOT

from dipaco_jax import join
from dipaco_jax.command_line import supervision
from dipaco_jax.core.errors import Away
from dipaco_jax.islands import owner_store
from dipaco_jax.registry.gateway_registry import GatewayRegistry
from dipaco_jax.registry.registry import Fact
from dipaco_jax.storage import object_store

made = one_process.made
ADDRESS, TOKEN = 'https://127.0.0.1:1#sha256=' + 'a' * 64, 'x' * 43


def start(*arguments: str, **variables: str) -> subprocess.Popen:
  env = {name: value for name, value in os.environ.items() if not name.startswith('DIPACO_')}
  command = [sys.executable, '-m', 'dipaco_jax.join', *arguments]
  pipes = dict.fromkeys(('stdout', 'stderr'), subprocess.PIPE)
  return subprocess.Popen(command, cwd=ROOT, env=env | {'JAX_PLATFORMS': 'cpu'} | variables, text=True, **pipes)


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
  try:
    out, err = process.communicate(timeout=60)
  finally:
    process.kill()
  return process.returncode, out, err


def test_no_other_user_sees_the_token_and_ctrl_c_ends_it():
  process = start(ADDRESS, '--token', TOKEN, '--workers=1')
  first = process.stderr.readline()  # nobody listens there
  proc = pathlib.Path(f'/proc/{process.pid}')
  if proc.exists():
    arguments = (proc / 'cmdline').read_text()
    assert 'dipaco_jax.join' in arguments and '--workers=1' in arguments and TOKEN not in arguments
  assert first.startswith('join.py: https://127.0.0.1:1 cannot be reached yet (Connection refused)')
  process.send_signal(signal.SIGINT)
  status, out, err = finish(process)
  assert status == 130 and not out and TOKEN not in err
  assert err == 'join.py: stopped, and tasks are handed back; run the same command to join again\n'


@pytest.mark.parametrize('wrong', ['fingerprint', 'token'])
def test_a_wrong_fingerprint_or_token_is_one_line(wrong, made, tmp_path):
  with gateways.running(made, tmp_path, is_secure=True) as running:
    address, fingerprint = running.address.url, running.address.fingerprint
    token = running.tokens.add('joined', None, 1)
    fingerprint = 'a' * 64 if wrong == 'fingerprint' else fingerprint
    given = TOKEN if wrong == 'token' else token
    status, out, err = finish(start(f'{address}#sha256={fingerprint}', DIPACO_TOKEN=given))
    heard = running.counts()
  words = {'fingerprint': 'has another certificate than', 'token': 'the token is unknown: ask the keeper'}[wrong]
  assert status == 2 and not out and words in err and err.count('\n') == 1 and given not in err
  assert heard == ({} if wrong == 'fingerprint' else {'unknown_token': 1})


@pytest.mark.parametrize(
  'arguments, words',
  [
    ([], 'give the address that the hub has printed'),
    ([ADDRESS], '--token is missing'),
    ([ADDRESS, '--token=file:/nowhere/token'], 'file:/nowhere/token: No such file'),
    ([ADDRESS, '--token=short'], 'DIPACO_TOKEN should be the token'),
    ([ADDRESS, f'--token={TOKEN}', '--name=a/b'], '--name=a/b: use letters'),
  ],
)
def test_wrong_options_are_one_line(arguments, words, monkeypatch, capsys):
  for name in ('DIPACO_GATEWAY', 'DIPACO_TOKEN'):
    monkeypatch.setenv(name, '')
  given = [argument for argument in arguments if not argument.startswith('--token')]
  for argument in set(arguments) - set(given):  # as if it had started itself again
    monkeypatch.setenv('DIPACO_TOKEN', argument.removeprefix('--token='))
  monkeypatch.setattr(sys, 'argv', ['join.py', *given])
  monkeypatch.setattr(join.command, 'quiet', lambda: None)
  assert join.main() == 2
  error = capsys.readouterr().err
  assert words in error and error.count('\n') == 1 and TOKEN not in error and 'short' not in error


def test_a_run_that_is_finished_starts_no_worker(made, tmp_path):
  gateways.begin_training(made)
  made.registry.put([Fact('finished', '', 0, '', '', {'perplexity': 17.123})])
  with gateways.running(made, tmp_path, is_secure=True) as running:
    token = running.tokens.add('joined', None, 1)
    address = f'{running.address.url}#sha256={running.address.fingerprint}'
    status, out, err = finish(start(address, DIPACO_TOKEN=token, TMPDIR=str(tmp_path)))
  assert (status, out) == (0, 'perplexity 17.12\n'), err
  assert not [*tmp_path.glob('dipaco_jax-*')] and not made.registry.roles()


def test_progress_is_that_of_the_tokens_paths_and_a_hub_that_is_away_is_waited_for(made, tmp_path):
  gateways.begin_training(made)
  with gateways.running(made, tmp_path) as running:
    worker, link = running.worker('alpha'), running.link('beta', [0, 1])
    view = join.View(GatewayRegistry(link), 'http://hub', patience_s=60)
    assert view.outcome() is None and view.line == f'0 of {2 * view.phases} phases of 2 paths are trained'
    for key in ('0', '3'):
      task = worker.registry.claim(worker.name, ['train'], [key])
      worker.registry.complete(task, gateways.train(worker, task))
    assert view.outcome() is None and view.line.startswith('1 of ')
    link.patience_s = 0
  assert view.outcome() is None and 'does not answer' in view.line and 'waiting for it, for 60 s' in view.line
  view.heard -= 61
  with pytest.raises(Away):
    view.outcome()


def test_clocks_that_differ_are_told(made, tmp_path, monkeypatch):
  with gateways.running(made, tmp_path) as running:
    skew_s = join.measure_skew(running.link())
    assert abs(skew_s) < 30
    real = time.time
    monkeypatch.setattr(join.time, 'time', lambda: real() + 3600)
    assert 3570 < join.measure_skew(running.link('beta')) < 3630
  assert join.describe_skew(5.0) == ''
  assert "is 1:00:00 ahead of the hub's" in join.describe_skew(3600.0) and 'behind' in join.describe_skew(-90.0)


def test_a_name_is_the_machines_own_and_that_of_an_owner_tells_nothing_of_the_machine():
  host, name = socket.gethostname(), join.name_process('', 'court')
  assert join.name_process('', '').startswith(host) and join.name_process('lab', '').startswith('lab-')
  assert re.fullmatch('[0-9a-f]{8}', name) and name != join.name_process('', 'court')
  assert re.fullmatch('lab-[0-9a-f]{8}', join.name_process('lab', 'court'))


def test_an_owner_who_has_joined_before_waits_longer_for_a_hub_that_begins(tmp_path):
  assert not join.has_joined('') and not join.has_joined(str(tmp_path))
  owner_store.settle(object_store.open_storage(str(tmp_path)), 'run', 'court')
  assert join.has_joined(str(tmp_path))


@pytest.mark.parametrize('is_made', [False, True])
def test_an_owner_whose_store_is_no_workdir_yet_needs_a_worker_after_the_end(is_made, tmp_path):
  options = join.parse_options([ADDRESS, f'--store={tmp_path}'])
  if is_made:
    (tmp_path / 'paths').mkdir()
    (tmp_path / 'paths' / 'best.json').write_text('{}')
  assert join.lacks_model(options, 'court') is not is_made and not join.lacks_model(options, '')


def test_what_a_worker_heard_is_the_outcome_or_its_last_line(tmp_path, capsys):
  role = supervision.Role('worker-0', [sys.executable, '-c', ''], tmp_path)
  role.process.wait()
  for last, told in (
    (f'{ADDRESS}: finished\nperplexity 3', f'{ADDRESS}: finished\nperplexity 3\n'),
    ('left', 'left\n'),
  ):
    role.log.write_text(f'loading JAX\n{last}\n')
    join.tell_what_a_worker_heard(role, ADDRESS)
    assert capsys.readouterr().out == told
