"""Before a run begins: its place is its own, and what proves wrong leaves nothing."""

import dataclasses

import pytest

from dipaco_jax.core.settings import Settings, from_dict
from dipaco_jax.pipeline import preflight, tokenize_stage
from dipaco_jax.storage import publishing
from dipaco_jax.training import metrics_log


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


def begun(workdir, wire: str, phases: int, at: int = 0, **checkpoint) -> Settings:
  """The settings of a run that is at work in a phase."""
  s = from_dict({'outer': {'wire': wire}, 'train': {'phases': phases}, 'checkpoint': checkpoint})
  publishing.write_json(workdir / 'config.json', s.to_dict())
  with metrics_log.Metrics(workdir, events=False) as rows:
    rows.write('step', 'train', 1, phase=at)
  return s


def lasting(s: Settings, phases: int) -> Settings:
  return dataclasses.replace(s, train=dataclasses.replace(s.train, phases=phases))


@pytest.mark.parametrize('at, phases', [(3, 8), (2, 8), (3, 3), (2, 3)])
def test_a_run_whose_levels_leave_within_phases_ends_as_it_was_begun(tmp_path, at, phases):
  s = begun(tmp_path, 'thin', 4, at)
  preflight.settle_config(tmp_path, s, '')
  with pytest.raises(ValueError, match=f'config.train.phases={phases}: .* ends as it was begun, after 4'):
    preflight.settle_config(tmp_path, lasting(s, phases), '')


def test_it_may_become_longer_before_its_last_phase(tmp_path):
  preflight.settle_config(tmp_path, lasting(begun(tmp_path, 'thin', 4, 1), 8), '')


def test_the_last_phase_of_a_run_may_have_been_of_the_usual_kind(tmp_path):
  for wire, every in (('lan', 16), ('thin', 2)):  # after every second phase all is exchanged
    preflight.settle_config(tmp_path, lasting(begun(tmp_path, wire, 4, 3, state_every_phases=every), 8), '')


def test_another_number_of_phases_bends_the_learning_rate(tmp_path, caplog):
  for phases, words in ((8, 'steps up'), (3, 'steps down')):
    caplog.clear()
    preflight.settle_config(tmp_path, lasting(begun(tmp_path, 'lan', 4), phases), '')
    assert f'so the learning rate {words}' in caplog.text
