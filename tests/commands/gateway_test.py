"""The command `gateway`, and a worker behind it: options, tokens, one line for what is wrong."""

import os
import subprocess
import sys

import one_process
import pytest
import slow
from repository import ROOT

from dipaco_jax.registry.registry import Fact
from dipaco_jax.storage import gateway_link

made = one_process.made
ADDRESS, TOKEN = 'https://127.0.0.1:1#sha256=' + 'a' * 64, 'x' * 43


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
  env = os.environ | {'JAX_PLATFORMS': 'cpu'} | variables
  command = [sys.executable, '-m', *arguments]
  return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_tokens_are_added_shown_once_listed_and_revoked(made, tmp_path):
  of_run = 'dipaco_jax.gateway', f'--workdir={tmp_path}'
  added = run(*of_run, 'add', '--name=court-1', '--paths=0,1', '--days=2')
  token = added.stdout.strip()
  assert gateway_link.read_token(token) == token and token not in added.stderr
  listed = run(*of_run, 'list').stdout
  assert 'court-1' in listed and 'paths 0, 1' in listed and token not in listed
  assert run(*of_run, 'revoke', '--name=court-1').returncode == 0
  assert 'revoked' in run(*of_run, 'list').stdout
  assert token.encode() not in (tmp_path / 'registry.db').read_bytes()


@pytest.mark.slow
def test_a_replay_has_no_tokens(made, tmp_path):
  made.registry.put([Fact('replay', '', 0, '', 'a' * 64, {'file': 'facts.json'})])
  done = run('dipaco_jax.gateway', f'--workdir={tmp_path}', 'add', '--name=court-1')
  assert done.returncode == 2 and 'this run is a replay, which workers behind a gateway cannot follow' in done.stderr


@pytest.mark.parametrize(
  'options, message',
  slow.all_but(
    [
      (['add'], '--name is missing'),
      (['add', '--name=a/b'], '--name=a/b: give a name of letters'),
      (['add', '--name=a', '--paths=9'], '--paths=9: give numbers of paths from 0 to 3'),
      (['add', '--name=a', '--owner=court'], 'axes have names'),
      (['add', '--name=a', '--days=0'], '--days=0.0 should be above 0'),
      (['revoke', '--name=a'], '--name=a: there is no such token'),
      (['--http'], '--http with --host=0.0.0.0 would let tokens travel in the clear'),
      (['--cert=x'], '--cert and --key'),
      (['list', 'add'], 'say one of'),
      (['--max_claims=0'], '--max_claims=0 should be above 0'),
    ],
    (['--cert=x'], '--cert and --key'),
  ),
)
def test_wrong_options_end_with_one_line(options, message, made, tmp_path):
  done = run('dipaco_jax.gateway', f'--workdir={tmp_path}', *options)
  assert done.returncode == 2 and message in done.stderr and done.stderr.count('\n') == 1


@pytest.mark.slow
def test_a_workdir_without_a_run_is_an_error(tmp_path):
  done = run('dipaco_jax.gateway', f'--workdir={tmp_path}', 'list')
  assert done.returncode == 2 and 'start a role of the run first' in done.stderr and not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
  'options, message',
  slow.all_but(
    [
      (['--config=tiny'], '--config is not for a worker behind a gateway'),
      (['--workdir=x'], '--workdir is not for a worker behind a gateway'),
      (['--registry=sqlite:////x:secret@y'], '--registry is not for a worker behind a gateway'),
      (['--config.train.phases=3'], '--config.train.phases is not for a worker behind a gateway'),
      (['--backup'], '--backup is not for a worker behind a gateway'),
      (['--name=a/b'], '--name=a/b: use letters'),
      (['--role=outer'], 'DIPACO_GATEWAY is for workers'),
    ],
    (['--config=tiny'], '--config is not for a worker behind a gateway'),
  ),
)
def test_options_of_a_worker_behind_a_gateway(options, message):
  done = run('dipaco_jax.main', '--role=worker', *options, DIPACO_GATEWAY=ADDRESS, DIPACO_TOKEN=TOKEN)
  assert done.returncode == 2 and message in done.stderr and done.stderr.count('\n') == 1
  assert TOKEN not in done.stderr and 'secret' not in done.stderr


@pytest.mark.parametrize(
  'variables, message',
  slow.all_but(
    [
      ({'DIPACO_GATEWAY': ADDRESS}, 'DIPACO_GATEWAY is set and DIPACO_TOKEN is not'),
      ({'DIPACO_GATEWAY': ADDRESS, 'DIPACO_TOKEN': 'file:/nowhere'}, 'file:/nowhere: No such file'),
      ({'DIPACO_GATEWAY': 'http://example.com', 'DIPACO_TOKEN': TOKEN}, 'http would send the token in the clear'),
      ({'DIPACO_GATEWAY': 'example.com', 'DIPACO_TOKEN': TOKEN}, 'should be an address such as https://host:8443'),
    ],
    ({'DIPACO_GATEWAY': ADDRESS}, 'DIPACO_GATEWAY is set and DIPACO_TOKEN is not'),
  ),
)
def test_variables_of_a_worker_behind_a_gateway(variables, message):
  done = run('dipaco_jax.main', '--role=worker', **variables)
  assert done.returncode == 2 and message in done.stderr and done.stderr.count('\n') == 1
