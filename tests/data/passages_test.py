"""A passage of a text is recognized wherever the text is cut and however it is spelled."""

import unicodedata

import numpy as np

from dipaco_jax.data import passages

RNG = np.random.default_rng(0)
TEXT = ' '.join(f'é{n}' for n in RNG.integers(1000, size=2000))


def held(*texts) -> passages.HeldPassages:
  return passages.HeldPassages(passages.hash_windows(text) for text in texts)


def test_a_passage_is_recognized_inside_another_text():
  assert held(TEXT[2000:4000]).shares_one('Other words before. ' + TEXT)
  assert held(TEXT).shares_one('Other words before. ' + TEXT[2000:4000] + ' And behind.')
  assert held(TEXT).shares_one(unicodedata.normalize('NFD', TEXT).replace(' ', '\r\n\r\n'))


def test_other_short_and_repetitive_texts_share_none():
  assert not held(TEXT).shares_one(TEXT[::-1])
  assert not held(TEXT).shares_one('z' * 3000 + TEXT[2000:2200] + 'z' * 3000)
  assert not held('-' * 9000, 'short', '').shares_one('-' * 9000)
  assert not held().shares_one(TEXT)


def test_a_passage_of_many_documents_is_common():
  documents = [f'{n}' + TEXT for n in range(passages.COMMON + 1)]
  assert held(*documents[1:]).shares_one(TEXT) and not held(*documents).shares_one(TEXT)


def test_passages_of_tokens():
  ids = RNG.integers(1000, size=4000)
  assert held(ids[1000:3000].astype('<u2')).shares_one(ids) and not held(ids).shares_one(ids[::-1])
