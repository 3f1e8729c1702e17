"""An island: names of objects and modules, reading and writing of objects, and the lock of the workdir."""

import dataclasses
import pathlib

import made_run
import numpy as np
import one_process
import pytest
import tiny_run

from dipaco_jax.config import settings
from dipaco_jax.data import tokenizer_files
from dipaco_jax.islands import island
from dipaco_jax.registry.registry import Fact, Task
from dipaco_jax.storage import files, lock

made = one_process.made


def test_the_name_of_an_object_tells_the_task_that_made_it():
  assert island.maker('objects/paths/7/12-low-0123456789abcdef.safetensors') == ('train', '12', 7)
  assert island.maker('objects/paths/7/12-step4-0123456789abcdef.safetensors') == ('train', '12', 7)
  assert island.maker('objects/modules/3/low/0-11-0123456789abcdef.safetensors') == ('outer', 'low/0-11', 3)
  assert island.maker('objects/outer/3/low/0-11-0123456789abcdef.safetensors') == ('outer', 'low/0-11', 3)
  assert island.maker('objects/modules/3/all/shared-0123456789abcdef.safetensors') == ('outer', 'all/shared', 3)
  for name in ('objects/modules/0/low-0123456789abcdef.safetensors', 'shards/0', 'routing/0', 'base', 'stages'):
    assert island.maker(name) == ('prepare', '', 0)
  assert island.maker('shards/2') == island.maker('routing/2') == ('reroute', '', 2)


def test_tasks_are_shown_with_the_names_of_paths(made):
  grid = tuple((axis, ('north', 'south')) for axis, _ in made.run.settings.grid)
  s = dataclasses.replace(made.run.settings, grid=grid)
  named = dataclasses.replace(made, run=dataclasses.replace(made.run, settings=s))
  for kind, key, of_numbers, of_names in (
    ('train', '1', 'train 1 7', f'train {named.layout.grid.path_name(1)} 7'),
    ('outer', 'low/0', 'outer low/0 7', 'outer low/0 7'),
    ('prepare', '', 'prepare 7', 'prepare 7'),
  ):
    task = Task(0, kind, key, 7, 1, 'me', 0)
    assert (made.words(task), named.words(task)) == (of_numbers, of_names)
  assert 'south' in named.layout.grid.path_name(1)


def test_a_workdir_that_another_process_holds_is_waited_for(made, tmp_path):
  with lock.hold(tmp_path), pytest.raises(island.Later, match='in use by process'), made.hold_workdir():
    pass
  with made.hold_workdir(), pytest.raises(ValueError, match='its own'):
    raise ValueError('its own')


@pytest.mark.parametrize('kind', ['sentencepiece', 'bytes'])
def test_a_tokenizer_is_fetched_with_all_its_files(made, kind, tmp_path):
  given = {tokenizer_files.MODEL: made_run.tokenizer_bytes()}
  if kind == 'bytes':
    config = settings.Tokenizer(kind=kind, vocab_size=300)
    given = dict(tokenizer_files.train([pathlib.Path(__file__).read_text()], config))
    given |= {'chat_template.jinja': b'{{ messages }}', 'generation_config.json': b'{"eos_token_id": [3, 4]}'}
  for name, content in given.items():
    files.write_file(made.run.workdir / name, content)
  made.registry.put([Fact('prepared', '', 0, '', '', {'tokenizer': made.publish_tokenizer()})])
  far = dataclasses.replace(made, run=dataclasses.replace(made.run, workdir=tmp_path / 'far'))
  far.run.workdir.mkdir()
  (far.run.workdir / next(iter(given))).write_bytes(b'something else')
  far.fetch_tokenizer()
  assert {file.name: file.read_bytes() for file in far.run.workdir.iterdir()} == given
  assert far.run.tokenizer.files == given


def test_other_errors_of_the_lock_are_raised(made, monkeypatch):
  def fail(workdir):
    raise ValueError('a bug')

  monkeypatch.setattr(lock, 'hold', fail)
  with pytest.raises(ValueError, match='a bug'), made.hold_workdir():
    pass


def test_a_module_and_its_paths_name_each_other(made):
  for module in made.all_modules():
    paths = [path for path in range(4) if module in made.modules_of(path).values()]
    assert made.paths_through(module) == paths and paths
  assert [made.modules_of(path)['low'] for path in range(4)] == ['low/0', 'low/0', 'low/1', 'low/1']


def test_equal_arrays_are_one_object(made):
  x = {'x': np.arange(3)}
  assert made.write_object('paths/0/1-low', x) == made.write_object('paths/0/1-low', {'x': np.arange(3)})
  assert len(made.storage.names(island.OBJECTS)) == 1
  assert made.write_object('paths/0/1-low', {'x': np.arange(4)}) != made.write_object('paths/0/1-low', x)


@pytest.mark.parametrize('damage', [tiny_run.flip_a_bit, lambda file: file.unlink()])
def test_reading_a_damaged_or_missing_object_raises_gone(damage, made):
  name, sha256 = made.write_object('paths/0/1-low', {'x': np.arange(3)})
  assert made.read_object(name, sha256)['x'].tolist() == [0, 1, 2]
  damage(made.run.workdir / name)
  with pytest.raises(island.Gone) as raised:
    made.read_object(name, sha256)
  assert island.maker(raised.value.name) == ('train', '1', 0)
