"""Stages' records: when one counts as done, what reopening takes back, and which fields each stage depends on."""

import dataclasses
import hashlib
import json
import time

import pytest

from dipaco_jax.config import fields, settings
from dipaco_jax.config.settings import Settings
from dipaco_jax.pipeline import stage, stage_records

S = Settings()


def changed(section: str, **values) -> Settings:
  return dataclasses.replace(S, **{section: dataclasses.replace(getattr(S, section), **values)})


def test_a_record_counts_for_its_own_settings_only(tmp_path):
  assert not stage_records.is_done(tmp_path, S, 'route')
  stage_records.write_record(tmp_path, S, 'route', 2.5, {'found': 1})
  assert stage_records.is_done(tmp_path, S, 'route')
  assert stage_records.is_done(tmp_path, changed('outer', learning_rate=0.1), 'route')  # of a later stage
  with pytest.raises(ValueError, match='stage route was made by another version or config; use another one'):
    stage_records.is_done(tmp_path, changed('data', max_documents=3), 'route')  # of an earlier one


def test_more_phases_open_training_again_and_the_evaluation_is_made_again(tmp_path):
  for name in ('train', 'evaluate'):
    stage_records.write_record(tmp_path, S, name, 1.0, {'phases': S.train.phases})
  longer = changed('train', phases=S.train.phases + 1)
  assert not stage_records.is_done(tmp_path, longer, 'train') and not stage_records.is_done(
    tmp_path, longer, 'evaluate'
  )
  assert not stage_records.is_done(tmp_path, changed('evaluate', matrix=True), 'evaluate')
  assert stage_records.is_done(tmp_path, changed('evaluate', matrix=True), 'train')


@pytest.mark.parametrize('words', ['nan', '-3', 'inf', 'x', ''])
def test_what_is_not_a_number_of_seconds_is_not_read(words, tmp_path):
  file = stage_records.seconds_file(tmp_path, 'route')
  file.parent.mkdir()
  file.write_text(words)
  assert stage_records.read_seconds(tmp_path) == {}


def test_reopening_takes_back_later_records_and_keeps_the_seconds(tmp_path):
  for name in stage.NAMES:
    stage_records.write_record(tmp_path, S, name, 7.5, {'name': name})
  stage_records.reopen(tmp_path, 'route')
  assert list(stage_records.read_stages(tmp_path)) == ['tokenize', 'pretrain']
  assert stage_records.read_seconds(tmp_path) == {'route': 7.5, 'train': 7.5, 'evaluate': 7.5}
  with stage_records.stopwatch(tmp_path, 'route') as elapsed:
    time.sleep(0.02)
    assert 7.5 < elapsed() < 8.5
  stage_records.write_record(tmp_path, S, 'route', 8.0, {})
  assert stage_records.read_seconds(tmp_path) == {'train': 7.5, 'evaluate': 7.5}


def test_a_damaged_record_is_named(tmp_path):
  stage_records.write_record(tmp_path, S, 'tokenize', 1.0, {'vocab_size': 300})
  file = stage_records.record_file(tmp_path, 'tokenize')
  file.write_text(file.read_text().replace('300', '301'))
  with pytest.raises(ValueError, match=r'stages/tokenize\.json'):
    stage_records.read_stages(tmp_path)


def test_every_field_is_a_stages_or_may_change():
  depends = [name for one in stage.STAGES for name in one.depends]
  # How it is run, and how long; a module's digest is in those of the stages whose fields name it.
  free = ('checkpoint', 'mesh', 'train.phases', 'train.offload', 'extensions')
  for name, about in fields.fields(Settings):
    assert about.may_change or any(name == d or name.startswith(f'{d}.') for d in (*depends, *free)), name


def test_a_digest_covers_the_fields_of_the_stages_before():
  later = changed('evaluate', reroute_every=(16,))
  assert [stage.digest(S, name) == stage.digest(later, name) for name in stage.NAMES] == [True] * 4 + [False]
  other = changed('tokenizer', vocab_size=300)
  assert not any(stage.digest(S, name) == stage.digest(other, name) for name in stage.NAMES)
  assert json.dumps([one.name for one in stage.up_to('route')]) == '["tokenize", "pretrain", "route"]'


def test_a_base_is_of_its_own_loss_and_digests_leave_out_the_default_that_earlier_runs_lack():
  other = changed('train', loss_on_prefix=True)
  assert [stage.digest(S, name) == stage.digest(other, name) for name in stage.NAMES] == [True] + [False] * 4
  added = {name for name, field in fields.fields(Settings) if field.added}
  of_earlier = {name: value for name, value in fields.flatten(S.to_dict()).items() if name not in added}
  assert 'train.loss_on_prefix' in added
  sha256 = hashlib.sha256(json.dumps(of_earlier, sort_keys=True).encode()).hexdigest()
  assert settings.digest(S) == sha256 != settings.digest(other)


def test_a_run_that_met_a_bad_record_continues_with_what_it_has_when_such_are_left_out(tmp_path):
  """Nothing that is there was made of a bad record, so that `check_changes` removes nothing."""
  old = Settings()
  new = dataclasses.replace(old, data=dataclasses.replace(old.data, skip_bad_records=True))
  assert all(stage.digest(old, name) == stage.digest(new, name) for name in stage.NAMES)
  part = tmp_path / 'tokenize-of these files' / 'sequences' / '0'
  part.mkdir(parents=True)
  stage_records.check_changes(tmp_path, old, new)
  assert part.exists()
