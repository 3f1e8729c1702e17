"""A run that one owner joins and another leaves: others do not wait, and the same facts give the same bits."""

import contextlib
import json
import shutil

import one_process
import owners_run
import pytest
from owners_run import Member, OwnersRun

from dipaco_jax.islands import final_files, members, monitor, owner_comparison, owner_workdir
from dipaco_jax.islands.island import Island
from dipaco_jax.processes import stopping
from dipaco_jax.registry.registry import Fact, Registry

pytestmark = pytest.mark.slow
SECTIONS = {'train': dict(phases=6), 'checkpoint': dict(state_every_phases=1, every_steps=2)}


@pytest.fixture(scope='module')
def one_device():
  with one_process.one_device():
    yield


def begin(folder, programs: dict) -> OwnersRun:
  owners_run.write_text(folder)
  return OwnersRun(folder, owners_run.settings(folder, **SECTIONS), programs)


@pytest.fixture(scope='module')
def changed(one_device, tmp_path_factory) -> OwnersRun:
  """A run that press joins after two phases, and that clinic leaves after two of press, all behind a gateway."""
  run = begin(tmp_path_factory.mktemp('changed'), {})
  with run.behind_gateway(*owners_run.OWNERS, 'press'), run.members() as processes:
    run.to('module', processes, 'shared/shared', 2)
    members.add(processes[0].island, 'press')
    processes.append(Member(run, 'press'))
    run.to('began', processes)
    since = processes[0].island.registry.facts('began')[0].meta['since']
    run.to('module', processes, 'shared/shared', since + 2)
    members.remove(processes[0].island, 'clinic')
    run.to('checkpoint', processes, '1', processes[0].island.registry.newest('checkpoint')['1'] + 1)
    final_files.write_grown_config(processes[0].island)
    monitor.LivePage(processes[0].island).write()
    run.page = (run.place / 'report.html').read_text()
    run.to('finished', processes)
    for process in processes[2:]:
      owner_workdir.complete(members.grow(process.island))
  return run


@contextlib.contextmanager
def facts_of(run: OwnersRun):
  facts = Registry(f'sqlite:///{run.place}/registry.db')
  with contextlib.closing(facts):
    yield facts


def test_others_train_on_and_versions_have_the_paths_that_facts_say(changed):
  with facts_of(changed) as facts:
    decided = members.read(facts)
    since, until = decided.since['press'], decided.until[0]
    assert 2 <= since < until < 6
    counts = {fact.number: fact.meta['paths'] for fact in facts.facts('module', ['shared/shared']) if fact.number}
    trained = {path: [f.number for f in facts.facts('checkpoint', [str(path)])] for path in range(3)}
  assert trained == {0: [*range(until)], 1: [*range(6)], 2: [*range(since, 6)]}
  assert counts == {v: 1 + (v <= until) + (v > since) for v in range(1, 7)}


def force(run: OwnersRun, decided: dict[str, list[Fact]]) -> None:
  """Inserts facts of another run, before training begins: who joins, since when, with which modules."""
  with facts_of(run) as facts:
    facts.put([*decided[members.JOINED], *decided[members.BEGAN]])
    facts.put([fact for fact in decided['module'] if fact.key == 'own/2' and '/0/' in fact.uri])


def test_the_same_facts_give_the_same_bits_with_processes_that_are_killed(changed, tmp_path):
  """Press is known before training begins, clinic leaves after as many phases, and all are killed now and then."""
  with facts_of(changed) as facts:
    decided = {kind: facts.facts(kind) for kind in (*members.MEMBERS, 'module')}
  until = decided[members.LEFT][0].meta['until']['0']
  run = begin(tmp_path, changed.programs)
  with run.members() as processes:
    run.to('prepared', processes)
  force(run, decided)
  lives, is_finished = 0, False
  while not is_finished:
    with run.members((*owners_run.OWNERS, 'press')) as processes:
      lives += 1
      registry = processes[0].island.registry
      for process in processes * 3:
        run.use_programs(process.island)
        if not process.turn():
          owners_run.schedule.advance(process.island)
        if registry.newest('checkpoint').get('0') == until - 1 and not registry.facts(members.LEFT):
          members.remove(processes[0].island, 'clinic')
      is_finished = bool(registry.facts('finished'))
    assert lives < 40
  assert lives > 3 and run.outcome() == changed.outcome()


def test_the_page_of_the_run_so_far_has_all_paths(changed):
  assert 'press' in changed.page


def test_the_report_names_who_joined_and_left(changed):
  with facts_of(changed) as facts:
    decided, [finished] = members.read(facts), facts.facts('finished')
  since, until = decided.since['press'], decided.until[0]
  report = json.loads((changed.place / 'report.json').read_text())
  assert report['owners']['press']['joined_in_phase'] == since + 1
  assert report['owners']['clinic']['left_after_phase'] == until
  assert report['owners']['press']['perplexity'] > 1 and report['perplexity'] > 1
  assert 1 <= report['best_version_by_path'][0] < until, 'the last version was not evaluated any more'
  assert report['best_version_by_path'][2] > since
  line = f'press joined in phase {since + 1} of 6'
  assert line in finished.meta['changes'] and line in (changed.place / 'report.html').read_text()
  rows = [json.loads(line) for line in (changed.place / 'metrics.jsonl').read_text().splitlines()]
  changes = {row['phase']: (row.get('joined'), row.get('left')) for row in rows if row['kind'] == 'phase'}
  assert changes[since + 1][0] == ['press'] and changes[until + 1][1] == ['clinic']
  assert json.loads((changed.place / 'timeline.json').read_text())['owners'][0].startswith('clinic: has left')


def test_the_store_of_an_owner_that_joined_has_its_model(changed):
  from dipaco_jax.inference import trained_run

  loaded = trained_run.TrainedRun(str(changed.store('press')))
  assert loaded.settings.grid[0][1] == ('clinic', 'court', 'press')
  assert loaded.paths_here == [2]


def test_an_owner_that_joined_is_compared_with_a_model_of_as_many_phases(changed, tmp_path):
  """From a copy of its store, where its shared place and its text are not."""
  with facts_of(changed) as facts:
    since = members.read(facts).since['press']
  shutil.copytree(changed.store('press'), tmp_path / 'press')
  report = owner_comparison.compare(str(tmp_path / 'press'), stopping.Signals(lambda number: None))
  assert (report['owner'], report['paths'], report['first_phase']) == ('press', [2], since)
  about = report['by_path']['press']
  assert about['steps'] == (6 - since) * 4 and about['targets'] > 0 and min(about['perplexity'].values()) > 1


def test_a_run_of_which_owners_have_left_is_begun_again_in_its_stores(changed):
  """A command that is started again finds a finished run, not one of another config."""
  again = OwnersRun(changed.folder, changed.settings, changed.programs)
  for owner in ('', 'press', 'court'):
    island: Island = again.begin(owner)
    assert island.registry.facts('finished')
    one_process.close(island)
