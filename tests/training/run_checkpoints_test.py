"""Checkpoints come back as they were saved; a damaged one is named, and the one before it is used."""

import gc
import json
import os
import shutil

import jax
import numpy as np
import pytest
import slow
import small
import tiny_run

from dipaco_jax.storage import files
from dipaco_jax.training import run_checkpoints


def arrays(k):
  rng = np.random.default_rng(k)
  return {'modules': {'w': jax.numpy.asarray(rng.normal(size=(40, 50)).astype('f'))}, 'count': jax.numpy.int32(k)}


def abstract(meta):
  one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), arrays(0))


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """Checkpoints of 4 and 6 updates; that of 2 was to go."""
  directory = tmp_path_factory.mktemp('run') / 'state'
  state = run_checkpoints.RunCheckpoints(directory, 2)
  for updates in (2, 4, 6):
    state.save(updates, arrays(updates), {'record': {'phase': updates, 'best': [None, 1.5]}})
  state.wait()
  state.close()
  return directory


def restored(directory):
  state = run_checkpoints.RunCheckpoints(directory, 2)
  try:
    return state.restore(abstract)
  finally:
    state.close()


def test_a_checkpoint_comes_back_as_it_was(saved):
  found, meta = restored(saved)
  assert meta == {'record': {'phase': 6, 'best': [None, 1.5]}}
  small.assert_close(found, arrays(6), 0)
  assert sorted(p.name for p in saved.iterdir() if p.name.isdigit()) == ['4', '6']
  assert sorted(os.listdir(saved.with_name('state.sha256'))) == ['4', '6']


def test_of_older_ones_no_more_is_read_than_is_needed(saved, tmp_path, caplog):
  directory = copied(saved, tmp_path)
  for item, found in (('arrays', {4, 6}), ('meta', {6})):
    tiny_run.flip_a_bit(tiny_run.largest(directory / '4' / item))
    assert restored(directory)[1]['record']['phase'] == 6
    assert {int(p.name) for p in directory.iterdir() if p.name.isdigit()} == found
  assert f'checkpoint {directory / "4"} is corrupt (meta/' in caplog.text


def test_no_checkpoint_is_none(tmp_path):
  assert restored(tmp_path / 'none') is None


def copied(saved, tmp_path):
  """The checkpoints with their seals, which Orbax itself doesn't have: it doesn't notice a flipped bit."""
  shutil.copytree(saved.with_name('state.sha256'), tmp_path / 'state.sha256')
  return shutil.copytree(saved, tmp_path / 'state')


def truncate(file):
  os.truncate(file, file.stat().st_size // 2)


def overwrite(file):
  file.write_bytes(bytes(file.stat().st_size))


def test_a_flipped_bit_in_an_array_is_noticed(saved, tmp_path):
  directory = copied(saved, tmp_path)
  tiny_run.flip_a_bit(tiny_run.largest(directory / '6'))
  found, meta = restored(directory)
  small.assert_close(found, arrays(meta['record']['phase']), 0)


@pytest.mark.parametrize('damage', slow.all_but([truncate, os.unlink, overwrite], truncate))
def test_a_corrupt_checkpoint_is_named_and_the_one_before_it_used(saved, tmp_path, damage, caplog):
  directory = shutil.copytree(saved, tmp_path / 'state')
  damage(tiny_run.largest(directory / '6'))
  found, meta = restored(directory)
  assert meta['record']['phase'] == 4
  small.assert_close(found, arrays(4), 0)
  assert f'checkpoint {directory / "6"} is corrupt' in caplog.text
  assert not (directory / '6').exists()
  gc.collect()


def test_half_of_an_old_checkpoint_is_passed_over(saved, tmp_path, caplog):
  directory = copied(saved, tmp_path)
  shutil.copytree(directory / '4', directory / '2')  # a run was killed while it removed this one
  shutil.copytree(tmp_path / 'state.sha256' / '4', tmp_path / 'state.sha256' / '2')
  shutil.rmtree(directory / '2' / 'arrays')
  assert restored(directory)[1]['record']['phase'] == 6
  assert 'corrupt' not in caplog.text


def test_what_these_devices_cannot_use_is_moved_aside_and_can_be_taken_back(saved, tmp_path, caplog):
  directory = copied(saved, tmp_path)
  state = run_checkpoints.RunCheckpoints(directory, 2)
  _, meta = state.restore(lambda meta: None if meta['record']['phase'] == 6 else abstract(meta))
  assert meta['record']['phase'] == 4 and set(state.metas) == {4}
  state.save(6, arrays(5), {'record': {'phase': 5, 'best': [None, 1.5]}})
  state.wait()
  state.close()
  (aside,) = tmp_path.glob('state-6-elsewhere-*')
  assert f'checkpoint {directory / "6"} was moved to {aside}' in caplog.text
  small.assert_close(restored(directory)[0], arrays(5), 0)
  shutil.rmtree(directory / '6')
  shutil.rmtree(tmp_path / 'state.sha256' / '6')
  os.replace(aside, directory / '6')
  small.assert_close(restored(directory)[0], arrays(6), 0)


def test_where_these_devices_can_use_none_nothing_is_moved(saved, tmp_path):
  directory = copied(saved, tmp_path)
  state = run_checkpoints.RunCheckpoints(directory, 2)
  with pytest.raises(ValueError, match='start on as many devices as before'):
    state.restore(lambda meta: None)
  state.close()
  assert os.listdir(tmp_path / 'state.sha256') and sorted(os.listdir(tmp_path)) == ['state', 'state.sha256']
  small.assert_close(restored(directory)[0], arrays(6), 0)


def test_a_checkpoint_is_not_compared_with_an_old_seal_of_its_name(saved, tmp_path, monkeypatch, caplog):
  directory = copied(saved, tmp_path)
  shutil.copytree(tmp_path / 'state.sha256' / '4', tmp_path / 'state.sha256' / '8')  # of one that is gone
  state = run_checkpoints.RunCheckpoints(directory, 2)
  with monkeypatch.context() as killed:  # before there is a new seal
    killed.setattr(files, 'digests', lambda *args: os.stat('there is no such file'))
    state.save(8, arrays(8), {'record': {'phase': 8, 'best': [None, 1.5]}})
    state.wait()
    state.close()
  small.assert_close(restored(directory)[0], arrays(8), 0)
  assert 'corrupt' not in caplog.text


def test_a_checkpoint_that_comes_with_the_next_one_is_sealed(tmp_path, monkeypatch):
  """Small ones do, between two looks of the thread that seals."""
  state = run_checkpoints.RunCheckpoints(tmp_path / 'state', 2)

  def meanwhile(seconds):
    for updates in '46':
      (tmp_path / 'state' / updates).mkdir()
      (tmp_path / 'state' / updates / 'file').write_text(updates)

  monkeypatch.setattr(state._closing, 'wait', meanwhile)
  state._seal(4)
  state._seal(3)  # this one has gone
  assert list(json.loads((tmp_path / 'state.sha256' / '4' / '0.json').read_text())) == ['file']
  assert os.listdir(tmp_path / 'state.sha256') == ['4']
  state.close()
