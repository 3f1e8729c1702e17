"""Workers that are killed, and their disks with the states that they hold: the run ends with the same bits [3]."""

import contextlib
import pathlib
import shutil
import signal
import time

import pytest
import tiny_run
from cluster import LONGEST_S, Cluster, More

from dipaco_jax.config import settings as settings_lib
from dipaco_jax.islands import held_states
from dipaco_jax.registry.registry import Fact

PHASES, EVERY = 6, 3
OTHERS = 'outer-0', 'evaluator-0', 'monitor-0'
LEASE_S = 2.0


@pytest.fixture(scope='module')
def config(tmp_path_factory) -> settings_lib.Settings:
  found: dict = {}
  file = tiny_run.write_config(tmp_path_factory.mktemp('config'))
  words = f'phases={PHASES}, steps_per_phase=4', f'  c.checkpoint.state_every_phases = {EVERY}\n  c.grid'
  exec(file.read_text().replace('phases=4, steps_per_phase=6', words[0]).replace('  c.grid', words[1]), found)
  return settings_lib.from_dict(found['get_config']().to_dict())


class Struck:
  """A run on this machine whose workers are struck once in each phase."""

  def __init__(self, config: settings_lib.Settings, place: pathlib.Path, workers: int):
    place.mkdir()
    names = [*(f'worker-{i}' for i in range(workers)), *OTHERS]
    self.place = place
    self.cluster = Cluster(config, str(place), f'sqlite:///{place}.db', place.parent / 'machines', names, More(LEASE_S))

  def to_the_end(self, strikes: bool) -> list[Fact]:
    """Returns all checkpoints."""
    until, struck = time.monotonic() + LONGEST_S, set()
    while not self.cluster.finished():
      assert time.monotonic() < until, self.cluster.registry.counts()
      self.cluster.tend()
      newest = self.cluster.registry.newest('checkpoint')
      phase = max(newest.values(), default=-1)
      if strikes and phase not in struck and -1 < phase < PHASES - 1:
        [fact] = self.cluster.registry.facts('checkpoint', [max(newest, key=newest.__getitem__)], phase)
        self.strike(fact)
        struck.add(phase)
      time.sleep(0.02)
    self.cluster.end()
    self.cluster.check()
    assert struck == ({*range(PHASES - 1)} if strikes else set())
    return self.cluster.registry.facts('checkpoint')

  def strike(self, fact: Fact):
    """The worker that has made this checkpoint, and its disk."""
    self.cluster.signal(fact.meta['worker'], signal.SIGKILL)
    self.cluster.processes[fact.meta['worker']].join()
    for file in (self.place / held_states.HELD).glob(f'*/{held_states.HOLDER}'):
      if file.read_text() == fact.meta['holder']:
        shutil.rmtree(file.parent)

  def close(self):
    self.cluster.kill()


@pytest.fixture(scope='module')
def undisturbed(config, tmp_path_factory) -> pathlib.Path:
  """A run of one worker."""
  place = tmp_path_factory.mktemp('undisturbed') / 'run'
  with contextlib.closing(Struck(config, place, 1)) as run:
    assert not any('replay' in fact.meta for fact in run.to_the_end(strikes=False))
  return place


@pytest.mark.slow  # in CI lineage_test.py says the same of one process
@pytest.mark.parametrize('workers', [1, 2, 4])
def test_workers_killed_in_every_phase_and_their_disks_removed(workers, config, undisturbed, tmp_path):
  with contextlib.closing(Struck(config, tmp_path / 'run', workers)) as run:
    made = run.to_the_end(strikes=True)
  assert tiny_run.modules_sha256(tmp_path / 'run') == tiny_run.modules_sha256(undisturbed)
  replayed = [fact.meta['replay'] for fact in made if 'replay' in fact.meta]
  print(f'{workers} workers: {[told["phases"] for told in replayed]}')
  assert not any(told['differing'] for told in replayed) and len(replayed) >= (PHASES - 1) // 2
  assert all(len(told['phases']) < 2 * EVERY for told in replayed)  # a disk may be lost before its state is published
