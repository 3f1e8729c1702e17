"""A run that was rejected before training accepts a corrected config, and keeps artefacts that still fit."""

import dataclasses
import logging
import os

import pytest
import tiny_run
from absl import flags

from dipaco_jax import main, status
from dipaco_jax.command_line import config_file
from dipaco_jax.config import settings
from dipaco_jax.pipeline import preflight, run, stage_records, stages
from dipaco_jax.storage import publishing


@pytest.fixture(scope='module')
def config(tmp_path_factory):
  return tiny_run.write_config(tmp_path_factory.mktemp('config'))


@pytest.fixture
def given(config):
  """`given(section={field: value})`: the config with changes."""

  def make(**changes) -> settings.Settings:
    values = config_file.read(str(config))
    for name, fields in changes.items():
      values[name] = values.get(name, {}) | fields if isinstance(fields, dict) else fields
    return settings.from_dict(values)

  return make


@pytest.fixture
def command(config, monkeypatch, capsys):
  """`command(option, ...)` runs main in this process, and is refused; what it says."""
  monkeypatch.setattr(logging.root, 'handlers', [])

  def call(*options: str) -> str:
    flags.FLAGS.unparse_flags()
    with pytest.raises(SystemExit) as stop:
      main.main(['main', f'--config={config}', *options])
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]

  yield call
  flags.FLAGS.unparse_flags()
  for name in main.OPTIONS:
    flags.FLAGS[name].unparse()


def test_a_grid_that_proves_too_large(command, config, given, tmp_path, monkeypatch):
  """Only once text is tokenized is it known how many rows it fills: 480 here, of 665 by its bytes."""
  workdir = tmp_path / 'run'
  said = command(f'--workdir={workdir}', '--config.grid.a=70')
  assert 'use a smaller grid or batch, or more text' in said
  lines = status.status(workdir).splitlines()
  assert lines[0].endswith('stopped while reading and tokenizing text (stage 1 of 5)')
  assert lines[1] == f'refused: {said.removeprefix("dipaco_jax: ")}' and 'resumes it' not in ''.join(lines)
  assert lines[2] == 'correct that, and run the command again: what still fits is kept'
  kept = {file: os.stat(file).st_mtime_ns for file in workdir.rglob('*.array_record')}
  assert kept and (workdir / 'tokenizer.model').exists()

  preflight.settle_config(workdir, given(), '')
  assert not stage_records.read_refusal(workdir)
  again = run.unattended(workdir, given())
  stages.run_all(again, 'tokenize')
  again.metrics.close()
  now = {file.name: os.stat(file).st_mtime_ns for file in workdir.rglob('*.array_record')}
  assert set(now.values()) <= set(kept.values()) and len(list(workdir.rglob('*.array_record'))) == len(kept)


def test_no_document_to_validate_on_is_known_before_any_work(command, tmp_path):
  (tmp_path / 'short.txt').write_text('Too short a text.')
  said = command(f'--workdir={tmp_path}/run', f'--config.data.validation={tmp_path}/short.txt')
  assert (
    'no document of validation is longer than config.routing.prefix_tokens=32: the longest has at most 19 tokens'
    in said
  )
  assert not (tmp_path / 'run').exists()


def test_only_a_rejected_run_takes_another_config(given, tmp_path):
  old, new = given(), given(outer={'momentum': 0.5})
  publishing.write_json(tmp_path / 'config.json', settings.recorded(old))
  stage_records.check_changes(tmp_path, old, old)
  with pytest.raises(ValueError, match=r'another config \(config.outer.momentum was 0.9, is 0.5\): use another'):
    stage_records.check_changes(tmp_path, old, new)
  stage_records.write_refusal(tmp_path, 'why')
  stage_records.check_changes(tmp_path, old, new)


def test_a_run_that_trains_is_not_rejected(given, tmp_path):
  stage_records.write_refusal(tmp_path, 'no run')
  assert not stage_records.read_refusal(tmp_path)
  publishing.write_json(tmp_path / 'config.json', settings.recorded(given()))
  (tmp_path / 'checkpoints' / 'train').mkdir(parents=True)
  stage_records.write_refusal(tmp_path, 'diverged')
  assert not stage_records.read_refusal(tmp_path)


MADE = {
  'tokenizer.model', 'sequences', 'base', 'shards/base', 'metrics.jsonl', 'features', 'routing/0-parts',
  'shards/0-parts',
}  # fmt: skip


@pytest.mark.parametrize(
  'done, changes, gone',
  [
    ('tokenize pretrain', {'outer': {'momentum': 0.5}}, set()),
    ('tokenize pretrain', {'grid': {'a': 2, 'b': 1}}, {'routing/0-parts', 'shards/0-parts'}),
    ('tokenize pretrain', {'mesh': {'data': 1}}, set()),
    ('tokenize', {'inner': {'b1': 0.8}}, MADE - {'tokenizer.model', 'sequences', 'features'}),
    ('tokenize', {'train': {'steps_per_phase': 7}}, MADE - {'tokenizer.model', 'sequences', 'features'}),
    ('', {'tokenizer': {'vocab_size': 280}}, MADE - {'features'}),
    ('tokenize', {'tokenizer': {'vocab_size': 280}}, None),
    ('tokenize pretrain', {'inner': {'b1': 0.8}}, None),
    ('tokenize pretrain', {'train': {'steps_per_phase': 7}}, None),  # it stretches the cosine
    ('tokenize pretrain', {'train': {'early_stopping': False}}, None),  # hold-outs were kept from the base
  ],
)
def test_what_goes_and_what_stays(given, tmp_path, done, changes, gone):
  for name in MADE:
    (tmp_path / name).mkdir(parents=True) if '.' not in name else (tmp_path / name).touch()
  for name in done.split():
    publishing.write_json(stage_records.record_file(tmp_path, name), {})
  old = given()
  publishing.write_json(tmp_path / 'config.json', settings.recorded(old))
  stage_records.write_refusal(tmp_path, 'why')
  new = {name: fields if name == 'grid' else vars(getattr(old, name)) | fields for name, fields in changes.items()}
  made = dataclasses.replace(old, **{n: getattr(settings.from_dict(old.to_dict() | new), n) for n in new})
  if gone is None:
    with pytest.raises(ValueError, match='holds a run with another config'):
      stage_records.check_changes(tmp_path, old, made)
    gone = set()
  else:
    stage_records.check_changes(tmp_path, old, made)
  assert {name for name in MADE if not (tmp_path / name).exists()} == gone
