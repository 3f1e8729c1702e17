"""Damaged files are answered with what to remove."""

import pytest
import small

from dipaco_jax.storage import remedies, seals

TREES = (
  'config.json tokenizer.model sequences/0/x base/x shards/base/0/x shards/base/meta.json shards/0/meta.json '
  'shards/1/meta.json routing/0/x routing/1/x routing/1-scores/0.npy modules/3/low/0.safetensors '
  'modules/4/base/0.safetensors modules/4/index-0.json paths/best.json evaluation/validation/nll-0.npy '
  'checkpoints/train/96/x stages/tokenize.json stages/pretrain.json stages/route.json stages/train.json '
  'stages/evaluate.json report.json'
).split()


@pytest.mark.parametrize(
  'name, removed',
  {
    'config.json': 'config.json',
    'tokenizer.model': 'tokenizer.model stages/tokenize.json',
    'sequences/0/x': 'sequences stages/tokenize.json',
    'base/x': 'base stages/pretrain.json',
    'shards/base/meta.json': 'shards/base stages/pretrain.json',
    'shards/0/meta.json': 'shards/0 stages/route.json',
    'routing/0/x': 'routing/0 stages/route.json',
    'shards/1/meta.json': 'shards/1 stages/train.json',
    'routing/1/x': 'routing/1 stages/train.json',
    'modules/4/base/0.safetensors': 'modules/4 stages/train.json',
    'modules/4/index-0.json': 'modules/4 stages/train.json',
    'modules/3/low/0.safetensors': 'checkpoints/train modules routing/1 routing/1-scores shards/1 stages/train.json',
    'modules/notes/x': 'checkpoints/train modules routing/1 routing/1-scores shards/1 stages/train.json',
    'paths/best.json': 'paths/best.json stages/train.json',
    'evaluation/validation/nll-0.npy': 'evaluation stages/evaluate.json',
    'stages/train.json': 'stages/train.json',
    'report.json': 'report.json',
    'tokenize-1/sequences/0/x': 'tokenize-1 stages/tokenize.json',
  }.items(),
)
def test_what_is_to_be_removed(name, removed, tmp_path):
  workdir = tmp_path / 'shards' / 'run'  # where somebody keeps his runs
  for each in TREES:
    (workdir / each).parent.mkdir(parents=True, exist_ok=True)
    (workdir / each).touch()
  (workdir / 'tokenize-1' / 'sequences' / '0').mkdir(parents=True)
  (workdir / 'tokenize-1' / 'sequences' / '0' / 'x').touch()
  assert remedies.locate(workdir / name) == (workdir, name)
  said = remedies.explain(workdir / name)
  assert said.startswith(f'{workdir / name}') and ': remove ' in said
  words = said.partition(': remove ')[2].partition(', and the command')[0].replace(' and ', ', ').split(', ')
  assert words == [str(workdir / each) for each in removed.split()]
  (workdir / 'registry.id').touch()
  assert 'read a copy of this run' in remedies.explain(workdir / name)


def test_a_round_without_the_checkpoints_that_its_shards_were_made_from(tmp_path):
  (tmp_path / 'shards' / '1').mkdir(parents=True)
  job = small.make_job(small.make_programs(small.settings()), begin=2)
  with pytest.raises(seals.Damaged, match=rf'no checkpoint that can be read.*: remove .*{tmp_path}/shards/1, and'):
    small.train(job, tmp_path)
