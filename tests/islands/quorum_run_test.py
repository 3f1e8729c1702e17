"""A whole run in which a path is late, with modules of its own that its worker evaluates and publishes."""

import json

import island_fixtures
import one_process
import pytest
from one_process import OWN_LEVELS, Faults, changed

from dipaco_jax.islands import monitor, pieces, worker
from dipaco_jax.islands.guard import Later

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('one_device')]
one_device, machine, prepared = island_fixtures.one_device, island_fixtures.machine, island_fixtures.prepared
LATE = ('1', 1), ('2', 1), ('2', 2)  # paths and phases


def test_a_run_with_late_paths_ends_and_is_computed_again(machine, prepared, tmp_path, monkeypatch, caplog):
  perform = worker.Worker.perform

  def performed(does, i, task, lease):
    if task.kind == 'train' and (task.key, task.number) in LATE and not i.decisions:
      raise Later('slow')
    return perform(does, i, task, lease)

  monkeypatch.setattr(worker.Worker, 'perform', performed)
  sections = dict(train=dict(phases=5), checkpoint=dict(state_every_phases=3), outer=dict(quorum=0.5, grace_s=4.0))
  s = changed(machine.settings, OWN_LEVELS, **sections)
  alone = machine.begin(prepared, tmp_path / 'run', s)
  alone.to_the_end(tmp_path / 'run', Faults(['after complete train 2 3']), far=tmp_path / 'run' / 'machines')
  made = alone.island(tmp_path / 'run')
  excluded = made.registry.facts('excluded')
  assert [fact[1:3] for fact in excluded if pieces.LATE in fact.meta] == [*LATE]
  assert len(excluded) == len(LATE)
  own = made.own_modules(2)
  digests = [made.registry.facts('module', own, version)[0].sha256 for version in range(6)]
  assert digests[1] == digests[2] == digests[3] and len({*digests}) == 4
  assert made.registry.facts('finished')
  [file] = (tmp_path / 'run' / 'machines').glob('*/report.json')
  report = json.loads(file.read_text())
  tau = s.train.steps_per_phase
  assert report['steps_by_path'] == [5 * tau, 4 * tau, 3 * tau, 5 * tau] and report['steps'] == round(4.25 * tau)
  rows = monitor.LivePage(made).make_rows()
  assert [row['phase'] for row in rows if row['kind'] == 'phase'] == [1, 2, 3, 4, 5]
  assert [row['excluded'].keys() for row in rows if 'excluded' in row] == [{'1', '2'}, {'2'}]
  decided = one_process.decisions_of(made, tmp_path)
  one_process.close(made)
  again = machine.begin(prepared, tmp_path / 'again', s)
  again.decisions = decided
  again.to_the_end(tmp_path / 'again', Faults())
  assert 'versions of modules are those of the run, to the bit' in caplog.text
