"""A growing text and its ends; batches are tried with an engine in engine_test."""

import made_run
import pytest

from dipaco_jax.data.sentencepiece_tokenizer import SentencePieceTokenizer
from dipaco_jax.data.tokenizer import Transcript
from dipaco_jax.inference.batch import Text, power_of_two
from dipaco_jax.inference.request import Request


@pytest.fixture(scope='module')
def tokenizer():
  return SentencePieceTokenizer(made_run.tokenizer_bytes())


def begun(tokenizer, **fields) -> Text:
  request = Request((5, 6, 7), **{'max_tokens': 10} | fields)
  return Text(request, Transcript(tokenizer, request.tokens, request.stop))


def grow(text: Text, tokens, *end_ids: int) -> str:
  for token in tokens:
    text.add(int(token), end_ids)
  return text.finished


def test_a_text_ends_at_its_length(tokenizer):
  text = begun(tokenizer, max_tokens=4)
  assert grow(text, [9, 9, 9], tokenizer.eos_id) == '' and grow(text, [9, 9], tokenizer.eos_id) == 'length'
  assert text.tokens == [5, 6, 7, 9, 9, 9, 9] and text.num_new == 4


@pytest.mark.parametrize('until_eos, finished, num_new', [(True, 'stop', 2), (False, '', 4)])
def test_the_end_of_a_text_is_no_part_of_it(tokenizer, until_eos, finished, num_new):
  text = begun(tokenizer, until_eos=until_eos)
  assert grow(text, [9, 9, tokenizer.eos_id, 9], tokenizer.eos_id) == finished and text.num_new == num_new


def test_a_stop_string_ends_a_text(tokenizer):
  text = begun(tokenizer, stop=('lazy',), max_tokens=50)
  tokens = tokenizer.encode('The quick brown fox jumps over the lazy dog', eos=False)
  assert grow(text, tokens, tokenizer.eos_id) == 'stop'
  assert text.transcript.text.rstrip().endswith('over the')


@pytest.mark.parametrize('W, limits', [(0, [13]), (4, [4, 8, 12, 13])])
def test_a_path_stays_to_the_end_of_its_chunk(tokenizer, W, limits):
  text, found = begun(tokenizer, reroute_every=W), []
  for _ in limits:
    text.set_limit()
    found.append(text.limit)
    grow(text, [9] * (text.limit - len(text.tokens)), tokenizer.eos_id)
  assert found == limits and text.finished == 'length'


def test_what_ended_a_text_first_stays_the_reason(tokenizer):
  text = begun(tokenizer)
  text.finish('cancelled')
  text.finish('error')
  assert grow(text, [9], tokenizer.eos_id) == 'cancelled' and text.num_new == 0


@pytest.mark.parametrize('number, least, expected', [(1, 1, 1), (3, 1, 4), (4, 1, 4), (5, 128, 128), (129, 128, 256)])
def test_sizes_are_powers_of_two(number, least, expected):
  assert power_of_two(number, least) == expected
