"""Text is routed in parts, by any number of processes, and those that are there are not made again."""

import shutil

import jax
import numpy as np
import safetensors.numpy

from dipaco_jax import history, router, routing
from dipaco_jax import run as run_lib


def opened(undisturbed, workdir, *names):
  """A run that has come as far as these of an undisturbed one's artefacts, and the router of that one."""
  for name in names:
    shutil.copytree(undisturbed / name, workdir / name)
  run = run_lib.unattended(workdir, history.read_settings(undisturbed))
  arrays = safetensors.numpy.load_file(undisturbed / 'routing' / '0' / 'router.safetensors')
  return run, router.Router(**{name: jax.numpy.asarray(x) for name, x in arrays.items()})


def test_shares_make_the_whole(undisturbed, tmp_path, monkeypatch):
  run, fitted = opened(undisturbed, tmp_path, 'sequences', 'base', 'stages')
  expected, folder = np.load(undisturbed / 'routing' / '0' / 'train.npy'), tmp_path / 'parts'
  monkeypatch.setattr(routing, 'MAX_FEATURE_BYTES', 0)  # as of a text whose features are not kept
  monkeypatch.setattr(routing, 'FEATURE_ROWS', 64)
  monkeypatch.setattr(routing, 'PART_ROWS', 128)
  assert len(expected) > 3 * 128

  for share, there in (((2, 3), {2}), ((0, 3), {0, 2, 3}), ((1, 3), {0, 1, 2, 3})):
    routing.route_parts(run, fitted, folder, 'train', 1, share)
    assert {path.name for path in folder.iterdir()} == {f'train-{i}.npy' for i in there}
  np.testing.assert_array_equal(np.concatenate([np.load(folder / f'train-{i}.npy') for i in range(4)]), expected)
  assert not (tmp_path / 'features').exists()

  np.save(folder / 'train-1.npy', np.full((128, 1), 7, np.int32))
  (folder / 'train-2.npy').unlink()
  routing.route_parts(run, fitted, folder, 'train', 1, (0, 1))
  assert (np.load(folder / 'train-1.npy') == 7).all()
  np.testing.assert_array_equal(np.load(folder / 'train-2.npy'), expected[256:384])
  run.metrics.close()


def test_what_is_routed_needs_no_features_and_its_parts_go(undisturbed, tmp_path, monkeypatch):
  run, fitted = opened(undisturbed, tmp_path, 'sequences', 'stages')  # no base model, of which features are made
  routed, folder = undisturbed / 'routing' / '0', tmp_path / 'routing' / '0-parts'
  shutil.copytree(routed, folder)
  for split in ('train', 'validation'):
    np.save(folder / f'{split}-0.npy', np.load(routed / f'{split}.npy').reshape(len(run.sequences(split)), -1))
  killed = shutil.copytree(folder, tmp_path / 'as it was')
  monkeypatch.setattr(routing, 'MAX_FEATURE_BYTES', 0)

  for _ in range(2):
    routing.publish_router(run, 0, lambda: (fitted, {}))
    routing.write_shards(run, 0)
    assert sorted(path.name for path in (tmp_path / 'routing').iterdir()) == ['0']
    shutil.copytree(killed, folder)  # as one leaves it who is killed before it goes
  for name in ('train.npy', 'validation.npy', 'meta.json'):
    assert (tmp_path / 'routing' / '0' / name).read_bytes() == (routed / name).read_bytes()
  run.metrics.close()
