"""Which run a process may join: the one that registry, place and workdir agree on."""

import platform

import one_process
import pytest
from one_process import Machine, changed, close

from dipaco_jax.core import settings as settings_lib
from dipaco_jax.reports import run_report


@pytest.fixture
def config(tmp_path) -> settings_lib.Settings:
  return one_process.two_phases(tmp_path)


def test_another_config_is_refused(config, tmp_path):
  close(Machine(config, {}).island(tmp_path))
  other = Machine(changed(config, train=dict(phases=3)), {})
  with pytest.raises(ValueError, match=r'config.train.phases was 2, is 3\): use another database'):
    other.island(tmp_path)
  with pytest.raises(ValueError, match=r'config.train.phases was 2, is 3\): use another --workdir'):
    other.island(tmp_path, url=f'sqlite:///{tmp_path}/new.db')


def test_a_place_that_another_registry_knows_is_refused(config, tmp_path):
  machine = Machine(config, {})
  close(machine.island(tmp_path))
  with pytest.raises(ValueError, match='another --registry knows: name that one, or another --workdir'):
    machine.island(tmp_path, url=f'sqlite:///{tmp_path}/new.db')
  close(machine.island(tmp_path))


def test_who_has_other_libraries_is_told(config, tmp_path, monkeypatch, caplog):
  machine = Machine(config, {})
  close(machine.island(tmp_path))
  assert 'begun with' not in caplog.text
  monkeypatch.setattr(run_report, 'versions', lambda: {'python': '3.99'})
  close(machine.island(tmp_path))
  assert f'python {platform.python_version()}, unlike here' in caplog.text
