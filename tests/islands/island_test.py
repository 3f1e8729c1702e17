"""Parts of islands by themselves: names, the question whether all is done, an executor's file, whose workdir it is."""

import dataclasses
import os
import platform

import numpy as np
import one_process
import pytest
import tiny_run
from one_process import Machine, changed, close

from dipaco_jax.core import settings as settings_lib
from dipaco_jax.islands import island, outer_executor, registry, run_history, screening_facts
from dipaco_jax.islands.registry import Fact, NewTask
from dipaco_jax.reports import run_report
from dipaco_jax.storage import lock

BOUNDS = screening_facts.Bounds({'low': 100.0}, 1.0, 10.0)


@pytest.fixture
def config(tmp_path) -> settings_lib.Settings:
  return one_process.two_phases(tmp_path)


def test_what_made_an_object():
  assert island.maker('objects/paths/7/12-low-0123456789abcdef.safetensors') == ('train', '12', 7)
  assert island.maker('objects/paths/7/12-step4-0123456789abcdef.safetensors') == ('train', '12', 7)
  assert island.maker('objects/modules/3/low/0-11-0123456789abcdef.safetensors') == ('outer', 'low/0-11', 3)
  assert island.maker('objects/modules/3/all/shared-0123456789abcdef.safetensors') == ('outer', 'all/shared', 3)
  for name in ('objects/modules/0/low-0123456789abcdef.safetensors', 'shards/0', 'routing/0', 'base', 'stages'):
    assert island.maker(name) == ('prepare', '', 0)
  assert island.maker('shards/2') == island.maker('routing/2') == ('reroute', '', 2)


@pytest.mark.parametrize('after', [0, 1])
def test_idle_is_asked_of_one_moment(after, tmp_path):
  """A task is completed before or after the first statement, and its fact scheduled before the next."""
  db = registry.Registry(f'sqlite:///{tmp_path}/registry.db')
  db.add_tasks([NewTask('train', '0', 0)])
  task, fact, asked = db.claim('a', ['train']), Fact('checkpoint', '0', 0, '', '', {}), []
  rows = db._db.rows

  def slowly(*args):
    asked.append(args)
    if len(asked) == 1 + after:
      db.complete(task, [fact])
    found = rows(*args)
    if len(asked) == 1 + after:
      db.add_tasks([NewTask('outer', 'x', 1)])
      db.mark_scheduled([fact])
    return found

  db._db.rows = slowly
  assert not db.is_idle()
  db.close()


@pytest.mark.parametrize('damage', [tiny_run.flip_a_bit, lambda f: os.truncate(f, 40), lambda f: os.truncate(f, 0)])
def test_a_damaged_sum_is_summed_anew(damage, tmp_path):
  file, old = tmp_path / 'x.sum', {'w': np.ones(100, np.float32)}
  kept = outer_executor.Partial(file, old, {}, BOUNDS)
  kept.add('3', 0.5, {'w': np.zeros(100, np.float32)})
  kept.save()
  found = outer_executor.Partial(file, old, {}, BOUNDS)
  assert found.squares == {'3': 25.0} and (found.sum.mean()['w'] == 1).all()
  damage(file)
  assert outer_executor.Partial(file, old, {}, BOUNDS).squares == {}


def test_a_workdir_that_another_process_holds_is_waited_for(config, tmp_path):
  made = Machine(config, {}).island(tmp_path)
  with lock.hold(tmp_path), pytest.raises(island.Busy, match='in use by process'), made.hold_workdir():
    pass
  with made.hold_workdir(), pytest.raises(ValueError, match='its own'):
    raise ValueError('its own')
  close(made)


def test_another_config_is_refused(config, tmp_path):
  close(Machine(config, {}).island(tmp_path))
  other = Machine(changed(config, train=dict(phases=3)), {})
  with pytest.raises(ValueError, match=r'config.train.phases was 2, is 3\): use another database'):
    other.island(tmp_path)
  with pytest.raises(ValueError, match=r'config.train.phases was 2, is 3\): use another --workdir'):
    other.island(tmp_path, url=f'sqlite:///{tmp_path}/new.db')


def test_a_place_that_another_registry_knows_is_refused(config, tmp_path):
  machine = Machine(config, {})
  close(machine.island(tmp_path))
  with pytest.raises(ValueError, match='another --registry knows: name that one, or another --workdir'):
    machine.island(tmp_path, url=f'sqlite:///{tmp_path}/new.db')
  close(machine.island(tmp_path))


def test_who_has_other_libraries_is_told(config, tmp_path, monkeypatch, caplog):
  machine = Machine(config, {})
  close(machine.island(tmp_path))
  assert 'begun with' not in caplog.text
  monkeypatch.setattr(run_report, 'versions', lambda: {'python': '3.99'})
  close(machine.island(tmp_path))
  assert f'python {platform.python_version()}, unlike here' in caplog.text


def test_replicas_of_a_model_point_at_one_version(config, tmp_path):
  """As `main` does; what each measured is told apart."""
  levels = tuple((name, pattern, tuple(axis for axis in axes if axis == 'a')) for name, pattern, axes in config.levels)
  made = Machine(dataclasses.replace(config, levels=levels), {}).island(tmp_path)
  targets = [10.0, 30.0, 20.0, 5.0]
  pointers = run_history.Pointers(made)
  for version, losses in ((1, [3.0, 2.0, 5.0, 5.0]), (2, [1.0, 2.5, 6.0, 4.5])):
    found = (
      Fact('evaluation', str(path), version, '', '', {'loss': loss, 'targets': targets[path]})
      for path, loss in enumerate(losses)
    )
    made.registry.put(list(found))
    assert pointers.add(version) == losses
  assert (pointers.version, pointers.loss) == ([2, 2, 1, 1], [2.125, 2.125, 5.0, 5.0])
  close(made)
