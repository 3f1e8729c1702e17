"""Published modules: read by path, checked, and kept while a path points at them."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy
import small

from dipaco_jax.algorithm import modules
from dipaco_jax.storage import module_store, publishing, seals
from dipaco_jax.training import module_publishing

SPECS = (('shared', 'x', ()), ('low', 'y', ('a',)), ('own', 'z', ('a', 'b')))
SHAPES = {'x': (3,), 'y': (2, 2), 'z': (1,)}
LAYOUT = modules.make_layout({'a': 2, 'b': 2}.items(), SPECS, SHAPES)


def numbered(version):
  """Every module filled with numbers of its own."""
  stacked = {}
  for i, level in enumerate(LAYOUT.levels):
    (name,), lead = LAYOUT.names(level), LAYOUT.grid.level_shape(level)
    numbers = 1000 * version + 100 * i + np.arange(LAYOUT.grid.num_modules(level), dtype='f')
    spread = numbers.reshape(*lead, *[1] * len(SHAPES[name]))
    stacked[level.name] = {name: jax.numpy.broadcast_to(spread, (*lead, *SHAPES[name]))}
  return stacked


@pytest.fixture
def workdir(tmp_path):
  for version in (1, 2, 3):
    module_publishing.publish_modules(tmp_path, version, LAYOUT, numbered(version))
  publishing.write_json(tmp_path / 'paths' / 'best.json', {'version': [3, 1, 3, 3]})
  return tmp_path


def test_load_path_is_what_the_path_takes(workdir):
  for path, version in enumerate([3, 1, 3, 3]):
    expected = modules.take(LAYOUT, numbered(version), LAYOUT.grid.coordinates(path))
    found = module_store.load_path(workdir, LAYOUT, path)
    assert list(found) == sorted(SHAPES)
    small.assert_close(found, small.fetched(expected), 0)
  assert module_store.load_path(workdir, LAYOUT, 0, version=2)['x'][0] == 2000


def test_load_path_reads_its_own_files_only(workdir):
  mine = {'shared/shared.safetensors', 'low/1.safetensors', 'own/1-0.safetensors'}
  for file in (workdir / 'modules').rglob('*.safetensors'):
    if '/'.join(file.parts[-3:]) not in {f'3/{name}' for name in mine}:
      file.unlink()
  assert set(module_store.load_path(workdir, LAYOUT, 2)) == set(SHAPES)
  with pytest.raises(seals.Damaged, match=r'3/low/0\.safetensors is missing'):
    module_store.load_path(workdir, LAYOUT, 1, version=3)


@pytest.mark.parametrize('at', [0, 9, -1])
def test_a_flipped_bit_in_a_module_is_named(workdir, at):
  file = workdir / 'modules' / '3' / 'low' / '0.safetensors'
  data = bytearray(file.read_bytes())
  data[at] ^= 1
  file.write_bytes(data)
  with pytest.raises(OSError, match=r'low/0\.safetensors is damaged'):
    module_store.load_path(workdir, LAYOUT, 0)
  module_store.load_path(workdir, LAYOUT, 2)


def test_a_module_is_one_plain_file(workdir):
  found = safetensors.numpy.load_file(workdir / 'modules' / '2' / 'own' / '0-1.safetensors')
  np.testing.assert_array_equal(found['z'], [2201])
  index = json.loads((workdir / 'modules' / '2' / 'index-0.json').read_text())
  assert len(index) == 1 + 2 + 4


def test_collect_keeps_what_is_pointed_at_and_the_newest(workdir):
  module_store.collect(workdir, {1})
  assert module_store.versions(workdir) == [1, 3]
  for path in range(4):
    module_store.load_path(workdir, LAYOUT, path)


def test_collect_continues_where_it_was_killed(workdir):
  (workdir / '.collected-2' / 'low').mkdir(parents=True)
  module_store.collect(workdir, {1})
  assert module_store.versions(workdir) == [1, 3] and not list(workdir.glob('.collected-*'))


def test_a_version_is_published_whole_and_replaced_whole(workdir):
  for number in (9, 3):
    (workdir / 'modules' / '.3.old' / 'low').mkdir(parents=True, exist_ok=True)  # of a killed run
    module_publishing.publish_modules(workdir, 3, LAYOUT, numbered(number))
    assert module_store.load_path(workdir, LAYOUT, 0)['x'][0] == 1000 * number
  (workdir / '.version-4' / 'modules' / '4' / 'low').mkdir(parents=True)  # of a killed run
  assert module_store.versions(workdir) == [1, 2, 3]
  module_publishing.publish_modules(workdir, 4, LAYOUT, numbered(4))
  assert module_store.versions(workdir) == [1, 2, 3, 4] and not list(workdir.glob('.version-*'))


def test_digest_is_of_parameters_and_where_they_are(workdir, tmp_path_factory):
  other = tmp_path_factory.mktemp('other')
  module_publishing.publish_modules(other, 7, LAYOUT, numbered(3))
  assert module_store.modules_sha256(other, 7) == module_store.modules_sha256(workdir, 3)
  assert module_store.modules_sha256(workdir, 2) != module_store.modules_sha256(workdir, 3)
  found = module_publishing.addressable_modules(LAYOUT, numbered(3))
  swapped = [(level, (1 - m[0],) if level.name == 'low' else m, x) for level, m, x in found]
  module_publishing.publish_module_files(other, 8, swapped)
  assert module_store.modules_sha256(other, 8) != module_store.modules_sha256(workdir, 3)
