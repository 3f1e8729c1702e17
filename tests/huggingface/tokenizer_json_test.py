"""tokenizer.json gives SentencePiece's ids for any text, and its text for ids."""

import functools
import io
import json
import pathlib
import unicodedata

import numpy as np
import pytest
import sentencepiece
import slow
import tokenizers

from dipaco_jax.data import json_tokenizer, sentencepiece_tokenizer
from dipaco_jax.huggingface import tokenizer_json

SOURCES = sorted(pathlib.Path(json.__file__).parent.parent.glob('*.py'))
PARTS = (  # what texts are made of to be hard
  ' ', '   ', ' ' * 33, '\n', '\t', '\r\n', '\x00', '\x1f', '\x7f', '\xa0', '\u3000', '\u2581', '\ufeff', '\u200d',
  'self', 'ababababa', 'aaaaaaaaaaa', '1234567890', 'é', 'e\u0301', '가', '각', '👩‍👩‍👧', '🇩🇪', 'ﬁ',
  '\U0010ffff', '(', ')',
)  # fmt: skip
SPECIAL = ('</s>', '<s>', '<unk>', '<0x41>')


def texts(parts: tuple[str, ...], count: int) -> list[str]:
  """Of these parts and of any characters."""
  rng = np.random.default_rng(0)
  found = ['', ' ']
  for _ in range(count):
    drawn = rng.integers(1, 0x3000, 10)
    pieces = [*map(chr, drawn), *parts]
    found.append(''.join(rng.choice(pieces, rng.integers(1, 60))))
  return found


def sentences() -> list[str]:
  return [line for file in SOURCES[:5] for line in file.read_text().split('\n') if line.strip()]


def train(**options) -> bytes:
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(sentences()), model_writer=model, minloglevel=3, **options
  )
  return model.getvalue()


LLAMA = dict(model_type='bpe', byte_fallback=True, normalization_rule_name='identity', remove_extra_whitespaces=False)
MODELS = {
  'ours': lambda: sentencepiece_tokenizer.train([file.read_text() for file in SOURCES[:5]], 1000),
  'llama': lambda: train(vocab_size=900, split_digits=True, **LLAMA),
  'gemma': lambda: train(vocab_size=900, add_dummy_prefix=False, user_defined_symbols=['\n\n', '<mask>'], **LLAMA),
  'spaces': lambda: train(vocab_size=900, **LLAMA | dict(remove_extra_whitespaces=True)),
  'unigram': lambda: train(
    vocab_size=900, **LLAMA | dict(model_type='unigram', add_dummy_prefix=False, max_sentencepiece_length=8)
  ),
  't5': lambda: train(vocab_size=600, model_type='unigram', pad_id=0, eos_id=1, unk_id=2, bos_id=-1),
}


@functools.cache
def pair(kind: str):
  """(SentencePiece, tokenizers) with the same model."""
  model = MODELS[kind]()
  theirs = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json.convert(model)))
  theirs.encode_special_tokens = True  # as tokenizer_config.json says to transformers
  return sentencepiece.SentencePieceProcessor(model_proto=model), theirs


@pytest.mark.parametrize('kind', slow.all_but(MODELS, *[*MODELS][:2]))
def test_ids_and_text_are_those_of_sentencepiece(kind):
  ours, theirs = pair(kind)
  files = [file.read_text() for file in SOURCES[:16]]
  # SentencePiece adds unigram's scores in float32 from a text's beginning on, and misses the best of a long one.
  short = [line for file in files for line in file.splitlines()]
  for text in short if kind == 't5' else files + texts(PARTS + SPECIAL, 300):
    ids = ours.encode(text)
    assert theirs.encode(text).ids == ids
    if ours.unk_id() not in ids:
      assert theirs.decode(ids) == ours.decode(ids)


@pytest.mark.parametrize('kind', MODELS)
def test_text_of_any_ids_is_that_of_sentencepiece(kind):
  """Also of those that begin with spaces, as what a path goes on with may."""
  ours, theirs = pair(kind)
  rng, whole = np.random.default_rng(0), [i for i in range(len(ours)) if not (ours.is_unknown(i) or ours.is_byte(i))]
  space = [ours.piece_to_id('\u2581')]
  for _ in range(300):
    ids = [*space * rng.integers(3), *rng.choice(whole, 5).tolist()]
    assert theirs.decode(ids) == ours.decode(ids)


def test_unigram_with_rules_agrees_where_characters_stand_alone():
  """Where several make one letter, as with accents apart, tokenizers applies the rules in another way."""
  ours, theirs = pair('t5')
  joins = set('\u200d\r🇩🇪👩') | set(map(chr, (*range(0x600, 0x606), 0x6DD, 0x70F, *range(0x1100, 0x1200))))
  hard = [
    ''.join(c for c in text if unicodedata.category(c) not in ('Mn', 'Mc', 'Me', 'Cn') and c not in joins)
    for text in texts(PARTS, 1000)
  ]
  assert [text for text in hard if theirs.encode(text).ids != ours.encode(text)] == []


@pytest.mark.parametrize('without', ['', '<', '/', '</s'])
@pytest.mark.parametrize('options', [{}, {'byte_fallback': True, 'vocab_size': 600}])
def test_special_pieces_that_are_spelled_are_text_in_unigram_too(without, options):
  """Also where characters of their names are unknown, as '<' is to T5."""
  lines = [''.join(c for c in line if c not in without) for line in sentences()]
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(lines), model_writer=model, minloglevel=3, **{'vocab_size': 300} | options
  )
  ours = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
  theirs = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json.convert(model.getvalue())))
  theirs.encode_special_tokens = True
  parts = ('<', '/', 's', '>', 'self', ' ', ' the ', '漢', '0x41>', *SPECIAL)
  for text in [*SPECIAL, 'hello </s> world', '</s></s>', *texts(parts, 100)]:
    text = ''.join(c for c in text if c.isascii() or c == '漢')
    ids = ours.encode(text)
    assert theirs.encode(text).ids == ids
    assert not {*ids} & {ours.bos_id(), ours.eos_id()}
  again = json_tokenizer.JsonTokenizer(
    tokenizer_json.make_files(sentencepiece_tokenizer.SentencePieceTokenizer(model.getvalue()))
  )
  for text in SPECIAL:
    assert again.encode(text, eos=False).tolist() == ours.encode(text)


def test_files_name_the_special_pieces():
  model = MODELS['ours']()
  files = tokenizer_json.make_files(sentencepiece_tokenizer.SentencePieceTokenizer(model))
  config = json.loads(files['tokenizer_config.json'])
  assert files.keys() == {'tokenizer.model', 'tokenizer.json', 'tokenizer_config.json'}
  assert files['tokenizer.model'] == model
  assert (config['bos_token'], config['eos_token'], config['unk_token']) == ('<s>', '</s>', '<unk>')
  assert config['split_special_tokens'] and 'pad_token' not in config


@pytest.mark.parametrize('kind, adds', [('ours', False), ('llama', True), ('gemma', False)])
def test_whether_a_text_gets_a_space_in_front_is_reported_for_llama_cpp(kind, adds):
  files = tokenizer_json.make_files(sentencepiece_tokenizer.SentencePieceTokenizer(MODELS[kind]()))
  assert json.loads(files['tokenizer_config.json'])['add_prefix_space'] is adds


def test_a_token_that_is_put_in_front_is_in_the_files():
  ours = sentencepiece_tokenizer.SentencePieceTokenizer(MODELS['ours'](), adds_bos=True)
  files = tokenizer_json.make_files(ours)
  theirs = tokenizers.Tokenizer.from_str(files['tokenizer.json'].decode())
  for text in ('', 'some words', 'é'):
    assert theirs.encode(text).ids == ours.encode(text, eos=False).tolist()
  assert json.loads(files['tokenizer_config.json'])['add_bos_token'] is True
  again = json_tokenizer.JsonTokenizer(files)
  assert again.bos_id == ours.bos_id and again.encode('a b').tolist() == ours.encode('a b').tolist()


def test_a_chat_template_that_was_given_is_in_the_files_and_tokens_that_the_model_lacks_are_not():
  given = {'chat_template': '{{ messages }}', 'model_max_length': 64, 'add_bos_token': True}
  alien = {'tokenizer_class': 'LlamaTokenizer', 'pad_token': '<none>', 'added_tokens_decoder': {'2000': '<none>'}}
  beside = {'tokenizer_config.json': json.dumps(given | alien).encode()}
  ours = sentencepiece_tokenizer.SentencePieceTokenizer(MODELS['ours'](), adds_bos=True, beside=beside)
  config = json.loads(tokenizer_json.make_files(ours)['tokenizer_config.json'])
  assert {name: config.get(name) for name in given} == given
  assert config.pop('tokenizer_class') == 'PreTrainedTokenizerFast' and not config.keys() & alien.keys()


@pytest.mark.parametrize('kind', ['json', 'pieces'])
def test_a_template_in_a_file_of_its_own_is_in_the_files_for_every_reader(kind):
  beside = {'chat_template.jinja': '{{ "é" }}'.encode(), 'tokenizer_config.json': b'{"eos_token": "</s>"}'}
  if kind == 'json':
    files = json_tokenizer.train(sentences(), 400)
    config = json.loads(files['tokenizer_config.json']) | {'chat_template': 'old'}
    ours = json_tokenizer.JsonTokenizer(files | beside | {'tokenizer_config.json': json.dumps(config).encode()})
  else:
    ours = sentencepiece_tokenizer.SentencePieceTokenizer(MODELS['ours'](), beside=beside)
  made = tokenizer_json.make_files(ours)
  assert made['chat_template.jinja'] == beside['chat_template.jinja']
  config = json.loads(made['tokenizer_config.json'])
  assert config['chat_template'] == '{{ "é" }}'  # llama.cpp's converter prefers it
  if kind == 'pieces':
    assert not config['split_special_tokens']  # transformers would take those of the template for text


def test_local_paths_of_a_tokenizer_config_are_not_written():
  files = json_tokenizer.train(['The quick brown fox. ' * 99], 270)
  given = files['tokenizer_config.json']
  places = {'name_or_path': '/home/me/model', 'tokenizer_file': '/home/me/x', 'special_tokens_map_file': '/home/me/y'}
  files['tokenizer_config.json'] = json.dumps(json.loads(given) | places).encode()
  made = tokenizer_json.make_files(json_tokenizer.JsonTokenizer(files))
  assert b'/home' not in b''.join(made.values()) and json.loads(made['tokenizer_config.json']) == json.loads(given)


def test_a_tokenizer_json_is_written_as_it_was_given():
  files = json_tokenizer.train(sentences(), 400)
  assert tokenizer_json.make_files(json_tokenizer.JsonTokenizer(files)) == files


@pytest.mark.parametrize(
  'options, words',
  [
    (dict(model_type='word', vocab_size=500), 'its pieces are words or characters'),
    (dict(model_type='bpe', vocab_size=500, treat_whitespace_as_suffix=True), 'spaces are at the end of its pieces'),
    (
      dict(vocab_size=900, user_defined_symbols=['<mask>'], **LLAMA),
      'it has user_defined_symbols and add_dummy_prefix or remove_extra_whitespaces; use',
    ),
  ],
)
def test_a_model_that_cannot_be_written_is_rejected(options, words):
  with pytest.raises(ValueError, match=words):
    tokenizer_json.convert(train(**options))
