"""Mixtures: shares are exact, nothing is left out in silence, and no text is both trained on and held back."""

import itertools
import random

import corpora
import numpy as np
import pytest

from dipaco_jax.config import settings
from dipaco_jax.data import corpus, holdouts, mixture

WEIGHTS = {'law': 3.0, 'news': 1.0, 'web': 0.5}


def streams(counts, weights, largest=50):
  """Documents (stream, number, times, size) of random sizes."""
  sizes = [[random.Random(f'{k} {i}').randint(1, largest) for i in range(count)] for k, count in enumerate(counts)]

  def read(k):
    return lambda times: ((k, i, times, size) for i, size in enumerate(sizes[k]))

  return [mixture.Stream(read(k), weight) for k, weight in enumerate(weights)]


@pytest.mark.parametrize('weights', [(1, 1), (3, 1), (0.7, 0.2, 0.1), (1000, 1), (2,)])
def test_shares_differ_by_less_than_a_document_or_two_all_the_time(weights):
  given = itertools.islice(mixture.mix(streams([40] * len(weights), weights), lambda d: d[3]), 20_000)
  sizes, largest = np.zeros(len(weights)), 50
  for stream, _, _, size in given:
    sizes[stream] += size
    assert np.abs(sizes - sizes.sum() * np.array(weights) / sum(weights)).max() <= largest * len(weights)


def test_all_is_read_once_at_least_and_the_end_is_where_the_last_one_was():
  found = list(mixture.mix(streams([10, 1000], [1, 1]), lambda d: d[3]))
  of = [[d for d in found if d[0] == k] for k in (0, 1)]
  assert [d[1] for d in of[1]] == list(range(1000)) and {d[2] for d in of[1]} == {0}
  assert [d[1:3] for d in of[0]] == [(i % 10, i // 10) for i in range(len(of[0]))]
  assert sum(d[3] for d in of[0]) == pytest.approx(sum(d[3] for d in of[1]), rel=0.01)


def test_a_stream_without_documents_is_passed_over():
  assert [d[:2] for d in mixture.mix(streams([0, 3], [5, 1]), lambda d: d[3])] == [(1, 0), (1, 1), (1, 2)]
  assert list(mixture.mix(streams([0, 0], [5, 1]), lambda d: d[3])) == []


@pytest.fixture
def of_three(tmp_path) -> settings.Settings:
  """Rows of tables, lines and plain text, as a mixture."""
  for name, kind in (('law', 'parquet'), ('news', 'jsonl.gz')):
    (tmp_path / name).mkdir()
    corpora.write_records(
      tmp_path / name, kind, [{'text': f'{name} {i} {"x" * (i % 90)}', 'domain': 'no'} for i in range(600)]
    )
  (tmp_path / 'web').mkdir()
  for i in range(3):
    (tmp_path / 'web' / f'{i}.txt').write_text(''.join(f'Line {n} of {i}.\n\n' for n in range(1500)))
  data = {'source': 'files', 'train': {name: (f'{tmp_path}/{name}/*', weight) for name, weight in WEIGHTS.items()}}
  return settings.from_dict({'data': data | {'validation_fraction': 0.1, 'domain_key': 'domain'}})


def shares(documents) -> dict[str, float]:
  sizes = {name: sum(len(d.text.encode()) for d in documents if d.domain == name) for name in WEIGHTS}
  return {name: size / sum(sizes.values()) for name, size in sizes.items()}


@pytest.mark.slow
@pytest.mark.parametrize('parts', [1, 2, 7])
def test_each_source_has_its_share_of_the_text_in_every_part(of_three, parts):
  expected = {name: weight / sum(WEIGHTS.values()) for name, weight in WEIGHTS.items()}
  found = []
  for k in range(parts):
    mine = list(corpus.documents(of_three.data, 'train', (k, parts)))
    assert mine == list(corpus.documents(of_three.data, 'train', (k, parts)))
    assert shares(mine) == pytest.approx(expected, abs=0.25 if parts == 7 else 0.1)
    found += mine
  assert len({d.id for d in found}) == len(found)
  once = {d.id for d in found if not d.times}
  assert {d.id.rsplit('@', 1)[0] for d in found} == once, 'what is repeated was read before'
  held = {d.id for d in corpus.documents(of_three.data, 'validation')}
  assert not held & once and len(once | held) > 1200 and {name.split('/')[0] for name in held} == {*WEIGHTS}


def test_repetitions_are_held_back_together(of_three):
  found = list(corpus.documents(of_three.data, 'train'))
  texts = [d.text for d in found]
  assert len({*texts}) < 0.9 * len(texts), 'some are repeated'
  contents, draws = np.array([d.content for d in found], np.uint64), np.array([d.draw for d in found], np.float32)
  pieces = holdouts.draw_pieces(contents, draws, 0.1)
  held, _ = holdouts.held_out(contents, np.zeros(len(found), int), 1, 0, 0.1, pieces)
  assert 0.03 < held.mean() < 0.3
  assert not {t for t, h in zip(texts, held, strict=True) if h} & {t for t, h in zip(texts, held, strict=True) if not h}


def test_validation_text_of_its_own(of_three, tmp_path):
  (tmp_path / 'other').mkdir()
  pattern = corpora.write_records(tmp_path / 'other', 'jsonl', [{'text': f'other {i}'} for i in range(30)], 'b')
  for given, domains in ((pattern, {''}), (dict.fromkeys(WEIGHTS, pattern), {*WEIGHTS})):
    values = of_three.to_dict()
    values['data']['validation'] = given
    data = settings.from_dict(values).data
    validation = list(corpus.documents(data, 'validation'))
    assert {d.text for d in validation} == {f'other {i}' for i in range(30)} and {
      d.domain for d in validation
    } == domains
    train = {d.id for d in corpus.documents(data, 'train')}
    assert {f'law/a.parquet:{i}' for i in range(1, 601)} <= train, 'none is held back'
  assert corpus.plan_held_back(settings.from_dict(values)).how == 'given'


@pytest.mark.slow
def test_limits_are_divided_by_the_weights(of_three):
  values = of_three.to_dict()
  values['data'] |= {'max_documents': 90, 'max_validation_documents': 9}
  data = settings.from_dict(values).data
  train, validation = corpora.both(data)
  counts = {name: sum(d.domain == name and not d.times for d in train) for name in WEIGHTS}
  assert 50 < counts['law'] <= 60 and 15 < counts['news'] <= 20 and 2 <= counts['web'] <= 10
  assert 4 <= len(validation) <= 9


def test_what_it_is_made_of_is_planned_and_written_down(of_three):
  assert corpus.plan_held_back(of_three).how == 'ends'
  assert settings.from_dict(of_three.to_dict()) == of_three


def test_a_source_without_text_is_named(of_three, tmp_path):
  values = of_three.to_dict()
  values['data']['train'] = {'law': f'{tmp_path}/law/*', 'none': f'{tmp_path}/none/*'}
  with pytest.raises(ValueError, match=r"none/\*' matches no file"):
    corpus.check_readable(settings.from_dict(values).data)
