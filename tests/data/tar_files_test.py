"""WebDataset's tar files: what a sample's text is, and every wrong one named."""

import io
import json
import tarfile

import corpora
import pytest
import webdataset

from dipaco_jax.config import settings
from dipaco_jax.data import corpus, tar_files


def of(folder, **changes) -> settings.Data:
  return settings.Data(source='files', train=(f'{folder}/*',), validation_fraction=0.3, **changes)


def write(file, samples):
  with webdataset.TarWriter(str(file)) as tar:
    for sample in samples:
      tar.write(sample)


def found(folder, **changes):
  return sorted((d.text, d.domain) for side in corpora.both(of(folder, **changes)) for d in side)


def test_text_is_in_a_file_or_in_its_json(tmp_path):
  texts = [{'__key__': f'a/{i}', 'txt': f'words {i}', 'jpg': b'\xff\0', 'json': {'domain': 'd'}} for i in range(9)]
  json_only = [{'__key__': f'b/{i}', 'json': {'text': f'json {i}', 'n': i}, 'cls': i} for i in range(9)]
  write(tmp_path / 'a.tar', [*texts, *json_only])
  assert found(tmp_path) == sorted([(f'words {i}', 'd') for i in range(9)] + [(f'json {i}', '') for i in range(9)])


@pytest.mark.parametrize(
  ('sample', 'words'),
  [
    ({'jpg': b'\xff'}, "s: no .txt, and no text under 'text'; leave out this file"),
    ({'json': {'words': 'x'}}, r"no text under 'text'; texts are under \['words'\]: set config.data.text_key"),
    ({'json': b'[1]'}, r's\.json: not a JSON object'),
    ({'json': b'{'}, r's\.json: not JSON'),
    ({'json': b'[' * 100_000}, r's\.json: not JSON'),
    ({'txt': b'\xff'}, 's: not UTF-8 at byte 0'),
  ],
)
def test_samples_without_text_are_named(sample, words, tmp_path):
  write(tmp_path / 'a.tar', [{'__key__': 's', **sample}])
  with pytest.raises(ValueError, match=words):
    corpus.check_readable(of(tmp_path))


def test_samples_of_one_name_are_named(tmp_path):
  with tarfile.open(tmp_path / 'a.tar', 'w') as tar:
    for _ in range(2):
      tar.addfile(tarfile.TarInfo('s.txt'))
  with pytest.raises(ValueError, match=r'a\.tar: it has two files s\.txt'):
    list(tar_files.samples(f'{tmp_path}/a.tar'))


@pytest.mark.parametrize('cut', [100, 512, 700, 1024, 1536, 5 * 512])
def test_a_tar_file_that_was_cut_is_damaged(cut, tmp_path):
  """Also where it was cut between two files."""
  write(tmp_path / 'whole.tar', [{'__key__': f'{i}', 'txt': 'x' * 600} for i in range(3)])
  content = (tmp_path / 'whole.tar').read_bytes()
  assert len(list(tar_files.samples(f'{tmp_path}/whole.tar'))) == 3
  (tmp_path / 'cut.tar').write_bytes(content[:cut])
  with pytest.raises(ValueError, match=r'cut\.tar: damaged or cut short'):
    list(tar_files.samples(f'{tmp_path}/cut.tar'))


def header(kind, size=0, name='h'):
  member = tarfile.TarInfo(name)
  member.type, member.size = kind, size
  return member.tobuf(tarfile.GNU_FORMAT)


def pax(words):
  record = next(b'%d %s' % (n, words) for n in range(999) if len(b'%d %s' % (n, words)) == n)
  return header(tarfile.XHDTYPE, len(record)) + record.ljust(512, b'\0')


@pytest.mark.parametrize(
  'content',
  [
    header(tarfile.XHDTYPE, 2 << 20) + bytes(2 << 20),
    header(tarfile.GNUTYPE_LONGNAME, 2 << 20) + bytes(2 << 20),
    (header(tarfile.GNUTYPE_LONGNAME, 1) + b'a'.ljust(512, b'\0')) * 2000,
    header(tarfile.GNUTYPE_SPARSE),
    pax(b'GNU.sparse.map=x\n'),
    pax(b'GNU.sparse.size=x\n'),
  ],
  ids=['long', 'long name', 'many', 'sparse', 'holes', 'no number'],
)
def test_headers_of_a_tar_file_that_take_much_memory_are_damaged(content, tmp_path):
  """A small compressed file may have gigabytes of them."""
  (tmp_path / 'a.tar').write_bytes(
    content + header(tarfile.REGTYPE, 5, 'a.txt') + b'hello'.ljust(512, b'\0') + bytes(1024)
  )
  with pytest.raises(ValueError, match=r'a\.tar: damaged or cut short'):
    list(tar_files.samples(f'{tmp_path}/a.tar'))


def test_folders_and_files_of_macos_are_no_samples(tmp_path):
  with tarfile.open(tmp_path / 'a.tar', 'w') as tar:
    folder = tarfile.TarInfo('x')
    folder.type = tarfile.DIRTYPE
    tar.addfile(folder)
    for name in ('x/._1.txt', 'x/1.txt', 'x/1.json'):
      content = json.dumps({'domain': 'd'}).encode()
      member = tarfile.TarInfo(name)
      member.size = len(content)
      tar.addfile(member, io.BytesIO(content))
  [(key, files)] = tar_files.samples(f'{tmp_path}/a.tar')
  assert key == 'x/1' and files.keys() == {'txt', 'json'}
