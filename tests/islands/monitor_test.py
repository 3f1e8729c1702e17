"""The monitor: the objects that it deletes and keeps, the tasks that it reports as stuck, and its page."""

import numpy as np
import one_process
import pytest

from dipaco_jax.islands import island, lineage, monitor, run_history, schedule, state_facts
from dipaco_jax.registry.registry import Fact, NewTask

made = one_process.made
PATHS = '0123'


def test_failing_tasks_and_missing_roles_are_reported(made):
  made.registry.add_tasks([NewTask('outer', 'low/0', 1)])
  made.registry.release(made.registry.claim('worker-0', ['prepare']), error='OSError: no space')
  failing = 'prepare  0, claimed 1 times: OSError: no space'
  missing = [f'no process has the role {role}: start one' for role in ('outer', 'worker')]
  assert monitor.stuck(made) == '; '.join([failing, *missing])
  made.registry.beat('outer-0', 'outer', {})
  made.registry.beat('evaluator-0', 'evaluator', {})
  assert monitor.stuck(made) == f'{failing}; {missing[1]}'
  made.registry.beat('worker-0', 'worker', {})
  made.registry.complete(made.registry.claim('worker-0', ['prepare']), [])
  assert monitor.stuck(made) == ''


def test_a_failing_task_is_found_among_many(made):
  made.registry.add_tasks([*(NewTask('outer', str(i), 1) for i in range(1000)), NewTask('train', '0', 0)])
  made.registry.release(made.registry.claim('worker-0', ['train']), error='OSError: no space')
  assert 'train 0 0, claimed 1 times: OSError: no space' in monitor.stuck(made)


def test_a_role_that_fell_silent_is_missing(made, monkeypatch):
  made.registry.beat('worker-0', 'worker', {})
  assert monitor.stuck(made) == ''
  monkeypatch.setattr(monitor, 'SILENT_S', 0)
  assert monitor.stuck(made) == 'no process has the role worker: start one'


@pytest.mark.parametrize(
  'tasks, facts, expected',
  [
    ([('train', '0', 5)], [], 5),
    ([('train', '0', 5), ('outer', 'low/0', 5)], [], 4),
    ([('train', '0', 5), ('evaluate', '0', 4)], [], 3),
    ([('train', '0', 5)], [('module', 'low/0', 2)], 2),
    ([('train', '0', 5)], [('checkpoint', '0', 1)], 1),
    ([('piece', '0', 1)], [('piece', '1', 4)], 1),
    ([('piece', '0', 4)], [('piece', '1', 1)], 1),
  ],
)
def test_the_frontier_is_the_lowest_phase_that_is_open(tasks, facts, expected, made):
  made.registry.add_tasks([NewTask(*task) for task in tasks])
  made.registry.put([Fact(*fact, 'x', 'y', {}) for fact in facts])
  assert monitor.frontier(made) == expected


def test_a_registry_is_backed_up_before_anything_is_collected(made, monkeypatch):
  backups = monitor.Backups(made)
  assert backups.reached == -1
  backups.write_if_due(0)
  assert backups.reached == 0 and len(made.storage.names('registry_backups')) == 1
  backups.write_if_due(3)
  assert backups.reached == 0, 'so soon after the one before'
  backups.next = 0.0
  backups.write_if_due(0)
  assert len(made.storage.names('registry_backups')) == 1, 'nothing is reached'
  backups.write_if_due(3)
  assert backups.reached == 3 and len(made.storage.names('registry_backups')) == 2


def test_a_run_does_not_end_for_its_backup(made, monkeypatch, caplog):
  def fail(*_):
    raise OSError('no space')

  monkeypatch.setattr(monitor.registry_backup, 'write', fail)
  backups = monitor.Backups(made)
  for reached in (1, 2):
    backups.write(reached)
  assert backups.reached == 2, 'or nothing would be deleted from a full disk'
  assert caplog.text.count('the registry was not backed up (no space)') == 1


def test_a_role_that_has_stopped_is_missing(made):
  made.registry.beat('worker-0', 'worker', {'task': ''})
  assert monitor.stuck(made) == ''
  made.registry.beat('worker-0', 'worker', {'task': '', 'stopped': True})
  assert monitor.stuck(made) == 'no process has the role worker: start one'


def test_a_monitor_that_ends_says_so(made):
  with monitor.saying_stopped(made):
    made.registry.beat(made.name, 'monitor', {'task': '', 'stuck': ''})
  [role] = made.registry.roles()
  assert role['about']['stopped']


# -- garbage


class Objects:
  """A run's objects up to a version, and its evaluations, by which one version is the best."""

  def __init__(self, made: island.Island, phases: int, best: int, published=range(99)):
    """States of some phases are published."""
    self.made = made
    self.modules = [self.write_modules(version) for version in range(phases + 1)]
    self.paths, self.inner = [], []
    for phase in range(phases):
      x = {'x': np.array([phase])}
      levels = {key: made.write_object(f'paths/{phase}/{key}-low', x) for key in '0123'}
      facts = [Fact('checkpoint', key, phase, '', '', {'objects': {'low': levels[key]}}) for key in '0123']
      made.registry.put(facts)
      for fact in facts if phase in published else ():
        state_facts.publish(made, fact, x)
      losses = {'loss': abs(best - phase - 1) + 1.0, 'targets': 1.0}
      made.registry.put([Fact('evaluation', key, phase + 1, '', '', losses) for key in '0123'])
      self.paths.append({name for name, _ in levels.values()})
      states = made.registry.facts('state', number=phase)
      self.inner.append({fact.meta['objects'][0][0] for fact in states})

  def write_modules(self, version: int) -> set[str]:
    x, keys = {'x': np.array([version])}, self.made.all_modules()
    facts = [Fact('module', key, version, *self.made.write_object(f'modules/{version}/{key}', x), {}) for key in keys]
    self.made.registry.put(facts)
    return {fact.uri for fact in facts}

  def left(self) -> set[str]:
    return set(self.made.storage.names(island.OBJECTS))


def test_what_is_of_use_is_kept(made):
  """Versions that early stopping points at, versions to come, and the inner state that each path goes on from."""
  objects, collector = Objects(made, phases=2, best=1), monitor.Collector(made)
  collector.collect(1)
  everything = objects.left() | objects.modules[0]
  assert everything - objects.left() == objects.modules[0]
  collector.collect(2)
  assert everything - objects.left() == objects.modules[0] | objects.paths[0] | objects.inner[0]
  collector.finish()
  assert objects.left() == objects.modules[1] | objects.modules[2]


def test_the_inner_state_before_goes_with_the_next(made):
  of = one_process.with_settings(made, train=dict(phases=4))
  objects, collector = Objects(of, phases=4, best=4), monitor.Collector(of)
  collector.collect(3)
  left = objects.left()
  assert not left & (objects.inner[1] | objects.paths[0] | objects.paths[1]) and objects.inner[2] <= left
  assert objects.modules[2] <= left and not left & objects.modules[1]
  collector.collect(4)
  assert not objects.left() & (objects.inner[2] | objects.modules[2]) and objects.inner[3] <= objects.left()


def test_weights_for_a_replay_stay_until_the_next_published_state(made):
  """States are published after phases 0, 3 and 6; path 3 is excluded in phase 5, and begins anew."""
  of = one_process.with_settings(made, train=dict(phases=9), checkpoint=dict(state_every_phases=3))
  objects, collector = Objects(of, phases=9, best=9, published=(0, 3, 6)), monitor.Collector(of)
  of.registry.put([Fact('excluded', '3', 5, '', '', {'why': 'bad', 'worker': 'w'})])
  versions = lambda: [v for v, names in enumerate(objects.modules) if names <= objects.left()]  # noqa: E731
  collector.collect(3)
  assert versions() == [*range(1, 10)] and objects.inner[0] <= objects.left(), 'a replay begins with phase 1'
  collector.collect(4)
  assert versions() == [*range(3, 10)], 'early stopping points at 3, a replay begins with phase 4'
  collector.collect(6)
  assert versions() == [4, 5, 6, 7, 8, 9], 'paths 0, 1 and 2 go on from the state of phase 3'
  of_path_3 = {fact.meta['objects'][0][0] for fact in of.registry.facts('state', ['3'], 3)}
  assert objects.inner[3] - of_path_3 <= objects.left() and not objects.left() & (objects.inner[0] | of_path_3)
  collector.collect(7)
  assert versions() == [6, 7, 8, 9], 'early stopping points at 6'
  collector.finish()
  assert objects.left() == objects.modules[7] | objects.modules[8] | objects.modules[9]


def test_what_an_open_audit_needs_stays_until_it_is_done(made):
  """States are published after phases 0, 3 and 6; phase 5 of path 2 is audited, which begins with phase 4."""
  sections = dict(train=dict(phases=9), checkpoint=dict(state_every_phases=3), audit=dict(fraction=1e-9))
  of = one_process.with_settings(made, **sections)
  objects, collector = Objects(of, phases=9, best=9, published=(0, 3, 6)), monitor.Collector(of)
  of.registry.mark_scheduled(of.registry.unscheduled(10_000))
  of.registry.add_tasks([NewTask('audit', '2', 5)])
  collector.collect(9)
  needed = {
    fact.uri
    for version in (4, 5)
    for key in of.modules_of(2).values()
    for fact in of.registry.facts('module', [key], version)
  }
  [state] = of.registry.facts('state', ['2'], 3)
  needed |= {name for name, _ in state.meta['objects']}
  contributions = {name for name, _ in of.registry.facts('checkpoint', ['2'], 5)[0].meta['objects'].values()}
  assert needed | contributions <= objects.left()
  others = {name for name, _ in of.registry.facts('checkpoint', ['1'], 5)[0].meta['objects'].values()}
  assert contributions and others and not others & objects.left()
  of.registry.complete(of.registry.claim('other', ['audit']), [])
  collector.next = 8
  collector.collect(9)
  assert not needed & objects.left() and not contributions & objects.left()


def test_without_kept_states_no_weights_stay_for_a_replay(made):
  sections = dict(train=dict(phases=9), checkpoint=dict(state_every_phases=3), inner=dict(keep_state=False))
  of = one_process.with_settings(made, **sections)
  objects, collector = Objects(of, phases=9, best=9, published=()), monitor.Collector(of)
  collector.collect(5)
  assert not objects.left() & set().union(*objects.modules[:4]), 'early stopping points at 4'


def test_an_older_version_goes_when_early_stopping_points_at_a_newer_one(made):
  of = one_process.with_settings(made, train=dict(phases=4))
  objects, collector = Objects(of, phases=4, best=3), monitor.Collector(of)
  for end in range(1, 5):
    collector.collect(end)
  collector.finish()
  assert objects.left() == objects.modules[3] | objects.modules[4]


def put_phase(of, phase: int):
  """Puts the facts of a phase: a row of two steps for each path, all modules, all losses on hold-outs."""
  about = {'timed_s': 2.0, 'timed_steps': 1, 'holdout_loss': 3.0, 'started': 0.0, 'ended': 4.0}
  rows = [[2, 3.0 + phase, 1.0, 1e-3, 2, 0]]
  of.registry.put([Fact('checkpoint', path, phase, '', '', about | {'rows': rows, 'objects': {}}) for path in PATHS])
  of.registry.put([Fact('module', module, phase + 1, '', '', {}) for module in of.all_modules()])
  losses = {'loss': 2.5, 'targets': 10.0}
  of.registry.put([Fact('evaluation', path, phase + 1, '', '', losses) for path in PATHS])


def test_rows_need_no_file_of_this_machine(made):
  """A monitor that starts again far from the workdir has the registry, and nothing that the stages have left."""
  put_phase(made, 0)
  assert not (made.run.workdir / 'stages').exists()
  page = monitor.LivePage(made)
  rows = page.make_rows()
  assert [row['kind'] for row in rows] == ['step'] * 4 + ['phase'] and page.phases == 1
  assert rows[-1]['loss_by_path'] == [3.0] * 4 and rows[-1]['holdout_loss_by_path'] == [2.5] * 4
  assert page.make_rows() == rows


def test_a_phase_that_cannot_be_read_is_counted_once(made, monkeypatch):
  put_phase(made, 0)
  page, real = monitor.LivePage(made), run_history.phase_row

  def failing(*args):
    raise OSError('the registry is away')

  monkeypatch.setattr(run_history, 'phase_row', failing)
  for _ in range(2):
    with pytest.raises(OSError):
      page.make_rows()
  monkeypatch.setattr(run_history, 'phase_row', real)
  rows = page.make_rows()
  assert [row['kind'] for row in rows] == ['step'] * 4 + ['phase']
  put_phase(made, 1)
  assert [row['phase'] for row in page.make_rows() if row['kind'] == 'phase'] == [1, 2]
  assert page.pointers.version == [1] * 4


def test_a_state_that_is_published_late_ends_what_is_kept_for_it(made):
  """And what a killed worker has left of one."""
  of = one_process.with_settings(made, train=dict(phases=9), checkpoint=dict(state_every_phases=3))
  objects, collector = Objects(of, phases=9, best=9, published=(0,)), monitor.Collector(of)
  left = of.write_object('states/2/1-0', {'x': np.array(1)})[0]
  of.storage.write('objects/states/2/.DS_Store', b'of a file manager')
  collector.collect(6)
  assert objects.inner[0] | {left} | objects.modules[1] <= objects.left()
  for key in '0123':
    state_facts.publish(of, of.registry.facts('checkpoint', [key], 3)[0], {'x': np.array(3)})
  collector.collect(7)
  assert not objects.left() & (objects.inner[0] | {left} | objects.modules[1] | objects.modules[3])
  assert objects.modules[4] <= objects.left() and len(of.storage.names('objects/states')) == 4 + 1


@pytest.mark.parametrize(
  'fact',
  [
    ('checkpoint', 'abc', 0),
    ('checkpoint', '00', 0),
    ('checkpoint', '4', 0),
    ('checkpoint', '0', -1),
    ('checkpoint', '0', 10**6),
    ('state', '²', 0),
    ('evaluation', '-1', 1),
    ('excluded', '', 0),
    ('piece', '7', 3),
    ('module', 'nosuch/0', 1),
    ('module', 'low/9', 1),
    ('module', 'low', 1),
  ],
)
def test_a_fact_that_no_process_makes_is_named_once_and_passed_over(fact, made, caplog):
  good = Fact('checkpoint', '0', 0, '', 'x', {'objects': {}})
  made.registry.put([Fact(*fact, '', 'x', {}), good])
  collector = monitor.Collector(made)
  for _ in range(2):
    schedule.advance(made)
    collector.collect(2)
    lineage.costs(made)
    schedule.waits(made)
  assert made.registry.facts('checkpoint', number=0) == [good] and made.registry.newest('checkpoint') == {'0': 0}
  assert not made.registry.unscheduled()
  named = [record for record in caplog.records if 'is malformed and is passed over' in record.message]
  assert len(named) == 1 or (not named and fact[2] in (-1, 10**6)), caplog.text


def test_metadata_that_are_none_are_passed_over(made, caplog):
  made.registry.put([Fact('evaluation', '1', 1, '', '', ['loss'])])
  assert made.registry.facts('evaluation', number=1) == []
  assert 'evaluation 1 1' in caplog.text
