"""Workers of unequal speed against times computed by hand; a task has 16 steps, of 1 s unless a test says otherwise."""

import json
import os
import random
import subprocess
import sys

import jax
import numpy as np
import pytest
import repository

from dipaco_jax import algorithm

sys.path.insert(0, str(repository.ROOT / 'benchmarks'))

from unequal_rules import DROP, METHODS, NEXT, Begin, Close, End, Rule, Work, Workers
from unequal_simulation import Simulation

FILE = repository.ROOT / 'benchmarks' / 'unequal.py'
TAU, PHASE_S = 16, 16.0
APART = {('low', i): (2 * i, 2 * i + 1) for i in range(2)} | {('high', i): (i, i + 2) for i in range(2)}


def shared(paths: int) -> dict:
  return {'all': tuple(range(paths))}


def simulate(modules, speeds, rule=Rule(), until=500.0, **workers):
  """Returns what is done until a time, and the simulation."""
  simulation = Simulation(Work(modules, TAU, PHASE_S), Workers(tuple(speeds), **workers), rule)
  done = []
  for entries in simulation.run():
    done += entries
    if simulation.time >= until:
      return done, simulation
  raise AssertionError


def begins(done, path: int) -> list[float]:
  return [entry.time for entry in done if isinstance(entry, Begin) and entry.path == path]


def closes(done, module='all') -> list[float]:
  return [entry.time for entry in done if isinstance(entry, Close) and entry.module == module]


def test_all_paths_wait_for_the_slowest_in_every_phase():
  done, simulation = simulate(METHODS['grid'].module_paths(), [0.1] + [1.0] * 15, until=480)
  assert all(begins(done, path) == [0, 160, 320, 480] for path in range(16))
  assert simulation.shares()['counted'] == pytest.approx(16 / (160 * 15.1) * 16)
  assert simulation.seconds()[0]['waiting'] == 0 and simulation.seconds()[1]['waiting'] == 3 * 144


def test_without_a_level_that_all_share_a_path_is_ahead_by_its_distance():
  done, _ = simulate(APART, [0.1, 1.0, 1.0, 1.0], until=340)
  assert begins(done, 0)[:3] == begins(done, 1)[:3] == begins(done, 2)[:3] == [0, 160, 320]
  assert begins(done, 3)[:3] == [0, 16, 176]  # it shares no module with the slow path, and both with paths that wait


def test_with_fewer_workers_than_paths_the_slow_one_holds_one_path():
  done, _ = simulate(shared(4), [0.1, 1.0], until=170)
  assert closes(done) == [160]
  ends = [(entry.path, entry.time) for entry in done if isinstance(entry, End)]
  assert ends[:4] == [(1, 16), (2, 32), (3, 48), (0, 160)]


def test_a_spare_trains_a_copy_from_the_beginning_and_then_the_path_that_waits():
  done, simulation = simulate(shared(4), [0.1, 1, 1, 1, 1], Rule(spares=1), until=79)
  # A straggler after 32 s, 5 s to fetch its state; then the path waits for 10 s, because nobody else has its state.
  assert closes(done) == [32 + 5 + 16, 53 + 10 + 16]
  assert simulation.seconds()[0]['repeated'] == 53 and simulation.seconds()[4]['moved'] == 5


@pytest.mark.parametrize(('every', 'end'), [(4, 16 + 5 + 16), (1, 16 + 5 + 15)])
def test_a_task_is_handed_over_with_its_last_checkpoint(every, end):
  done, simulation = simulate(shared(4), [0.1, 1, 1, 1], Rule(hand_over=1.0), until=end, checkpoint_steps=every)
  assert closes(done) == [end]
  assert [entry.steps for entry in done if isinstance(entry, End)] == [16] * 4
  assert simulation.seconds()[0]['repeated'] == pytest.approx(16 if every == 4 else 6)


def test_a_task_is_not_handed_over_to_a_worker_that_would_end_it_later():
  done, _ = simulate(shared(2), [0.8, 1.0], Rule(hand_over=1.0), until=20)
  assert closes(done) == [20]  # a free worker would need 16 + 5 s and more


@pytest.mark.parametrize(('late', 'terms'), [(NEXT, [1, 1, 1, 0.5**7]), (DROP, [1, 1, 1])])
def test_a_quorum_closes_a_version_after_the_grace_and_a_late_contribution_is_in_the_next(late, terms):
  rule = Rule(quorum=0.75, grace=0.25, late=late)
  done, simulation = simulate(shared(4), [0.11, 1, 1, 1], rule, until=161)
  assert closes(done)[:8] == [20, 40, 60, 80, 100, 120, 140, 160]
  eighth = [entry for entry in done if isinstance(entry, Close)][7]  # the slow path ended after 145 s
  assert sorted((weight for _, weight in eighth.terms), reverse=True) == terms
  assert simulation.seconds()[0]['dropped'] == pytest.approx(0 if late == NEXT else 16 / 0.11)
  assert begins(done, 0)[1] == 160  # from the version that its contribution is in


def test_a_late_path_may_begin_at_once():
  done, _ = simulate(shared(4), [0.11, 1, 1, 1], Rule(quorum=0.75, grace=0.25, begins_at_once=True), until=161)
  assert begins(done, 0)[1] == pytest.approx(16 / 0.11)


def test_grace_is_not_waited_for_when_all_are_there():
  done, _ = simulate(shared(4), [1, 1, 1, 0.9], Rule(quorum=0.75, grace=0.5), until=36)
  assert closes(done) == pytest.approx([16 / 0.9, 32 / 0.9])


def test_a_task_that_ends_by_time_weighs_its_steps():
  done, simulation = simulate(shared(2), [1.0, 0.25], Rule(by_time=True), until=32)
  assert closes(done) == [16, 32]
  assert next(entry.terms for entry in done if isinstance(entry, Close)) == ((0, 1.0), (1, 0.25))
  assert simulation.shares()['counted'] == 1


def test_paths_that_move_have_trained_equally_after_some_phases():
  done, _ = simulate(shared(2), [1.0, 0.25], Rule(by_time=True, moves=True), until=64, move_s=0.0)
  steps = [[entry.steps for entry in done if isinstance(entry, End) and entry.path == path] for path in (0, 1)]
  assert steps == [[16, 4, 16, 4], [4, 16, 4, 16]]


def test_a_failure_costs_the_steps_since_the_last_checkpoint_and_the_restart():
  at = random.Random(0).expovariate(450 / 3600)
  assert 12 < at < 16
  done, simulation = simulate(shared(1), [1.0], until=at + 34, failures_per_hour=450, restart_s=30, checkpoint_steps=4)
  assert closes(done)[0] == pytest.approx(at + 30 + 16 - 12)
  assert simulation.seconds()[0]['repeated'] == pytest.approx(at - 12)


@pytest.mark.parametrize('rule', [Rule(spares=1), Rule(hand_over=1.0), Rule(0.5, 0.1), Rule(by_time=True, moves=True)])
def test_every_second_has_one_cause(rule):
  speeds = [0.1, 0.3, 1, 1, 0.5]
  _, simulation = simulate(APART, speeds, rule, until=2000, failures_per_hour=300)
  assert sum(simulation.shares().values()) == pytest.approx(1)
  assert all(seconds >= -1e-6 for of_worker in simulation.seconds() for seconds in of_worker.values())


@pytest.mark.slow
def test_an_outer_step_is_the_librarys():
  import unequal_training as training

  text = training.Text()
  base = training.pretrain(text, 1)
  trainer = training.Trainer(METHODS['grid'], text, base, training.Memory())
  method = METHODS['grid']
  outer = algorithm.OuterStep(trainer.levels, training.outer_optimizer, inner_optimizer='other')
  expected = trainer.levels.start(jax.tree.map(lambda x: x[0], base))
  state = outer.init(expected)
  done, _ = simulate(method.module_paths(), [1.0] * 16, until=2 * TAU)
  for phase in range(2):
    of_phase = [entry for entry in done if entry.time in (phase * TAU, (phase + 1) * TAU)]
    starts = {entry.path: entry for entry in of_phase if isinstance(entry, Begin) and entry.time == phase * TAU}
    for entry in starts.values():
      trainer.perform(entry)
    ends = [entry for entry in of_phase if isinstance(entry, End) and entry.time == (phase + 1) * TAU]
    old = {path: trainer.begun[path][1] for path in starts}
    for entry in ends:
      trainer.perform(entry)
    moves = {entry.path: trainer.contributions[entry.task][1][0] for entry in ends}
    new = {name: np.stack([np.asarray(old[p][name])[0] - moves[p][name][0] for p in range(16)]) for name in old[0]}
    expected, state, _ = outer.step(expected, state, trainer.levels.tree(new))
    for entry in of_phase:
      if isinstance(entry, Close) and entry.time == (phase + 1) * TAU:
        trainer.perform(entry)
  for (level, at), (_, (module, _)) in trainer.modules.items():
    for name, x in module.items():
      np.testing.assert_allclose(x[0], expected[level][name][at], rtol=1e-4, atol=1e-5)


def run(*options: str) -> list[dict]:
  command = [sys.executable, str(FILE), *options]
  env = os.environ | {'XLA_FLAGS': '', 'PYTHONPATH': str(repository.ROOT)}
  done = subprocess.run(command, capture_output=True, text=True, env=env)
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])['rows']


@pytest.mark.slow
def test_the_benchmark_trains():
  rows = {(row['scenario'], row['rule']): row for row in run('--quick', '--seeds=1', '--phases=4', '--tau=8')}
  equal, slow = rows['equal', 'wait'], rows['one slow', 'wait']
  assert equal['time_ratio'] == 1 and equal['loss'] == 0 and equal['losses'][-1] < equal['losses'][0]
  assert slow['time_ratio'] == pytest.approx(10 * 7.1 / 8, rel=1e-3)
  assert abs(slow['loss']) < 1e-6  # the same steps, later
  assert rows['one slow', 'unequal tau']['time_ratio'] < 2


@pytest.mark.slow
def test_processes_with_quotas_are_compared():
  command = [sys.executable, str(FILE.with_name('unequal_processes.py')), '--phases=2', '--tau=8', '--speeds=1,0.2']
  env = os.environ | {'XLA_FLAGS': '', 'PYTHONPATH': str(repository.ROOT)}
  busy = os.getloadavg()[0]
  done = subprocess.run(command, capture_output=True, text=True, env=env)
  if done.returncode == 3:
    pytest.skip(done.stderr.strip())
  assert done.returncode == 0, done.stderr
  equal, unequal, by_time = json.loads(done.stdout.splitlines()[-1])['rows']
  assert equal['time'] == equal['steps'] == 1 and equal['by_worker'] == unequal['by_worker'] == [16, 16]
  assert unequal['last_loss'] == equal['last_loss']
  fast, slow = by_time['by_worker']
  assert fast > slow
  if busy > 0.5:
    pytest.skip(f'{busy:.1f} other processes ran: what a quota takes from a worker is little beside them')
  assert unequal['time'] > 1.2 and by_time['time'] < unequal['time']
