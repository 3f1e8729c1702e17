"""Texts with equal content have equal digests, and unchanged files are not read again."""

import hashlib
import os
import shutil
import sys

import bits
import corpora
import pytest

from dipaco_jax.config import settings
from dipaco_jax.data import content
from dipaco_jax.storage import user_modules


@pytest.fixture
def folder(tmp_path):
  """A folder `text` with two files of lines."""
  made = tmp_path / 'text'
  made.mkdir()
  for number, name in enumerate(('a.jsonl', 'b.jsonl')):
    (made / name).write_bytes(corpora.lines(50 + number))
  return made


def digest(data: settings.Data, known=None) -> dict[str, str]:
  made = content.Digests(known or {})
  return {field: made.of_content(of) for field, of in content.of_text(data).items()}


def test_the_same_text_elsewhere_is_the_same(folder, tmp_path):
  shutil.copytree(folder, tmp_path / 'copy' / 'text')
  here, copy = (digest(corpora.in_files(path)) for path in (folder, tmp_path / 'copy' / 'text'))
  assert here == copy and here.keys() == {'data.train', 'data.validation'}


@pytest.mark.parametrize('what', ['rewritten', 'added', 'removed', 'renamed'])
def test_other_text_is_another(folder, what):
  before = digest(corpora.in_files(folder))
  if what == 'rewritten':
    bits.rewrite_in_place(folder / 'a.jsonl')
  elif what == 'added':
    shutil.copy(folder / 'a.jsonl', folder / 'c.jsonl')
  elif what == 'removed':
    (folder / 'b.jsonl').unlink()
  else:  # documents are known by the names of files, and read in their order
    (folder / 'a.jsonl').rename(folder / 'c.jsonl')
  after = digest(corpora.in_files(folder))
  assert before['data.train'] != after['data.train'] and before['data.validation'] == after['data.validation']


def test_limits_change_no_content(folder):
  assert digest(corpora.in_files(folder)) == digest(corpora.in_files(folder, max_documents=3))


def test_an_index_beside_a_file_of_tokens_is_part_of_it(tmp_path):
  (tmp_path / 'a.bin').write_bytes(bytes(100))
  (tmp_path / 'a.idx').write_bytes(b'index')
  data = settings.Data(source='files', train=(f'{tmp_path}/*.bin',))
  before = digest(data)
  (tmp_path / 'a.idx').write_bytes(b'other')
  assert digest(data) != before


def test_a_mixture_is_compared_by_source(folder, tmp_path):
  (tmp_path / 'swapped').mkdir()
  for one, other in (('a', 'b'), ('b', 'a')):
    shutil.copy(folder / f'{one}.jsonl', tmp_path / 'swapped' / f'{other}.jsonl')
  found = []
  for root in (folder, tmp_path / 'swapped'):
    sources = {'x': f'{root}/a.jsonl', 'y': f'{root}/b.jsonl'}
    found.append(digest(settings.from_dict({'data': {'train': sources, 'validation': ''}}).data)['data.train'])
  assert found[0] != found[1]


@pytest.fixture
def reads(monkeypatch):
  """The files that were read for their digests."""
  found, file_digest = [], hashlib.file_digest

  def counting(file, name):
    found.append(os.path.basename(file.name))
    return file_digest(file, name)

  monkeypatch.setattr(hashlib, 'file_digest', counting)
  return found


def test_what_is_known_is_not_read_again(folder, reads):
  paths = [str(path) for path in sorted(folder.iterdir())]
  digests = content.Digests({})
  before = digests.of_files(paths)
  assert sorted(reads) == ['a.jsonl', 'b.jsonl']
  digests.of_files(paths)
  assert len(reads) == 4, 'they were new, and could have changed within the resolution of their times'
  known = {path: [*found[:-2], found[-2] + 10 * content.RACY_NS, found[-1]] for path, found in digests.known.items()}
  assert content.Digests(known).of_files(paths) == before and len(reads) == 4
  bits.rewrite_in_place(folder / 'a.jsonl')
  after = content.Digests(known).of_files(paths)
  assert reads[4:] == ['a.jsonl'] and [before[path] == after[path] for path in paths] == [False, True]
  (folder / 'b.jsonl').unlink()
  assert [*content.Digests(known).of_files(paths)] == paths[:1]


def test_user_defined_documents_are_read(tmp_path, monkeypatch):
  (tmp_path / 'own_text.py').write_text(
    'import pathlib\n\ndef make(config, split):\n'
    f'  return [("a", pathlib.Path("{tmp_path}/a.txt").read_text)] if split == "train" else None\n'
  )
  monkeypatch.syspath_prepend(tmp_path)
  user_modules.trust(['own_text'])
  data = settings.from_dict({'data': {'source': 'own_text:make'}}).data
  found = []
  for text in ('some', 'more', 'some'):
    (tmp_path / 'a.txt').write_text(text)
    found.append(digest(data))
  sys.modules.pop('own_text')
  assert found[0] == found[2] != found[1] and found[0].keys() == {'data.source'}


def test_the_text_of_python_has_a_digest():
  data = settings.Data(source='stdlib')
  assert digest(data) == digest(data)
