"""Three owners who reach nothing but a hub's port: one more joins, one leaves, all is stopped once, audits, a model."""

import contextlib
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import apart
import hubs
import owners_run
import ports
import pytest

from dipaco_jax.islands import audit_facts, members
from dipaco_jax.registry.registry import Registry

pytestmark = pytest.mark.slow  # twenty processes, which take minutes of a core to begin
OWNERS = 'clinic', 'court', 'press'
LATE = 'bank'
PHASES = 6
CONFIG = """
import json
from ml_collections import ConfigDict

def get_config():
  return ConfigDict(json.loads({values!r}))
"""
LOOK = """
import os, socket, sys
for folder in sys.argv[2:]:
  assert not os.listdir(folder), folder
for host, port in (
  ('{hub}', {port}), ('{hub}', {other}), ('10.77.1.1', {port}), ('10.77.0.2', {port}), ('192.0.2.1', 80)
):
  try:
    socket.create_connection((host, port), 2).close()
    print(host, port)
  except OSError:
    pass
"""


def put_apart(folder: pathlib.Path) -> pathlib.Path:
  """Gives each machine the text that is its own, in a folder of its own; returns the config of the run, at the hub."""
  owners_run.write_text(folder)
  for name in ('hub', *OWNERS, LATE):
    (folder / name).mkdir()
  for split in ('train', 'validation'):
    (folder / f'public-{split}.jsonl').rename(folder / 'hub' / f'public-{split}.jsonl')
  shutil.copy(owners_run.own_file(folder, 'press'), folder / LATE / 'text.jsonl')
  for owner in OWNERS:
    owners_run.own_file(folder, owner).rename(folder / owner / 'text.jsonl')
  run = owners_run.settings(
    folder / 'hub', train=dict(phases=PHASES), audit=dict(fraction=1.0), outer=dict(floor=100.0, floor_rows=8)
  )
  values = run.to_dict() | {'grid': {'owner': OWNERS}}
  config = folder / 'hub' / 'config.py'
  config.write_text(CONFIG.format(values=json.dumps(values)))
  return config


class World:
  """The machines, and what runs on them."""

  def __init__(self, folder: pathlib.Path, machines: apart.Machines, hub: hubs.Hub):
    self.folder, self.machines, self.hub = folder, machines, hub
    self.workdir = folder / 'hub' / 'run'
    self.lines: dict[str, tuple[str, str]] = {}  # address and token of each owner
    self.joined: dict[str, subprocess.Popen] = {}

  def run(self, name: str, *words: str) -> str:
    """Runs a command on a machine; returns what it printed."""
    command = [*self.machines.inside(name), sys.executable, *words]
    done = subprocess.run(command, env=hubs.environment(), capture_output=True, text=True, timeout=hubs.PATIENCE_S)
    assert done.returncode == 0, f'{done.stdout}{done.stderr}'
    return done.stdout

  def keep(self, *words: str) -> str:
    return self.run('hub', '-m', 'dipaco_jax.owners', f'--workdir={self.workdir}', *words)

  def join(self, stack: contextlib.ExitStack, owner: str, *options: str):
    """Starts an owner's workers, as the line says that the hub has printed."""
    home = self.folder / owner
    options = (f'--data={home}/text.jsonl', f'--store={home}/store', *options)
    process = hubs.joined(*self.lines[owner], *options, inside=self.machines.inside(owner))
    self.joined[owner] = stack.enter_context(process)

  def stop(self, owner: str):
    """Presses Ctrl-C on an owner's machine."""
    self.joined[owner].send_signal(signal.SIGINT)
    _, err = self.joined[owner].communicate(timeout=60)
    assert self.joined[owner].returncode == 130 and err.endswith('run the same command to join again\n')

  def facts(self, kind: str, *keys: str) -> list:
    with contextlib.closing(Registry(f'sqlite:///{self.workdir}/registry.db')) as registry:
      return registry.facts(kind, keys or None)

  def wait_for(self, kind: str, *keys: str):
    until = time.monotonic() + hubs.PATIENCE_S
    while not self.facts(kind, *keys):
      assert time.monotonic() < until, self.hub.log.read_text()[-4000:]
      time.sleep(0.5)


@pytest.fixture
def world(tmp_path):
  if words := apart.missing():
    pytest.skip(words)
  config = put_apart(tmp_path)
  port = ports.free_port()
  with apart.Machines(tmp_path, [*OWNERS, LATE], port) as machines:
    workdir, inside = tmp_path / 'hub' / 'run', machines.inside('hub')
    with hubs.Hub(config, workdir, address=apart.HUB, inside=inside, port=port) as hub:
      yield World(tmp_path, machines, hub)


def check_apart(world: World):
  """Asserts that an owner's machine reaches the hub's port and nothing else, and sees no folder of others."""
  other = world.hub.port - 1
  listen = f'import socket, time; s = socket.create_server(("0.0.0.0", {other})); print(1, flush=True); time.sleep(60)'
  command = [*world.machines.inside('hub'), sys.executable, '-c', listen]
  with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
    server.stdout.readline()
    text = LOOK.format(hub=apart.HUB, port=world.hub.port, other=other)
    hidden = [str(world.folder / name) for name in ('hub', 'clinic', 'press')]
    reached = world.run('court', '-c', text, *hidden)
    server.kill()
  assert reached == f'{apart.HUB} {world.hub.port}\n'


def test_three_owners_who_reach_nothing_but_the_hub(world):
  with contextlib.ExitStack() as stack:
    world.lines['clinic'] = world.hub.start()
    world.lines |= {owner: world.hub.read_line() for owner in OWNERS[1:]}
    check_apart(world)
    for owner in OWNERS:
      world.join(stack, owner, *(['--workers=2'] if owner == 'court' else []))
    world.wait_for('checkpoint', '0')
    world.stop('clinic')  # for which the others wait soon
    assert 'bank may join' in world.keep('add', LATE)
    world.lines[LATE] = world.hub.read_line()
    world.join(stack, LATE)
    world.wait_for(members.BEGAN, LATE)
    assert 'press: has left after phase' in world.keep('remove', 'press')
    out, err = world.joined['press'].communicate(timeout=hubs.PATIENCE_S)
    assert world.joined['press'].returncode == 0 and 'press has left this run' in out + err
    world.hub.process.send_signal(signal.SIGINT)
    world.hub.finish(130)
    world.hub.restart()
    world.join(stack, 'clinic')
    for owner in ('clinic', 'court', LATE):
      out, err = world.joined[owner].communicate(timeout=hubs.PATIENCE_S)
      assert world.joined[owner].returncode == 0 and f'--path={owner} --prompt=TEXT' in out, err
    assert 'court: ' in world.hub.finish()
  check_outcome(world)


def check_outcome(world: World):
  """Asserts what the keeper knows at the end, and that an owner has a model of its own."""
  report = json.loads((world.workdir / 'report.json').read_text())
  assert report['owners'][LATE]['joined_in_phase'] > 1 and report['owners']['press']['left_after_phase'] < PHASES
  court = [fact for fact in world.facts(audit_facts.AUDITED, '1') if fact.meta['equal'] is not None]
  assert court and all(fact.meta['equal'] and fact.meta['by'] != fact.meta['worker'] for fact in court)
  assert {fact.meta['by'].partition('/')[0] for fact in court} == {'court'}
  assert report['audits']['equal'] == len(court) and not report['audits']['different']
  assert not (world.workdir / 'shards' / '0').exists() and world.facts('judged')
  store, out = str(world.folder / 'court' / 'store'), str(world.folder / 'court' / 'exported')
  world.run('court', '-m', 'dipaco_jax.export', f'--workdir={store}', '--path=court', f'--out={out}')
  about = ['--prompt=bcd', '--max_tokens=4', '--temperature=0']
  text = world.run('court', '-m', 'dipaco_jax.generate', f'--workdir={store}', '--path=court', *about)
  assert text.startswith('bcd') and pathlib.Path(out, 'model.safetensors').exists()
