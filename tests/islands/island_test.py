"""Parts of islands by themselves: names, the question whether all is done, an executor's file, whose workdir it is."""

import one_process
import pytest
from one_process import Machine, close

from dipaco_jax.core import settings as settings_lib
from dipaco_jax.islands import island
from dipaco_jax.storage import lock


@pytest.fixture
def config(tmp_path) -> settings_lib.Settings:
  return one_process.two_phases(tmp_path)


def test_what_made_an_object():
  assert island.maker('objects/paths/7/12-low-0123456789abcdef.safetensors') == ('train', '12', 7)
  assert island.maker('objects/paths/7/12-step4-0123456789abcdef.safetensors') == ('train', '12', 7)
  assert island.maker('objects/modules/3/low/0-11-0123456789abcdef.safetensors') == ('outer', 'low/0-11', 3)
  assert island.maker('objects/modules/3/all/shared-0123456789abcdef.safetensors') == ('outer', 'all/shared', 3)
  for name in ('objects/modules/0/low-0123456789abcdef.safetensors', 'shards/0', 'routing/0', 'base', 'stages'):
    assert island.maker(name) == ('prepare', '', 0)
  assert island.maker('shards/2') == island.maker('routing/2') == ('reroute', '', 2)


def test_a_workdir_that_another_process_holds_is_waited_for(config, tmp_path):
  made = Machine(config, {}).island(tmp_path)
  with lock.hold(tmp_path), pytest.raises(island.Busy, match='in use by process'), made.hold_workdir():
    pass
  with made.hold_workdir(), pytest.raises(ValueError, match='its own'):
    raise ValueError('its own')
  close(made)
