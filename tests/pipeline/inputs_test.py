"""A resumed run requires the same content of text, tokenizer and model."""

import dataclasses
import json
import pathlib
import shutil

import bits
import corpora
import made_run
import numpy as np
import pytest
import safetensors.numpy

from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.pipeline import input_records, inputs, run as run_lib, stage_records
from dipaco_jax.storage import publishing


@pytest.fixture
def run(tmp_path):
  """A run of two files of text with a tokenizer and a model that are given; no stage is done."""
  for folder in ('text', 'more', 'model'):
    (tmp_path / folder).mkdir()
  for number, name in enumerate(('text/a.jsonl', 'text/b.jsonl', 'more/v.jsonl')):
    (tmp_path / name).write_bytes(corpora.lines(50 + number))
  (tmp_path / 'model' / 'config.json').write_text('{}')
  (tmp_path / 'model' / 'tokenizer.model').write_bytes(made_run.tokenizer_bytes())
  (tmp_path / 'model' / 'model.safetensors').write_bytes(safetensors.numpy.save({'x': np.zeros(9)}))
  data = {'train': f'{tmp_path}/text/*', 'validation': f'{tmp_path}/more/*'}
  tokenizer = {'model_file': f'{tmp_path}/model/tokenizer.model'}
  s = settings.from_dict({'data': data, 'tokenizer': tokenizer})
  s = dataclasses.replace(s, pretrain=dataclasses.replace(s.pretrain, init=f'{tmp_path}/model'))
  made = run_lib.unattended(tmp_path / 'run', s)
  yield made
  made.metrics.close()


def finish(run: run_lib.Run, *stages: str):
  for stage in stages:
    inputs.note_inputs(run, stage)
    stage_records.write_record(run.workdir, run.settings, stage, 1.0, {})


def check(run: run_lib.Run):
  inputs.check_inputs(run.workdir, run.settings)


@pytest.mark.parametrize(
  'file, field',
  [
    ('text/a.jsonl', 'data.train'),
    ('more/v.jsonl', 'data.validation'),
    ('model/tokenizer.model', 'tokenizer.model_file'),
    ('model/model.safetensors', 'pretrain.init'),
  ],
)
def test_what_is_another_by_now_is_rejected_and_what_is_gone_is_not(run, tmp_path, file, field):
  finish(run, 'tokenize', 'pretrain')
  check(run)
  before = (tmp_path / file).read_bytes()
  bits.rewrite_in_place(tmp_path / file)
  with pytest.raises(InputError) as info:
    check(run)
  assert str(info.value).startswith(f'config.{field}: {tmp_path}/{file} has changed since stage ')
  assert str(info.value).endswith(f'restore the files that were read, or use another --workdir than {run.workdir}')
  (tmp_path / file).write_bytes(before)
  check(run)
  (tmp_path / file).unlink()
  check(run)


def test_all_of_the_text_may_go_or_move_when_it_is_tokenized(run, tmp_path):
  finish(run, 'tokenize', 'pretrain')
  (tmp_path / 'text' / 'a.jsonl').rename(tmp_path / 'text' / 'c.jsonl')
  check(run)
  for folder in ('text', 'more', 'model'):
    (tmp_path / folder).rename(tmp_path / f'{folder} away')
  check(run)


def test_text_that_was_added_is_named(run, tmp_path):
  finish(run, 'tokenize')
  (tmp_path / 'text' / 'c.jsonl').write_bytes(corpora.lines(70))
  with pytest.raises(
    InputError, match=r'config.data.train: .*/text/c.jsonl was added after stage tokenize of this run'
  ):
    check(run)


def test_a_copy_that_was_added_is_named_and_a_copy_in_another_place_is_not(run, tmp_path):
  finish(run, 'tokenize')
  shutil.copytree(tmp_path / 'text', tmp_path / 'elsewhere')
  data = dataclasses.replace(run.settings.data, train=(f'{tmp_path}/elsewhere/*',))
  inputs.check_inputs(run.workdir, dataclasses.replace(run.settings, data=data))
  shutil.copy(tmp_path / 'text' / 'a.jsonl', tmp_path / 'text' / 'c.jsonl')
  with pytest.raises(InputError, match=r'config.data.train: .*/text/c.jsonl was added after stage tokenize'):
    check(run)


def test_an_unfinished_tokenization_begins_again_with_other_text(run, tmp_path, caplog):
  inputs.note_inputs(run, 'tokenize')
  made = [run.workdir / name for name in ('tokenizer.model', 'tokenize-x', 'sequences')]
  for path in made:
    path.mkdir()
  inputs.note_inputs(run, 'tokenize')
  assert all(path.exists() for path in made) and not caplog.records
  bits.rewrite_in_place(tmp_path / 'text' / 'b.jsonl')
  check(run)  # nothing is left of what it was
  inputs.note_inputs(run, 'tokenize')
  assert not any(path.exists() for path in made)
  assert [record.getMessage() for record in caplog.records] == [
    'config.data.train: it has changed since stage tokenize began, which is started again'
  ]


def test_a_model_may_change_until_it_is_trained_on(run, tmp_path):
  finish(run, 'tokenize')
  inputs.note_inputs(run, 'pretrain')
  bits.rewrite_in_place(tmp_path / 'model' / 'model.safetensors')
  check(run)
  inputs.note_inputs(run, 'pretrain')
  (run.workdir / 'checkpoints' / 'pretrain').mkdir(parents=True)
  check(run)
  bits.rewrite_in_place(tmp_path / 'model' / 'model.safetensors')
  with pytest.raises(InputError, match=r'config.pretrain.init: .*model.safetensors has changed since stage pretrain'):
    check(run)


def test_files_that_change_while_they_are_read(run, tmp_path):
  inputs.note_inputs(run, 'tokenize')
  inputs.check_unchanged(run, 'tokenize')
  bits.rewrite_in_place(tmp_path / 'text' / 'a.jsonl')
  with pytest.raises(InputError, match='added, removed or changed while they were read: run the'):
    inputs.check_unchanged(run, 'tokenize')


def test_a_record_has_the_digests(run):
  finish(run, 'tokenize', 'pretrain', 'route')
  fields = {stage: [*run.record(stage)['inputs']] for stage in ('tokenize', 'pretrain', 'route')}
  assert fields['pretrain'] == ['pretrain.init'] and fields['route'] == []
  assert fields['tokenize'] == ['data.train', 'data.validation', 'tokenizer.model_file']


def test_a_damaged_or_missing_record_of_inputs_stops_nothing(run, tmp_path, caplog):
  finish(run, 'tokenize')
  bits.rewrite_in_place(tmp_path / 'text' / 'a.jsonl')
  file = run.workdir / input_records.FILE
  file.write_bytes(file.read_bytes()[:-20])
  check(run)
  assert 'is damaged: it is unknown whether text and models have changed since the run began' in caplog.text
  file.unlink()
  check(run)


def test_a_check_beside_others_writes_nothing(run):
  finish(run, 'tokenize')
  file = run.workdir / input_records.FILE
  known = json.loads(file.read_text())
  known.pop('seal')
  publishing.write_json(file, known | {'files': {}})
  before = file.read_bytes()
  inputs.check_inputs(run.workdir, run.settings, keeps=False)
  assert file.read_bytes() == before
  check(run)
  assert file.read_bytes() != before


def test_settings_without_places_differ_in_what_is_no_place():
  def of(**values) -> settings.Settings:
    return inputs.without_places(settings.from_dict(values))

  assert of(data={'train': 'a/*'}) == of(data={'train': 'b/*,c/*'}) != of()
  assert (
    of(data={'train': {'x': ('a', 1)}}) == of(data={'train': {'x': ('b', 1)}}) != of(data={'train': {'x': ('b', 2)}})
  )
  assert of(tokenizer={'model_file': 'a'}) == of(tokenizer={'model_file': 'b'}) != of()
  assert of(data={'train': 'a', 'text_key': 'x'}) != of(data={'train': 'a'})


def test_a_folder_of_this_machine_may_be_named_from_here(tmp_path, monkeypatch):
  (tmp_path / 'my.model').write_bytes(made_run.tokenizer_bytes())
  (tmp_path / 'a.txt').write_text('words')
  monkeypatch.chdir(tmp_path)
  s = settings.from_dict({'data': {'train': 'a.txt'}, 'tokenizer': {'model_file': 'my.model'}})
  relative = inputs.compute_digests(pathlib.Path('run'), s, 'tokenize')
  s = settings.from_dict({'data': {'train': f'{tmp_path}/a.txt'}, 'tokenizer': {'model_file': f'{tmp_path}/my.model'}})
  assert relative == inputs.compute_digests(pathlib.Path('run'), s, 'tokenize')
