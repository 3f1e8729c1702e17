"""A run takes from another what that has made with the same settings, and nothing else."""

import json

import pytest
import tiny_run


def test_stages_of_the_same_settings_are_taken(undisturbed, tmp_path):
  config, workdir = undisturbed.parent / 'config.py', tmp_path / 'run'
  said = tiny_run.run(config, workdir, f'--reuse={undisturbed}', '--config.outer.momentum=0.5')
  assert 'train 96/96' in said and not any(word in said for word in ('tokenize', 'pretrain', 'features', 'shards'))
  for name in ('base/params.safetensors', 'shards/0/1/train.array_record', 'sequences/train.array_record'):
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
  'option, reused',
  [
    ('--config.train.phases=2', ['tokenize']),  # the base's cosine would be another
    ('--config.routing.method=random', ['tokenize', 'pretrain']),
    ('--config.seed=1', []),
  ],
)
def test_a_stage_of_other_settings_is_made_anew(undisturbed, tmp_path, option, reused):
  config, workdir = undisturbed.parent / 'config.py', tmp_path / 'run'
  said = tiny_run.run_until('pretrain', config, workdir, f'--reuse={undisturbed}', option)
  made = [stage for stage, word in (('tokenize', 'tokenize '), ('pretrain', 'pretrain ')) if word not in said]
  assert made == [stage for stage in reused if stage != 'route']


def test_a_directory_without_a_run_is_refused(undisturbed, tmp_path):
  said = tiny_run.finish(
    tiny_run.start(undisturbed.parent / 'config.py', tmp_path / 'run', f'--reuse={tmp_path}'), status=2
  )
  assert 'no run here' in said
