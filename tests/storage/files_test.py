"""Files are written whole or not at all, and what killed writers leave is not seen."""

import os

import pytest

from dipaco_jax.storage import files


def test_write_file_is_whole_or_not_at_all(tmp_path):
  file = tmp_path / 'new' / 'file'
  files.write_file(file, 'one')
  assert file.read_text() == 'one'
  with pytest.raises(TypeError):
    files.write_file(file, 12)
  assert file.read_text() == 'one' and os.listdir(file.parent) == ['file']
  before = open(file)  # noqa: SIM115
  files.write_file(file, b'two')
  with before:
    assert before.read() == 'one'  # who was reading goes on with the old one
  assert file.read_text() == 'two'


def test_two_writers_of_one_name_do_not_meet(tmp_path, monkeypatch):
  """They may have one number, in two containers."""
  real, file = os.fsync, tmp_path / 'file'

  def meanwhile(handle):
    monkeypatch.setattr(os, 'fsync', real)
    files.write_file(file, b'other')
    real(handle)

  monkeypatch.setattr(os, 'fsync', meanwhile)
  files.write_file(file, b'the first one')
  assert file.read_bytes() == b'the first one' and os.listdir(tmp_path) == ['file']


def test_what_is_written_aside_is_not_listed_and_is_tidied_up(tmp_path):
  whole = [tmp_path / name for name in ('.hidden', 'a', 'deep/b.1')]
  for file in (*whole, *map(files.beside, whole)):
    file.parent.mkdir(exist_ok=True)
    file.touch()
  assert files.complete_files(tmp_path) == whole
  assert [files.written_as(files.beside(file)) for file in whole] == whole
  files.tidy(tmp_path)
  assert sorted(file for file in tmp_path.rglob('*') if file.is_file()) == whole


@pytest.mark.parametrize('times', [1, 2])
def test_what_was_tidied_away_while_it_was_written_is_written_again(tmp_path, monkeypatch, times):
  real, left = os.fsync, [None] * times

  def meanwhile(handle):
    real(handle)
    if left:
      left.pop()
      files.tidy(tmp_path)

  monkeypatch.setattr(os, 'fsync', meanwhile)
  files.write_file(tmp_path / 'file', b'whole')
  assert (tmp_path / 'file').read_bytes() == b'whole' and os.listdir(tmp_path) == ['file']


def test_what_can_never_be_named_is_an_error(tmp_path):
  def publish(aside, path):
    raise FileNotFoundError(path)

  with pytest.raises(FileNotFoundError, match='file'):
    files.write_file(tmp_path / 'file', b'', publish=publish)
  assert not os.listdir(tmp_path)


def test_a_directory_is_replaced_whole(tmp_path):
  for text in ('one', 'two'):
    (tmp_path / 'aside').mkdir()
    (tmp_path / 'aside' / text).write_text(text)
    (tmp_path / '.final.old').mkdir()  # of a run that was killed
    files.put_in_place(tmp_path / 'aside', tmp_path / 'final')
    assert os.listdir(tmp_path) == ['final'] and os.listdir(tmp_path / 'final') == [text]


@pytest.mark.parametrize('size', [0, 1, 5 << 20])
def test_what_is_read_may_be_written_to(tmp_path, size):
  (tmp_path / 'file').write_bytes(data := os.urandom(size))
  found = files.read_file(tmp_path / 'file')
  assert found == data and not found.readonly
