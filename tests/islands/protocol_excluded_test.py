"""The protocol of islands, as in protocol_test.py, where paths are left out, and where that ends the run.

A run that has diverged ends for every process, whenever each gets to know; and goes on with those that begin after it.
"""

import os

import digest_tasks
import excluded_path
import numpy as np
import protocol_test as protocol
import pytest
import slow
from digest_tasks import digest, read_module

from dipaco_jax.islands import island, schedule, screening_facts
from dipaco_jax.registry.registry import Fact

EXCLUDED = {(1, 1), (3, 2)}  # paths and phases, by their workers
REFUSED = {('low/0', '0', 2)}  # by an executor, which reads otherwise
SICK = 3  # a phase in which no path comes to anything, until the run has diverged
SHARED = (protocol.SHARED, dict(train=dict(phases=5)))
RUNS = {'healthy': SHARED, 'sick': SHARED, 'apart': (protocol.APART, dict(train=dict(phases=5)))}


def train(of: island.Island, task) -> list[Fact]:
  path, phase = int(task.key), task.number
  is_sick = protocol.RUNS['of'] is RUNS['sick'] and phase == SICK
  is_sick = is_sick and not screening_facts.times_resumed(of.registry)
  is_left_out = is_sick or (path, phase) in EXCLUDED
  if is_left_out and not of.own_levels:
    made = [schedule.checkpoint_fact(path, phase, {}, {'excluded': 'bad'})]
  else:
    made = digest_tasks.train(of, task, lambda *at: at in EXCLUDED)
  return made + [excluded_path.exclusion(of, path, phase, of.name)] * is_left_out


def outer(of: island.Island, task) -> list[Fact]:
  """As outer_executor.perform and publish, of digests."""
  phase, level = task.number - 1, task.key.split('/')[0]
  wanted = sorted(map(str, of.paths_through(task.key)))
  made = of.registry.facts('module', [task.key], task.number)
  left_out = dict(made[0].meta['left_out']) if made else {}
  found = of.registry.facts('checkpoint', wanted, phase)
  if not made:
    left_out = {f.key: 'bad' for f in found if 'excluded' in f.meta or (task.key, f.key, phase) in REFUSED}
    if left_out:
      screening_facts.check(of, task.key, phase, np.ones(of.layout.grid.num_paths), left_out)
  counted = [fact for fact in found if fact.key not in left_out]
  if {*left_out, *(fact.key for fact in counted)} != {*wanted}:
    of.registry.release(task, waiting=True)
    return []
  screening_facts.heed(of)
  [before] = of.registry.facts('module', [task.key], phase)
  if counted:
    new = digest(*read_module(of, before), *(of.read_object(*fact.meta['objects'][level]) for fact in counted))
    made_now = digest_tasks.module_fact(of, task, new, {'left_out': left_out})
  else:
    made_now = before._replace(number=task.number, meta=before.meta | {'left_out': left_out})
  refused = [path for path in left_out if (task.key, path, phase) in REFUSED]
  more = [excluded_path.exclusion(of, int(path), phase, 'worker', of.name) for path in refused]
  return [made_now, *more]


@pytest.fixture(autouse=True)
def patched(monkeypatch):
  monkeypatch.setattr(os, 'fsync', lambda handle: None)  # no machine dies here
  monkeypatch.setattr(protocol, 'PERFORM', protocol.PERFORM | {'train': train, 'outer': outer})
  monkeypatch.setattr(protocol, 'RUNS', dict(protocol.RUNS))


def play(place, name: str, seed: int, faults: bool):
  protocol.RUNS['of'] = RUNS[name]
  return protocol.play(place, 'of', seed, faults)


@pytest.mark.parametrize('name', slow.but(['sick', 'apart'], 'sick', 'apart'))
def test_ends_with_the_same_digest(name, tmp_path, request):
  expected, _ = play(tmp_path / 'undisturbed', name.replace('sick', 'healthy'), 0, faults=False)
  for seed in range(request.config.getoption('--protocol_runs')):
    found, befell = play(tmp_path / str(seed), name, seed, faults=True)
    assert found == expected, seed
    print(f'{name}: {dict(befell)}')
