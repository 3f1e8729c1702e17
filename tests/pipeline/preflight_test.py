"""Before a run begins: its place is its own, and what proves wrong leaves nothing."""

import dataclasses
import errno
import pathlib

import numpy as np
import pytest
import small

from dipaco_jax.config.settings import Settings, from_dict, recorded
from dipaco_jax.core.errors import InputError, Unavailable
from dipaco_jax.data import json_tokenizer
from dipaco_jax.pipeline import preflight, tokenize_stage
from dipaco_jax.planning import cost_check
from dipaco_jax.storage import publishing
from dipaco_jax.telemetry import metrics_log


def test_a_microbatch_that_does_not_divide(caplog):
  s = Settings(train=dataclasses.replace(Settings().train, microbatch=60))
  preflight.check_model(s)
  assert 'config.train.microbatch=60 does not divide the 64 rows of train.batch_size on a device: 32' in caplog.text
  caplog.clear()
  preflight.check_model(Settings(train=dataclasses.replace(Settings().train, microbatch=64)))
  assert not caplog.text


def test_costs_are_those_of_the_vocabulary_that_the_run_will_have(tmp_path, monkeypatch):
  checked = []

  def check(s, say, is_whole_run):
    checked.append((s.tokenizer.vocab_size, is_whole_run))

  monkeypatch.setattr(cost_check, 'check', check)
  preflight.check_costs(tmp_path, Settings())
  for name, data in json_tokenizer.train([pathlib.Path(__file__).read_text()], 300).items():
    (tmp_path / name).write_bytes(data)
  tokenizer = dataclasses.replace(Settings().tokenizer, model_file=str(tmp_path / json_tokenizer.JSON))
  preflight.check_costs(tmp_path, Settings(tokenizer=tokenizer))
  preflight.check_worker_costs(Settings(tokenizer=tokenizer))
  preflight.check_worker_costs(Settings(tokenizer=dataclasses.replace(tokenizer, model_file='/gone/tokenizer.json')))
  assert checked == [(32_000, True), (300, True), (300, False)]


def test_nothing_is_said_of_the_costs_of_a_run_that_is_done(tmp_path, monkeypatch):
  monkeypatch.setattr(cost_check, 'check', lambda *args, **options: pytest.fail('it is done'))
  record = tmp_path / 'stages' / 'evaluate.json'
  record.parent.mkdir()
  record.touch()
  preflight.check_costs(tmp_path, Settings())


def test_what_proves_wrong_in_the_first_stage_leaves_nothing(tmp_path):
  for workdir in (tmp_path / 'a' / 'new', tmp_path / 'empty'):
    (tmp_path / 'empty').mkdir(exist_ok=True)
    with pytest.raises(ValueError, match='use a smaller grid'), preflight.kept(workdir):
      (workdir / 'tokenizer.model').touch()
      tokenize_stage.check_rows(Settings(), 1000)
    assert not workdir.exists()


def test_what_was_there_before_stays(tmp_path):
  (tmp_path / 'mine').touch()
  with pytest.raises(ValueError, match=r'contains other files \(mine\) but no run'), preflight.kept(tmp_path):
    raise AssertionError
  (tmp_path / 'config.json').touch()
  with pytest.raises(ValueError), preflight.kept(tmp_path):
    raise ValueError
  assert (tmp_path / 'mine').exists()


def test_files_that_cannot_be_written_any_more_are_told(tmp_path):
  workdir = tmp_path / 'run'
  of_disk = OSError(errno.EROFS, 'Read-only file system', str(workdir / 'a'))
  words = f'{workdir}/a: Read-only file system; check its disk, permissions and kind, and run'
  with pytest.raises(Unavailable, match=words), preflight.kept(workdir):
    raise RuntimeError('as of a library') from of_disk
  with pytest.raises(Unavailable, match=f'{workdir}/events: File exists'), preflight.kept(workdir):
    (workdir / 'events').touch()
    (workdir / 'events').mkdir(exist_ok=True)
  with pytest.raises(PermissionError), preflight.kept(workdir):
    raise PermissionError(errno.EACCES, 'Permission denied', str(tmp_path / 'elsewhere'))


def begun(workdir, wire: str, phases: int, at: int = 0, **outer) -> Settings:
  """The settings of a run that is at work in a phase."""
  s = from_dict({'outer': {'wire': wire} | outer, 'train': {'phases': phases}})
  publishing.write_json(workdir / 'config.json', recorded(s))
  with metrics_log.Metrics(workdir, events=False) as rows:
    rows.write('step', 'train', 1, phase=at)
  return s


def lasting(s: Settings, phases: int) -> Settings:
  return dataclasses.replace(s, train=dataclasses.replace(s.train, phases=phases))


@pytest.mark.parametrize('at, phases', [(3, 8), (2, 8), (3, 3), (2, 3)])
def test_a_run_whose_levels_leave_within_phases_ends_as_it_was_begun(tmp_path, at, phases):
  s = begun(tmp_path, 'thin', 4, at)
  preflight.settle_config(tmp_path, s, '')
  with pytest.raises(ValueError, match=f'config.train.phases={phases}: .* has to end as it was begun, after 4'):
    preflight.settle_config(tmp_path, lasting(s, phases), '')


def test_it_may_become_longer_before_its_last_phase(tmp_path):
  preflight.settle_config(tmp_path, lasting(begun(tmp_path, 'thin', 4, 1), 8), '')


def test_the_last_phase_of_a_run_may_have_been_of_the_usual_kind(tmp_path):
  for wire, every in (('lan', 16), ('thin', 2)):  # after every second phase all is exchanged
    preflight.settle_config(tmp_path, lasting(begun(tmp_path, wire, 4, 3, closed_every=every), 8), '')


@pytest.mark.parametrize(
  'frozen, problem', [('block_7', 'matches none'), ('.', 'matches all'), ('(', 'is not a regular')]
)
def test_frozen_parameters_have_to_be_some(frozen, problem):
  with pytest.raises(InputError, match=rf'config\.inner\.frozen=.*{problem}'):
    preflight.check_model(small.on_2x2(inner=dict(frozen=frozen)))


def test_frozen_modules_stay_as_they_were(tmp_path):
  s = small.on_2x2(
    inner=dict(frozen='block_0|embed'), outer=dict(optimizer='nesterov', learning_rate=0.7, momentum=0.9)
  )
  preflight.check_model(s)
  made = small.make_programs(s)
  trained, base = small.fetched(small.train(small.make_job(made), tmp_path / 'run').modules), small.base(made.model)
  for level, modules in trained.items():
    for name, x in modules.items():
      same = (x == np.broadcast_to(base[name], x.shape)).all()
      assert same == ('block_0' in name or 'embed' in name), (level, name)


def test_a_kernel_for_other_devices_is_rejected():
  with pytest.raises(InputError, match=r"config\.model\.experts='megablox' is for a TPU"):
    preflight.check_model(small.on_2x2(model=dict(num_experts=2, experts='megablox')))
