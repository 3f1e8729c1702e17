"""Documents: the same every time, in parts, within the limits, and enough of them held back for validation."""

import json
import os

import corpora
import pytest
import slow

from dipaco_jax.config import settings
from dipaco_jax.data import corpus


def test_limits_leave_text_on_both_sides(tmp_path):
  """The first pieces of all are of one file's beginning."""
  for name in 'abc':
    (tmp_path / f'{name}.txt').write_text(corpora.paragraphs(50_000, name))
  train, validation = corpora.both(corpora.in_files(tmp_path, max_documents=20, validation_fraction=0.1))
  assert (len(train), len(validation)) == (18, 2)


def test_a_limit_of_validation_draws_from_all_files(tmp_path):
  for name in 'abcd':
    (tmp_path / f'{name}.jsonl').write_bytes(corpora.lines(400, name))
  few = corpora.both(corpora.in_files(tmp_path, validation_fraction=0.3, max_validation_documents=40))[1]
  assert len(few) == 40 and {d.id[0] for d in few} == set('abcd')
  everything = corpora.both(corpora.in_files(tmp_path, validation_fraction=0.3))[1]
  assert set(few) < set(everything) and few == sorted(few, key=everything.index)


def settings_of(tmp_path, **data):
  values = {'data': {'source': 'files', 'train': (f'{tmp_path}/*.*',), **data}, 'model': {'seq_len': 256}}
  return settings.from_dict(values | {'grid': {'a': 4, 'b': 4}})


@pytest.mark.slow
def test_more_is_held_back_of_little_text(tmp_path):
  """First more of the pieces that are held back anyway, then more pieces, up to a bound."""
  for name in 'abc':
    (tmp_path / f'{name}.txt').write_text(corpora.paragraphs(45_000, f'words of {name},'))  # 3 MB, 650,000 tokens
  assert corpus.plan_held_back(settings_of(tmp_path, min_validation_tokens=0)) == (0.02, 1, 'ends')
  fraction, sequences, how = corpus.plan_held_back(settings_of(tmp_path, min_validation_tokens=200))  # 6,400 in all
  assert fraction == 0.02 and 1 < sequences < 20 and how == 'ends'
  fraction, sequences, _ = corpus.plan_held_back(settings_of(tmp_path))  # 32,000 in all
  assert 0.04 < fraction < 0.06 and sequences == corpus.ALL
  assert corpus.plan_held_back(settings_of(tmp_path, min_validation_tokens=10_000))[0] == 0.1
  assert corpus.plan_held_back(settings_of(tmp_path, validation_fraction=0.2)) == (0.2, 6, 'ends')
  for name in 'abc':
    (tmp_path / f'{name}.txt').write_text(corpora.paragraphs(1_000_000, f'{name} some words of text'))
  assert corpus.plan_held_back(settings_of(tmp_path)) == (0.02, 1, 'ends')


def test_of_lines_more_are_held_back(tmp_path):
  (tmp_path / 'a.jsonl').write_text(
    ''.join(json.dumps({'text': f'{i:4} ' + 'word ' * 199}) + '\n' for i in range(2000))  # 218 tokens count
  )
  fraction, sequences, how = corpus.plan_held_back(settings_of(tmp_path))
  assert (sequences, how) == (corpus.ALL, 'documents')
  held = list(corpus.documents(settings_of(tmp_path, max_validation_documents=0).data, 'validation', fraction=fraction))
  assert len(held) >= round(32_000 / 218) and fraction < 1.2 * 32_000 / 218 / 2000
  assert corpus.plan_held_back(settings_of(tmp_path, validation=f'{tmp_path}/a.jsonl')) == (0.02, 1, 'given')


@pytest.mark.parametrize('count', [2, 5, 20])
@pytest.mark.parametrize('least', [0, 1000])
def test_of_few_lines_one_is_held_back_whatever_their_hashes(tmp_path, count, least):
  for name in 'abcdefgh':
    (tmp_path / 'a.jsonl').write_bytes(corpora.lines(count, name))
    data = settings_of(tmp_path, min_validation_tokens=least)
    fraction = corpus.plan_held_back(data).fraction
    train, validation = (
      list(corpus.documents(data.data, split, fraction=fraction)) for split in ('train', 'validation')
    )
    assert train and validation and len(train) + len(validation) == count


def test_validation_globs_and_limits_hold(tmp_path):
  (tmp_path / 'train.jsonl').write_bytes(corpora.lines(50))
  (tmp_path / 'other.jsonl').write_bytes(corpora.lines(20, 'other'))
  data = settings.Data(source='files', train=(f'{tmp_path}/train*',), validation=(f'{tmp_path}/other*',))
  assert [len(split) for split in corpora.both(data)] == [50, 20]
  data = settings.Data(**vars(data) | {'max_documents': 7, 'max_validation_documents': 3})
  assert [len(split) for split in corpora.both(data)] == [7, 3]
  shared = corpora.in_files(tmp_path, max_documents=40, validation_fraction=0.5)
  assert sum(map(len, corpora.both(shared))) == 40
  shared = corpora.in_files(tmp_path, max_validation_documents=4, validation_fraction=0.5)
  assert len(corpora.both(shared)[1]) == 4 < len(corpora.both(shared)[0])


@pytest.mark.parametrize('parts', slow.but([3, 5], 5))  # of 4 files
@pytest.mark.parametrize('source', ['files', 'stdlib'])
def test_parts_are_the_whole(tmp_path, source, parts):
  """Each document is in one of them, on the same side of the split."""
  for name in 'xyz':
    (tmp_path / f'{name}.jsonl').write_bytes(corpora.lines(100, name))
  (tmp_path / 'b.txt').write_text(corpora.paragraphs(20_000))
  stdlib = settings.Data(source='stdlib', max_documents=200, validation_fraction=0.1)
  data = corpora.in_files(tmp_path, validation_fraction=0.3) if source == 'files' else stdlib
  for split in ('train', 'validation'):
    found = [list(corpus.documents(data, split, (k, parts))) for k in range(parts)]
    assert sorted(d for part in found for d in part) == sorted(corpus.documents(data, split))
    assert all(found) or split == 'validation'


def test_a_part_reads_its_own_files_only(tmp_path):
  for name in 'abcd':
    (tmp_path / f'{name}.jsonl').write_bytes(corpora.lines(50, name) if name in 'bd' else b'not JSON')
  data = corpora.in_files(tmp_path, validation_fraction=0.3)
  names = {d.id[0] for split in ('train', 'validation') for d in corpus.documents(data, split, (1, 2))}
  assert names == {'b', 'd'}
  with pytest.raises(ValueError, match='not JSON'):
    list(corpus.documents(data, 'train', (0, 2)))


def test_each_part_has_its_share_of_the_limits(tmp_path):
  for name in 'abc':
    (tmp_path / f'{name}.jsonl').write_bytes(corpora.lines(50, name))
  (tmp_path / 'other').mkdir()
  (tmp_path / 'other' / 'v.jsonl').write_bytes(corpora.lines(50, 'v'))
  data = corpora.in_files(tmp_path, max_documents=31, max_validation_documents=2)
  for parts in (2, 3, 5):
    shares = [len([*corpus.documents(data, 'train', (k, parts))]) for k in range(parts)]
    shares = [n + len([*corpus.documents(data, 'validation', (k, parts))]) for k, n in enumerate(shares)]
    assert 29 <= sum(shares) <= 31 and max(shares) - min(shares) <= 2
  data = settings.Data(**vars(data) | {'validation': (f'{tmp_path}/other/*',)})
  for split, most in (('train', 31), ('validation', 2)):
    shares = [len([*corpus.documents(data, split, (k, 3))]) for k in range(3)]
    assert shares == [len(range(k, most, 3)) for k in range(3)]


def test_missing_files_and_empty_splits_are_errors(tmp_path):
  with pytest.raises(ValueError, match=r'matches no file: correct config\.data\.train'):
    corpus.check_readable(corpora.in_files(tmp_path))
  os.mkfifo(tmp_path / 'pipe.txt')
  with pytest.raises(ValueError, match=r'pipe or a device, which is not read: write the text to a file, and name that'):
    corpus.check_readable(corpora.in_files(tmp_path))
  (tmp_path / 'a.txt').write_text('one short text')
  with pytest.raises(ValueError, match=r'no document is left for validation.*validation_fraction=1e-09'):
    corpus.check_readable(corpora.in_files(tmp_path, validation_fraction=1e-9))
  with pytest.raises(ValueError, match='no document is left for training'):
    corpus.check_readable(corpora.in_files(tmp_path, validation_fraction=1 - 1e-9))
