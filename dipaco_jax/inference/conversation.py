"""Conversations as OpenAI's API has them: what of one chooses its path, and which messages can be answered here."""

import re
from collections.abc import Mapping
from typing import Any

from dipaco_jax.core.errors import InputError

SURROGATES = re.compile('[\ud800-\udfff]')
ROLES = ('system', 'developer', 'user', 'assistant')


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
