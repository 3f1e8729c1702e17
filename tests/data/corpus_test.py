"""Documents: the same every time, in parts, on the right side of the split; and every bad input named in one line."""

import gzip
import itertools
import json
import os
import sys

import pytest
import zstandard

from dipaco_jax.core import settings
from dipaco_jax.data import corpus, source_files, source_stdlib, text_files


def files(tmp_path, **kwargs):
  return settings.Data(source='files', train=(f'{tmp_path}/*.*',), **kwargs)


def lines(count):
  return ''.join(json.dumps({'text': f'line {i}', 'domain': 'ab'[i % 2]}) + '\n' for i in range(count)).encode()


def both(data):
  return [list(corpus.documents(data, split)) for split in ('train', 'validation')]


def test_formats_agree(tmp_path):
  content = lines(200)
  names = {'jsonl': bytes, 'json.gz': gzip.compress, 'jsonl.gz': gzip.compress, 'jsonl.zst': zstandard.compress}
  found = []
  for name, compress in names.items():
    (tmp_path / f'a.{name}').write_bytes(compress(content))
    train, validation = both(settings.Data(source='files', train=(f'{tmp_path}/a.{name}',), validation_fraction=0.1))
    assert {d.text for d in train + validation} == {f'line {i}' for i in range(200)}
    assert all(d.domain == 'ab'[int(d.text.split()[1]) % 2] for d in train)
    found.append((len(train), len(validation)))
  assert all(15 <= validation <= 25 and train + validation == 200 for train, validation in found)


def test_long_text_is_cut_at_blank_lines(tmp_path):
  paragraphs = [f'Paragraph {i}. ' + 'äöü word ' * (i % 97) for i in range(5000)]
  (tmp_path / 'book.txt').write_bytes('\r\n\r\n'.join(paragraphs).encode())
  train, validation = both(files(tmp_path))
  assert validation, 'one book alone has a validation part'
  pieces = sorted(train + validation, key=lambda d: int(d.id.split('#')[1]))
  assert ''.join(d.text for d in pieces).split() == ' '.join(paragraphs).split()
  assert all(d.text.startswith(('Paragraph', '\nParagraph')) for d in pieces)
  assert all(len(d.text) < 2 * text_files.PIECE_CHARS for d in pieces)


def test_text_without_any_break_is_cut_too(tmp_path):
  (tmp_path / 'a.txt').write_text('é' * 3_000_000)
  train, validation = both(files(tmp_path, validation_fraction=0.1))
  assert sum(len(d.text) for d in train + validation) == 3_000_000
  assert max(len(d.text) for d in train + validation) < 2 * text_files.PIECE_CHARS


def names(split):
  return [d.id.split('#')[0] for d in split]


@pytest.mark.parametrize('count', [source_files.WHOLE_FILES, 60])
@pytest.mark.parametrize('fraction', [0.02, 0.2])
def test_whole_files_are_held_back_where_there_are_some(tmp_path, count, fraction):
  for i in range(count):
    (tmp_path / f'{i}.txt').write_text('some words\n\n' * (3000 if i else 300_000))  # the first is most of the text
  train, validation = (set(names(split)) for split in both(files(tmp_path, validation_fraction=fraction)))
  assert validation and not train & validation and len(train | validation) == count
  sizes = {name: (tmp_path / name).stat().st_size for name in train | validation}
  held, total, largest = sum(sizes[name] for name in validation), sum(sizes.values()), sorted(sizes.values())[-2]
  assert '0.txt' in train
  assert held <= fraction * total + largest and (held >= fraction * total or len(validation) == count - 1)


def test_of_fewer_files_a_stretch_at_the_end_of_each(tmp_path):
  """No held-back piece stands between two that are trained on, and each file has its part."""
  for i, words in enumerate(('words ', 'wörter ', 'слова ')):
    lines = (f'{words * 20}{n}\n\n' for n in range(3000 * (i + 1)))
    (tmp_path / f'{i}.txt').write_text(''.join(lines))
  train, validation = both(files(tmp_path, validation_fraction=0.05))
  for name in ('0.txt', '1.txt', '2.txt'):
    mine, held = ([d for d in split if d.id.startswith(name)] for split in (train, validation))
    numbers = [[int(d.id.split('#')[1]) for d in side] for side in (mine, held)]
    assert numbers[0] + numbers[1] == list(range(len(mine) + len(held)))
    assert ''.join(d.text for d in mine + held) == (tmp_path / name).read_text()
    chars = [sum(len(d.text) for d in side) for side in (mine, held)]
    assert chars[1] / sum(chars) == pytest.approx(0.05, abs=0.003)
    draws = [d.draw for d in mine]
    assert 0 <= draws[-1] < 0.02 and draws[0] > 0.95 and draws == sorted(draws, reverse=True)


def test_a_short_file_has_its_stretch_too(tmp_path):
  for name in 'abc':
    (tmp_path / f'{name}.txt').write_text('\n\n'.join(f'Paragraph {i} of a text.' for i in range(1000)))  # 3 pieces
  train, validation = both(files(tmp_path, validation_fraction=0.1))
  assert set(names(train)) == set(names(validation)) == {'a.txt', 'b.txt', 'c.txt'}
  chars = [sum(len(d.text) for d in side) for side in (train, validation)]
  assert chars[1] / sum(chars) == pytest.approx(0.1, abs=0.01)
  assert all(d.text.lstrip().startswith('Paragraph') for d in validation)


def test_compressed_text_is_split_as_plain_text_is(tmp_path):
  content = ''.join(f'äöü {n} some words\n\n' for n in range(20_000)).encode()
  found = []
  for name, compress in {'txt': bytes, 'txt.gz': gzip.compress, 'txt.zst': zstandard.compress}.items():
    (tmp_path / name).mkdir()
    (tmp_path / name / f'a.{name}').write_bytes(compress(content))
    sides = both(settings.Data(source='files', train=(f'{tmp_path}/{name}/*',), validation_fraction=0.1))
    found.append([[d.text for d in side] for side in sides])
  assert found[0] == found[1] == found[2] and found[0][1]


def test_limits_leave_text_on_both_sides(tmp_path):
  """The first pieces of all are of one file's beginning."""
  for name in 'abc':
    (tmp_path / f'{name}.txt').write_text('some words\n\n' * 50_000)
  train, validation = both(files(tmp_path, max_documents=20, validation_fraction=0.1))
  assert (len(train), len(validation)) == (18, 2)


def test_a_limit_of_validation_draws_from_all_files(tmp_path):
  for name in 'abcd':
    (tmp_path / f'{name}.jsonl').write_bytes(lines(400))
  few = both(files(tmp_path, validation_fraction=0.3, max_validation_documents=40))[1]
  assert len(few) == 40 and {d.id[0] for d in few} == set('abcd')
  everything = both(files(tmp_path, validation_fraction=0.3))[1]
  assert set(few) < set(everything) and few == sorted(few, key=everything.index)


@pytest.mark.parametrize(
  ('paths', 'expected'),
  [
    (['/x/a.txt'], ['']),
    (['/x/a.txt', '/x/b.jsonl.gz'], ['a', 'b']),
    ([f'/x/{i}.txt' for i in range(21)], [''] * 21),
    (['/x/law/a.txt', '/x/law/b.txt', '/x/news/old/c.txt'], ['law', 'law', 'news/old']),
    (['/x/a.txt', '/x/law/b.txt'], ['x', 'law']),
    (['gs://b/law/a.txt', 'gs://b/news/b.txt'], ['law', 'news']),
  ],
)
def test_files_and_folders_are_domains_where_documents_name_none(paths, expected):
  assert list(source_files.domains_of(paths).values()) == expected


def settings_of(tmp_path, **data):
  values = {'data': {'source': 'files', 'train': (f'{tmp_path}/*.*',), **data}, 'model': {'seq_len': 256}}
  return settings.from_dict(values | {'grid': {'a': 4, 'b': 4}})


def test_more_is_held_back_of_little_text(tmp_path):
  """First more of the pieces that are held back anyway, then more pieces, up to a bound."""
  for name in 'abc':
    (tmp_path / f'{name}.txt').write_text('some words of text\n\n' * 50_000)  # 3 MB, some 650,000 tokens that count
  assert corpus.plan_held_back(settings_of(tmp_path, min_validation_tokens=0)) == (0.02, 1, 'ends')
  fraction, sequences, how = corpus.plan_held_back(settings_of(tmp_path, min_validation_tokens=200))  # 6,400 in all
  assert fraction == 0.02 and 1 < sequences < 20 and how == 'ends'
  fraction, sequences, _ = corpus.plan_held_back(settings_of(tmp_path))  # 32,000 in all
  assert 0.04 < fraction < 0.06 and sequences == corpus.ALL
  assert corpus.plan_held_back(settings_of(tmp_path, min_validation_tokens=10_000))[0] == 0.1
  assert corpus.plan_held_back(settings_of(tmp_path, validation_fraction=0.2)) == (0.2, 5, 'ends')
  for name in 'abc':
    (tmp_path / f'{name}.txt').write_text('some words of text\n\n' * 5_000_000)
  assert corpus.plan_held_back(settings_of(tmp_path)) == (0.02, 1, 'ends')


def test_of_lines_more_are_held_back(tmp_path):
  (tmp_path / 'a.jsonl').write_bytes((json.dumps({'text': 'word ' * 200}) + '\n').encode() * 2000)  # 218 tokens count
  assert corpus.plan_held_back(settings_of(tmp_path)) == (
    pytest.approx(32_000 / 218 / 2000, rel=1e-3),
    corpus.ALL,
    'documents',
  )
  assert corpus.plan_held_back(settings_of(tmp_path, validation=f'{tmp_path}/a.jsonl')) == (0.02, 1, 'given')


def test_names_do_not_depend_on_where_the_files_are(tmp_path):
  for folder in ('x', 'y'):
    (tmp_path / folder / 'sub').mkdir(parents=True)
    (tmp_path / folder / 'sub' / 'a.jsonl').write_bytes(lines(300))
  x, y = (both(settings.Data(source='files', train=(f'{tmp_path}/{folder}/**/*.jsonl',))) for folder in ('x', 'y'))
  assert x == y and x[0][0].id == 'sub/a.jsonl:1'


def test_validation_globs_and_limits(tmp_path):
  (tmp_path / 'train.jsonl').write_bytes(lines(50))
  (tmp_path / 'other.jsonl').write_bytes(lines(20))
  data = settings.Data(source='files', train=(f'{tmp_path}/train*',), validation=(f'{tmp_path}/other*',))
  assert [len(split) for split in both(data)] == [50, 20]
  data = settings.Data(**vars(data) | {'max_documents': 7, 'max_validation_documents': 3})
  assert [len(split) for split in both(data)] == [7, 3]
  shared = files(tmp_path, max_documents=40, validation_fraction=0.5)
  assert sum(map(len, both(shared))) == 40
  shared = files(tmp_path, max_validation_documents=4, validation_fraction=0.5)
  assert len(both(shared)[1]) == 4 < len(both(shared)[0])


@pytest.mark.parametrize('parts', [3, 5])  # of 4 files
@pytest.mark.parametrize('source', ['files', 'stdlib'])
def test_parts_are_the_whole(tmp_path, source, parts):
  """Each document is in one of them, on the same side of the split."""
  for name in 'xyz':
    (tmp_path / f'{name}.jsonl').write_bytes(lines(100))
  (tmp_path / 'b.txt').write_text('a b c\n\n' * 20_000)
  data = files(tmp_path, validation_fraction=0.3) if source == 'files' else settings.Data(max_documents=200)
  for split in ('train', 'validation'):
    found = [list(corpus.documents(data, split, (k, parts))) for k in range(parts)]
    assert sorted(d for part in found for d in part) == sorted(corpus.documents(data, split))
    assert all(found) or split == 'validation'


def test_a_part_reads_its_own_files_only(tmp_path):
  for name in 'abcd':
    (tmp_path / f'{name}.jsonl').write_bytes(lines(50) if name in 'bd' else b'not JSON')
  data = files(tmp_path, validation_fraction=0.3)
  names = {d.id[0] for split in ('train', 'validation') for d in corpus.documents(data, split, (1, 2))}
  assert names == {'b', 'd'}
  with pytest.raises(ValueError, match='not JSON'):
    list(corpus.documents(data, 'train', (0, 2)))


def test_each_part_has_its_share_of_the_limits(tmp_path):
  for name in 'abc':
    (tmp_path / f'{name}.jsonl').write_bytes(lines(50))
  (tmp_path / 'other').mkdir()
  (tmp_path / 'other' / 'v.jsonl').write_bytes(lines(50))
  data = files(tmp_path, max_documents=31, max_validation_documents=2)
  for parts in (2, 3, 5):
    shares = [len([*corpus.documents(data, 'train', (k, parts))]) for k in range(parts)]
    shares = [n + len([*corpus.documents(data, 'validation', (k, parts))]) for k, n in enumerate(shares)]
    assert 29 <= sum(shares) <= 31 and max(shares) - min(shares) <= 2
  data = settings.Data(**vars(data) | {'validation': (f'{tmp_path}/other/*',)})
  for split, most in (('train', 31), ('validation', 2)):
    shares = [len([*corpus.documents(data, split, (k, 3))]) for k in range(3)]
    assert shares == [len(range(k, most, 3)) for k in range(3)]


def test_other_files_have_another_fingerprint(tmp_path):
  (tmp_path / 'a.jsonl').write_bytes(lines(50))
  found = [corpus.fingerprint(files(tmp_path))]
  (tmp_path / 'b.jsonl').write_bytes(lines(50))
  found.append(corpus.fingerprint(files(tmp_path)))
  (tmp_path / 'b.jsonl').write_bytes(lines(51))
  found.append(corpus.fingerprint(files(tmp_path)))
  assert len({*found}) == 3 and found[-1] == corpus.fingerprint(files(tmp_path, max_documents=3))


def test_stdlib_is_text_of_several_domains():
  train, validation = both(settings.Data(max_documents=600))
  assert (len(train) + len(validation)) == 600 and 5 <= len(validation) <= 30
  assert {'code', 'tests'} <= {d.domain for d in train}
  names = [{d.id.split('#')[0] for d in split} for split in (train, validation)]
  assert not names[0] & names[1], 'a file is on one side'
  assert not any('site-packages' in d.id for d in train)
  assert sum(len(d.text) for d in train) > 1_000_000


def test_stdlib_has_the_language_reference():
  topics = [d for d in corpus.documents(settings.Data(), 'train') if d.id.startswith(source_stdlib.TOPICS)]
  assert len(topics) > 40 and {d.domain for d in topics} == {'docs'}
  assert not any(d.text.startswith('#') for d in topics), 'as text, not as source'


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
  'plain.jsonl': (lines(2) + b'plain text\n', r'plain\.jsonl:3: not JSON'),
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
    corpus.check_readable(files(tmp_path))
  assert name in str(error.value) and '\n' not in str(error.value)


def test_good_files_pass(tmp_path):
  (tmp_path / 'a.txt').write_text('\ufeffgood text, ' * 100_000)
  (tmp_path / 'b.jsonl').write_bytes(b'\xef\xbb\xbf' + lines(5) + b'\n' + lines(200).rstrip())
  corpus.check_readable(files(tmp_path))
  corpus.check_readable(settings.Data())


def test_faults_beyond_the_beginning_are_found_by_the_stream(tmp_path):
  (tmp_path / 'a.jsonl').write_bytes(lines(60_000) + b'{"txt": 1}\n')
  corpus.check_readable(files(tmp_path))
  with pytest.raises(ValueError, match=r'a\.jsonl:60001: no text'):
    list(corpus.documents(files(tmp_path, validation_fraction=1e-9), 'train'))
  (tmp_path / 'a.jsonl').unlink()
  (tmp_path / 'b.txt').write_bytes(b'good text\n' * 300_000 + b'\xff')
  with pytest.raises(ValueError, match=r'b\.txt: not UTF-8 at byte 3000000'):
    list(corpus.documents(files(tmp_path), 'train'))


def test_missing_files_and_empty_splits(tmp_path):
  with pytest.raises(ValueError, match=r'matches no file: mend config\.data\.train'):
    corpus.check_readable(files(tmp_path))
  (tmp_path / 'a.txt').write_text('one short text')
  with pytest.raises(ValueError, match=r'no document is left for validation.*validation_fraction=1e-09'):
    corpus.check_readable(files(tmp_path, validation_fraction=1e-9))
  with pytest.raises(ValueError, match='no document is left for training'):
    corpus.check_readable(files(tmp_path, validation_fraction=1 - 1e-9))


def test_zst_without_its_library(tmp_path, monkeypatch):
  (tmp_path / 'a.jsonl.zst').write_bytes(zstandard.compress(lines(3)))
  monkeypatch.setitem(sys.modules, 'zstandard', None)
  with pytest.raises(ValueError, match='pip install'):
    corpus.check_readable(files(tmp_path))


def test_half_a_surrogate_pair_is_replaced(tmp_path):
  (tmp_path / 'a.jsonl').write_bytes(b'{"text": "a\\ud800b \\ud83d\\ude00"}\n' * 300)
  assert {d.text for d in corpus.documents(files(tmp_path), 'train')} == {'a?b \U0001f600'}
