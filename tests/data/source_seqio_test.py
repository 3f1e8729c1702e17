"""A SeqIO task gives its text as it was, or as its tokens decode to; mixtures too; and clear errors."""

import sys

import prepared
import pytest
import slow

from dipaco_jax.config import settings
from dipaco_jax.data import corpus, sentencepiece_tokenizer, source_tfds
from dipaco_jax.storage import user_modules

pytestmark = pytest.mark.filterwarnings('ignore')  # TensorFlow's own
TRAIN, VALIDATION = prepared.documents(60, seed=0), prepared.documents(20, seed=1)
TRAIN[7]['text'] += ' \u2581'  # SentencePiece's own sign for a space

TASKS = """
import functools

import seqio

FEATURES = {{'targets': seqio.Feature(seqio.SentencePieceVocabulary({model!r}), add_eos=True)}}
KEYS = {{'targets': 'text', 'domain': 'domain', 'number': 'number'}}
REKEY = functools.partial(seqio.preprocessors.rekey, key_map=KEYS)
for name, splits, keeps in (
  ('kept', ('train', 'validation'), True), ('decoded', ('train', 'validation'), False),
  ('alone', ('train',), True), ('elsewhere', {{'test': 'train'}}, True),
):
  seqio.TaskRegistry.add(
    name,
    seqio.TfdsDataSource({dataset!r}, splits=splits),
    preprocessors=[
      REKEY,
      functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=keeps),
      seqio.preprocessors.append_eos,
    ],
    output_features=FEATURES,
  )
seqio.TaskRegistry.add('missing', seqio.TfdsDataSource('none_such:1.0.0'), preprocessors=[REKEY], output_features={{}})
seqio.MixtureRegistry.add('mixed', [('kept', 2), ('alone', 1)])
seqio.MixtureRegistry.add('mixed_kinds', [('kept', 2), ('decoded', 1)])
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Where the dataset is, and `my_tasks.py`, a user's module."""
  root = tmp_path_factory.mktemp('seqio')
  prepared.prepare(root, {'train': TRAIN, 'validation': VALIDATION}, 'tfrecord')
  model = root / 'tokenizer.model'
  model.write_bytes(sentencepiece_tokenizer.train([d['text'] for d in TRAIN], 300))
  (root / 'my_tasks.py').write_text(TASKS.format(model=str(model), dataset=prepared.NAME))
  sys.path.insert(0, str(root))
  user_modules.trust(['my_tasks', 'no_tasks'])
  yield root
  sys.path.remove(str(root))


def data(folder, name, **kwargs):
  return settings.Data(
    **{'source': 'seqio', 'name': name, 'data_dir': str(folder), 'module': 'my_tasks', 'text_key': 'targets'} | kwargs
  )


def both(given):
  return [list(corpus.documents(given, split)) for split in ('train', 'validation')]


@pytest.mark.parametrize('name', slow.but(['kept', 'decoded'], 'decoded'))
def test_a_task_gives_the_text_that_was_put_in(folder, name):
  """But for what its tokens do not tell, where it keeps nothing else."""
  corpus.check_readable(data(folder, name))
  as_it_was = (lambda words: words) if name == 'kept' else (lambda words: words.replace('\u2581', ' '))
  for documents, given in zip(both(data(folder, name)), (TRAIN, VALIDATION), strict=True):
    assert sorted((d.text, d.domain) for d in documents) == sorted((as_it_was(d['text']), d['domain']) for d in given)
    assert len({d.id for d in documents}) == len(given)


def test_numbers_may_be_domains(folder):
  given = data(folder, 'kept', domain_key='number')
  assert {d.domain for d in corpus.documents(given, 'train')} == {str(i) for i in range(60)}
  assert {d.domain for d in corpus.documents(data(folder, 'kept', domain_key='url'), 'train')} == {''}


@pytest.mark.slow
def test_documents_come_in_the_same_order_every_time(folder):
  assert both(data(folder, 'kept')) == both(data(folder, 'kept'))


@pytest.mark.slow
@pytest.mark.parametrize('name', ['mixed', 'mixed_kinds'])
def test_a_mixture_draws_from_all_its_tasks(folder, name):
  train, validation = both(data(folder, name))
  assert len(train) > 60 and len(validation) >= 20  # of two tasks, until one ends
  assert {d.domain for d in train} == set(prepared.KINDS)
  as_it_was = (lambda words: words) if name == 'mixed' else (lambda words: words.replace('\u2581', ' '))
  assert {d.text for d in train} <= {as_it_was(d['text']) for d in TRAIN}


def test_without_a_validation_split_a_hash_draws_one(folder):
  train, validation = both(data(folder, 'alone', validation_fraction=0.2))
  assert 8 <= len(validation) <= 16
  assert sorted(d.text for d in train + validation) == sorted(d['text'] for d in TRAIN)


PARTS = ('kept', 3), ('kept', 4), ('alone', 3), ('mixed', 3)  # of 3 files


@pytest.mark.parametrize('name, parts', slow.but(PARTS, *PARTS))
def test_parts_are_the_whole(folder, name, parts):
  """Also by id, but where SeqIO itself takes a task apart."""
  for split in ('train', 'validation'):
    whole = list(corpus.documents(data(folder, name), split))
    found = [d for k in range(parts) for d in corpus.documents(data(folder, name), split, (k, parts))]
    assert sorted(d[name == 'kept' :] for d in found) == sorted(d[name == 'kept' :] for d in whole)
    assert len({d.id for d in found}) == len(whole)


@pytest.mark.slow
def test_a_part_of_a_task_is_whole_files(folder):
  for k in range(3):
    found = sorted(d.text for d in corpus.documents(data(folder, 'kept'), 'train', (k, 3)))
    assert found == sorted(d['text'] for d in TRAIN[20 * k : 20 * (k + 1)])


@pytest.mark.parametrize(
  'name, changes, message',
  [
    ('kep', {}, r"name='kep': SeqIO has no such task or mixture; the nearest are \['kept'"),
    ('kept', {'module': 'no_tasks'}, r"config\.data\.module='no_tasks' cannot be imported \(No module named"),
    ('kept', {'text_key': 'text'}, r"kept: no text under 'text'; there are .*'targets'.*: set config\.data\.text_key"),
    ('missing', {}, "name='missing' cannot be read"),
  ],
)
def test_what_is_missing_is_named(folder, name, changes, message):
  with pytest.raises(ValueError, match=message) as error:
    corpus.check_readable(data(folder, name, **changes))
  assert len(str(error.value)) < 400


def test_a_missing_training_split_is_named(folder):
  with pytest.raises(ValueError, match=r"config\.data\.name='elsewhere' has no split 'train': it has \['test'\]"):
    corpus.check_readable(data(folder, 'elsewhere'))


def test_the_extra_that_is_missing_is_named(folder, monkeypatch):
  source_tfds.load_library.cache_clear()
  monkeypatch.setitem(sys.modules, 'seqio', None)
  with pytest.raises(ValueError, match=r"config\.data\.source='seqio' needs seqio: pip install 'dipaco_jax\[c4\]'"):
    corpus.check_readable(data(folder, 'kept'))
