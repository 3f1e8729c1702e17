"""Audits by replay: honest phases are equal to the bit, and every kind of cheating is found."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator

import cheater
import island_fixtures
import one_process
import pytest
import slow
from one_process import OWN_LEVELS, Faults, Machine, changed

from dipaco_jax.islands import (
  audit_facts,
  auditor,
  path_steps,
  schedule,
  screening_facts,
  state_facts,
  suspensions,
)
from dipaco_jax.islands.auditor import Auditor
from dipaco_jax.islands.island import Island
from dipaco_jax.islands.lease import Lease
from dipaco_jax.registry.registry import Fact, NewTask

pytestmark = pytest.mark.usefixtures('one_device')
one_device, machine, prepared = island_fixtures.one_device, island_fixtures.machine, island_fixtures.prepared
ALL = dict(fraction=1.0)
# Path 0 is honest, and path 1 in its second phase.
CHEATS = {
  (1, 0): 'scaled', (2, 0): 'flipped', (3, 0): 'other_text',
  (2, 1): 'stale', (3, 1): 'fewer_steps',
}  # fmt: skip

PUBLISHED = dict(state_every_phases=2)
THIN = dict(wire='thin', mix=0.25, closed_every=2)
ROUNDS = {
  'routing': dict(method='discriminative', router_fraction=0.2, rounds=1, phases_per_round=1),
  'train': dict(phases=2),
}
CONFIGS = {
  'own modules, published states': (OWN_LEVELS, {'train': dict(phases=4), 'checkpoint': PUBLISHED}),
  'own modules, a round of re-sharding': (OWN_LEVELS, ROUNDS),
  'sampled': (None, {'train': dict(phases=4, paths_per_phase=2)}),
  'fresh states': (None, {'inner': dict(keep_state=False), 'train': dict(phases=3)}),
  'thin, own modules': (OWN_LEVELS, {'outer': THIN, 'train': dict(phases=4), 'checkpoint': PUBLISHED}),
  'row weights, int8': (None, {'outer': dict(
    optimizer='sgd', learning_rate=1.0, rescale=False, row_weights=True, compress='int8'
  )}),
}  # fmt: skip


def train(machine: Machine, prepared: pathlib.Path, place: pathlib.Path, levels=None, **sections) -> Machine:
  """Trains all phases, with everything that an audit may need."""
  s = changed(machine.settings, levels, **sections)
  if {'routing', 'inner'} & sections.keys():  # its text is cut, or its base trained, otherwise
    place.mkdir()
    alone = machine.other(s)
  else:
    alone = machine.other(s).begin(prepared, place, s)
  alone.to_the_end(place, Faults(), end=one_process.TRAINED)
  return alone


@contextlib.contextmanager
def worker_of(machine: Machine, place: pathlib.Path, name: str, **audit) -> Iterator[Island]:
  """Another worker of a run that is trained, in which all phases are audited."""
  made = machine.island(place)
  settings = changed(made.run.settings, audit=ALL | audit)
  run = dataclasses.replace(made.run, settings=settings)
  run.__dict__.update(machine.programs)
  try:
    yield dataclasses.replace(made, run=run, name=name)
  finally:
    one_process.close(made)


def audit_all(island: Island) -> dict[tuple[int, int], Fact]:
  """Audits all phases of all paths that this worker may audit."""
  audit_facts.draw(island, {})
  queue, results = audit_facts.Queue(island), {}
  while task := queue.next():
    lease = Lease(island, 'worker', task)
    facts = Auditor().perform(island, task, lease)()
    island.registry.complete(task, facts)
    lease.close()
    schedule.schedule(island, facts)
    results[int(task.key), task.number] = facts[0]
  return results


def test_a_contribution_of_the_other_sign_is_found(machine, prepared, tmp_path):
  with cheater.installed({(2, 0): 'flipped'}):
    alone = train(machine, prepared, tmp_path / 'run', train=dict(phases=1))
  with worker_of(alone, tmp_path / 'run', 'second') as second:
    results = audit_all(second)
    assert {at: fact.meta['equal'] for at, fact in results.items()} == {(path, 0): path != 2 for path in range(4)}
    assert results[2, 0].meta['difference'] == pytest.approx(dict.fromkeys(('ends', 'low', 'high'), 2.0), rel=1e-3)


@pytest.mark.slow
def test_phases_of_unequal_steps_are_found_if_they_have_fewer_than_is_claimed(machine, prepared, tmp_path, monkeypatch):
  monkeypatch.setattr(path_steps.Clock, 'is_over', lambda clock: clock.dispatches == 2)
  with cheater.installed({(2, 0): 'fewer_steps'}):
    alone = train(machine, prepared, tmp_path / 'run', train=dict(phases=2, phase_s=1e6))
  monkeypatch.setattr(path_steps.Clock, 'is_over', lambda clock: clock.dispatches == 1)  # which an audit does not ask
  with worker_of(alone, tmp_path / 'run', 'second') as second:
    differing = {at for at, fact in audit_all(second).items() if fact.meta['equal'] is False}
    assert differing == {(2, 0), (2, 1)}  # which began with the state of the first


@pytest.mark.slow
def test_every_kind_of_cheating_is_found_and_no_honest_phase_is_accused(machine, prepared, tmp_path):
  with cheater.installed(CHEATS):
    alone = train(machine, prepared, tmp_path / 'run')
  with worker_of(alone, tmp_path / 'run', 'second') as second:
    results = audit_all(second)
    assert {at for at, fact in results.items() if fact.meta['equal'] is False} == {*CHEATS}
    assert {at for at, fact in results.items() if fact.meta['equal'] is True} == {(0, 0), (0, 1), (1, 1)}
    assert all(fact.meta['worker'] == 'all' and fact.meta['by'] == 'second' for fact in results.values())
    assert results[1, 0].meta['difference'] == pytest.approx(dict.fromkeys(('ends', 'low', 'high'), 2.0), rel=1e-3)
    assert results[2, 0].meta['difference'] == pytest.approx(dict.fromkeys(('ends', 'low', 'high'), 2.0), rel=1e-3)
    assert (results[1, 1].meta['phases'], results[1, 1].meta['differing']) == ([0, 1], [0])
    assert not suspensions.current(second.registry), 'nobody has confirmed it yet'
  with worker_of(alone, tmp_path / 'run', 'third') as third:
    confirmed = audit_all(third)
    assert confirmed.keys() == CHEATS.keys() and not any(fact.meta['equal'] for fact in confirmed.values())
    [suspension] = suspensions.current(third.registry).values()
    assert suspension.key == 'all' and 'second and third have computed other values of phase' in suspension.meta['why']
    with pytest.raises(suspensions.Suspended, match='all is suspended: second and third'):
      suspensions.heed(dataclasses.replace(third, name='all'))
    suspensions.heed(third)


@pytest.mark.slow
def test_a_tolerance_allows_small_differences_only(machine, prepared, tmp_path, monkeypatch):
  with cheater.installed({(1, 0): 'scaled'}):
    alone = train(machine, prepared, tmp_path / 'run', train=dict(phases=1))
  real = auditor.worker.inner_phase.run
  monkeypatch.setattr(auditor.worker.inner_phase, 'run', cheater.rounding_otherwise(real))
  with worker_of(alone, tmp_path / 'run', 'second', tolerance=0.01) as second:
    results = audit_all(second)
    assert [at for at, fact in results.items() if not fact.meta['equal']] == [(1, 0)]
    assert all(0 < x < 0.01 for x in results[0, 0].meta['difference'].values()), 'from which to derive a tolerance'
  with worker_of(alone, tmp_path / 'run', 'third') as third:  # compares digests
    third.registry.add_tasks([NewTask(audit_facts.CONFIRM, '0', 0)])
    result = audit_all(third)[0, 0]
    assert not result.meta['equal'] and all(0 < x < 0.01 for x in result.meta['difference'].values())


@pytest.mark.parametrize('name', slow.all_but(CONFIGS, 'nothing'))
def test_all_phases_of_an_honest_run_are_equal(name, machine, prepared, tmp_path):
  levels, sections = CONFIGS[name]
  alone = train(machine, prepared, tmp_path / 'run', levels, **sections)
  with worker_of(alone, tmp_path / 'run', 'second') as second:
    results = audit_all(second)
    trained = {(int(fact.key), fact.number) for fact in second.registry.facts('checkpoint')}
    assert results.keys() == trained and all(fact.meta['equal'] is True for fact in results.values())
    if 'checkpoint' in sections:
      assert any(state_facts.STATE in fact.meta for fact in results.values())


@pytest.mark.slow
def test_a_run_with_audits_that_nobody_can_do_ends_with_the_same_modules(machine, prepared, tmp_path):
  plain = train(machine, prepared, tmp_path / 'plain')
  audited = train(machine, prepared, tmp_path / 'audited', audit=ALL)
  modules = []
  for alone, place in ((plain, tmp_path / 'plain'), (audited, tmp_path / 'audited')):
    made = alone.island(place)
    modules.append({fact[:3]: fact.sha256 for fact in made.registry.facts('module')})
    facts = made.registry.facts('audited')
    one_process.close(made)
  assert modules[0] == modules[1]
  assert len(facts) == 8 and all('no worker that may do it is alive' in fact.meta['closed'] for fact in facts)


@pytest.mark.slow
def test_an_exclusion_that_no_other_worker_makes_is_found(machine, prepared, tmp_path, monkeypatch):
  real = screening_facts.judge

  def judge(island, path, *args):
    lies = island.name == 'all' and path == 1
    return real(island, path, *args) | ({'excluded': 'it was too long'} if lies else {})

  monkeypatch.setattr(screening_facts, 'judge', judge)
  alone = train(machine, prepared, tmp_path / 'run', train=dict(phases=1))
  with worker_of(alone, tmp_path / 'run', 'second') as second:
    results = audit_all(second)
    assert {at: fact.meta['levels'] for at, fact in results.items() if not fact.meta['equal']} == {
      (1, 0): [auditor.EXCLUSION]
    }
