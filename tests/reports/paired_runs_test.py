"""Two runs on the documents that both have, and what tells that runs are of other text."""

import math

import numpy as np
import pytest

from dipaco_jax.core import bootstrap
from dipaco_jax.pipeline.document_losses import Documents
from dipaco_jax.reports import paired_runs, run_contents

COUNT = 40


def contents(nats, num_bytes=100, text=range(COUNT), beginning=range(COUNT), tokenizer='a', **changes):
  size = len(text)
  documents = Documents(
    {'paths': np.broadcast_to(np.asarray(nats, float), size)}, np.full(size, 30), np.broadcast_to(num_bytes, size),
    np.arange(size) % 2, np.zeros(size, int), np.array(text, np.uint64), np.array(beginning, np.uint64),
    np.arange(size).astype(np.uint64),
  )  # fmt: skip
  made = run_contents.Contents(tokenizer, '', {'law': 3}, 'digest', (1, 128, 32), documents, ['law', 'news'])
  return made._replace(**changes)


def test_shared_documents_are_compared_in_bits_per_byte():
  hard = np.random.default_rng(0).uniform(50, 150, COUNT)
  all_kinds, law, news = paired_runs.compare(contents(hard), contents(0.9 * hard))
  assert (all_kinds.kind, all_kinds.documents) == (paired_runs.ALL, COUNT) and {law.kind, news.kind} == {'law', 'news'}
  assert all_kinds.first == pytest.approx(hard.sum() / math.log(2) / (100 * COUNT))
  assert all_kinds.other / all_kinds.first == pytest.approx(0.9)
  assert all_kinds.interval == pytest.approx((0.9, 0.9))  # drawn together: how hard a document is plays no part


def test_the_interval_is_that_of_the_bootstrap_where_bytes_are_the_same():
  rng = np.random.default_rng(0)
  a, b = rng.uniform(50, 150, COUNT), rng.uniform(50, 150, COUNT)
  found = paired_runs.compare(contents(a), contents(b))[0]
  assert found.interval[0] < found.other / found.first < found.interval[1]
  drawn = np.random.default_rng(0).integers(COUNT, size=(bootstrap.RESAMPLES, COUNT))
  ratios = b[drawn].sum(1) / a[drawn].sum(1)
  assert found.interval == pytest.approx(tuple(np.quantile(ratios, [0.025, 0.975])))


def test_documents_are_found_in_another_order_and_by_their_beginnings_with_another_tokenizer():
  nats = np.arange(COUNT) + 50.0
  backwards = contents(nats[::-1], text=range(COUNT)[::-1], beginning=range(COUNT)[::-1])
  found = paired_runs.compare(contents(nats), backwards)
  assert found[0].documents == COUNT and found[0].interval == pytest.approx((1, 1))
  other = contents(nats, text=range(100, 100 + COUNT), tokenizer='b')
  assert paired_runs.compare(contents(nats), other)[0].documents == COUNT
  assert paired_runs.compare(contents(nats), other._replace(tokenizer='a')) == []


def test_sequences_of_few_documents_have_no_interval():
  first, other = contents(60), contents(50)
  content = np.arange(COUNT, dtype=np.uint64) % 7
  found = paired_runs.compare(first._replace(documents=first.documents._replace(content=content)), other)
  assert found[0].interval is None and paired_runs.compare(first, other)[0].interval


def test_few_documents_have_no_interval():
  few = contents(50, text=range(7), beginning=range(7))
  found = paired_runs.compare(contents(60), few)
  assert found[0].documents == 7 and found[0].interval is None
  assert 'too few documents' in paired_runs.table(found, ('a', 'b'))[1][-1]


def test_sequences_of_one_document_are_drawn_together():
  hard = np.random.default_rng(0).uniform(50, 150, COUNT)
  first, other = contents(hard), contents(np.roll(hard, 1))
  assert paired_runs.compare(first, other)[0].interval is not None
  of_one = first.documents._replace(content=np.zeros(COUNT, np.uint64))
  assert paired_runs.compare(first._replace(documents=of_one), other)[0].interval is None


def test_equal_documents_of_a_run_count_once():
  twice = contents(50, text=[*range(COUNT // 2)] * 2)
  assert paired_runs.compare(twice, twice)[0].documents == COUNT // 2


@pytest.mark.parametrize(
  ('changes', 'differences'),
  [
    ({}, []),
    ({'tokenizer': 'b', 'sequences': 'another'}, ['tokenizer']),
    ({'sequences': 'another'}, ['training text']),
    ({'sequences': 'another', 'cut': (2, 128, 32)}, []),  # the same text in other parts
    ({'sequences': ''}, []),  # a copy of a bucket
    ({'text': {'law': 4}}, ['training text']),
    ({'documents': None}, []),
    ({'files': 'known'}, []),  # of one run only
  ],
)
def test_other_contents_are_named(changes, differences):
  first, other = contents(50), contents(50)._replace(**changes)
  assert run_contents.differences([first, other]) == differences
  assert run_contents.differences([first, first, other]) == differences


def test_files_of_text_tell_whatever_the_tokenizer():
  first, other = (contents(50, files=files) for files in ('one', 'two'))
  assert run_contents.differences([first, other]) == ['training text']
  same = contents(50, files='one', tokenizer='b', sequences='another')
  assert run_contents.differences([first, same]) == ['tokenizer']


def test_another_validation_set_is_named():
  assert run_contents.differences([contents(50), contents(50, text=range(1, COUNT + 1))]) == ['validation set']
  assert run_contents.differences([contents(50), contents(60, text=range(COUNT)[::-1])]) == []
  cut_elsewhere = contents(50, text=range(1, COUNT + 1), tokenizer='b')
  assert run_contents.differences([contents(50), cut_elsewhere]) == ['tokenizer']
