"""Conversations as sequences: what is learned is what a server has to write, behind the tokens that it is given."""

import types

import chats
import numpy as np
import pytest

from dipaco_jax.core.errors import InputError
from dipaco_jax.data import answers, chat_template, packing
from dipaco_jax.data.conversation import Conversation
from dipaco_jax.data.cutting import Cutting

SYSTEM = {'role': 'system', 'content': 'Be brief.'}
FORGETFUL = (  # writes the thoughts of the last answer alone, as some models' templates do
  "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
  "{%- if not loop.last %}{{ message.content.split('</t>')[-1] }}{% else %}{{ message.content }}{% endif %}"
  "{{ '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope='module')
def made():
  return chats.tokenizer(chat_template=chats.CHATML)


def cut(tokenizer, messages, seq_len=1000, is_validation=False, prefix_tokens=8):
  document = types.SimpleNamespace(id='a.jsonl:1', text=Conversation(messages))
  cutting = Cutting(seq_len, seq_len, prefix_tokens, conversations=True)
  return answers.Encoder(tokenizer).cut(document, cutting, is_validation)


def spelled(tokenizer, tokens) -> str:
  return tokenizer._tokenizer.decode([int(t) for t in tokens], skip_special_tokens=False)


def learned(tokenizer, sequence) -> list[str]:
  """The runs of tokens to learn, as they are spelled."""
  runs: list[list[int]] = [[]]
  for token in sequence:
    runs[-1].append(token) if token >= 0 else runs.append([])
  return [spelled(tokenizer, run) for run in runs if run]


def test_what_is_learned_is_each_answer_and_the_end_of_its_turn(made):
  [sequence] = cut(made, [SYSTEM, *chats.chat('hi', 'yes', 'and', 'no')]).kept
  assert learned(made, sequence) == [f'yes{chats.END}', f'no{chats.END}']
  written = f'{chats.START}system\nBe brief.{chats.END}\n'
  for role, text in (('user', 'hi'), ('assistant', 'yes'), ('user', 'and'), ('assistant', 'no')):
    written += f'{chats.START}{role}\n{text}{chats.END}\n'
  assert spelled(made, answers.plain(sequence)) == written


def test_before_an_answer_stand_the_tokens_that_a_server_is_given(made):
  messages = [SYSTEM, *chats.chat('hi', 'yes', 'and', 'no', 'so')]
  template = chat_template.load(made)
  [sequence] = cut(made, [*messages, {'role': 'assistant', 'content': 'well'}]).kept
  for count in (2, 4, 6):
    given = template.encode(messages[:count])
    np.testing.assert_array_equal(answers.plain(sequence)[: len(given)], given)
    assert sequence[len(given) - 1] < 0 <= sequence[len(given)]


def test_an_answer_has_a_sequence_of_its_own_where_the_template_rewrites_those_before():
  made = chats.tokenizer(chat_template=FORGETFUL)
  first, second = cut(made, chats.chat('hi', 'a</t>yes', 'and', 'b</t>no')).kept
  assert learned(made, first) == [f'a</t>yes{chats.END}'] and learned(made, second) == [f'b</t>no{chats.END}']
  assert 'yes' in spelled(made, answers.plain(second)) and 'a</t>' not in spelled(made, answers.plain(second))


def test_a_long_conversation_is_cut_between_exchanges_and_keeps_its_instructions(made):
  messages = [SYSTEM, *chats.chat(*(f'{kind}{i}' for i in range(6) for kind in 'qa'))]
  [whole] = cut(made, messages).kept
  parts = cut(made, messages, seq_len=len(whole) // 2)
  assert len(parts.kept) > 1 and not parts.short
  assert [a for part in parts.kept for a in learned(made, part)] == [f'a{i}{chats.END}' for i in range(6)]
  for part in parts.kept:
    before = f'{chats.START}system\nBe brief.{chats.END}\n{chats.START}user'
    assert spelled(made, answers.plain(part)).startswith(before)
    assert len(part) <= len(whole) // 2
  assert len(cut(made, messages, len(whole) // 2, is_validation=True).kept) == 1


def test_what_is_too_long_in_one_exchange_is_cut_off_and_counted(made):
  [whole] = cut(made, chats.chat('hi', 'yes ' * 40)).kept
  parts = cut(made, chats.chat('hi', 'yes ' * 40), seq_len=50)
  assert [len(part) for part in parts.kept] == [50] and [len(part) for part in parts.short] == [len(whole) - 50]
  parts = cut(made, chats.chat('hi ' * 90, 'yes'), seq_len=50)
  assert not parts.kept and len(parts.short) == 2 and min(part.min() for part in parts.short) >= 0


def test_the_users_first_turn_chooses_the_path(made):
  for prefix_tokens in (4, 50):
    parts = cut(made, [SYSTEM, *chats.chat('some words', 'yes', 'more', 'no')], prefix_tokens=prefix_tokens)
    np.testing.assert_array_equal(parts.routed, made.encode('some words', eos=False)[:prefix_tokens])


def test_bytes_are_those_of_the_answers(made):
  parts = cut(made, [SYSTEM, *chats.chat('hi', 'yes', 'and', 'né')], is_validation=True)
  assert parts.num_bytes == [len('yesné'.encode())]


def test_text_for_training_does_not_depend_on_the_day():
  template = chat_template.load(chats.tokenizer(chat_template="{{ strftime_now('%d %b %Y') }}" + chats.CHATML))
  before, _ = template.encode_answer(chats.chat('hi', 'yes'))
  assert '26 Jul 2024' in spelled(template._tokenizer, before)


def test_errors_name_the_record_and_the_problem(made):
  with pytest.raises(InputError, match=r'the tokenizer has no chat template, which .* needs: name an instruct'):
    answers.Encoder(chats.tokenizer())
  strict = chats.tokenizer(chat_template="{{ raise_exception('roles must alternate') }}")
  with pytest.raises(InputError, match=r'^a.jsonl:1: messages: the chat template does not take them: roles must alter'):
    cut(strict, chats.chat('hi', 'yes'))
  elsewhere = chats.tokenizer(chat_template='{% if add_generation_prompt %}x{% endif %}{{ messages[0].content }}')
  with pytest.raises(InputError, match='it changes an answer, and what it writes before it does not ask for one'):
    cut(elsewhere, chats.chat('hi', 'yes'))


LAST = (  # instructions are part of the user's message if that is the last one, as in templates of Mistral
  "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
  "{% for m in messages %}{% if m.role == 'user' %}[{{ system ~ ' ' if loop.last and system }}{{ m.content }}]"
  "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


def test_an_answer_is_learned_behind_what_a_server_gives_where_the_template_forgets_instructions():
  made = chats.tokenizer(chat_template=LAST)
  first, second = cut(made, [SYSTEM, *chats.chat('hi', 'yes', 'and', 'no')]).kept
  assert spelled(made, answers.plain(first)) == f'[Be brief. hi] yes{chats.END}'
  assert spelled(made, answers.plain(second)) == f'[hi] yes{chats.END}[Be brief. and] no{chats.END}'
  assert learned(made, second) == [f' no{chats.END}']


def test_each_answer_is_written_once_however_many_there_are(made, monkeypatch):
  """And at most twice where a part begins: else the time would grow with the cube of the exchanges."""
  asked = []
  encode = chat_template.ChatTemplate.encode_answer
  monkeypatch.setattr(chat_template.ChatTemplate, 'encode_answer', lambda *a: asked.append(len(a[1])) or encode(*a))
  messages = chats.chat(*(f'{kind}{i}' for i in range(20) for kind in 'qa'))
  [whole] = cut(made, messages).kept
  assert len(asked) == 20
  asked.clear()
  parts = cut(made, messages, seq_len=len(whole) // 4).kept
  assert len(asked) == 20 + len(parts) - 1


def test_given_tokens_have_negative_segments(made):
  sequences = [cut(made, chats.chat(*texts)).kept[0] for texts in (('hi', 'yes'), ('and', 'no'))]
  [row] = packing.pack(sequences, sum(map(len, sequences)) + 3)
  assert row.dtype == np.int32
  np.testing.assert_array_equal(row[0][:-3], np.concatenate([*map(answers.plain, sequences)]))
  signs = np.concatenate([np.where(s < 0, -n, n) for n, s in enumerate(sequences, 1)])
  np.testing.assert_array_equal(row[1], [*signs, 0, 0, 0])
  tokens, segments = packing.pad(sequences, 200)
  np.testing.assert_array_equal(segments[0][: len(sequences[0])], np.where(sequences[0] < 0, -1, 1))
  assert tokens.min() == 0
