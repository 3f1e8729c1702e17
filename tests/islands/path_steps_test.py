"""Phases that end after some time, and without paths that are late: facts say so, and all else follows [2.5]."""

import contextlib
import itertools
import threading
import time

import island_fixtures
import numpy as np
import one_process
import pytest
import small
import twin
from one_process import Faults, changed
from stopped_clock import Clock

from dipaco_jax.islands import decisions, path_steps, pieces
from dipaco_jax.islands.path_steps import PathSteps
from dipaco_jax.pipeline import jobs
from dipaco_jax.registry import registry
from dipaco_jax.registry.registry import Fact
from dipaco_jax.storage import module_store

pytestmark = pytest.mark.usefixtures('one_device')
one_device, machine, prepared = island_fixtures.one_device, island_fixtures.machine, island_fixtures.prepared
PHASES = 2
ENOUGH_S = 1e6
DISPATCHES = 1, 3, 2, 1, 2, 3, 1  # of one phase after another, whoever trains it


def to_the_end(machine, prepared, place, kills=(), decided=None, slow='', **sections):
  """Trains the paths; another worker, from which nothing comes, has the path `slow` in the first phase."""
  s = changed(machine.settings, **{'train': dict(phases=PHASES)} | sections)
  alone = machine.begin(prepared, place, s)
  alone.decisions = decided
  faults = Faults([*kills, *[one_process.PREPARED] * bool(slow)])

  def strike():
    if faults.hit[-1] != one_process.PREPARED:
      faults.kill()
    other = registry.Registry(alone.backend.registry(place), one_process.LEASE_S)
    threading.Thread(target=hold, args=(other, other.claim('slow', ['train'], [slow])), daemon=True).start()

  faults.strike = strike
  alone.to_the_end(place, faults, far=place / 'machines' if kills else None, end=one_process.TRAINED)
  return alone.island(place)


HEARTBEAT = registry.Registry.heartbeat  # where nothing strikes


def hold(of: registry.Registry, task: registry.Task):
  """Holds a task until it is lost."""
  with contextlib.closing(of), contextlib.suppress(registry.Lost):
    while True:
      HEARTBEAT(of, task)
      time.sleep(one_process.LEASE_S / 5)


def modules_of(made) -> dict:
  return {fact.key: made.read_weights(fact) for fact in made.registry.facts('module', number=PHASES)}


@pytest.mark.slow
def test_with_enough_time_it_is_the_run_of_tau_steps(machine, prepared, tmp_path):
  made = to_the_end(machine, prepared, tmp_path / 'timed', train=dict(phases=PHASES, phase_s=ENOUGH_S))
  plain = to_the_end(machine, prepared, tmp_path / 'plain')
  found, expected = ({f.key: f.sha256 for f in each.registry.facts('module', number=PHASES)} for each in (made, plain))
  assert found == expected
  tau = made.run.settings.train.steps_per_phase
  notes = [fact.meta[path_steps.STEPS] for fact in made.registry.facts('checkpoint', ['3'])]
  assert notes == [[made.run.settings.pretrain.steps + phase * tau, tau] for phase in range(PHASES)]
  assert all(path_steps.STEPS not in fact.meta for fact in plain.registry.facts('checkpoint'))
  for each in (made, plain):
    one_process.close(each)


class Scripted(path_steps.Clock):
  """Ends phases after numbers of dispatches that nobody can foresee: replays, too, would be told others."""

  script = itertools.cycle(DISPATCHES)

  def __init__(self, seconds, is_warm):
    super().__init__(seconds, is_warm)
    self.most = next(self.script)

  def is_over(self):
    return self.dispatches >= self.most


@pytest.fixture(scope='module')
def killed(machine, prepared, tmp_path_factory):
  """A run of unequal steps, one of them late, that was killed, and lost what it held; its sections of the config."""
  sections = {'checkpoint': dict(state_every_phases=PHASES, every_steps=2)}
  sections |= {'train': dict(phases=PHASES, phase_s=ENOUGH_S), 'outer': dict(quorum=0.75, grace_s=1.0)}
  kills = ['after complete train 2 0', 'before complete train 3 1']
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(path_steps, 'Clock', Scripted)
    made = to_the_end(machine, prepared, tmp_path_factory.mktemp('killed') / 'run', kills, slow='1', **sections)
  yield made, sections
  one_process.close(made)


def test_a_killed_run_of_unequal_steps_is_the_reference_given_its_facts(killed):
  made, _ = killed
  checkpoints = made.registry.facts('checkpoint')
  taken = {(int(fact.key), fact.number): path_steps.of_fact(made, fact).taken for fact in checkpoints}
  assert len({*taken.values()}) > 1
  assert [fact[1:3] for fact in checkpoints if pieces.LATE in fact.meta] == [('1', 0)] and taken[1, 0] == 0
  replayed = [fact.meta['replay'] for fact in checkpoints if 'replay' in fact.meta]
  assert replayed and not any(replay['differing'] for replay in replayed)
  check_with_reference(made, taken, late={0: [1]})


def test_a_run_that_follows_its_decisions_has_the_same_bits(killed, machine, prepared, tmp_path, caplog):
  made, sections = killed
  decided = one_process.decisions_of(made, tmp_path)
  again = to_the_end(machine, prepared, tmp_path / 'again', decided=decided, **sections)
  assert decisions.compare(decided, again.registry)['differing'] == []
  assert 'versions of modules are those of the run, to the bit' in caplog.text
  assert decisions.of_facts(again.registry) == decided
  one_process.close(again)


def check_with_reference(made, taken, late):
  s, job, layout = made.run.settings, jobs.paths_job(made.run, 0), made.layout
  paths = layout.grid.num_paths
  modules, *_ = twin.train(
    job.base, base_state(job), job.data.batch, [range(paths)] * PHASES, job.weights(0).reshape(-1).tolist(),
    layout.grid, layout.levels, layout.owner, small.mean_loss(made.run.model, s.routing.prefix_tokens), s,
    s.decay_steps, taken=lambda path, phase: taken[path, phase],
    late=lambda phase: late.get(phase, ()),
  )  # fmt: skip
  steps, targets = PHASES * s.train.steps_per_phase, s.train.batch_size * s.model.seq_len
  tolerance = 1.33 * paths**0.5 * steps * small.EPS * (2 + s.inner.learning_rate * targets)
  found = modules_of(made)
  assert len(found) == len(modules)
  levels = {level.name: level for level in layout.levels}
  for (level, at), params in modules.items():
    key = module_store.module_key(levels[level], at)
    for name, expected in params.items():
      np.testing.assert_allclose(found[key][name], expected, rtol=0, atol=tolerance, err_msg=f'{key} {name}')


def base_state(job) -> dict:
  """AdamW's state after pretraining, as the reference has it."""
  adam, *_ = job.base_state.optimizer
  return {'m': dict(adam.mu), 'v': dict(adam.nu), 't': int(adam.count)}


def test_steps_are_those_of_the_facts_or_tau(machine, prepared, tmp_path):
  made = machine.begin(prepared, tmp_path / 'run', machine.settings).island(tmp_path / 'run')
  s = made.run.settings
  before, tau = s.pretrain.steps, s.train.steps_per_phase
  assert path_steps.planned(made, 1) == PathSteps(before + tau, tau)
  assert path_steps.share(made, PathSteps(7, tau)) == 1.0
  assert path_steps.share(made, PathSteps(7, 1)) == 1 / tau
  one_process.close(made)


def test_a_phase_that_is_trained_again_has_as_many_steps(machine, prepared, tmp_path):
  """Whether its result is still a fact, or was withdrawn: a module may contain it."""
  s = changed(machine.settings, train=dict(phase_s=ENOUGH_S))
  made = machine.begin(prepared, tmp_path / 'run', s).island(tmp_path / 'run')
  assert path_steps.decided(made, 1, 0, is_replay=False) is None
  sent = Fact('checkpoint', '1', 0, '', 'x', {'steps': [12, 4]})
  made.registry.put([sent])
  assert path_steps.decided(made, 1, 0, is_replay=False) == PathSteps(12, 4)
  assert made.registry.revoke(registry.Withdrawal([sent], 'malformed', 'outer'))
  assert path_steps.decided(made, 1, 0, is_replay=False) == PathSteps(12, 4)
  one_process.close(made)


def test_who_comes_late_trains_for_the_rest_of_the_phase_if_each_path_has_a_worker(machine, prepared, tmp_path):
  s = changed(machine.settings, train=dict(phase_s=60.0))
  made = machine.begin(prepared, tmp_path / 'run', s).island(tmp_path / 'run')
  of, paths = made.registry, range(made.layout.grid.num_paths)
  of.add_tasks(registry.NewTask('train', str(path), 3) for path in paths)
  for path in paths[:3]:
    of.beat(f'worker-{path}', 'worker', {})
  assert of.claim('worker-1', ['train'], ['1'])
  assert path_steps.seconds(made, 0, 3) == 60.0, 'a worker may train several paths, one after another'
  of.beat('worker-3', 'worker', {})
  assert path_steps.seconds(made, 1, 3) == 60.0, 'it is the first'
  time.sleep(0.01)
  assert 59.0 < path_steps.seconds(made, 0, 3) <= 59.99
  short = one_process.with_settings(made, train=dict(phase_s=1e-9))
  assert path_steps.seconds(short, 0, 3) == path_steps.SHORTEST_S
  assert path_steps.seconds(one_process.with_settings(made, train=dict(phase_s=0.0)), 0, 3) == 0.0
  time.sleep(one_process.LEASE_S)
  assert path_steps.seconds(made, 0, 3) == 60.0, 'all were away'
  one_process.close(made)


@pytest.fixture
def clock(monkeypatch) -> Clock:
  found = Clock()
  monkeypatch.setattr(path_steps, 'time', found)
  return found


def count_dispatches(clock, of: path_steps.Clock, seconds: float) -> int:
  """Of dispatches that take so long each, of which the first has just been queued."""
  for number in itertools.count(1):
    of.dispatched()
    if of.is_over() or number == 100:
      return number
    clock.now += seconds


@pytest.mark.parametrize('each_s, expected', [(1.0, 10), (3.0, 3), (4.9, 2), (20.0, 2)])
def test_a_phase_ends_with_the_last_dispatch_that_ends_in_time(each_s, expected, clock):
  assert count_dispatches(clock, path_steps.Clock(10.0, is_warm=True), each_s) == expected


def test_what_compiles_costs_no_time(clock):
  of = path_steps.Clock(10.0, is_warm=False)
  clock.now += 1000.0
  assert count_dispatches(clock, of, 1.0) == 10


def test_without_a_limit_the_time_is_never_over(clock):
  of = path_steps.Clock(0.0, is_warm=True)
  assert count_dispatches(clock, of, 1.0) == 100 and of.left() == 1.0
