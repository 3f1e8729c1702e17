"""Conversations: the text that chooses their path, and the messages that are rejected."""

import pytest

from dipaco_jax.core.errors import InputError
from dipaco_jax.data import conversation

SYSTEM = {'role': 'system', 'content': 'You are a helpful assistant. ' * 20}


def chat(*texts):
  roles = ['user', 'assistant'] * len(texts)
  return [{'role': role, 'content': text} for role, text in zip(roles, texts, strict=False)]


def test_what_the_user_says_first_chooses_the_path():
  assert conversation.routing_text([SYSTEM, *chat('fox')]) == 'fox' == conversation.routing_text(chat('fox'))
  parts = [{'type': 'text', 'text': 'f'}, {'type': 'image_url', 'image_url': {}}, {'type': 'text', 'text': 'ox'}]
  assert conversation.routing_text(chat(parts)) == 'fox'
  assert conversation.routing_text([*chat('fox'), *chat('dog')]) == 'fox\ndog'


def test_a_conversation_stays_on_its_path_as_it_grows():
  grown = [SYSTEM, *chat('fox', 'yes', 'dog', 'no', 'cat')]
  assert {conversation.routing_text(grown[:end]) for end in range(2, 7)} == {'fox'}


def test_where_the_user_says_nothing_the_first_text_chooses():
  assert conversation.routing_text([SYSTEM]) == SYSTEM['content']
  assert conversation.routing_text(chat('', 'yes', 'fox')) == 'yes'


@pytest.mark.parametrize(
  'messages, words',
  [
    (None, 'messages should be a list of objects'),
    ([], 'messages should be a list of objects'),
    (['hi'], 'messages should be a list of objects'),
    (chat(''), 'messages have no text'),
    ([{'role': 'user'}], 'messages have no text'),
    (chat('a\ud800'), 'messages have a lone surrogate'),
  ],
)
def test_messages_that_no_path_can_be_chosen_by_are_rejected(messages, words):
  with pytest.raises(InputError, match=words):
    conversation.routing_text(messages)


@pytest.mark.parametrize(
  'message, words',
  [
    ({'role': 'tool', 'content': 'x'}, r"messages\[1\]\.role is 'tool': it should be one of system, developer, user"),
    ({'content': 'x'}, r"messages\[1\]\.role is 'None'"),
    ({'role': ['user'], 'content': 'x'}, r'messages\[1\]\.role is'),
    ({'role': 'user', 'content': None}, r'messages\[1\]\.content is not supported'),
    ({'role': 'user', 'content': [{'type': 'image_url', 'image_url': {}}]}, r'messages\[1\]\.content is not supported'),
    ({'role': 'user', 'content': 'x', 'tool_calls': [{}]}, r'messages\[1\]\.tool_calls is not supported'),
    ({'role': 'user', 'content': 'x', 'name': 3}, r'messages\[1\]\.name should be a string'),
    ({'role': 'user', 'content': '\ud800'}, r'messages\[1\]\.content has a lone surrogate'),
  ],
)
def test_messages_that_cannot_be_answered_are_rejected(message, words):
  with pytest.raises(InputError, match=words):
    conversation.check_messages([*chat('hi'), message])


def test_a_picture_alone_is_named_as_what_is_not_supported():
  with pytest.raises(InputError, match=r'messages\[0\]\.content is not supported'):
    conversation.check_messages([{'role': 'user', 'content': [{'type': 'image_url', 'image_url': {}}]}])


def test_an_answer_may_be_given_back_as_openais_client_has_it():
  answer = {'role': 'assistant', 'content': 'yes', 'refusal': None, 'tool_calls': None, 'annotations': []}
  found = conversation.check_messages([*chat('hi'), answer, {'role': 'user', 'content': 'so', 'name': 'Ann'}])
  assert found[1:] == [{'role': 'assistant', 'content': 'yes'}, {'role': 'user', 'content': 'so', 'name': 'Ann'}]


def test_the_text_of_a_conversation_is_what_is_said_in_it():
  made = conversation.for_training(
    [SYSTEM, *chat('fox', 'yes'), {'role': 'user', 'content': [{'type': 'text', 'text': 'a'}]}]
  )
  assert made == 'fox\nyes\na' and isinstance(made, str)
  assert [message['role'] for message in made.messages] == ['system', 'user', 'assistant', 'user']


@pytest.mark.parametrize(
  'messages, words',
  [
    (chat('fox'), 'messages have no answer to train on'),
    (chat('fox', ''), r'messages\[1\].content is empty'),
    (chat(' \n', 'yes'), r'messages\[0\].content is empty'),
    ([{'role': 'tool', 'content': 'x'}, *chat('fox', 'yes')], r"messages\[0\].role is 'tool': it should be one of"),
    ([{'from': 'human', 'value': 'fox'}], r'messages\[0\].role is'),
    (chat('fox', 'yes\ud800'), r'messages\[1\].content has a lone surrogate'),
    ([*chat('fox'), {'role': 'assistant', 'content': 'x', 'tool_calls': [1]}], r'messages\[1\].tool_calls is not supp'),
  ],
)
def test_conversations_that_cannot_be_trained_on(messages, words):
  with pytest.raises(InputError, match=words):
    conversation.for_training(messages)
