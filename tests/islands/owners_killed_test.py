"""Processes of a run of owners behind a gateway, one of whom joins and one leaves, are killed again and again.

`pytest tests/islands/owners_killed_test.py -n0 -s --slow`. Each worker, the gateway and each role of the keeper is a
process that SIGKILL ends at any moment. The run ends with the bits of one in which nobody is killed.
"""

import collections
import contextlib
import json
import os
import pathlib
import random
import signal
import time

import cluster
import one_process
import owners_run
import ports
import pytest
import quick_xla
from absl import flags
from cluster import Cluster, More
from owners_run import OwnersRun

from dipaco_jax.config import owners
from dipaco_jax.gateway import __main__ as gateway_main, tokens as tokens_lib
from dipaco_jax.islands import behind_gateway, members, roles
from dipaco_jax.registry.registry import Registry
from dipaco_jax.storage import gateway_link
from dipaco_jax.storage.remedies import ISLANDS_MARK

pytestmark = pytest.mark.slow
PHASES = 20
KILLS = 50
KEEPERS = 'worker-0', 'outer-0', 'evaluator-0', 'monitor-0', 'gateway-0'
JOINS_AT, LEAVES_AFTER = 3, 9  # versions of the shared module
PAUSE_S = 0.25  # between kills, on average, and until a task is done, but no longer than PATIENCE_S
PATIENCE_S = 30.0  # so that on a busy machine somebody gets on
LONGEST_S = 3600
PORT = 'TEST_PORT'


def work(name: str, settings, place: str, url: str, more: More):
  """Works as an owner, behind the gateway, or in a role of the keeper."""
  kind = name.split('-')[0]
  if kind == 'gateway':
    return serve_gateway(place, url, more)
  if kind not in owners_run.LETTERS:
    return cluster.work(name, settings, place, url, more)
  folder = pathlib.Path(place).parent
  address, token = f'http://127.0.0.1:{more.env[PORT]}', (folder / f'{kind}.token').read_text()
  own = behind_gateway.Own('', (str(owners_run.own_file(folder, kind)),), str(folder / f'store-{kind}'))
  run = behind_gateway.open_run(gateway_link.Link(gateway_link.parse_address(address), token), '', own)
  behind_gateway.serve(run, roles.Process('worker', '', more.lease_s, globs=own.globs, store=own.store))


def serve_gateway(place: str, url: str, more: More):
  """Serves at the port of the test, without TLS."""
  gateway_main.define_flags()
  options = f'--workdir={place}', '--host=127.0.0.1', f'--port={more.env[PORT]}', '--http', f'--lease_s={more.lease_s}'
  flags.FLAGS(['gateway', *options, '--requests_per_s=1000'])
  while not pathlib.Path(place, ISLANDS_MARK).exists():
    time.sleep(0.1)
  raise SystemExit(gateway_main.serve(url))


class Owners(Cluster):
  """All processes of a run of owners."""

  work = staticmethod(work)

  def __init__(self, run: OwnersRun):
    run.place.mkdir()
    self.run, self.counts = run, collections.Counter[str]()
    more = More(4.0, env={PORT: str(ports.free_port())})
    url = f'sqlite:///{run.place}/registry.db'
    super().__init__(run.settings, str(run.place), url, run.folder / 'machines', KEEPERS, more)

  def admit(self, owner: str):
    """Gives an owner a token and starts its worker."""
    island = self.run.begin()
    with contextlib.closing(tokens_lib.Tokens(self.url)) as tokens:
      token = tokens.add(f'{owner}-token', owners.paths_of(island.layout.grid, owner), 1, owner)
    (self.run.folder / f'{owner}.token').write_text(token)
    one_process.close(island)
    self.processes[f'{owner}-0'] = self.start(f'{owner}-0')

  def versions(self) -> int:
    """How many outer steps the shared module has made."""
    return self.registry.newest('module').get('shared/shared', 0)

  def change(self):
    """One owner joins as soon as it is time, and later one leaves."""
    for name, version, act in (('press', JOINS_AT, members.add), ('clinic', LEAVES_AFTER, members.remove)):
      kind = members.JOINED if act is members.add else members.LEFT
      if self.versions() >= version and not self.registry.facts(kind):
        if act is members.remove and not self.registry.facts(members.BEGAN):
          return
        island = self.run.begin()
        act(island, name)
        one_process.close(island)
        if act is members.add:
          self.admit(name)

  def kill_one(self, draw: random.Random):
    """Kills one of the processes that run."""
    name = draw.choice([name for name, process in self.processes.items() if process.exitcode is None])
    self.signal(name, signal.SIGKILL)
    self.counts[name] += 1

  def play(self, draw: random.Random):
    """Kills until the run is finished; who is killed begins again."""
    until, due, before, patience = time.monotonic() + LONGEST_S, 0.0, 0, 0.0
    while not self.finished():
      assert time.monotonic() < until, self.registry.counts()
      self.tend()
      self.change()
      done, now = self.done(), time.monotonic()
      if now > due and (done > before or now > patience):
        self.kill_one(draw)
        before, patience, due = done, now + PATIENCE_S, now + draw.expovariate(1 / PAUSE_S)
      time.sleep(0.05)


def begin(folder: pathlib.Path) -> OwnersRun:
  owners_run.write_text(folder)
  sections = {'train': dict(phases=PHASES), 'checkpoint': dict(state_every_phases=1, every_steps=2)}
  return OwnersRun(folder, owners_run.settings(folder, **sections))


def undisturbed(folder: pathlib.Path, decided) -> OwnersRun:
  """A run in one process with the same facts of who joined and left."""
  until = decided[members.LEFT][0].meta['until']['0']
  run = begin(folder)
  with run.members() as processes:
    run.to('prepared', processes)
  with contextlib.closing(Registry(f'sqlite:///{run.place}/registry.db')) as facts:
    facts.put([*decided[members.JOINED], *decided[members.BEGAN]])
    facts.put([fact for fact in decided['module'] if fact.key == 'own/2' and '/0/' in fact.uri])
  with run.members((*owners_run.OWNERS, 'press')) as processes:
    run.to('checkpoint', processes, '0', until - 1)
    members.remove(processes[0].island, 'clinic')
    run.to('finished', processes)
  return run


def refer(folder: pathlib.Path, decided, out: pathlib.Path):
  """Writes what a run comes to in which nobody is killed; in a process with one device, as all others have."""
  os.environ['XLA_FLAGS'] = quick_xla.on(1)
  with one_process.one_device():
    out.write_text(json.dumps(undisturbed(folder, decided).outcome()))


def test_fifty_kills_change_no_bits(tmp_path):
  killed = begin(tmp_path / 'killed')
  of = Owners(killed)
  try:
    while not of.registry.facts('config'):
      time.sleep(0.1)
    for owner in owners_run.OWNERS:
      of.admit(owner)
    of.play(random.Random(0))
    decided = {kind: of.registry.facts(kind) for kind in (*members.MEMBERS, 'module')}
  finally:
    of.kill()
  print(f'{of.counts.total()} kills: {dict(of.counts)}')
  assert of.counts.total() >= KILLS and decided[members.BEGAN] and decided[members.LEFT]
  reference = cluster.PROCESSES.Process(target=refer, args=(tmp_path / 'undisturbed', decided, tmp_path / 'outcome'))
  reference.start()
  reference.join()
  assert killed.outcome() == json.loads((tmp_path / 'outcome').read_text())
