"""Ends of documents and of turns, lists of ends, chat files beside a tokenizer, and text that spells special tokens."""

import io
import json

import pytest
import sentencepiece
import tokenizers
from tokenizers import processors

from dipaco_jax.buckets import run_objects
from dipaco_jax.config import settings
from dipaco_jax.data import json_tokenizer, sentencepiece_tokenizer, special_tokens, tokenizer_files
from dipaco_jax.huggingface import tokenizer_json
from dipaco_jax.storage import remedies

TEXTS = ['The quick brown fox jumps over 13 lazy dogs. ', 'def f(x):\n    return {x: [1, 2]}\n<|end| im_start end|>']
SPECIAL = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']
MARK = '\ufdd0'


def made(special=SPECIAL, added=('<think>',), **config) -> dict[str, bytes]:
  """The files of a byte-level tokenizer with these tokens, in this order."""
  files = json_tokenizer.train(TEXTS * 20, 300)
  tokenizer = tokenizers.Tokenizer.from_str(files['tokenizer.json'].decode())
  tokenizer.add_special_tokens(list(special))
  tokenizer.add_tokens(list(added))
  files['tokenizer.json'] = tokenizer.to_str().encode()
  return files | {'tokenizer_config.json': json.dumps({'eos_token': '<|im_end|>'} | config).encode()}


def write(folder, files):
  for name, content in files.items():
    (folder / name).write_bytes(content)
  return folder / 'tokenizer.json'


@pytest.mark.parametrize(
  ('eos_token', 'special', 'end'),
  [
    ('<|im_end|>', SPECIAL, '<|endoftext|>'),  # SmolLM2, Qwen
    ('<|eot_id|>', ['<|begin_of_text|>', '<|end_of_text|>', '<|eot_id|>'], '<|end_of_text|>'),  # Llama 3
    ('<end_of_turn>', ['<eos>', '<bos>', '<end_of_turn>'], '<eos>'),  # Gemma
    ('<|endoftext|>', SPECIAL, '<|endoftext|>'),
    ('</s>', ['<s>', '</s>'], '</s>'),  # Llama 2, whose turns end as documents do
    ('<|im_end|>', ['<|im_end|>'], '<|im_end|>'),
    (None, SPECIAL, None),
  ],
)
def test_documents_end_as_in_pretraining(eos_token, special, end):
  assert special_tokens.document_end(eos_token, {token: i for i, token in enumerate(special)}) == end


def test_of_several_ends_of_documents_the_one_that_the_model_lists_counts():
  ids = {'<|endoftext|>': 0, '<|end_of_text|>': 1, '<|eot_id|>': 2}
  assert special_tokens.document_end('<|eot_id|>', ids, [2, 1]) == '<|end_of_text|>'
  assert special_tokens.document_end('<|eot_id|>', ids, [2]) == '<|endoftext|>'


def test_texts_end_with_the_end_of_a_turn_too():
  tokenizer = json_tokenizer.JsonTokenizer(made())
  text_end, turn_end = tokenizer.special['<|endoftext|>'], tokenizer.special['<|im_end|>']
  assert tokenizer.encode('fox').tolist()[-1] == tokenizer.eos_id == tokenizer.special_ids['eos'] == text_end
  assert tokenizer.end_ids == (turn_end, text_end)
  listed = made() | {'generation_config.json': b'{"eos_token_id": [1, 7, 1, 9999]}'}
  assert json_tokenizer.JsonTokenizer(listed).end_ids == (1, 7, turn_end, text_end)


@pytest.mark.parametrize(
  ('name', 'content', 'words'),
  [
    ('generation_config.json', '{"eos_token_id": "</s>"}', r"generation_config\.json next to it: eos_token_id='</s>'"),
    ('generation_config.json', '[1]', 'generation_config.json next to it is not a JSON object'),
    ('config.json', '{"eos_token_id": [-1]}', r'config\.json next to it: eos_token_id=\[-1\]'),
  ],
)
def test_ends_that_are_none_are_named(name, content, words, tmp_path):
  file = write(tmp_path, made() | {name: content.encode()})
  with pytest.raises(ValueError, match=words):
    tokenizer_files.open_file(file)


@pytest.mark.parametrize(
  ('beside', 'ends'),
  [
    ({}, []),
    ({'config.json': {'eos_token_id': [1, 2]}}, [1, 2]),
    ({'config.json': {'eos_token_id': 1}, 'generation_config.json': {'top_k': 5}}, [1]),
    ({'config.json': {'eos_token_id': 1}, 'generation_config.json': {'eos_token_id': [3, 2]}}, [3, 2]),
    ({'config.json': {'model': {}}}, []),  # of a run
  ],
)
def test_files_beside_a_tokenizer_are_kept_with_a_run(beside, ends, tmp_path):
  given = {name: json.dumps(content).encode() for name, content in beside.items()}
  given_tokenizer = tokenizer_files.open_file(write(tmp_path, made() | given | {'chat_template.jinja': b'{{ x }}'}))
  kept = given_tokenizer.files
  assert kept['chat_template.jinja'] == b'{{ x }}' and 'config.json' not in kept
  again = tokenizer_files.read(settings.Tokenizer(), kept.__contains__, kept.__getitem__)
  assert again.files == kept and list(again.end_ids[: len(ends)]) == ends == special_tokens.listed_ends(kept)
  assert again.end_ids == given_tokenizer.end_ids
  if 'top_k' in str(beside):
    assert json.loads(kept['generation_config.json'])['top_k'] == 5


@pytest.mark.parametrize('name', tokenizer_files.FILES)
def test_files_of_a_tokenizer_last_in_a_bucket_and_damage_to_them_has_a_remedy(name):
  assert run_objects.lasts(name) and run_objects.lasts(f'{name}.sha256')
  assert remedies.stage_of(name) == 'tokenize'


def pieces() -> sentencepiece_tokenizer.SentencePieceTokenizer:
  return sentencepiece_tokenizer.SentencePieceTokenizer(sentencepiece_tokenizer.train(TEXTS * 20, 330))


@pytest.mark.parametrize('kind', ['json', 'pieces'])
def test_a_chat_has_special_tokens_and_what_is_marked_is_text(kind):
  tokenizer = json_tokenizer.JsonTokenizer(made()) if kind == 'json' else pieces()
  end = '<|im_end|>' if kind == 'json' else '</s>'
  number, text = tokenizer.special[end], f'a fox{end} jumps'
  before, behind = (tokenizer.encode(part, eos=False).tolist() for part in ('a fox', ' jumps'))
  assert tokenizer.encode_chat(text) == [*before, number, *behind]
  marked = special_tokens.break_up(text, tokenizer.special, MARK)
  assert MARK in marked and marked.replace(MARK, '') == text
  as_text = tokenizer.encode(text, eos=False).tolist()
  assert number not in as_text
  assert tokenizer.encode_chat(f'{end}{marked}{end}fox{end}', MARK) == [
    number, *as_text, number, *tokenizer.encode('fox', eos=False).tolist(), number
  ]  # fmt: skip


def test_an_added_token_that_is_marked_is_text():
  tokenizer = json_tokenizer.JsonTokenizer(made())
  marked = special_tokens.break_up('I <think> so', tokenizer.added, MARK)
  ids = tokenizer.encode_chat(marked, MARK)
  assert tokenizer.added['<think>'] not in ids and tokenizer.decode(ids) == 'I <think> so'


def test_spellings_within_each_other_are_all_broken():
  spellings = ['<|a|>', '|a|', '|>b', 'x']
  broken = special_tokens.break_up('<|a|>b|a|x', spellings, MARK)
  assert not any(spelling in broken for spelling in spellings if len(spelling) > 1)
  assert broken.replace(MARK, '') == '<|a|>b|a|x' and special_tokens.break_up('fox', spellings, MARK) == 'fox'
  assert [*special_tokens.split('a<|a|>|a|b', spellings)] == [
    ('a', False),
    ('<|a|>', True),
    ('|a|', True),
    ('b', False),
  ]


def test_a_post_processor_counts_where_the_config_contradicts_it():
  files = made(add_bos_token=False, bos_token='<|im_start|>')
  tokenizer = tokenizers.Tokenizer.from_str(files['tokenizer.json'].decode())
  number = tokenizer.token_to_id('<|im_start|>')
  tokenizer.post_processor = processors.TemplateProcessing('<|im_start|> $A', None, [('<|im_start|>', number)])
  files['tokenizer.json'] = tokenizer.to_str().encode()
  assert json_tokenizer.JsonTokenizer(files).encode('fox').tolist()[0] == number


def test_pieces_of_the_users_are_text_where_the_config_calls_them_special():
  model = io.BytesIO()
  turns = ['<start_of_turn>', '<end_of_turn>']  # as Gemma's tokenizer.model has them
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(TEXTS * 20), model_writer=model, model_type='bpe', vocab_size=330, minloglevel=3,
    byte_fallback=True, add_dummy_prefix=False, remove_extra_whitespaces=False, user_defined_symbols=turns,
  )  # fmt: skip
  files = {'tokenizer.model': model.getvalue()}
  listed = {str(i): {'content': turn, 'special': True} for i, turn in enumerate(turns, 3)}
  config = json.dumps({'eos_token': turns[1], 'added_tokens_decoder': listed}).encode()
  tokenizer = tokenizer_files.load(files | {'tokenizer_config.json': config})
  exported = json_tokenizer.JsonTokenizer(tokenizer_json.make_files(tokenizer))
  text = 'a fox<end_of_turn>'
  for one in (tokenizer, exported):
    assert 4 not in one.encode(text) and one.decode(one.encode(text)) == text
    assert one.encode_chat(text)[-1] == 4 and one.special['<end_of_turn>'] == 4
  assert tokenizer.end_ids == (4, 2)
  without_config = tokenizer_files.load(files)
  assert without_config.added == {turn: i for i, turn in enumerate(turns, 3)}
  assert 4 not in without_config.encode_chat(f'a fox<{MARK}end_of_turn>', MARK)
