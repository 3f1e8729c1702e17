"""Before a run begins: its place is its own, and what proves wrong leaves nothing."""

import dataclasses

import pytest

from dipaco_jax.core.settings import Settings
from dipaco_jax.pipeline import preflight, tokenize_stage


def test_a_microbatch_that_does_not_divide(caplog):
  s = Settings(train=dataclasses.replace(Settings().train, microbatch=60))
  preflight.check_model(s)
  assert 'config.train.microbatch=60 does not divide the 64 rows of train.batch_size on a device: 32' in caplog.text
  caplog.clear()
  preflight.check_model(Settings(train=dataclasses.replace(Settings().train, microbatch=64)))
  assert not caplog.text


def test_what_proves_wrong_in_the_first_stage_leaves_nothing(tmp_path):
  for workdir in (tmp_path / 'a' / 'new', tmp_path / 'empty'):
    (tmp_path / 'empty').mkdir(exist_ok=True)
    with pytest.raises(ValueError, match='use a smaller grid'), preflight.kept(workdir):
      (workdir / 'tokenizer.model').touch()
      tokenize_stage.check_rows(Settings(), 1000)
    assert not workdir.exists()


def test_what_was_there_before_stays(tmp_path):
  (tmp_path / 'mine').touch()
  with pytest.raises(ValueError, match=r'holds other things \(mine\) and no run'), preflight.kept(tmp_path):
    raise AssertionError
  (tmp_path / 'config.json').touch()
  with pytest.raises(ValueError), preflight.kept(tmp_path):
    raise ValueError
  assert (tmp_path / 'mine').exists()
