"""Directories are published whole with their seals, and parts that are damaged count as missing."""

import os

import bits
import numpy as np
import pytest

from dipaco_jax.storage import publishing, seals


def test_publish_directory_is_whole_or_not_at_all(tmp_path):
  final = tmp_path / 'published'
  with publishing.publish_directory(final) as aside:
    (aside / 'part').mkdir()
    (aside / 'part' / 'file').write_text('one')
    assert not final.exists()
  with pytest.raises(KeyboardInterrupt), publishing.publish_directory(final) as aside:
    (aside / 'file').write_text('two')
    raise KeyboardInterrupt
  assert [str(p.relative_to(final)) for p in final.rglob('*')] == ['part', 'part/file']
  (tmp_path / '.published.1').mkdir()  # of a killed run
  with publishing.publish_directory(final) as aside:
    (aside / 'file').write_text('three')
  assert sorted(os.listdir(final)) == [seals.SUMS, 'file'] and os.listdir(tmp_path) == ['published']


def test_parts_that_are_absent_or_damaged_are_missing(tmp_path):
  parts = [tmp_path / f'{i}.npy' for i in range(5)] + [tmp_path / 'folder', tmp_path / 'none']
  (tmp_path / 'folder').mkdir()
  for i in (0, 1, 3, 4):
    publishing.write_array(parts[i], np.arange(100 + i))
  bits.flip_in_middle(parts[3])
  assert publishing.missing(parts, (1, 2)) == [3] and not parts[3].exists()
  assert publishing.missing(parts, (0, 2)) == [2, 6]
  assert publishing.missing(parts, (0, 1)) == [2, 3, 6]


def test_a_file_with_the_seal_of_another_is_missing(tmp_path):
  """As after a writer that was killed between the two."""
  file = tmp_path / 'train.npy'
  publishing.write_array(file, np.arange(100))
  file.with_name('train.npy.sha256').write_text(seals.line('train.npy', '0' * 64))
  assert publishing.missing([file], (0, 1)) == [0] and not file.exists()


def test_json_comes_back_without_its_seal(tmp_path):
  publishing.write_json(tmp_path / 'new' / 'a.json', {'b': 1, 'a': [2.5]})
  assert list(seals.read_json(tmp_path / 'new' / 'a.json', 'a', 'b').items()) == [('b', 1), ('a', [2.5])]
