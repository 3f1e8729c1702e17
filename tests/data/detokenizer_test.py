"""Text as it comes, token by token, is the text of all tokens."""

import made_run
from hypothesis import given
from hypothesis import strategies as st

from dipaco_jax.data.detokenizer import HALF, Transcript
from dipaco_jax.data.tokenizer import Tokenizer

TOKENIZER = Tokenizer(made_run.tokenizer_bytes())
WORDS = st.lists(st.sampled_from(['fox', ' ', 'é', '漢', '🦊', '\n', 'über', '  ', 'x', '.']), max_size=12).map(''.join)


def pieces(tokens, before=(), stop=()) -> tuple[list[str], Transcript]:
  transcript, found = Transcript(TOKENIZER, before, stop), []
  for token in tokens:
    transcript.add(token)
    found.append(transcript.take())
  transcript.close()
  return [*found, transcript.take(final=True)], transcript


@given(WORDS, WORDS)
def test_pieces_together_are_the_text(before, text):
  tokens = TOKENIZER.encode(text, eos=False)
  found, transcript = pieces(tokens, TOKENIZER.encode(before, eos=False))
  assert ''.join(found) == text == transcript.text and not any(HALF in piece for piece in found)


def test_half_a_character_is_not_shown_before_the_end():
  tokens = list(TOKENIZER.encode('🦊', eos=False))[:-1]
  found, _ = pieces(tokens)
  assert not any(found[:-1]) and set(found[-1]) == {HALF}


@given(WORDS, st.sampled_from('é漢🦊'), WORDS, st.integers(1, 3))
def test_a_character_begun_by_what_is_before_is_whole(before, character, text, given_of_it):
  halves = TOKENIZER.encode(character, eos=False)
  start = [*TOKENIZER.encode(before, eos=False), *halves[:-given_of_it]]
  found, _ = pieces([*halves[-given_of_it:], *TOKENIZER.encode(text, eos=False)], start)
  assert ''.join(found) == character + text


@given(WORDS, st.lists(st.text('fox .é', min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string_that_comes(text, stop):
  tokens = TOKENIZER.encode(text, eos=False)
  found, transcript = pieces(tokens, stop=stop)
  expected = text
  for end in range(1, len(tokens) + 1):
    so_far = TOKENIZER.decode(tokens[:end])
    at = [so_far.rstrip(HALF).find(s) for s in stop]
    if any(i >= 0 for i in at):
      expected = so_far[: min(i for i in at if i >= 0)]
      break
  assert ''.join(found) == transcript.text == expected and transcript.stopped == (expected != text)
