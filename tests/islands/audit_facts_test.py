"""Audits as facts: who draws and does them, what follows from a result, and that none keeps a run from ending."""

import pytest
from one_process import made as one_made, with_settings

from dipaco_jax.islands import audit_facts, audit_history, audit_oversight, pieces, schedule, suspensions
from dipaco_jax.islands.audit_facts import AUDIT, AUDITED, CONFIRM, CONFIRMED
from dipaco_jax.registry.registry import Fact, NewTask, Task
from dipaco_jax.reports import audit_lines

made = one_made


@pytest.fixture
def audited(made):
  """A process of a run whose phases are all audited; paths 0 to 3 were trained by maker-0 to maker-3 for a phase."""
  of = with_settings(made, audit=dict(fraction=1.0), train=dict(phases=4))
  of.registry.put([checkpoint(path, 0) for path in range(4)])
  of.registry.mark_scheduled(of.registry.unscheduled())
  of.registry.complete(of.registry.claim('all', ['prepare']), [Fact('prepared', '', 0, '', '', {})])
  of.registry.mark_scheduled(of.registry.unscheduled())
  return of


def checkpoint(path: int, phase: int, **about) -> Fact:
  meta = {'worker': f'maker-{path}', 'holder': f'disk-{path}', 'objects': {}} | about
  return Fact(pieces.CHECKPOINT, str(path), phase, '', f'sha of {path} {phase}', meta)


def result(kind: str, is_equal: bool | None, by: str, digest: str = 'd', **about) -> Fact:
  about = {'by': by, 'worker': 'maker-1', 'levels': ['low'], 'differing': []} | about
  return audit_facts.result(Task(0, kind, '1', 0, 1, by, 0), 'sha of 1 0', is_equal, digest, about)


def put(of, *facts: Fact):
  of.registry.put(facts)
  schedule.schedule(of, facts)


def open_audits(of) -> set[tuple[str, str, int]]:
  return {(row['kind'], row['key'], row['number']) for row in audit_facts.open_tasks(of)}


def test_phases_are_drawn_with_their_probability_by_a_seed_that_is_random():
  drawn = [audit_facts.is_drawn('seed', path, phase, 0.2) for path in range(100) for phase in range(100)]
  assert sum(drawn) == pytest.approx(2000, abs=5 * (10_000 * 0.2 * 0.8) ** 0.5)
  other = [audit_facts.is_drawn('other', path, phase, 0.2) for path in range(100) for phase in range(100)]
  both = sum(a and b for a, b in zip(drawn, other, strict=True))
  assert both == pytest.approx(400, abs=5 * (10_000 * 0.04) ** 0.5)
  assert not any(audit_facts.is_drawn('seed', path, 0, 0.0) for path in range(100))
  assert all(audit_facts.is_drawn('seed', path, 0, 1.0) for path in range(100))


def test_the_seed_is_made_once_and_not_from_the_runs_seed(made, audited):
  seed = audit_facts.secret_seed(audited)
  assert seed == audit_facts.secret_seed(audited) and len(seed) == 32
  assert len(audited.registry.facts(audit_facts.SEED)) == 1


def test_nothing_is_drawn_without_audits(made):
  made.registry.put([checkpoint(0, 0)])
  audit_facts.draw(made, {})
  assert not audit_oversight.Overseer(made).look() and not open_audits(made)
  assert not made.registry.facts(audit_facts.SEED)


def test_an_audit_is_done_by_any_worker_but_the_one_that_trained(audited):
  drawn = {}
  audit_facts.draw(audited, drawn)
  assert open_audits(audited) == {(AUDIT, str(path), 0) for path in range(4)} and drawn == dict.fromkeys('0123', 0)
  may = lambda name, holder='': [  # noqa: E731
    path for path in '0123' if audit_facts.may_do(audited, AUDIT, path, 0, name, holder)
  ]
  assert may('other') == [*'0123'] and may('maker-1') == [*'023']
  assert may('other', 'disk-2') == [*'013'], 'a disk may have what a process of another name has trained'
  audited.registry.put([result(AUDIT, False, 'other')])
  assert not audit_facts.may_do(audited, CONFIRM, '1', 0, 'other')
  assert audit_facts.may_do(audited, CONFIRM, '1', 0, 'third')


def test_an_audit_that_only_a_worker_on_the_same_disk_could_do_is_closed(audited):
  audit_facts.draw(audited, {})
  audited.registry.put([checkpoint(0, 1, worker='begun again', holder='disk-0')])
  audited.registry.beat('begun again', 'worker', {})
  assert [row['key'] for row in audit_oversight.without_workers(audited)] == ['0']


def test_a_worker_owes_audits_in_the_share_that_is_set(made):
  of = with_settings(made, audit=dict(fraction=0.4))
  queue, due = audit_facts.Queue(of), []
  for _ in range(5):
    queue.note(Task(0, pieces.TRAIN, '0', 0, 1, 'all', 0))
    due.append(queue.is_due)
    if queue.is_due:
      queue.note(Task(0, AUDIT, '0', 0, 1, 'all', 0))
  assert due == [False, False, True, False, True]


def test_a_difference_needs_a_third_worker_who_decides(audited):
  put(audited, result(AUDIT, False, 'auditor'))
  assert open_audits(audited) == {(CONFIRM, '1', 0)} and not suspensions.current(audited.registry)
  put(audited, result(CONFIRM, False, 'third'))
  [suspension] = suspensions.current(audited.registry).values()
  assert suspension.key == 'maker-1' and suspension.meta['path'] == 1 and suspension.meta['phase'] == 0


def test_an_auditor_whom_the_third_contradicts_is_suspended(audited):
  put(audited, result(AUDIT, False, 'auditor'))
  put(audited, result(CONFIRM, True, 'third'))
  assert [*suspensions.current(audited.registry)] == ['auditor']


@pytest.mark.parametrize('tolerance, suspended', [(0.0, []), (0.1, ['maker-1'])])
def test_nobody_is_suspended_if_all_three_differ(tolerance, suspended, audited, caplog):
  of = with_settings(audited, audit=dict(fraction=1.0, tolerance=tolerance))
  put(of, result(AUDIT, False, 'auditor', 'one'))
  put(of, result(CONFIRM, False, 'third', 'two'))
  assert [*suspensions.current(of.registry)] == suspended
  assert ('maker-1, auditor and third all disagree' in caplog.text) == (not suspended)


def test_without_a_third_worker_both_are_named_and_nobody_is_suspended(audited, caplog):
  put(audited, result(AUDIT, False, 'auditor'))
  audited.registry.beat('maker-1', 'worker', {})
  audited.registry.beat('auditor', 'worker', {})
  facts = audit_oversight.settle(with_settings(audited, audit=dict(fraction=1e-9)))
  assert [fact.kind for fact in facts] == [CONFIRMED]
  schedule.schedule(audited, facts)
  assert 'maker-1 and auditor disagree on phase 1 of path 1, and no third worker has confirmed it' in caplog.text
  assert not suspensions.current(audited.registry)


def test_an_earlier_phase_that_differs_is_audited_too(audited):
  put(audited, result(AUDIT, True, 'auditor', differing=[2, 3]))
  assert open_audits(audited) == {(AUDIT, '1', 2)}


def test_a_run_waits_for_audits_that_a_live_worker_may_do_and_for_no_others(audited):
  audited.registry.beat('maker-1', 'worker', {})
  schedule.advance(audited)
  assert open_audits(audited) == {(AUDIT, path, 0) for path in '023'}, 'nobody but maker-1 is alive'
  [fact] = audited.registry.facts(AUDITED)
  assert fact.meta['equal'] is None and fact.meta['closed'] == 'no worker that may do it is alive'
  assert 'finish' not in audited.registry.counts()
  queue = audit_facts.Queue(audited)
  while task := queue.next():
    audited.registry.complete(task, [audit_facts.result(task, 'x', True, 'd', {'by': 'all', 'worker': 'maker'})])
  schedule.advance(audited)
  schedule.advance(audited)
  assert audited.registry.counts()['finish'] == {'ready': 1}


def test_the_monitor_gives_up_what_nobody_begins(audited, monkeypatch):
  seconds = [0.0]
  overseer = audit_oversight.Overseer(audited, lambda: seconds[0])
  audited.registry.beat('other', 'worker', {})
  assert not overseer.look() and len(open_audits(audited)) == 4
  seconds[0] = 1000.0
  assert len(overseer.look()) == 4 and not open_audits(audited)


def test_a_state_that_is_published_after_its_audit_is_compared_with_it(audited):
  overseer = audit_oversight.Overseer(audited)
  audited.registry.put(
    [result(AUDIT, True, 'auditor', state='good'), result(AUDIT, True, 'auditor', state='good')._replace(key='2')]
  )
  audited.registry.mark_scheduled(audited.registry.unscheduled())
  overseer.look()
  claims = {path: {'checkpoint': f'sha of {path} 0', 'worker': 'm', 'objects': []} for path in (1, 2)}
  audited.registry.put([Fact('state', '1', 0, '', 'bad', claims[1])])
  audited.registry.put([Fact('state', '2', 0, '', 'good', claims[2] | {'checkpoint': 'sha of 1 0'})])
  overseer.look()
  assert (CONFIRM, '1', 0) in open_audits(audited) and (CONFIRM, '2', 0) not in open_audits(audited)


def test_a_process_stops_when_it_is_suspended_and_may_begin_when_it_is_resumed(made):
  suspensions.heed(made)
  assert suspensions.suspend(made.registry, 'all', 'it lies', 'test')
  assert not suspensions.suspend(made.registry, 'all', 'again', 'test')
  with pytest.raises(suspensions.Suspended, match=r'all is suspended: it lies; .*owners resume all'):
    suspensions.heed(made)
  assert suspensions.resume(made.registry, 'all') and not suspensions.resume(made.registry, 'all')
  suspensions.heed(made)
  assert suspensions.suspend(made.registry, 'all', 'it lies again', 'test')
  assert [fact.number for fact in suspensions.current(made.registry).values()] == [1]


def test_a_report_names_what_was_contributed_since_the_last_good_audit(audited):
  of, registry = audited, audited.registry
  registry.put([checkpoint(1, phase) for phase in (1, 2, 3)])
  modules = [Fact('module', key, v, '', '', {}) for key in of.modules_of(1).values() for v in (1, 2, 3)]
  left_out = {'left_out': {'1': 'its worker maker-1 is suspended'}}
  registry.put([*modules, *(Fact('module', key, 4, '', '', left_out) for key in of.modules_of(1).values())])
  registry.put([result(AUDIT, True, 'auditor')])
  suspensions.suspend(registry, 'maker-1', 'it lies', 'test')
  figures = audit_history.figures(of)
  assert figures['audits']['equal'] == 1
  modules = {key: [2, 3] for key in of.modules_of(1).values()}
  assert figures['suspended'][0]['contributions'] == [{'path': 1, 'phases': [2, 3, 4], 'modules': modules}]
  lines = audit_lines.in_words(figures)
  assert lines[0].startswith('audits: 1 equal, 0 different, 0 given up')
  assert lines[1] == 'suspended: maker-1, by test: it lies'
  assert lines[2] == '  since its last good audit: path 1, phases 2-4, in versions 2-3 of ends/shared, low/0, high/1'


def test_without_audits_a_report_has_none_of_this(made):
  assert audit_history.figures(made) == {} and audit_lines.in_words({}) == []


def test_confirmations_that_lack_their_audit_do_nothing(audited):
  audited.registry.add_tasks([NewTask(CONFIRM, '1', 0)])
  put(audited, result(CONFIRM, False, 'third'))
  assert not suspensions.current(audited.registry)
