"""A whole run of owners in processes of their own, with a real gateway: what users start."""

import json
import os
import pathlib
import subprocess
import sys
import time

import owners_run
import ports
import pytest
import quick_xla
from owners_run import OWNERS, OwnersRun
from repository import ROOT

from dipaco_jax.registry.registry import Registry

pytestmark = pytest.mark.slow
CONFIG = """
import json
from ml_collections import ConfigDict

def get_config():
  return ConfigDict(json.loads({values!r}))
"""
LONGEST_S = 600
AWAY_S = 4.0  # in which a gateway is away


class Processes:
  """The processes of a run, each with a log."""

  def __init__(self, folder: pathlib.Path, config: pathlib.Path, place: pathlib.Path):
    self.folder, self.config, self.place = folder, config, place
    self.processes: dict[str, subprocess.Popen] = {}
    self.variables = {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': quick_xla.on(1), 'TMPDIR': str(folder)}

  def start(self, name: str, *arguments: str, **variables: str):
    env = os.environ | self.variables | variables
    with open(self.folder / f'{name}.log', 'ab') as log:
      command = [sys.executable, '-m', *arguments]
      self.processes[name] = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)

  def start_role(self, role: str):
    of_run = f'--config={self.config}', f'--workdir={self.place}', '--lease_s=10'
    self.start(role, 'dipaco_jax.main', *of_run, f'--role={role}')

  def start_worker(self, name: str, owner: str, address: str, token: str, *arguments: str):
    """A worker that needs an address, a token, its text and its store."""
    text, store = owners_run.own_file(self.folder, owner), self.folder / f'store-{owner}'
    options = '--role=worker', f'--data={text}', f'--store={store}', *arguments
    self.start(name, 'dipaco_jax.main', *options, DIPACO_GATEWAY=address, DIPACO_TOKEN=token)

  def gateway(self, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, '-m', 'dipaco_jax.gateway', f'--workdir={self.place}', *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | self.variables, capture_output=True, text=True)

  def start_gateway(self, port: int) -> str:
    """Starts a gateway; returns the address that it prints."""
    options = f'--workdir={self.place}', '--host=127.0.0.1', f'--port={port}', '--lease_s=10'
    self.start('gateway', 'dipaco_jax.gateway', *options)
    return wait_for(lambda: self.said('gateway', 'ready; workers need DIPACO_GATEWAY=')).split('DIPACO_GATEWAY=')[1]

  def said(self, name: str, what: str) -> str:
    """The last line of a log that has these words."""
    lines = (self.folder / f'{name}.log').read_text().splitlines()
    return next((line for line in reversed(lines) if what in line), '')

  def end(self):
    for process in self.processes.values():
      process.kill()
      process.wait()


def wait_for(look):
  """Waits until a function returns something true, and returns it."""
  until = time.monotonic() + LONGEST_S
  while not (found := look()):
    assert time.monotonic() < until
    time.sleep(0.5)
  return found


def test_owners_behind_a_real_gateway_that_goes_away_finish_the_run(tmp_path):
  owners_run.write_text(tmp_path)
  run = OwnersRun(tmp_path, owners_run.settings(tmp_path, train=dict(phases=4)))
  config = tmp_path / 'config.py'
  config.write_text(CONFIG.format(values=json.dumps(run.settings.to_dict())))
  all_of = Processes(tmp_path, config, run.place)
  try:
    for role in ('monitor', 'worker', 'outer', 'evaluator'):
      all_of.start_role(role)
    names = [*OWNERS, 'court-2']
    wait_for(lambda: all_of.gateway('list').returncode == 0)
    tokens = {n: all_of.gateway('add', f'--name={n}', f'--owner={n.removesuffix("-2")}').stdout.strip() for n in names}
    refused = all_of.gateway('add', '--name=x')
    assert refused.returncode == 2 and '--owner is missing: the text of this run stays with' in refused.stderr
    port = ports.free_port()
    address = all_of.start_gateway(port)
    all_of.start_worker('wrong', 'court', address, tokens['court'], '--owner=clinic')
    assert all_of.processes['wrong'].wait(LONGEST_S) == 2 and all_of.said(
      'wrong', '--owner=clinic: the token is that of'
    )
    for name in names:
      all_of.start_worker(name, name.removesuffix('-2'), address, tokens[name])
    registry = Registry(f'sqlite:///{run.place}/registry.db')
    wait_for(lambda: registry.facts('checkpoint'))
    assert all_of.gateway('revoke', '--name=court-2').returncode == 0
    assert all_of.processes['court-2'].wait(LONGEST_S) == 2
    assert all_of.said('court-2', 'the token was revoked by the keeper') and not all_of.said('court-2', 'Traceback')
    all_of.processes['gateway'].kill()
    all_of.processes['gateway'].wait()
    time.sleep(AWAY_S)
    all_of.start_gateway(port)
    for name in (*OWNERS, 'worker', 'outer', 'evaluator'):
      assert all_of.processes[name].wait(LONGEST_S) == 0, all_of.said(name, '')
    registry.close()
  finally:
    all_of.end()
  assert 'perplexity' in (tmp_path / 'court.log').read_text() and all_of.said('court', '--path=court --prompt=TEXT')
  assert (run.store('court') / 'paths' / 'best.json').exists() and not (run.place / 'shards' / '0').exists()
