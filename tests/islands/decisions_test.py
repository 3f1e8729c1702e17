"""The decisions of a run: what facts.json holds, what it may be given to, and what an outer step leaves out by it."""

import dataclasses
import json
import math

import one_process
import pytest
from one_process import changed

from dipaco_jax.config import settings as settings_lib
from dipaco_jax.core.errors import InputError
from dipaco_jax.islands import decisions, outer_executor
from dipaco_jax.islands.path_steps import PathSteps
from dipaco_jax.registry.registry import Fact, Task

made = one_process.made
LATE = {'2': 'it was late'}


@pytest.fixture
def decided(made) -> decisions.Decisions:
  """Of a run with one version of a module, from which an executor has left out path 2, and the worker path 1."""
  made.registry.put(
    [
      Fact('module', 'low/0', 1, 'm', 'a' * 64, {'left_out': LATE | {'1': 'not finite'}}),
      Fact('excluded', '1', 0, '', '', {'why': 'not finite', 'worker': 'w'}),
      Fact('excluded', '2', 0, '', '', {'why': 'it was late', 'worker': 'w', 'executor': 'e'}),
      Fact('checkpoint', '2', 0, '', 'b', {'steps': [12, 4]}),
      Fact('checkpoint', '1', 0, '', 'c', {'steps': [12, 6], 'excluded': 'not finite'}),
    ]
  )
  return decisions.of_facts(made.registry)


def settings(made) -> settings_lib.Settings:
  """Of the run, as the first process was given them; a process has those of its devices."""
  return settings_lib.of_run(made.registry.facts('config')[0].meta['config'])


def write(made, file, **changes):
  file.write_text(json.dumps(decisions.to_json(made.registry) | changes))
  return str(file)


def test_they_are_read_as_they_were_written(made, decided, tmp_path):
  assert decisions.read(write(made, tmp_path / 'facts.json'), settings(made)) == decided
  assert decided.excluded == {(1, 0): 'not finite'}, 'what an executor leaves out is of one module'
  assert decided.steps == {(1, 0): PathSteps(12, 6), (2, 0): PathSteps(12, 4)}


def test_text_may_be_elsewhere_but_the_config_is_the_same(made, decided, tmp_path):
  file = write(made, tmp_path / 'facts.json')
  s = settings(made)
  decisions.read(file, dataclasses.replace(s, data=dataclasses.replace(s.data, train=('/elsewhere/*.txt',))))
  with pytest.raises(InputError, match=r'data.validation_fraction.*give the same --config'):
    decisions.read(file, changed(s, data=dict(validation_fraction=0.3)))
  other = changed(s, train=dict(batch_size=7))
  with pytest.raises(InputError, match=r'of a run with another config .*train.batch_size.*give the same --config'):
    decisions.read(file, other)


@pytest.mark.parametrize(
  'changes',
  [
    {'config': 3}, {'modules': [['low/0', 1]]}, {'steps': [[0, 0, 'x', 1]]}, {'excluded': None}, {'late': [[3, 0]]},
    {'steps': [[0, 0, math.inf, 1]]},
  ],
)  # fmt: skip
def test_a_damaged_file_is_one_line(changes, made, decided, tmp_path):
  with pytest.raises(InputError, match=r'is not the facts.json of a finished run, or damaged'):
    decisions.read(write(made, tmp_path / 'facts.json', **changes), settings(made))


def test_brackets_without_end_are_one_line(made, tmp_path):
  (tmp_path / 'facts.json').write_text('[' * 200_000)
  with pytest.raises(InputError, match='is not the facts'):
    decisions.read(str(tmp_path / 'facts.json'), settings(made))


@pytest.mark.parametrize('taken', [None, 0, -1, 7, 5])
def test_timed_phases_have_their_steps_or_are_late(taken, made, decided):
  s = changed(settings(made), train=dict(phase_s=1.0))
  tau, phases = s.train.steps_per_phase, range(s.train.phases)
  steps = {(path, phase): PathSteps(0, tau) for path in range(s.num_paths) for phase in phases}
  decisions.check_complete(decided._replace(steps=steps), s)
  assert tau == 6 and s.train.steps_per_dispatch == 2
  del steps[2, 1]
  steps |= {} if taken is None else {(2, 1): PathSteps(0, taken)}
  with pytest.raises(ValueError, match='how many of 6 steps path 2 took in phase 2'):
    decisions.check_complete(decided._replace(steps=steps), s)
  if taken == 0:
    late = {(2, 1): 'it was late'}
    decisions.check_complete(decided._replace(steps=steps, excluded=late, late={*late}), s)


def test_a_file_that_is_not_there_is_one_line(made, tmp_path):
  with pytest.raises(InputError, match=r'--replay=.*cannot be read: No such file'):
    decisions.read(str(tmp_path / 'facts.json'), settings(made))


def test_a_registry_says_the_same_once_its_run_is_finished(made, decided, tmp_path):
  url, s = f'sqlite:///{tmp_path}/registry.db', settings(made)
  with pytest.raises(InputError, match='its run is not finished'):
    decisions.read(url, s)
  made.registry.put([Fact('finished', '', 0, '', '', {})])
  (tmp_path / 'url').write_text(url)
  assert decisions.read(url, s) == decisions.read(f'file:{tmp_path}/url', s) == decided
  assert decisions.load(url) == decisions.load(write(made, tmp_path / 'facts.json'))
  with pytest.raises(InputError, match=r'cannot be read: No such file'):
    decisions.read(f'sqlite:///{tmp_path}/other.db', s)
  with pytest.raises(InputError, match=r'it has a password, which all users of the machine can read.*file:PATH') as e:
    decisions.read('postgresql://u:hidden@host/name', s)
  assert 'hidden' not in str(e.value)


def test_a_run_follows_one_file_from_its_beginning(made, decided, tmp_path):
  file = write(made, tmp_path / 'facts.json')
  with pytest.raises(InputError, match='this run was begun without it'):
    decisions.follow(made.registry, file, settings(made))
  assert decisions.follow(made.registry, '', settings(made)) is None


def test_a_replay_is_not_continued_without_its_file(made, decided, tmp_path):
  first, other = (write(made, tmp_path / name, note=name) for name in ('a.json', 'b.json'))
  made.registry.withdraw(Fact('diverged', 'resumed', 0, '', '', {}), made.registry.facts('module'), [])
  assert decisions.follow(made.registry, first, settings(made)) == decided
  assert decisions.follow(made.registry, first, settings(made)) == decided
  for file in (other, ''):
    with pytest.raises(InputError, match=r'this run was begun with --replay=.*a.json: give that, or another'):
      decisions.follow(made.registry, file, settings(made))


def test_an_outer_step_leaves_out_whom_the_run_has_left_out(made, decided):
  replay, task = dataclasses.replace(made, decisions=decided), Task(0, 'outer', 'low/0', 1, 1, 'w', 0)
  sent = {fact.key: fact for fact in made.registry.facts('checkpoint')}
  assert outer_executor.why_barred(replay, task, sent) == LATE, 'path 1 has sent nothing'
  assert outer_executor.why_barred(replay, task._replace(number=2), sent) == {}
  assert outer_executor.why_barred(made, task, sent) == {}


def test_versions_that_differ_are_named_the_first_first(made, decided, caplog):
  assert decisions.compare(decided, made.registry) == {'modules': 1, 'differing': []}
  other = decided._replace(modules=decided.modules | {('low/0', 1): 'z', ('ends/0', 3): 'y', ('high/0', 2): 'x'})
  found = decisions.compare(other, made.registry)['differing']
  assert found == [['low/0', 1], ['high/0', 2], ['ends/0', 3]]
  assert 'replay: 3 of 3 versions of modules differ from those of the run, first low/0 in version 1' in caplog.text


def test_versions_that_the_file_does_not_have_differ(made, decided):
  assert decisions.compare(decided._replace(modules={}), made.registry) == {'modules': 1, 'differing': [['low/0', 1]]}


def test_a_worker_excludes_what_it_excluded_and_not_what_it_had_sent_before(decided):
  both = decided._replace(modules=decided.modules | {('ends', 1): 'c' * 64})
  assert both.why_excluded(1, 0, ['low/0']) == 'not finite'
  assert both.why_excluded(1, 0, ['ends']) == '', 'that module has its contribution'
  assert both.why_excluded(2, 0, ['low/0']) == '', 'an executor left it out'
