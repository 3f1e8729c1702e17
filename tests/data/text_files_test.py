"""Plain text out of files: cut at blank lines, whatever the compression; every bad file is named in one line."""

import itertools

import corpora
import pytest

from dipaco_jax.config import settings
from dipaco_jax.data import compressed_files, corpus, text_files


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
  (tmp_path / 'a.txt').write_text(''.join(f'é{i}' for i in range(1_000_000))[:3_000_000])
  train, validation = corpora.both(corpora.in_files(tmp_path, validation_fraction=0.1))
  assert sum(len(d.text) for d in train + validation) == 3_000_000
  assert max(len(d.text) for d in train + validation) < 2 * text_files.PIECE_CHARS


def test_compressed_text_is_split_as_plain_text_is(tmp_path):
  content = ''.join(f'äöü {n} some words\n\n' for n in range(20_000)).encode()
  found = []
  for name, compress in {'txt': bytes, **{f'txt.{name}': make for name, make in corpora.COMPRESS.items()}}.items():
    (tmp_path / name).mkdir()
    (tmp_path / name / f'a.{name}').write_bytes(compress(content))
    sides = corpora.both(settings.Data(source='files', train=(f'{tmp_path}/{name}/*',), validation_fraction=0.1))
    found.append([[d.text for d in side] for side in sides])
  assert all(sides == found[0] for sides in found) and found[0][1]


def test_an_endless_file_streams():
  """Memory is one chunk: reading stops where the consumer does."""
  data = settings.Data(source='files', train=('/dev/zero',))
  with pytest.raises(ValueError, match='is a pipe or a device, which is not read: write the text to a file'):
    corpus.check_readable(data)
  read = itertools.count()
  pieces = text_files.pieces('word ' * 5000 for _ in read)
  assert len(list(itertools.islice(pieces, 10))) == 10 and next(read) < 12


@pytest.mark.parametrize('size', [1, 2, 3, 7])
def test_text_does_not_depend_on_where_its_chunks_end(tmp_path, monkeypatch, size):
  (tmp_path / 'a.txt').write_bytes(b'one\r\ntwo\r\n\r\nthree\rfour\r')
  monkeypatch.setattr(compressed_files, 'CHUNK_BYTES', size)
  assert ''.join(text_files.decode(f'{tmp_path}/a.txt')) == 'one\ntwo\n\nthree\rfour\r'
