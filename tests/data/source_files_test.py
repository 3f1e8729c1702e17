"""Files: which are held back whole or at their ends, their domains and their names."""

import corpora
import pytest

from dipaco_jax.config import settings
from dipaco_jax.data import corpus, source_files


def names(split):
  return [d.id.split('#')[0] for d in split]


@pytest.mark.parametrize('count', [source_files.WHOLE_FILES, 60])
@pytest.mark.parametrize('fraction', [0.02, 0.2])
def test_whole_files_are_held_back_where_there_are_some(tmp_path, count, fraction):
  for i in range(count):
    words = corpora.paragraphs(2000 if i else 200_000, f'words {i}')  # the first is most of the text
    (tmp_path / f'{i}.txt').write_text(words)
  train, validation = (
    set(names(split)) for split in corpora.both(corpora.in_files(tmp_path, validation_fraction=fraction))
  )
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
  train, validation = corpora.both(corpora.in_files(tmp_path, validation_fraction=0.05))
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
    (tmp_path / f'{name}.txt').write_text(
      '\n\n'.join(f'Paragraph {i} of text {name}.' for i in range(1000))
    )  # 3 pieces
  train, validation = corpora.both(corpora.in_files(tmp_path, validation_fraction=0.1))
  assert set(names(train)) == set(names(validation)) == {'a.txt', 'b.txt', 'c.txt'}
  chars = [sum(len(d.text) for d in side) for side in (train, validation)]
  assert chars[1] / sum(chars) == pytest.approx(0.1, abs=0.01)
  assert all(d.text.lstrip().startswith('Paragraph') for d in validation)


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


def test_names_do_not_depend_on_where_the_files_are(tmp_path):
  for folder in ('x', 'y'):
    (tmp_path / folder / 'sub').mkdir(parents=True)
    (tmp_path / folder / 'sub' / 'a.jsonl').write_bytes(corpora.lines(300))
  x, y = (
    corpora.both(settings.Data(source='files', train=(f'{tmp_path}/{folder}/**/*.jsonl',))) for folder in ('x', 'y')
  )
  assert x == y and x[0][0].id == 'sub/a.jsonl:1'


def test_files_of_one_name_in_several_folders_have_documents_of_their_own(tmp_path):
  for folder in ('x/law', 'x/news', 'y/z'):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / 'a.jsonl').write_bytes(corpora.lines(300, folder))
  globs = tuple(f'{tmp_path}/{folder}/*.jsonl' for folder in ('x/law', 'x/news', 'y/z'))
  train, validation = corpora.both(settings.Data(source='files', train=globs))
  ids = {d.id for d in train + validation}
  assert len(ids) == 900 and 'x/law/a.jsonl:1' in ids and 'y/z/a.jsonl:1' in ids
  held = [{d.id.split(':')[1] for d in validation if d.id.startswith(folder)} for folder in ('x/law', 'x/news')]
  assert held[0] != held[1], 'not the same lines of each'
  alone = corpora.both(settings.Data(source='files', train=globs[:1]))
  assert alone[0][0].id == 'a.jsonl:1'


@pytest.mark.parametrize('validation', ['b.jsonl', '../x/b*', 'link'])
def test_a_file_that_is_trained_on_is_no_validation_text(tmp_path, validation):
  (tmp_path / 'x').mkdir()
  for name in 'ab':
    (tmp_path / 'x' / f'{name}.jsonl').write_bytes(corpora.lines(50, name))
  (tmp_path / 'x' / 'link').symlink_to('b.jsonl')
  data = settings.Data(source='files', train=(f'{tmp_path}/x/*.jsonl',), validation=(f'{tmp_path}/x/{validation}',))
  words = r'is both in config\.data\.train and in config\.data\.validation: remove it from one'
  with pytest.raises(ValueError, match=words) as error:
    corpus.check_readable(data)
  assert str(error.value).startswith(f'{tmp_path}/x/') and '\n' not in str(error.value)
  corpus.check_readable(settings.Data(source='files', train=(f'{tmp_path}/x/a*',), validation=data.validation))


@pytest.mark.parametrize('pattern', ['[D]/a[1].jsonl', '[D]/*.jsonl', '[D]/**/*.jsonl', '*/*.jsonl'])
def test_brackets_in_the_names_of_what_is_there_are_no_wildcards(tmp_path, pattern):
  (tmp_path / '[D]').mkdir()
  (tmp_path / '[D]' / 'a[1].jsonl').write_text('{"text": "words"}\n')
  data = settings.Data(source='files', train=(f'{tmp_path}/{pattern}',))
  assert [item.read()[0] for item in source_files.items(data, 'train')] == ['words']


def test_a_file_is_read_once_whatever_links_lead_to_it(tmp_path):
  """A link to a folder above it would show each file some forty times."""
  (tmp_path / 'a.jsonl').write_text('{"text": "words"}\n')
  (tmp_path / 'again.jsonl').symlink_to('a.jsonl')
  (tmp_path / 'loop').symlink_to('.')
  data = settings.Data(source='files', train=(f'{tmp_path}/**/*.jsonl',))
  assert [item.id for item in source_files.items(data, 'train')] == ['a.jsonl:1']
