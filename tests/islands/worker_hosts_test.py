"""A worker of two hosts: two processes joined by jax.distributed train each path together, and go together."""

import pathlib
import signal
import time

import one_process
import ports
import pytest
import safetensors.numpy
import small
import tiny_run
from one_process import Faults, Machine

from dipaco_jax.config import settings as settings_lib
from dipaco_jax.islands import decisions
from dipaco_jax.registry import registry

pytestmark = pytest.mark.filterwarnings('ignore::ResourceWarning')
LEASE_S = 60  # nobody waits for one to run out


def start(config: pathlib.Path, place: pathlib.Path, *options: str):
  return tiny_run.start(config, place, f'--lease_s={LEASE_S}', *options)


def start_hosts(config: pathlib.Path, place: pathlib.Path):
  options = ['--role=worker', '--name=two hosts', '--distributed', '--num_processes=2']
  options.append(f'--coordinator=localhost:{ports.free_port()}')
  return [start(config, place, *options, f'--process_id={i}') for i in range(2)]


def wait_for(found):
  deadline = time.monotonic() + tiny_run.PATIENCE_S
  while not found():
    assert time.monotonic() < deadline
    time.sleep(0.05)


def prepare(folder: pathlib.Path, train: str) -> tuple[pathlib.Path, Machine]:
  """A config, and a machine with a run of it in `folder/run` that is about to train."""
  config = tiny_run.write_config(folder)
  config.write_text(config.read_text().replace('phases=4, steps_per_phase=6', train))
  found: dict = {}
  exec(config.read_text(), found)
  with one_process.one_device():
    machine = Machine(settings_lib.from_dict(found['get_config']().to_dict()), {})
    machine.to_the_end(folder / 'run', Faults(), end=one_process.PREPARED)
    machine.backend.copy(folder / 'run', folder / 'alone')
  return config, machine


def train(config: pathlib.Path, place: pathlib.Path, facts: registry.Registry, disturbed: bool):
  """Trains all paths on two hosts; where that is disturbed, the second host has to go at first."""
  hosts = start_hosts(config, place)
  try:
    if disturbed:
      wait_for(lambda: facts.facts('checkpoint') and facts.tasks('running', 'train'))
      hosts[1].send_signal(signal.SIGTERM)
      began = time.monotonic()
      tiny_run.finish(hosts[0], 128 + signal.SIGTERM)
      assert time.monotonic() - began < LEASE_S / 4 and not facts.tasks('running', 'train')
      assert hosts[1].wait(tiny_run.PATIENCE_S)
      hosts = start_hosts(config, place)
    wait_for(lambda: len(facts.facts('checkpoint')) == 4)
    hosts[0].send_signal(signal.SIGTERM)
    tiny_run.finish(hosts[0], 128 + signal.SIGTERM)
  finally:
    for process in hosts:
      process.kill()
      process.communicate()


def compare(facts: registry.Registry, place: pathlib.Path, machine: Machine, alone: pathlib.Path):
  """Compares what two hosts have sent with what one process has."""
  tolerance = 72 * small.EPS * (2 + 0.01 * 4 * 64) * 100  # as in two_processes_test: 60 steps, and those of pretraining
  other = registry.Registry(machine.backend.registry(alone), LEASE_S)
  for ours, theirs in zip(facts.facts('checkpoint'), other.facts('checkpoint'), strict=True):
    assert ours.meta['worker'] == 'two hosts' and theirs.meta['worker'] == 'all'
    assert ours.meta.get('steps') == theirs.meta.get('steps')
    for level in ('ends', 'low', 'high'):
      new, old = (
        safetensors.numpy.load_file(folder / fact.meta['objects'][level][0])
        for folder, fact in ((place, ours), (alone, theirs))
      )
      small.assert_close(new, old, tolerance)
  other.close()


@pytest.mark.slow
def test_two_hosts_train_as_one_and_end_together(tmp_path):
  place, alone = tmp_path / 'run', tmp_path / 'alone'
  config, machine = prepare(tmp_path, 'phases=1, steps_per_phase=60')
  with one_process.one_device():
    machine.to_the_end(alone, Faults(), end=one_process.TRAINED)
  facts = registry.Registry(machine.backend.registry(place), LEASE_S)
  train(config, place, facts, disturbed=True)
  compare(facts, place, machine, alone)
  facts.close()


@pytest.mark.slow
def test_two_hosts_end_a_timed_phase_after_the_same_step(tmp_path):
  place, alone = tmp_path / 'run', tmp_path / 'alone'
  config, machine = prepare(tmp_path, 'phases=1, steps_per_phase=2000, phase_s=0.5')
  facts = registry.Registry(machine.backend.registry(place), LEASE_S)
  train(config, place, facts, disturbed=False)
  assert all(2 <= fact.meta['steps'][1] < 2000 for fact in facts.facts('checkpoint'))
  machine.decisions = decisions.of_facts(facts)
  with one_process.one_device():
    machine.to_the_end(alone, Faults(), end=one_process.TRAINED)
  compare(facts, place, machine, alone)
  facts.close()
