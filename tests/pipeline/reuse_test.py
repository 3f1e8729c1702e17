"""A run takes from another what that has made with the same settings, and nothing else."""

import dataclasses
import json
import re
import signal

import bits
import pytest
import tiny_run

from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.pipeline import inputs, reuse, run as run_lib, stage_records
from dipaco_jax.storage import publishing
from dipaco_jax.telemetry import metrics_log


def test_stages_of_the_same_settings_are_taken(undisturbed, tmp_path):
  config, workdir = undisturbed.parent / 'config.py', tmp_path / 'run'
  process = tiny_run.start(config, workdir, f'--reuse={undisturbed}', '--config.outer.momentum=0.5')
  is_about_to_train = (workdir / 'checkpoints' / 'train').exists  # its programs would take seconds to compile
  said = tiny_run.stop_when(process, is_about_to_train, signal.SIGKILL)
  work = [line for line in said.splitlines() if not line.startswith('stages:')]
  assert not any(re.search('tokenize|pretrain|features|shards', line) for line in work)
  for name in ('base/params.safetensors', 'shards/0/1/train.array_record', 'sequences/0/train.array_record'):
    assert (workdir / name).samefile(undisturbed / name)
  for stage in ('tokenize', 'pretrain', 'route'):
    assert tiny_run.record(workdir, stage) == tiny_run.record(undisturbed, stage)
  ours, theirs = (
    [row for row in map(json.loads, (w / 'metrics.jsonl').read_text().splitlines()) if row['stage'] == 'pretrain']
    for w in (workdir, undisturbed)
  )
  assert ours == theirs


@pytest.mark.parametrize(
  'changes, reused',
  [
    ({'outer': {'momentum': 0.5}}, ['tokenize', 'pretrain', 'route']),
    ({'train': {'phases': 2}}, ['tokenize']),  # the base's cosine would be another
    ({'routing': {'method': 'random'}}, ['tokenize', 'pretrain']),
    ({'train': {'early_stopping': False}}, ['tokenize']),  # it has hold-outs kept from it
    ({'seed': 1}, []),
  ],
)
def test_a_stage_of_other_settings_is_not_taken(undisturbed, tmp_path, changes, reused):
  values = json.loads((undisturbed / 'config.json').read_text())
  for section, fields in changes.items():
    values[section] = values[section] | fields if isinstance(fields, dict) else fields
  run = run_lib.unattended(tmp_path, settings.from_dict(values))
  reuse.take_stages(run, undisturbed)
  run.metrics.close()
  assert sorted(file.stem for file in tmp_path.glob('stages/*.json')) == sorted(reused)
  assert (tmp_path / 'base').exists() == ('pretrain' in reused)
  assert (tmp_path / 'shards' / '0').exists() == ('route' in reused)


def test_rows_of_an_earlier_start_are_not_there_twice(undisturbed, tmp_path):
  run = run_lib.unattended(tmp_path, settings.from_dict(json.loads((undisturbed / 'config.json').read_text())))
  run.metrics.close()
  with metrics_log.Metrics(tmp_path) as rows:
    rows.write('step', 'pretrain', 1, loss=9.0)  # begun before --reuse was given
    reuse.take_stages(dataclasses.replace(run, metrics=rows), undisturbed)
  ours, theirs = (
    [row for row in map(json.loads, (w / 'metrics.jsonl').read_text().splitlines()) if row['stage'] == 'pretrain']
    for w in (tmp_path, undisturbed)
  )
  assert ours == theirs


def test_a_directory_without_a_run_is_rejected(undisturbed, tmp_path):
  said = tiny_run.finish(
    tiny_run.start(undisturbed.parent / 'config.py', tmp_path / 'run', f'--reuse={tmp_path}'), status=2
  )
  assert 'there is no run' in said


@pytest.fixture
def as_undisturbed(undisturbed, tmp_path):
  """`as_undisturbed(text)`: a run with the settings of `undisturbed`, whose text is elsewhere: these bytes."""
  made = []

  def make(text: bytes) -> run_lib.Run:
    (tmp_path / 'elsewhere').mkdir(exist_ok=True)
    (tmp_path / 'elsewhere' / 'text.jsonl').write_bytes(text)
    values = json.loads((undisturbed / 'config.json').read_text())
    values['data'] |= {'train': (f'{tmp_path}/elsewhere/*.jsonl',)}
    made.append(run_lib.unattended(tmp_path / f'run {len(made)}', settings.from_dict(values)))
    return made[-1]

  yield make
  for run in made:
    run.metrics.close()


def taken(run: run_lib.Run) -> list[str]:
  return sorted(file.stem for file in run.workdir.glob('stages/*.json'))


def test_the_same_text_in_another_place_is_the_same(undisturbed, as_undisturbed):
  run = as_undisturbed((undisturbed.parent / 'text.jsonl').read_bytes())
  reuse.take_stages(run, undisturbed)
  assert taken(run) == ['pretrain', 'route', 'tokenize']
  assert all(stage_records.is_done(run.workdir, run.settings, name) for name in taken(run))
  inputs.check_inputs(run.workdir, run.settings)
  bits.rewrite_in_place(run.workdir.parent / 'elsewhere' / 'text.jsonl')
  with pytest.raises(InputError, match=r'text.jsonl has changed since stage tokenize'):
    inputs.check_inputs(run.workdir, run.settings)


def test_other_text_of_the_same_size_is_not(undisturbed, as_undisturbed, caplog):
  text = bytearray((undisturbed.parent / 'text.jsonl').read_bytes())
  text[len(text) // 2] ^= 1
  run = as_undisturbed(bytes(text))
  reuse.take_stages(run, undisturbed)
  assert not taken(run) and not (run.workdir / 'sequences').exists()
  assert [record.getMessage() for record in caplog.records] == [
    f'--reuse={undisturbed}: stages from tokenize on are not reused: config.data.train has other contents'
  ]


def test_a_base_of_other_text_is_not_taken_by_a_run_that_is_tokenized(undisturbed, as_undisturbed, caplog):
  run = as_undisturbed((undisturbed.parent / 'text.jsonl').read_bytes())
  reuse.take_stages(run, undisturbed)
  for name in ('stages/pretrain.json', 'stages/route.json'):
    (run.workdir / name).unlink()
  record = json.loads((run.workdir / 'stages' / 'tokenize.json').read_text())
  publishing.write_json(run.workdir / 'stages' / 'tokenize.json', record | {'inputs': {'data.train': 'of other text'}})
  reuse.take_stages(run, undisturbed)
  assert taken(run) == ['tokenize'] and 'config.data.train has other contents' in caplog.text


def test_the_field_that_differs_is_named(undisturbed, tmp_path, caplog):
  values = json.loads((undisturbed / 'config.json').read_text()) | {'seed': 1}
  run = run_lib.unattended(tmp_path, settings.from_dict(values))
  reuse.take_stages(run, undisturbed)
  run.metrics.close()
  assert 'stages from tokenize on are not reused: config.seed was 0, is 1' in caplog.text
