"""The tokenizer gives back text, whole or as it comes, counts its bytes, trains to the same bytes, and is quiet."""

import io
import random

import made_run
import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings as hypothesis_settings, strategies as st

from dipaco_jax.config import settings
from dipaco_jax.data import corpus, tokenizer_files
from dipaco_jax.data.sentencepiece_tokenizer import SentencePieceTokenizer, train
from dipaco_jax.data.tokenizer import HALF, Transcript, sample


def t5_model() -> bytes:
  """Unigram that normalizes: it leaves out blanks and joins accents."""
  model = io.BytesIO()
  sentences = ['the quick brown fox jumps over the lazy dog', 'über den großen Deich', 'e\u0301 x'] * 30
  options = {'vocab_size': 60, 'hard_vocab_limit': False, 'minloglevel': 3}
  sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(sentences), model_writer=model, **options)
  return model.getvalue()


T5 = SentencePieceTokenizer(t5_model())


@pytest.fixture(scope='module')
def texts():
  return [d.text for d in corpus.documents(settings.Data(source='stdlib', max_documents=60), 'train')]


@pytest.fixture(scope='module')
def tokenizer(texts):
  return SentencePieceTokenizer(train(texts, 600))


@hypothesis_settings(deadline=None)
@given(st.text())
def test_text_comes_back_and_its_bytes_are_counted(tokenizer, content):
  content = content.replace('\u2581', '')  # SentencePiece's own sign for a space
  tokens = tokenizer.encode(content)
  assert tokens.dtype == np.int32 and tokens[-1] == tokenizer.eos_id and tokenizer.eos_id not in tokens[:-1]
  assert tokenizer.decode(tokens) == content
  assert tokenizer.piece_bytes()[tokens].sum() == len(content.encode())


def test_code_comes_back_in_fewer_tokens_than_bytes(tokenizer, texts):
  batch = tokenizer.encode_batch(texts)
  assert [tokenizer.decode(tokens) for tokens in batch] == texts
  assert sum(map(len, batch)) < 0.6 * sum(len(t.encode()) for t in texts)
  assert all((tokenizer.encode(t, eos=False) == tokens[:-1]).all() for t, tokens in zip(texts, batch, strict=True))
  assert max(map(max, batch)) < tokenizer.vocab_size == 600 == len(tokenizer.piece_bytes())


@pytest.mark.parametrize('language', ['漢字仮名交じり文', 'เราเรียนภาษาไทย'])
def test_a_space_is_a_space_though_the_text_to_train_on_has_none(language):
  trained = SentencePieceTokenizer(train([language * 200], 275))
  content = f'{language[:3]} {language[3:]}  a\n '
  assert trained.decode(trained.encode(content)) == content
  assert trained.piece_bytes()[trained.encode(content)].sum() == len(content.encode())


@hypothesis_settings(deadline=None)
@given(st.text(st.sampled_from('aé漢🦊ﬁ \n\u0301\u3000x')))
def test_bytes_end_with_tokens(tokenizer, content):
  """Exactly, by bytes, where nothing is normalized; where something is, all bytes of the text are counted."""
  ends = tokenizer.byte_ends(content)
  assert ends.tolist() == np.cumsum(tokenizer.piece_bytes()[tokenizer.encode(content)]).tolist()
  ends = T5.byte_ends(content)
  assert len(ends) == len(T5.encode(content)) and ends[-1] == len(content.encode())
  assert (np.diff([0, *ends]) >= 0).all()


def test_bytes_of_blanks_that_are_left_out_end_with_a_token_beside_them():
  text = '  fox   über  '
  pieces = [T5.decode([i]).strip() for i in T5.encode(text, eos=False)]
  ends = T5.byte_ends(text)[:-1]
  assert ends[pieces.index('fox')] == len('  fox') if 'fox' in pieces else ends[0] <= len('  fox')
  assert ends[-1] == len('  fox   über'.encode()) and T5.byte_ends(text)[-1] == len(text.encode())


def test_training_is_deterministic(texts):
  assert train(texts, 500) == train(iter(texts), 500)
  assert train(texts, 500) != train(texts[1:], 500)


def test_training_is_quiet(texts, capfd):
  train(texts[:3], 400)
  with pytest.raises(ValueError):
    train(texts[:3], 100_000)
  assert capfd.readouterr() == ('', '')


def test_the_error_of_too_many_pieces_says_how_many_work():
  with pytest.raises(ValueError, match=r'config.tokenizer.vocab_size=5000 .* set it to (\d+) or less') as error:
    train(['a few words, and no more'], 5000)
  most = int(str(error.value).split('set it to ')[1].split()[0])
  assert SentencePieceTokenizer(train(['a few words, and no more'], most)).vocab_size == most
  with pytest.raises(ValueError, match='or less'):
    train(['a few words, and no more'], most + 1)


def test_the_error_of_too_few_pieces_says_how_many_work():
  chinese = [''.join(chr(0x4E00 + i) for i in range(500)) * 3]
  with pytest.raises(ValueError, match=r'config.tokenizer.vocab_size=300 .* set it to (\d+) or more') as error:
    train(chinese, 300)
  least = int(str(error.value).split('set it to ')[1].split()[0])
  assert SentencePieceTokenizer(train(chinese, least)).vocab_size == least
  with pytest.raises(ValueError, match='or more'):
    train(chinese, least - 1)


def test_no_text_to_train_on_is_an_error():
  with pytest.raises(ValueError, match='no text'):
    train([], 300)


def test_sample_does_not_depend_on_order_but_on_the_seed():
  documents = [(str(i), f'text {i} ' * 10) for i in range(500)]
  chosen = sample(documents, 5000, seed=0)
  assert 5000 <= sum(len(piece) for _, piece in chosen) < 5200
  random.Random(0).shuffle(documents)
  assert sample(iter(documents), 5000, seed=0) == chosen
  assert set(sample(documents, 5000, seed=1)) != set(chosen)
  assert sorted(sample(documents, 10**9, seed=0)) == sorted(documents)
  parts = [document for k in range(3) for document in sample(documents[k::3], 5000, seed=0)]
  assert sample(parts, 5000, seed=0) == chosen and len(parts) < len(documents)


def test_bad_models_are_named(tmp_path, texts):
  with pytest.raises(ValueError, match=r"none\.model': No such file.*config\.tokenizer\.model_file"):
    tokenizer_files.open_file(tmp_path / 'none.model')
  (tmp_path / 'bad.model').write_bytes(b'nonsense' * 100)
  with pytest.raises(ValueError, match=r"bad\.model': not a SentencePiece model"):
    tokenizer_files.open_file(tmp_path / 'bad.model')
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(texts[0].splitlines()),
    model_prefix=str(tmp_path / 'no_eos'),
    vocab_size=200,
    eos_id=-1,
    hard_vocab_limit=False,
    minloglevel=3,
  )
  with pytest.raises(ValueError, match='no end-of-text token'):
    tokenizer_files.open_file(tmp_path / 'no_eos.model')


@pytest.mark.slow
def test_a_model_of_another_shape_counts_bytes_too(tmp_path, texts):
  """T5's kind: unigram, a dummy space in front, unknown pieces, pad 0 and end 1."""
  model = str(tmp_path / 't5')
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter([line for t in texts for line in t.splitlines()]),
    model_prefix=model,
    vocab_size=300,
    pad_id=0,
    eos_id=1,
    unk_id=2,
    bos_id=-1,
    minloglevel=3,
  )
  tokenizer = tokenizer_files.open_file(model + '.model')
  tokens = tokenizer.encode('import this')
  assert tokens[-1] == tokenizer.eos_id == 1
  assert tokenizer.piece_bytes()[tokens].sum() == len('import this') + 1  # the dummy space
  assert tokenizer.piece_bytes()[:3].tolist() == [0, 0, 1]


TOKENIZER = SentencePieceTokenizer(made_run.tokenizer_bytes())
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
