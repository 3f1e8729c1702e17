"""Roles: which run a process may join, and where its files are on this machine."""

import dataclasses
import os
import pathlib
import platform
import tempfile

import one_process
import owners_run
import pytest
from one_process import Machine, changed, close

from dipaco_jax.config import settings as settings_lib
from dipaco_jax.islands import registration, roles
from dipaco_jax.islands.worker_hosts import Hosts
from dipaco_jax.registry import registry_url
from dipaco_jax.registry.registry import Fact, Registry
from dipaco_jax.reports import run_report
from dipaco_jax.storage import lock, object_store


@pytest.fixture
def config(tmp_path) -> settings_lib.Settings:
  return one_process.two_phases(tmp_path)


def test_another_config_is_rejected(config, tmp_path):
  close(Machine(config, {}).island(tmp_path))
  other = Machine(changed(config, train=dict(phases=3)), {})
  with pytest.raises(ValueError, match=r'config.train.phases was 2, is 3\): use another database'):
    other.island(tmp_path)
  with pytest.raises(ValueError, match='has a run with another --registry'):
    other.island(tmp_path, url=f'sqlite:///{tmp_path}/new.db')


def test_a_place_that_another_registry_knows_is_rejected(config, tmp_path):
  machine = Machine(config, {})
  close(machine.island(tmp_path))
  other = f'sqlite:///{tmp_path}/new.db'
  with pytest.raises(ValueError, match='another --registry: name that one, or set DIPACO_REGISTRY'):
    machine.island(tmp_path, url=other)
  facts = Registry(other)
  assert not facts.facts('config'), 'it knows no run either'
  facts.put([Fact('config', '', 0, '', settings_lib.digest(config), {'config': {}, 'id': 'b2', 'versions': {}})])
  facts.close()
  with pytest.raises(ValueError, match='another --registry: name that one'):
    machine.island(tmp_path, url=other)
  close(machine.island(tmp_path))
  (tmp_path / 'registry.id').write_bytes(b'\xff')
  with pytest.raises(ValueError, match='another --registry: name that one'):
    machine.island(tmp_path)


def test_processes_that_begin_at_one_time_register_one_run(config, tmp_path, monkeypatch):
  """One registers the run, and marks the place, after the other has looked into the registry."""
  facts = Registry(f'sqlite:///{tmp_path}/registry.db', 10.0)
  places = [tmp_path / name for name in ('run', 'machine-a', 'machine-b')]
  for place in places:
    place.mkdir()
  storage, run_ids = object_store.open_storage(str(places[0])), list[str]()
  exists = type(storage).exists

  def exists_late(self, name: str) -> bool:
    if not run_ids:
      run_ids.append('being made')
      run_ids[0] = registration.settle(facts, storage, config, places[1])
    return exists(self, name)

  monkeypatch.setattr(type(storage), 'exists', exists_late)
  assert registration.settle(facts, storage, config, places[2]) == run_ids[0]
  facts.close()


def test_no_second_registry_is_made_for_a_run_and_a_lost_one_is_reported(config, tmp_path):
  place, storage = tmp_path / 'run', object_store.open_storage(str(tmp_path / 'run'))
  roles.check_place(storage, place, registry_url.in_folder(place))  # a new run
  close(Machine(config, {}).island(place))
  roles.check_place(storage, place, registry_url.in_folder(place))
  roles.check_place(storage, place, 'postgresql://host/runs')
  for file in place.glob('registry.db*'):
    file.unlink()
  with pytest.raises(ValueError, match=r'no registry .*registry.db, but .* if that registry is lost, run .* rebuild'):
    roles.check_place(storage, place, registry_url.in_folder(place))
  assert not [*place.glob('registry.db*')]


def test_roles_do_not_join_a_run_at_which_main_is_at_work(config, tmp_path):
  storage = object_store.open_storage(str(tmp_path))
  with lock.hold(tmp_path):
    with pytest.raises(ValueError, match=r'is in use by `main`, process \d+ on .*: stop that first'):
      roles.check_place(storage, tmp_path, registry_url.in_folder(tmp_path))
    storage.write('registry.id', b'a1')  # a worker prepares the run
    roles.check_place(storage, tmp_path, 'postgresql://host/runs')


def test_a_place_without_the_run_that_the_registry_knows_is_rejected(config, tmp_path):
  """As a mount that is not there: all would be made again in it."""
  machine, place = Machine(config, {}), tmp_path / 'run'
  made = machine.island(place)
  made.registry.put([Fact('prepared', '', 0, '', '', {})])
  close(made)
  url = f'sqlite:///{place}/registry.db'
  with pytest.raises(ValueError, match=r'elsewhere has no data of the run .*: check --workdir, or whether it is'):
    machine.island(tmp_path / 'elsewhere', url=url)
  assert not [*(tmp_path / 'elsewhere').iterdir()]
  close(machine.island(place, url=url))


def test_a_process_with_other_libraries_is_warned(config, tmp_path, monkeypatch, caplog):
  machine = Machine(config, {})
  close(machine.island(tmp_path))
  assert 'begun with' not in caplog.text
  monkeypatch.setattr(run_report, 'versions', lambda: {'python': '3.99'})
  close(machine.island(tmp_path))
  assert f'python {platform.python_version()}, which differs here' in caplog.text


def test_a_process_with_other_source_is_warned_or_rejected_as_the_config_says(config, tmp_path, monkeypatch, caplog):
  strict = dataclasses.replace(config, other_code='reject')
  mild, strict = Machine(config, {}), Machine(strict, {})
  for machine, place in ((mild, 'mild'), (strict, 'strict')):
    close(machine.island(tmp_path / place))
    close(machine.island(tmp_path / place))
  assert 'begun with' not in caplog.text
  begun = run_report.source_digest()[:16]
  monkeypatch.setattr(run_report, 'source_digest', lambda: 'other')
  close(mild.island(tmp_path / 'mild'))
  assert f'this run was begun with dipaco_jax source {begun}, which differs here' in caplog.text
  with pytest.raises(
    ValueError, match=rf"dipaco_jax source {begun}, which differs here, and its config.other_code is 'reject'"
  ):
    strict.island(tmp_path / 'strict')


def test_the_digest_of_the_source_is_that_of_every_file(tmp_path, monkeypatch):
  for name in ('__init__.py', 'core/a.py', 'configs/mine.py'):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('x = 1')
  monkeypatch.setattr(run_report.dipaco_jax, '__file__', str(tmp_path / '__init__.py'))
  before = run_report.source_digest()
  (tmp_path / 'configs' / 'mine.py').write_text('x = 2')
  assert run_report.source_digest() == before
  (tmp_path / 'core' / 'a.py').rename(tmp_path / 'core' / 'b.py')
  renamed = run_report.source_digest()
  (tmp_path / 'core' / 'b.py').write_text('x = 2')
  assert len({before, renamed, run_report.source_digest()}) == 3


# -- where its files are

BUCKET = 's3://bucket/runs/one'


@pytest.fixture
def temp(tmp_path, monkeypatch):
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
  monkeypatch.setenv('AWS_REGION', 'us-east-1')
  return tmp_path


def test_a_local_place_is_for_its_user_alone(temp):
  before = os.umask(0)
  try:
    place = roles.make_local_place(BUCKET)
  finally:
    os.umask(before)
  assert place.parent == temp and place.stat().st_mode & 0o777 == 0o700
  assert roles.make_local_place(BUCKET) == place == roles.local_place(BUCKET)
  assert roles.make_local_place(str(temp / 'new' / 'run')) == temp / 'new' / 'run'


def of_another(place: pathlib.Path):
  place.mkdir(mode=0o700)
  os.chown(place, 4321, -1)


def link(place: pathlib.Path):
  (place.parent / 'elsewhere').mkdir(mode=0o700)
  place.symlink_to('elsewhere')


def shared(place: pathlib.Path):
  place.mkdir()
  place.chmod(0o777)


@pytest.mark.parametrize('make', [link, shared, pathlib.Path.touch, of_another])
def test_a_local_place_that_another_user_may_have_made_is_rejected(temp, make):
  if make is of_another and os.geteuid():
    pytest.skip('only root gives folders away')
  make(roles.local_place(BUCKET))
  with pytest.raises(ValueError, match=r'is not a folder of this user alone .* remove it, or name another in TMPDIR'):
    roles.make_local_place(BUCKET)


def test_the_keepers_evaluator_judges_what_owners_send_and_evaluates_no_hold_outs(tmp_path, monkeypatch):
  claimed = []
  monkeypatch.setattr(roles, 'work', lambda process, claims, perform: claimed.extend(claims.kinds))
  owners_run.write_text(tmp_path)
  keeper = owners_run.OwnersRun(tmp_path, owners_run.settings(tmp_path, outer=dict(floor=0.1))).begin()
  try:
    roles.serve(keeper, roles.Process('evaluator', str(tmp_path), 30), Hosts(), tmp_path)
  finally:
    close(keeper)
  assert claimed == ['judge', 'finish']


def test_a_new_store_is_for_its_owner_alone(tmp_path, caplog):
  place = roles.make_store(str(tmp_path / 'home' / 'store'))
  assert place.stat().st_mode & 0o777 == 0o700 and not caplog.text
  (tmp_path / 'open').mkdir(mode=0o755)
  roles.make_store(str(tmp_path / 'open'))
  assert f'--store={tmp_path}/open: other users of this machine can read the text in it: chmod 700' in caplog.text
