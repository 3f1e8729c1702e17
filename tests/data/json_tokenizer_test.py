"""tokenizer.json: text comes back whole, its bytes are counted, special tokens stand where its files say."""

import base64
import json
import os
import subprocess
import sys

import made_run
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings as hypothesis_settings, strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.data import corpus, json_tokenizer, sentencepiece_tokenizer, tokenizer_files
from dipaco_jax.data.tokenizer import Transcript

TEXTS = [d.text[:4000] for d in corpus.documents(settings.Data(source='stdlib', max_documents=40), 'train')]


def trained(kind: str) -> tokenizers.Tokenizer:
  """A tokenizer in the shape of a family's."""
  special = ['<unk>', '<s>', '</s>', '<pad>']
  if kind == 'llama3':
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), 'isolated')
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
      TEXTS, trainers.BpeTrainer(vocab_size=700, special_tokens=special, initial_alphabet=alphabet)
    )
  else:  # Llama 2's and Gemma's: bytes stand for unknown characters
    made = tokenizers.Tokenizer(models.BPE(unk_token='<unk>', byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Replace(' ', '\u2581')
    made.decoder = decoders.Sequence([decoders.Replace('\u2581', ' '), decoders.ByteFallback(), decoders.Fuse()])
    tokens = [*special, *(f'<0x{i:02X}>' for i in range(256))]
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=900, special_tokens=tokens))
    parts = json.loads(made.to_str())
    parts['added_tokens'] = parts['added_tokens'][:4]  # bytes are of the model's vocabulary alone
    made = tokenizers.Tokenizer.from_str(json.dumps(parts))
  return made


MADE = {kind: trained(kind) for kind in ('llama3', 'llama2')}
IDS = {'bos': 1, 'eos': 2, 'pad': 3}


def of(kind: str, template: bool = True, **config) -> json_tokenizer.JsonTokenizer:
  made = tokenizers.Tokenizer.from_str(MADE[kind].to_str())
  if template:
    made.post_processor = processors.TemplateProcessing('<s> $A', '<s> $A <s> $B', [('<s>', 1)])
  config = {'bos_token': '<s>', 'eos_token': {'content': '</s>', 'special': True}, 'pad_token': '<pad>'} | config
  return json_tokenizer.JsonTokenizer({
    'tokenizer.json': made.to_str().encode(), 'tokenizer_config.json': json.dumps(config).encode()
  })  # fmt: skip


OURS = json_tokenizer.JsonTokenizer(json_tokenizer.train(TEXTS, 600))
KINDS = {'ours': OURS, 'llama3': of('llama3'), 'llama2': of('llama2')}


@pytest.mark.parametrize('kind', KINDS)
@hypothesis_settings(deadline=None, max_examples=60)
@given(st.text())
def test_text_comes_back_and_its_bytes_are_counted(kind, content):
  tokenizer, content = KINDS[kind], content.replace('\u2581', '')
  tokens = tokenizer.encode(content)
  assert tokens.dtype == np.int32 and tokens[-1] == tokenizer.eos_id and tokenizer.eos_id not in tokens[:-1]
  assert (tokens[0] == tokenizer.bos_id) == (tokenizer.bos_id >= 0)
  assert tokenizer.decode(tokens) == content
  assert tokenizer.piece_bytes()[tokens].sum() == len(content.encode())


@pytest.mark.parametrize('kind', KINDS)
def test_text_as_it_comes_is_the_text(kind):
  tokenizer = KINDS[kind]
  for text in ('über 漢字 🦊 x', TEXTS[0][:500]):
    transcript = Transcript(tokenizer, ())
    for token in tokenizer.encode(text, eos=False):
      transcript.add(token)
    transcript.close()
    assert transcript.text == text


WORDS = st.text('fox é漢字🦊', max_size=8)


@pytest.mark.parametrize('kind', KINDS)
@hypothesis_settings(deadline=None)
@given(WORDS, st.sampled_from('x é漢🦊'), st.integers(0, 3), WORDS)
def test_a_continuation_is_whole_wherever_its_prompt_ends(kind, before, character, missing, text):
  """Also where that is inside a character. `tokenizers` decodes a run of bytes as no character if its first is none."""
  tokenizer = KINDS[kind]
  start, middle, end = (tokenizer.encode(part, eos=False).tolist() for part in (before, character, text))
  skip = tokenizer.bos_id >= 0
  given_of_it = max(0, len(middle[skip:]) - missing)
  transcript = Transcript(tokenizer, start + middle[skip:][:given_of_it])
  for token in middle[skip:][given_of_it:] + end[skip:]:
    transcript.add(token)
  transcript.close()
  assert transcript.text == (character if missing else '') + text


@pytest.mark.parametrize('kind', KINDS)
def test_special_tokens_in_a_text_are_text(kind):
  tokenizer = KINDS[kind]
  text = f'a </s><s> <pad>{json_tokenizer.END} b'
  tokens = tokenizer.encode(text, eos=False)
  assert not {*tokens[tokenizer.bos_id >= 0 :].tolist()} & {*tokenizer.special_ids.values()}
  assert tokenizer.decode(tokens) == text


@pytest.mark.parametrize(
  ('template', 'config', 'bos'),
  [
    (True, {}, 1),
    (False, {}, -1),
    (True, {'add_bos_token': False}, 1),  # as in transformers 5, the post-processor counts
    (False, {'add_bos_token': True}, -1),
    (True, {'bos_token': None}, 1),
    (True, {'eos_token': '<s>'}, 1),
  ],
)
def test_what_stands_in_front_is_what_the_files_say(template, config, bos):
  tokenizer = of('llama3', template, **config)
  assert tokenizer.bos_id == bos and tokenizer.special_ids.get('bos', -1) in (bos, 1)
  assert tokenizer.encode('a').tolist()[: bos >= 0] == [1] * (bos >= 0)


def test_ids_are_those_of_the_library():
  tokenizer = of('llama3')
  batch = tokenizer.encode_batch(TEXTS)
  expected = tokenizers.Tokenizer.from_str(tokenizer.files['tokenizer.json'].decode()).encode_batch(TEXTS)
  assert [ids.tolist() for ids in batch] == [[*found.ids, 2] for found in expected]


def test_a_limit_of_length_or_padding_in_the_file_is_not_followed():
  made = tokenizers.Tokenizer.from_str(MADE['llama3'].to_str())
  made.enable_truncation(5)
  made.enable_padding(length=100)
  files = {'tokenizer.json': made.to_str().encode(), 'tokenizer_config.json': b'{"eos_token": "</s>"}'}
  tokenizer = json_tokenizer.JsonTokenizer(files)
  assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]


@pytest.mark.slow
def test_training_gives_the_same_files_on_any_number_of_threads():
  code = (
    'import sys; from dipaco_jax.config import settings; from dipaco_jax.data import corpus, json_tokenizer; '
    'texts = [d.text[:4000] for d in corpus.documents(settings.Data(source="stdlib", max_documents=40), "train")]; '
    'sys.stdout.buffer.write(json_tokenizer.train(texts, 600)["tokenizer.json"])'
  )
  found = {
    subprocess.run([sys.executable, '-c', code], env=os.environ | env, capture_output=True, check=True).stdout
    for env in ({'RAYON_NUM_THREADS': '1'}, {'RAYON_NUM_THREADS': '5'}, {'TOKENIZERS_PARALLELISM': 'false'})
  }
  assert found == {OURS.files['tokenizer.json']}
  assert OURS.vocab_size == 600 == len(OURS.piece_bytes())


def test_sizes_that_do_not_fit_are_named():
  with pytest.raises(ValueError, match=r'vocab_size=256 is less than the number of bytes .* set it to 257'):
    json_tokenizer.train(TEXTS, 256)
  with pytest.raises(
    ValueError, match=r'vocab_size=5000 is more than this text can fill: set it to (\d+) or less'
  ) as e:
    json_tokenizer.train(['a few words, and no more'], 5000)
  most = int(str(e.value).split('set it to ')[1].split()[0])
  assert json_tokenizer.JsonTokenizer(json_tokenizer.train(['a few words, and no more'], most)).vocab_size == most


def test_gpt_2_ends_texts_though_its_config_does_not_say_so():
  files = json_tokenizer.train(TEXTS, 600) | {'tokenizer_config.json': b'{"model_max_length": 1024}'}
  assert json_tokenizer.JsonTokenizer(files).special_ids == {'eos': 0}


WITHOUT_UNKNOWN = tokenizers.Tokenizer(models.WordLevel({'</s>': 0}, unk_token='[UNK]')).to_str().encode()
PROCESSOR = {'single': [{'SpecialToken': {'id': 'none', 'type_id': 0}}], 'pair': [], 'special_tokens': {}}
WITH_PANIC = json.dumps(
  json.loads(MADE['llama3'].to_str()) | {'post_processor': {'type': 'TemplateProcessing', **PROCESSOR}}
).encode()
EOS = b'{"eos_token": "</s>"}'


@pytest.mark.parametrize(
  ('files', 'words'),
  [
    (
      {'tokenizer.json': b'{}'},
      r"tokenizer\.json': no tokenizer\.json \(.*name another in config\.tokenizer\.model_file",
    ),
    ({'tokenizer.json': MADE['llama3'].to_str().encode()}, 'it has no end-of-text token: add the tokenizer_config'),
    ({'tokenizer.json': b'plain'}, 'not a SentencePiece model'),
    ({'tokenizer.json': made_run.tokenizer_bytes().replace('\u2581'.encode(), b'\xff__')}, 'not a SentencePiece model'),
    ({'tokenizer.json': WITHOUT_UNKNOWN, 'tokenizer_config.json': EOS}, 'cannot be used .*Missing .UNK. token'),
    ({'tokenizer.json': WITH_PANIC, 'tokenizer_config.json': EOS}, 'cannot be used .no entry found for key'),
    (
      {'tokenizer.json': MADE['llama3'].to_str().encode(), 'tokenizer_config.json': b'{"eos_token": "\\ud800"}'},
      'tokenizer.json cannot be used .*surrogates not allowed',
    ),
    (
      {'tokenizer.json': MADE['llama3'].to_str().encode(), 'tokenizer_config.json': b'{"eos_token": "<no>"}'},
      'no end-of-text token',
    ),
    ({'tokenizer.json': MADE['llama3'].to_str().encode(), 'tokenizer_config.json': b'['}, r'no tokenizer\.json \('),
    ({'tokenizer.json': MADE['llama3'].to_str().encode(), 'tokenizer_config.json': b'[1]'}, 'is not a JSON object'),
  ],
)
def test_bad_files_are_named(files, words, tmp_path):
  for name, content in files.items():
    (tmp_path / name).write_bytes(content)
  with pytest.raises(ValueError, match=words) as error:
    tokenizer_files.open_file(tmp_path / 'tokenizer.json')
  assert '\n' not in str(error.value)


def test_a_file_is_known_by_what_it_holds(tmp_path):
  (tmp_path / 'mine').write_bytes(OURS.files['tokenizer.json'])
  (tmp_path / 'tokenizer_config.json').write_bytes(OURS.files['tokenizer_config.json'])
  assert tokenizer_files.open_file(tmp_path / 'mine').files == OURS.files
  model = sentencepiece_tokenizer.train(TEXTS, 400)
  (tmp_path / 'mine').write_bytes(model)
  found = tokenizer_files.open_file(tmp_path / 'mine')
  assert found.files['tokenizer.model'] == model and found.bos_id == -1


def test_a_sentencepiece_model_has_its_begin_token_where_its_config_says(tmp_path):
  (tmp_path / 'tokenizer.model').write_bytes(sentencepiece_tokenizer.train(TEXTS, 400))
  (tmp_path / 'tokenizer_config.json').write_text('{"add_bos_token": true}')
  found = tokenizer_files.open_file(tmp_path / 'tokenizer.model')
  assert found.encode('a').tolist()[0] == 1 == found.bos_id and found.decode(found.encode('a b')) == 'a b'
  again = tokenizer_files.read(settings.Tokenizer(), found.files.__contains__, found.files.__getitem__)
  assert again.bos_id == 1 and again.files == found.files
  for config in ('[1]', '{', '[' * 100_000):
    (tmp_path / 'tokenizer_config.json').write_text(config)
    with pytest.raises(ValueError, match=r'tokenizer_config\.json next to it is not a JSON object'):
      tokenizer_files.open_file(tmp_path / 'tokenizer.model')


@pytest.mark.parametrize('files', [OURS.files, {'tokenizer.model': sentencepiece_tokenizer.train(TEXTS, 400)}])
def test_a_config_that_cannot_be_read_is_not_taken_for_none(files, tmp_path):
  [name] = files.keys() - {'tokenizer_config.json'}
  (tmp_path / name).write_bytes(files[name])
  assert tokenizer_files.open_file(tmp_path / name).bos_id == -1
  (tmp_path / 'tokenizer_config.json').mkdir()
  with pytest.raises(ValueError, match=rf"{name}': tokenizer_config\.json beside it: Is a directory; name another"):
    tokenizer_files.open_file(tmp_path / name)


def spelled(kind: str) -> json_tokenizer.JsonTokenizer:
  """A tokenizer whose model has its special tokens as pieces, in the shape of a kind of models."""
  letters = [chr(i) for i in range(0x21, 0x7F)]
  special = ['<unk>', '<s>', '</s>', '[PAD]']
  if kind.startswith('unigram'):
    pieces = [(piece, 0.0) for piece in special] + [(f'<0x{i:02X}>', 0.0) for i in range(256)] * (kind != 'unigram')
    pieces += [(c, -9.0) for c in ['\u2581', *letters]] + [('\u2581hello', -5.0), ('world', -5.0), ('</', -8.0)]
    made = tokenizers.Tokenizer(models.Unigram(pieces, 0, kind != 'unigram'))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme='never')
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme='never')])
  elif kind == 'wordpiece':
    words = [*special, 'hello', 'world', *letters, *(f'##{c}' for c in letters)]
    made = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token='<unk>'))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.WordPiece(cleanup=False)
  elif kind == 'wordlevel':
    words = [*special, 'hello', 'world']
    made = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token='<unk>'))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  else:  # Llama 3's, but with its special tokens in the model; or with bytes for unknown characters
    by_bytes = kind == 'ignore_merges'
    pieces = [
      *special,
      *(pre_tokenizers.ByteLevel.alphabet() if by_bytes else ['\u2581', *letters, *json_tokenizer.BYTES]),
    ]
    made = tokenizers.Tokenizer(
      models.BPE({piece: i for i, piece in enumerate(pieces)}, [], ignore_merges=True, byte_fallback=not by_bytes)
    )
    if by_bytes:
      split = pre_tokenizers.Split(tokenizers.Regex(r'\S+|\s+'), 'isolated')
      made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
      made.decoder = decoders.ByteLevel()
    else:
      made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme='never')])
      made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme='never')])
  made.add_special_tokens(special[:2])  # the others are named in tokenizer_config.json alone
  made.add_tokens(['<think>'])
  config = {'bos_token': '<s>', 'eos_token': '</s>', 'pad_token': '[PAD]', 'add_bos_token': False}
  return json_tokenizer.JsonTokenizer({
    'tokenizer.json': made.to_str().encode(), 'tokenizer_config.json': json.dumps(config).encode()
  })  # fmt: skip


SPELLED = ['unigram', 'unigram with bytes', 'wordpiece', 'wordlevel', 'ignore_merges', 'ignore_merges with bytes']


@pytest.mark.parametrize('kind', SPELLED)
def test_a_special_token_that_is_a_piece_of_the_model_is_text_where_it_is_spelled(kind):
  tokenizer = spelled(kind)
  for text in (
    'hello </s> world',
    '</s>',
    '<s></s>hello',
    'hello<</s>',
    'hello [PAD] <0x41>',
    'hello\n</s>\n',
    '<unk>',
  ):
    tokens = tokenizer.encode(text, eos=False).tolist()
    assert not {*tokens} & {1, 2, 3}, text
    if kind not in ('wordlevel', 'wordpiece') and (kind != 'unigram' or '\n' not in text):  # which give all text back
      assert 0 not in tokens and tokenizer.decode(tokens) == text
  assert tokenizer.decode(tokenizer.encode('hello')) == 'hello'  # without the end of text


@pytest.mark.parametrize('kind', SPELLED)
def test_a_token_that_the_file_does_not_call_special_is_parsed(kind):
  tokenizer = spelled(kind)
  think = tokenizer.vocab_size - 1
  assert think in tokenizer.encode('hello <think> world') and '<think>' in tokenizer.decode([think])
  assert tokenizer.piece_bytes()[[think, tokenizer.eos_id]].tolist() == [len('<think>'), 0]


@pytest.mark.parametrize('kind', SPELLED)
def test_other_texts_have_the_ids_of_the_library(kind):
  tokenizer = spelled(kind)
  theirs = tokenizers.Tokenizer.from_str(tokenizer.files['tokenizer.json'].decode())
  for text in ('hello world', '< /s> <s> s> 0x41>', 'hello <think> x', ''):
    text = text.replace('<s>', '<')
    assert tokenizer.encode(text, eos=False).tolist() == theirs.encode(text, add_special_tokens=False).ids


def test_blanks_of_added_tokens_count_as_blanks():
  """As Gemma's runs of blanks, which are both pieces and added tokens."""
  made = tokenizers.Tokenizer.from_str(MADE['llama2'].to_str())
  made.add_tokens([tokenizers.AddedToken('\u2581\u2581', normalized=False)])
  tokenizer = json_tokenizer.JsonTokenizer({
    'tokenizer.json': made.to_str().encode(), 'tokenizer_config.json': b'{"eos_token": "</s>"}'
  })  # fmt: skip
  (blanks,) = [i for piece, i in made.get_vocab().items() if piece == '\u2581\u2581']
  assert tokenizer.piece_bytes()[blanks] == 2


def test_an_end_of_text_that_also_stands_for_unknown_text_has_no_bytes():
  config = json.dumps(dict.fromkeys(('eos_token', 'unk_token'), json_tokenizer.END)).encode()
  files = json_tokenizer.train(TEXTS, 600) | {'tokenizer_config.json': config}
  assert json_tokenizer.JsonTokenizer(files).piece_bytes()[0] == 0


def changed(change) -> dict[str, bytes]:
  """The files of a small tokenizer whose tokenizer.json `change(parts)` has changed."""
  parts = json.loads(OURS.files['tokenizer.json'])
  change(parts)
  return dict(OURS.files) | {'tokenizer.json': json.dumps(parts).encode()}


def test_an_id_that_would_fill_the_memory_is_rejected():
  files = changed(lambda parts: parts['model']['vocab'].update(x2=2**31 - 2))
  with pytest.raises(InputError, match=r'tokenizer.json has the token id 2147483646: number its tokens from 0'):
    json_tokenizer.JsonTokenizer(files)


def test_a_character_map_that_names_a_larger_size_than_it_has_is_rejected():
  charsmap = base64.b64encode((2**32 - 4).to_bytes(4, 'little') + bytes(64)).decode()
  normalizer = {'type': 'Precompiled', 'precompiled_charsmap': charsmap}
  files = changed(lambda parts: parts.update(normalizer={'type': 'Sequence', 'normalizers': [normalizer]}))
  with pytest.raises(InputError, match='its precompiled_charsmap is cut off'):
    json_tokenizer.JsonTokenizer(files)
