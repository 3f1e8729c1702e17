"""Files of a run: as they were written, or an error that says which is not."""

import made_run
import pytest

from dipaco_jax.inference.run_files import RunFiles
from dipaco_jax.storage import object_store, publishing, seals

NAME = 'base/params.safetensors'


@pytest.fixture
def files(tmp_path):
  return RunFiles(made_run.write(tmp_path, made_run.settings()))


def test_a_file_is_read_as_it_was_written(files, tmp_path):
  assert files.read('tokenizer.model') == made_run.tokenizer_bytes()
  assert files.read(NAME) == (tmp_path / NAME).read_bytes()
  assert 'embed/tokens' in files.read_arrays(NAME)


@pytest.mark.parametrize('name', ['tokenizer.model', NAME])
def test_a_file_that_differs_from_its_seal_is_damaged(files, tmp_path, name):
  data = bytearray((tmp_path / name).read_bytes())
  data[-1] ^= 1
  (tmp_path / name).write_bytes(data)
  with pytest.raises(seals.Damaged, match='is damaged'):
    files.read(name)


def test_a_sha256_that_is_given_counts(files):
  with pytest.raises(seals.Damaged):
    files.read('config.json', '0' * 64)


def test_arrays_that_are_none_are_damaged(files, tmp_path):
  (tmp_path / 'x.safetensors').write_bytes(b'x')  # has no seal
  with pytest.raises(seals.Damaged, match=r'x\.safetensors'):
    files.read_arrays('x.safetensors')


def test_an_object_needs_its_names_and_its_seal(files, tmp_path):
  assert files.read_json('paths/best.json', 'version') == {'version': [2, 2, 2, 1]}
  with pytest.raises(seals.Damaged):
    files.read_json('paths/best.json', 'other')
  file = tmp_path / 'paths' / 'best.json'
  file.write_text(file.read_text().replace('2', '1', 1))
  with pytest.raises(seals.Damaged):
    files.read_json('paths/best.json')


def test_a_missing_file_is_damage_only_where_a_stage_has_written_it(files):
  with pytest.raises(object_store.Missing):
    files.read('report.json')
  with pytest.raises(seals.Damaged, match='is missing'), files.required('report.json'):
    files.read('report.json')


def test_what_is_beside_a_file_is_read_from_its_own_folder(files, tmp_path):
  publishing.write_sealed(tmp_path / 'a' / 'b' / 'x', b'x')
  assert files.read('a/b/x') == b'x'
