"""The router of a run gives the paths of training, and reads only the first tokens of a text."""

import pathlib

import made_run
import numpy as np
import pytest

import dipaco_jax
from dipaco_jax.data import json_tokenizer, tokenizer_files
from dipaco_jax.data.sequences import Sequences
from dipaco_jax.data.tokenizer import beginning, token_ids
from dipaco_jax.inference.text_router import TextRouter


@pytest.fixture(scope='module')
def router(tmp_path_factory):
  return dipaco_jax.load_router(made_run.write(tmp_path_factory.mktemp('made'), made_run.settings()))


def test_paths_are_those_that_training_chose(undisturbed):
  router, folder = dipaco_jax.load_router(str(undisturbed)), pathlib.Path(undisturbed)
  routed = np.load(folder / 'routing' / '0' / 'validation.npy')
  found = Sequences(folder / 'sequences', 'validation').read(range(len(routed)))
  assert [router.path(sequence.tokens) for sequence in found] == routed.tolist()


def test_only_the_first_tokens_count(router):
  tokens = np.random.default_rng(0).integers(3, 300, 20)
  other = np.where(np.arange(20) < router.prefix_tokens, tokens, 5)
  np.testing.assert_array_equal(router.scores(tokens), router.scores(other))
  assert (router.scores(tokens) != router.scores(np.where(np.arange(20) == 0, 5, tokens))).any()


def test_padding_of_a_short_text_does_not_count(router):
  tokens = np.random.default_rng(0).integers(3, 300, 3)
  short = TextRouter(router.fitted, router.model, router.base, 3, router.tokenizer)
  np.testing.assert_allclose(router.scores(tokens), short.scores(tokens), rtol=1e-4)


def test_an_empty_text_has_no_path(router):
  with pytest.raises(ValueError, match='give some text'):
    router.path('')


@pytest.mark.parametrize('kind', ['pieces', 'bytes'])
def test_the_beginning_of_a_long_text_is_enough(kind):
  files = (
    json_tokenizer.train(made_run.TEXT * 20, 330)
    if kind == 'bytes'
    else {'tokenizer.model': made_run.tokenizer_bytes()}
  )
  tokenizer, rng = tokenizer_files.load(files), np.random.default_rng(0)
  parts = [*made_run.TEXT, ' ' * 90, '\n\n', 'x' * 50, '\u2581', 'é', '가', '🇩🇪']
  texts = [''.join(rng.choice(parts, 60)) for _ in range(50)] + [' ' * 5000, ' ' * 5000 + 'fox', 'a' * 5000]
  for text in texts:
    whole = token_ids(tokenizer, text)[:8]
    np.testing.assert_array_equal(beginning(tokenizer, text, 8), whole)
