"""A prepared dataset gives the documents that were put in, in their order, whatever its format; and clear errors."""

import sys

import prepared
import pytest
import slow

from dipaco_jax.config import settings
from dipaco_jax.data import corpus, source_tfds

pytestmark = pytest.mark.filterwarnings('ignore')  # TensorFlow's own
FORMATS = ['tfrecord', 'array_record']
SPLITS = ('train', 'validation')
TRAIN, VALIDATION = prepared.documents(100, seed=0), prepared.documents(20, seed=1)


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
  """Data dirs by format; with a validation split, without one, and with labels."""
  root = tmp_path_factory.mktemp('tfds')
  for form in FORMATS:
    prepared.prepare(root / form, {'train': TRAIN, 'validation': VALIDATION}, form)
    prepared.prepare(root / f'{form}-alone', {'train': TRAIN}, form)
  prepared.prepare(root / 'label', {'test': TRAIN}, 'tfrecord', label=True)
  return root


def data(folder, **kwargs):
  return settings.Data(**{'source': 'tfds', 'name': prepared.NAME, 'data_dir': str(folder)} | kwargs)


def pairs(documents):
  return [{'text': d.text, 'domain': d.domain} for d in documents]


@pytest.mark.slow
@pytest.mark.parametrize('form', slow.but(FORMATS, *FORMATS[1:]))
def test_documents_are_those_that_were_put_in(folders, form):
  corpus.check_readable(data(folders / form))
  train, validation = (list(corpus.documents(data(folders / form), split)) for split in ('train', 'validation'))
  assert pairs(train) == TRAIN and pairs(validation) == VALIDATION
  assert [d.id for d in train] == [f'train:{i}' for i in range(100)] and validation[0].id == 'validation:0'
  assert len(list((folders / form).rglob(f'*train.{form}*'))) == 3  # and this is their order


@pytest.mark.slow
@pytest.mark.parametrize('form', slow.but(FORMATS, *FORMATS[1:]))
def test_limits_of_documents_hold(folders, form):
  few = data(folders / form, max_documents=7, max_validation_documents=3)
  assert [len(list(corpus.documents(few, split))) for split in ('train', 'validation')] == [7, 3]


def test_without_a_validation_split_a_hash_draws_the_same_from_every_format(folders):
  splits = []
  for form in FORMATS:
    alone = data(folders / f'{form}-alone', validation_fraction=0.2)
    splits.append([list(corpus.documents(alone, split)) for split in ('train', 'validation')])
  assert splits[0] == splits[1]
  train, validation = splits[0]
  assert 15 <= len(validation) <= 25 and not {d.id for d in train} & {d.id for d in validation}
  assert sorted(d.text for d in train + validation) == sorted(d['text'] for d in TRAIN)


@pytest.mark.slow
@pytest.mark.parametrize('form', FORMATS)
def test_parts_are_the_whole_and_parse_no_more_than_their_share(folders, form, monkeypatch):
  parsed = []
  parse = source_tfds._parse_example
  monkeypatch.setattr(source_tfds, '_parse_example', lambda *args: parsed.append(1) or parse(*args))
  for given in (data(folders / form), data(folders / f'{form}-alone', validation_fraction=0.2)):
    for n in (3, 4):  # files, and fewer files than parts
      parsed.clear()
      parts = [
        [d for split in SPLITS for d in corpus.documents(given, split, (k, n), held_text=corpus.NOTHING)]
        for k in range(n)
      ]
      documents = len(parsed)
      assert sorted(d for part in parts for d in part) == sorted(d for s in SPLITS for d in corpus.documents(given, s))
      both = 2 if 'alone' in given.data_dir else 1  # splits have to read a document to draw it
      assert documents == both * sum(map(len, parts)) and max(map(len, parts)) - min(map(len, parts)) <= 3
      numbers = [[int(d.id.split(':')[1]) for d in part if 'train' in d.id] for part in parts]
      assert all((n == 3) == (max(part) - min(part) <= 33) for part in numbers)


def test_a_part_opens_its_own_files_only(tmp_path):
  prepared.prepare(tmp_path, {'train': TRAIN}, 'array_record')
  *_, last = sorted(tmp_path.rglob('*train.array_record*'))
  last.unlink()
  own = data(tmp_path, validation_fraction=1e-9)
  assert [len(list(corpus.documents(own, 'train', (k, 3)))) for k in (0, 1)] == [33, 34]
  with pytest.raises(ValueError, match='documents can be read'):
    list(corpus.documents(own, 'train', (2, 3)))


def test_the_name_of_a_label_is_a_domain(folders):
  labelled = data(folders / 'label')
  with pytest.raises(ValueError, match=r"config\.data\.name='my_text:1\.0\.0' has no split 'train': it has \['test'\]"):
    corpus.check_readable(labelled)
  read = [item.read() for item in source_tfds.items(labelled, 'test')]
  assert [domain for _, domain in read] == [d['domain'] for d in TRAIN]


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'name': 'my_text:2.0.0'}, r"'my_text:2\.0\.0': it has not been prepared in .*; there are \['my_text:1\.0\.0'\]"),
    ({'name': 'c4/en:3.0.1'}, r"'c4/en:3\.0\.1': it has not been prepared"),
    ({'data_dir': '/nowhere'}, r"config\.data\.data_dir='/nowhere': there is no such folder"),
    ({'text_key': 'content'}, r"no text under 'content'; texts are under \['domain', 'text'\]: set config\.data"),
    ({'text_key': 'number'}, "no text under 'number'"),
  ],
)
def test_what_is_missing_is_named(folders, changes, message):
  with pytest.raises(ValueError, match=message) as error:
    corpus.check_readable(data(folders / 'tfrecord', **changes))
  assert '\n' not in str(error.value)


def test_documents_without_the_domain_key_have_none(folders):
  assert {d.domain for d in corpus.documents(data(folders / 'tfrecord', domain_key='url'), 'train')} == {''}


@pytest.mark.slow
@pytest.mark.parametrize('form', slow.but(FORMATS, *FORMATS[1:]))
def test_a_damaged_file_is_named(tmp_path, form):
  prepared.prepare(tmp_path, {'train': TRAIN}, form)
  *_, last = sorted(tmp_path.rglob(f'*train.{form}*'))
  last.write_bytes(last.read_bytes()[:1000])
  with pytest.raises(ValueError, match=rf'{last.name}: \d+ of 33 documents can be read'):
    list(corpus.documents(data(tmp_path, validation_fraction=1e-9), 'train'))
  last.unlink()
  with pytest.raises(ValueError, match=rf'{last.name}: \d+ of 33 documents can be read'):
    list(corpus.documents(data(tmp_path, validation_fraction=1e-9), 'train'))


def test_the_extra_that_is_missing_is_named(folders, monkeypatch):
  source_tfds.load_library.cache_clear()
  monkeypatch.setitem(sys.modules, 'tensorflow_datasets', None)
  with pytest.raises(ValueError, match=r"source='tfds' needs tensorflow_datasets: pip install 'dipaco_jax\[c4\]'"):
    corpus.check_readable(data(folders / 'tfrecord'))
