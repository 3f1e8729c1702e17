"""Text out of files: cut at blank lines, whatever the compression; every bad file is named in one line."""

import gzip
import itertools
import os
import sys

import corpora
import pytest
import zstandard

from dipaco_jax.core import settings
from dipaco_jax.data import corpus, text_files


def test_documents_do_not_depend_on_the_compression_of_json(tmp_path):
  content = corpora.lines(200)
  names = {'jsonl': bytes, 'json.gz': gzip.compress, 'jsonl.gz': gzip.compress, 'jsonl.zst': zstandard.compress}
  found = []
  for name, compress in names.items():
    (tmp_path / f'a.{name}').write_bytes(compress(content))
    train, validation = corpora.both(
      settings.Data(source='files', train=(f'{tmp_path}/a.{name}',), validation_fraction=0.1)
    )
    assert {d.text for d in train + validation} == {f'line {i}' for i in range(200)}
    assert all(d.domain == 'ab'[int(d.text.split()[1]) % 2] for d in train)
    found.append((len(train), len(validation)))
  assert all(15 <= validation <= 25 and train + validation == 200 for train, validation in found)


def test_long_text_is_cut_at_blank_lines(tmp_path):
  paragraphs = [f'Paragraph {i}. ' + 'äöü word ' * (i % 97) for i in range(5000)]
  (tmp_path / 'book.txt').write_bytes('\r\n\r\n'.join(paragraphs).encode())
  train, validation = corpora.both(corpora.in_files(tmp_path))
  assert validation, 'one book alone has a validation part'
  pieces = sorted(train + validation, key=lambda d: int(d.id.split('#')[1]))
  assert ''.join(d.text for d in pieces).split() == ' '.join(paragraphs).split()
  assert all(d.text.startswith(('Paragraph', '\nParagraph')) for d in pieces)
  assert all(len(d.text) < 2 * text_files.PIECE_CHARS for d in pieces)


def test_text_without_any_break_is_cut_too(tmp_path):
  (tmp_path / 'a.txt').write_text('é' * 3_000_000)
  train, validation = corpora.both(corpora.in_files(tmp_path, validation_fraction=0.1))
  assert sum(len(d.text) for d in train + validation) == 3_000_000
  assert max(len(d.text) for d in train + validation) < 2 * text_files.PIECE_CHARS


def test_compressed_text_is_split_as_plain_text_is(tmp_path):
  content = ''.join(f'äöü {n} some words\n\n' for n in range(20_000)).encode()
  found = []
  for name, compress in {'txt': bytes, 'txt.gz': gzip.compress, 'txt.zst': zstandard.compress}.items():
    (tmp_path / name).mkdir()
    (tmp_path / name / f'a.{name}').write_bytes(compress(content))
    sides = corpora.both(settings.Data(source='files', train=(f'{tmp_path}/{name}/*',), validation_fraction=0.1))
    found.append([[d.text for d in side] for side in sides])
  assert found[0] == found[1] == found[2] and found[0][1]


def test_an_endless_file_streams():
  """Memory is one chunk: reading stops where the consumer does."""
  data = settings.Data(source='files', train=('/dev/zero',))
  with pytest.raises(ValueError, match='matches no file'):  # a device is no file
    corpus.check_readable(data)
  read = itertools.count()
  pieces = text_files.pieces('word ' * 5000 for _ in read)
  assert len(list(itertools.islice(pieces, 10))) == 10 and next(read) < 12


BAD = {
  'nothing.txt': (b'', 'no text in it'),
  'blank.jsonl': (b'\n\n', 'no text in it'),
  'binary.txt': (b'abc\0def', r'byte 3 is NUL'),
  'latin.txt': (('x' * 100 + 'é').encode('latin1'), 'not UTF-8 at byte 100'),
  'split.txt': (b'x' * ((1 << 20) - 1) + b'\xc3(', f'not UTF-8 at byte {(1 << 20) - 1}'),
  'plain.jsonl': (corpora.lines(2) + b'plain text\n', r'plain\.jsonl:3: not JSON'),
  'key.jsonl': (b'{"content": "x", "n": 1}\n', r"key\.jsonl:1: no text under 'text'; texts are under \['content'\]"),
  'list.jsonl': (b'[1]\n', 'no JSON object, which each line should be'),
  'latin.jsonl': (b'{"text": "\xe9"}\n', r'latin\.jsonl:1: not UTF-8 at byte 10'),
  'cut.jsonl.gz': (gzip.compress(os.urandom(5000))[:2000], 'damaged or cut short'),
  'no.jsonl.gz': (b'plain', 'Not a gzipped file'),
  'no.jsonl.zst': (b'plain', 'damaged or cut short'),
}


@pytest.mark.parametrize('name', BAD)
def test_bad_files_are_named(tmp_path, name):
  content, message = BAD[name]
  (tmp_path / 'good.txt').write_text('good text\n\n' * 20_000)
  (tmp_path / name).write_bytes(content)
  with pytest.raises(ValueError, match=message) as error:
    corpus.check_readable(corpora.in_files(tmp_path))
  assert name in str(error.value) and '\n' not in str(error.value)


def test_good_files_pass_the_check(tmp_path):
  (tmp_path / 'a.txt').write_text('\ufeffgood text, ' * 100_000)
  (tmp_path / 'b.jsonl').write_bytes(b'\xef\xbb\xbf' + corpora.lines(5) + b'\n' + corpora.lines(200).rstrip())
  corpus.check_readable(corpora.in_files(tmp_path))
  corpus.check_readable(settings.Data())


def test_faults_beyond_the_beginning_are_found_by_the_stream(tmp_path):
  (tmp_path / 'a.jsonl').write_bytes(corpora.lines(60_000) + b'{"txt": 1}\n')
  corpus.check_readable(corpora.in_files(tmp_path))
  with pytest.raises(ValueError, match=r'a\.jsonl:60001: no text'):
    list(corpus.documents(corpora.in_files(tmp_path, validation_fraction=1e-9), 'train'))
  (tmp_path / 'a.jsonl').unlink()
  (tmp_path / 'b.txt').write_bytes(b'good text\n' * 300_000 + b'\xff')
  with pytest.raises(ValueError, match=r'b\.txt: not UTF-8 at byte 3000000'):
    list(corpus.documents(corpora.in_files(tmp_path), 'train'))


def test_the_library_that_zst_needs_is_named(tmp_path, monkeypatch):
  (tmp_path / 'a.jsonl.zst').write_bytes(zstandard.compress(corpora.lines(3)))
  monkeypatch.setitem(sys.modules, 'zstandard', None)
  with pytest.raises(ValueError, match='pip install'):
    corpus.check_readable(corpora.in_files(tmp_path))


def test_half_a_surrogate_pair_is_replaced(tmp_path):
  (tmp_path / 'a.jsonl').write_bytes(b'{"text": "a\\ud800b \\ud83d\\ude00"}\n' * 300)
  assert {d.text for d in corpus.documents(corpora.in_files(tmp_path), 'train')} == {'a?b \U0001f600'}


@pytest.mark.parametrize('size', [1, 2, 3, 7])
def test_text_does_not_depend_on_where_its_chunks_end(tmp_path, monkeypatch, size):
  (tmp_path / 'a.txt').write_bytes(b'one\r\ntwo\r\n\r\nthree\rfour\r')
  monkeypatch.setattr(text_files, 'CHUNK_BYTES', size)
  assert ''.join(text_files.decode(f'{tmp_path}/a.txt')) == 'one\ntwo\n\nthree\rfour\r'
