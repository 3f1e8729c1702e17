"""Conversations as OpenAI's API has them: what of one chooses its path, and which can be answered or trained on."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Self

from dipaco_jax.core.errors import InputError

SURROGATES = re.compile('[\ud800-\udfff]')
ROLES = ('system', 'developer', 'user', 'assistant')
INSTRUCTIONS = ('system', 'developer')  # roles of messages that many conversations share


class Conversation(str):
  """The messages of a conversation as a document; as a text, it is what users and the model say, a line each.

  Instructions are not part of the text, by which equal documents are found, because many conversations share them.
  """

  messages: Sequence[dict[str, str]]

  @property
  def answers(self) -> str:
    """The answers, a line each."""
    return '\n'.join(message['content'] for message in self.messages if message['role'] == 'assistant')

  def __new__(cls, messages: Sequence[dict[str, str]]) -> Self:
    made = super().__new__(cls, '\n'.join(m['content'] for m in messages if m['role'] not in INSTRUCTIONS))
    made.messages = messages
    return made


def for_training(messages: Any) -> Conversation:
  """Returns a conversation with an answer to train on; raises InputError if there is none, or a message is unfit."""
  checked = check_messages(messages)
  for i, message in enumerate(checked):
    if not message['content'].strip():
      raise InputError(f'messages[{i}].content is empty')
  if not any(message['role'] == 'assistant' for message in checked):
    raise InputError("messages have no answer to train on: one should have the role 'assistant'")
  return Conversation(checked)


def routing_text(messages: Any) -> str:
  """Returns the text that chooses a conversation's path; raises InputError if the messages are none or have none.

  This is the text of the user before the first answer, so that a conversation stays on its path as it grows. The text
  of the chat template and a system message are the same in many conversations, and are not used. If there is no text of
  the user, the first message with a text is used.
  """
  _check_list(messages)
  roles = [message.get('role') for message in messages]
  first_answer = roles.index('assistant') if 'assistant' in roles else len(messages)
  texts = [_text(message.get('content')) for message in messages]
  asked = [texts[i] for i in range(first_answer) if roles[i] == 'user']
  text = '\n'.join(filter(None, asked)) or next(filter(None, texts), '')
  if not text:
    raise InputError('messages have no text: the first message of the user should have some')
  if SURROGATES.search(text):
    raise InputError('messages have a lone surrogate (half a character): send complete characters')
  return text


def check_messages(messages: Any) -> list[dict[str, str]]:
  """Returns messages of a role, a content and perhaps a name, all of them texts; raises InputError for any other."""
  _check_list(messages)
  checked = [_check_message(f'messages[{i}]', message) for i, message in enumerate(messages)]
  routing_text(messages)
  return checked


def _check_list(messages: Any):
  if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
    raise InputError('messages should be a list of objects, as [{"role": "user", "content": "A text"}]')


def _check_message(name: str, message: Mapping[str, Any]) -> dict[str, str]:
  role, content = message.get('role'), message.get('content')
  if role not in ROLES:
    raise InputError(f'{name}.role is {str(role)[:80]!r}: it should be one of {", ".join(ROLES)}')
  if not (isinstance(content, str) or (isinstance(content, list) and all(map(_is_text, content)))):
    problem = 'it should be a text, or a list of parts like {"type": "text", "text": "A text"}'
    raise InputError(f'{name}.content is not supported: {problem}')
  if SURROGATES.search(_text(content)):
    raise InputError(f'{name}.content has a lone surrogate (half a character): send complete characters')
  for field, value in message.items():
    if field not in ('role', 'content', 'name') and value not in (None, [], {}, ''):
      raise InputError(f'{name}.{str(field)[:80]} is not supported: leave it out')
  called = message.get('name')
  if called is not None and (not isinstance(called, str) or SURROGATES.search(called)):
    raise InputError(f'{name}.name should be a string')
  return {'role': role, 'content': _text(content)} | ({} if called is None else {'name': called})


def _is_text(part: Any) -> bool:
  return isinstance(part, dict) and part.get('type') == 'text' and isinstance(part.get('text'), str)


def _text(content: Any) -> str:
  """Returns a content that is a text, or the parts of it that are."""
  if isinstance(content, list):
    return ''.join(part['text'] for part in content if isinstance(part, dict) and isinstance(part.get('text'), str))
  return content if isinstance(content, str) else ''
