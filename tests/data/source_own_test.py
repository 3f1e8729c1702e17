"""User-defined sources: splits by id, division into parts, and errors about faulty ones."""

import itertools

import own_modules
import pytest

from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import corpus

SOURCE = """
import itertools

opened = []

def read(i):
  opened.append(i)
  return f'text {i}'

def make(config, split):
  for i in range(400) if split == 'train' else ():
    yield f'id {i}', lambda i=i: read(i), 'ab'[i % 2]

def both(config, split):
  return [(f'{split} {i}', f'{split} text {i}') for i in range(30)]

def shuffled(config, split, calls=itertools.count()):
  first = next(calls)
  return [(f'id {(i + first) % 9}', 'text') for i in range(9)]

def failing(config, split):
  yield 'a', 'text'
  yield 'b', 1 / 0

unnamed = lambda config, split: ['text'] * 3
numbered = lambda config, split: [(i, 'text') for i in range(3)]
repeated = lambda config, split: [('a', 'text'), ('a', 'more')]
wordless = lambda config, split: [('a', None)]
halved = lambda config, split: [('a', 'text'), ('b', 'x\\ud800')]
empty = lambda config, split: None
unread = lambda config, split: [('a', lambda: 1 / 0)]
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
  """The user's module, under a name that no other test has."""
  return own_modules.write(tmp_path, monkeypatch, SOURCE)


def data(module: str, name: str = 'make', **changes) -> settings.Data:
  return settings.from_dict({'data': {'source': f'{module}:{name}', **changes}}).data


def test_validation_text_is_held_back_by_content(module):
  d = data(module, validation_fraction=0.25)
  train, validation = (list(corpus.documents(d, split)) for split in ('train', 'validation'))
  assert len(train) + len(validation) == 400 and {x.id for x in train}.isdisjoint(x.id for x in validation)
  assert 60 < len(validation) < 140 and {x.domain for x in train} == {'a', 'b'}
  assert train[0].text == f'text {train[0].id.removeprefix("id ")}'


def test_parts_are_the_whole_and_read_only_their_own(module):
  d = data(module, validation_fraction=0.25)
  whole = [x.id for x in corpus.documents(d, 'train')]
  opened = __import__(module).opened
  parts = []
  for k in range(3):
    opened.clear()
    parts.append([x.id for x in corpus.documents(d, 'train', (k, 3))])
    assert len(opened) == len(range(k, 400, 3)), 'each once'
  assert sorted(itertools.chain(*parts)) == sorted(whole) and min(map(len, parts)) > 60


def test_a_split_of_its_own(module):
  found = list(corpus.documents(data(module, 'both'), 'validation'))
  assert [x.id for x in found] == [f'validation {i}' for i in range(30)] and {x.domain for x in found} == {''}
  assert len(list(corpus.documents(data(module, 'both', max_documents=7), 'train'))) == 7


def test_mixtures_may_have_it_too(module):
  d = data(module, 'both', train={'x': 'a', 'y': 'b'})
  assert {x.domain for x in corpus.documents(d, 'train')} == {'x', 'y'}


@pytest.mark.parametrize('name, words', [
  ('shuffled', "document 0 is 'id 0' at first, but 'id 1' when documents are listed again"),
  ('failing', r'raises ZeroDivisionError: division by zero \(line \d+ of .*own_.*py\)'),
  ('unnamed', r'document 0 of train is a str: expected a tuple \(id, text\) or \(id, text, domain\)'),
  ('numbered', 'document 0 of train has the id 0: expected a str, different for each document'),
  ('repeated', "document 1 of train has the id 'a', as an earlier one"),
  ('wordless', "text and domain of document 'a' are NoneType and str: expected str"),
  ('halved', "the text of document 'b' has a lone surrogate"),
  ('unread', 'raises ZeroDivisionError: division by zero'),
  ('missing', 'has no function missing'),
])  # fmt: skip
def test_what_goes_wrong_names_the_field(module, name, words):
  d = data(module, name)
  with pytest.raises(InputError, match=rf"config.data.source='{module}:{name}'[: ].*{words}"):
    corpus.check_readable(d)
    list(corpus.documents(d, 'train', fraction=0.0))


def test_no_documents(module):
  with pytest.raises(InputError, match='no document is left for training'):
    corpus.check_readable(data(module, 'empty'))
