"""A run takes from another what that has made with the same settings, and nothing else."""

import dataclasses
import json

import pytest
import tiny_run

from dipaco_jax.core import settings
from dipaco_jax.pipeline import preflight, run as run_lib
from dipaco_jax.training import metrics_log


def test_stages_of_the_same_settings_are_taken(undisturbed, tmp_path):
  config, workdir = undisturbed.parent / 'config.py', tmp_path / 'run'
  said = tiny_run.run_until('train', config, workdir, f'--reuse={undisturbed}', '--config.outer.momentum=0.5')
  assert 'train 96/96' in said and not any(word in said for word in ('tokenize', 'pretrain', 'features', 'shards'))
  for name in ('base/params.safetensors', 'shards/0/1/train.array_record', 'sequences/0/train.array_record'):
    assert (workdir / name).samefile(undisturbed / name)
  for stage in ('tokenize', 'pretrain', 'route'):
    assert tiny_run.record(workdir, stage) == tiny_run.record(undisturbed, stage)
  assert tiny_run.modules_sha256(workdir) != tiny_run.modules_sha256(undisturbed)
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
  preflight.take_stages(run, undisturbed)
  run.metrics.close()
  assert sorted(file.stem for file in tmp_path.glob('stages/*.json')) == sorted(reused)
  assert (tmp_path / 'base').exists() == ('pretrain' in reused)
  assert (tmp_path / 'shards' / '0').exists() == ('route' in reused)


def test_rows_of_an_earlier_start_are_not_there_twice(undisturbed, tmp_path):
  run = run_lib.unattended(tmp_path, settings.from_dict(json.loads((undisturbed / 'config.json').read_text())))
  run.metrics.close()
  with metrics_log.Metrics(tmp_path) as rows:
    rows.write('step', 'pretrain', 1, loss=9.0)  # begun before --reuse was given
    preflight.take_stages(dataclasses.replace(run, metrics=rows), undisturbed)
  ours, theirs = (
    [row for row in map(json.loads, (w / 'metrics.jsonl').read_text().splitlines()) if row['stage'] == 'pretrain']
    for w in (tmp_path, undisturbed)
  )
  assert ours == theirs


def test_a_directory_without_a_run_is_refused(undisturbed, tmp_path):
  said = tiny_run.finish(
    tiny_run.start(undisturbed.parent / 'config.py', tmp_path / 'run', f'--reuse={tmp_path}'), status=2
  )
  assert 'there is no run' in said
