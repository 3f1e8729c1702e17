"""The running Python's own text: several domains, each file on one side of the split."""

import corpora

from dipaco_jax.config import settings
from dipaco_jax.data import corpus, source_stdlib


def test_stdlib_is_text_of_several_domains():
  train, validation = corpora.both(settings.Data(source='stdlib', max_documents=600))
  assert (len(train) + len(validation)) == 600 and 5 <= len(validation) <= 30
  assert {'code', 'tests'} <= {d.domain for d in train}
  names = [{d.id.split('#')[0] for d in split} for split in (train, validation)]
  assert not names[0] & names[1], 'a file is on one side'
  assert not any('site-packages' in d.id for d in train)
  assert sum(len(d.text) for d in train) > 1_000_000


def test_stdlib_has_the_language_reference(monkeypatch):
  name = source_stdlib.TOPICS
  file = source_stdlib._list_files()[name]
  monkeypatch.setattr(source_stdlib, '_list_files', lambda: {name: file})  # the other files take seconds to read
  topics = [d for d in corpus.documents(settings.Data(source='stdlib'), 'train') if d.id.startswith(name)]
  assert len(topics) > 40 and {d.domain for d in topics} == {'docs'}
  assert not any(d.text.startswith('#') for d in topics), 'as text, not as source'
