"""The chat template of a tokenizer: how a conversation becomes the tokens that a model was tuned on.

Special tokens that the template writes are ids; those that are spelled in a message are text, so that no message can
end its turn or begin another. Before the template sees them, spellings in messages are broken up by a character that
none of them has, and it is taken out as the result is encoded. Templates may therefore trim, compare or repeat contents
as they like, and a conversation without such spellings has the ids that transformers gives it.
"""

import datetime
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dipaco_jax.core.errors import InputError
from dipaco_jax.data import special_tokens, template_sandbox, tokenizer_files
from dipaco_jax.data.tokenizer import Tokenizer

MAX_SOURCE_CHARS = 1 << 18
MARKS = range(0xFDD0, 0xFDF0)  # which Unicode keeps for use inside a program
NAMES = ('bos_token', 'eos_token', 'unk_token', 'pad_token')
TRAINED_ON = datetime.date(2024, 7, 26)  # the date in text for training, which must not depend on the day
Messages = Sequence[Mapping[str, str]]


class ChatTemplate:
  def __init__(self, source: str, tokenizer: Tokenizer, tokens: Mapping[str, str]):
    """Compiles a template; `tokens` are those that it may name, by name. Raises InputError."""
    if len(source) > MAX_SOURCE_CHARS:
      raise InputError(f'the chat template has {len(source):,} characters, more than {MAX_SOURCE_CHARS:,}')
    self._tokenizer, self._tokens = tokenizer, tokens
    self._environment = template_sandbox.Environment()
    try:
      self._template = self._environment.from_string(source)
    except Exception as e:  # of Jinja, or of Python, which compiles what Jinja writes
      raise InputError(f'the chat template: {e}; correct it, or remove it from the files of the tokenizer') from e
    self._special = [*tokenizer.special]
    # Tokens like <think> are none of a message's either, but an answer that is given back had them as tokens.
    self._control = self._special + [token for token in tokenizer.added if token in source and not token.isspace()]

  def encode(self, messages: Messages, values: Mapping[str, Any] | None = None) -> list[int]:
    """Returns the tokens of a conversation, up to where the model's answer begins; raises InputError.

    Args:
      messages: of `conversation.check_messages`.
      values: other names for the template, such as `enable_thinking`.
    """
    mark = _unused_mark(json.dumps([*messages, values], ensure_ascii=False))
    extra = {name: self._break_up(value, mark) for name, value in (values or {}).items()}
    try:
      text = self._render(self._broken_up(messages, mark), True, extra)
      return self._tokenizer.encode_chat(text, mark)
    except Exception as e:  # any error that messages of another shape cause
      raise _not_taken(e) from e

  def encode_answer(self, messages: Messages) -> tuple[list[int], list[int]]:
    """Returns (tokens before it, its own tokens) of an answer, the last message, for training; raises InputError.

    The tokens before the answer are those of `encode` for the messages before it, as a server has them, but that the
    date is a fixed one. The answer's own tokens are what the template writes behind them.
    """
    mark = _unused_mark(json.dumps([*messages], ensure_ascii=False))
    broken, fixed = self._broken_up(messages, mark), {'strftime_now': TRAINED_ON.strftime}
    try:
      before, whole = self._render(broken[:-1], True, fixed), self._render(broken, False, fixed)
      asked, both = self._tokenizer.encode_chat(before, mark), self._tokenizer.encode_chat(whole, mark)
      if both[: len(asked)] == asked:
        return asked, both[len(asked) :]
      # A token crosses the border, or the template writes messages before an answer otherwise than those without one.
      return asked, self._tokenizer.encode_chat(_answer(before, whole, broken[-1]['content']), mark)
    except Exception as e:  # any error that messages of another shape cause
      raise _not_taken(e) from e

  def _render(self, broken: Sequence[Any], asks: bool, extra: Mapping[str, Any]) -> str:
    names = {'messages': broken, 'tools': None, 'documents': None, 'add_generation_prompt': asks}
    return self._environment.render(self._template, {**self._tokens, **extra, **names})

  def _broken_up(self, messages: Messages, mark: str) -> list[dict[str, Any]]:
    return [
      {name: self._break_up(text, mark, message['role'] == 'assistant') for name, text in message.items()}
      for message in messages
    ]

  def _break_up(self, value: Any, mark: str, is_answer: bool = False) -> Any:
    if isinstance(value, list):
      return [self._break_up(part, mark, is_answer) for part in value]
    if isinstance(value, dict):
      return {self._break_up(key, mark): self._break_up(part, mark, is_answer) for key, part in value.items()}
    spellings: Collection[str] = self._special if is_answer else self._control
    return special_tokens.break_up(value, spellings, mark) if isinstance(value, str) else value


def _answer(before: str, whole: str, content: str) -> str:
  """Returns what a template writes for an answer; raises InputError if that cannot be told.

  Args:
    before, whole: what it writes for the messages before the answer, to ask for one, and for all.
    content: the answer.
  """
  if whole.startswith(before):
    return whole[len(before) :]
  if (at := whole.rfind(content.strip())) < 0:
    advice = 'train on other conversations, or correct the template'
    raise InputError(f'it changes an answer, and what it writes before it does not ask for one: {advice}')
  return whole[len(whole[:at].rstrip(' ')) :]


def _not_taken(error: Exception) -> InputError:
  return InputError(f'messages: the chat template does not take them: {" ".join(str(error).split())[:200]}')


def load(tokenizer: Tokenizer) -> ChatTemplate | None:
  """Returns the template of a tokenizer, None if it has none; raises InputError if it is no template."""
  config = json.loads(tokenizer.files.get(tokenizer_files.CONFIG, b'{}'))
  source = _source(tokenizer.files, config)
  if source is None:
    return None
  spelled = {number: spelling for spelling, number in tokenizer.special.items()}
  known = {f'{name}_token': spelled.get(number) for name, number in tokenizer.special_ids.items()}
  named = {name: known.get(name) if config.get(name) is None else _content(config[name]) for name in NAMES}
  return ChatTemplate(source, tokenizer, {name: token for name, token in named.items() if token is not None})


def _source(files: Mapping[str, bytes], config: Mapping[str, Any]) -> str | None:
  """Returns the default template. A separate file takes precedence over tokenizer_config.json."""
  if (content := files.get(tokenizer_files.TEMPLATE)) is not None:
    try:
      return content.decode()
    except UnicodeDecodeError as e:
      raise InputError(f'{tokenizer_files.TEMPLATE} is not UTF-8: {e}') from e
  source = config.get('chat_template')
  if isinstance(source, list):
    source = {one.get('name'): one.get('template') for one in source if isinstance(one, dict)}.get('default')
  return source if isinstance(source, str) else None


def _content(token: Any) -> str | None:
  """Returns a token as tokenizer_config.json has it: its spelling, or an object with it."""
  content = token.get('content') if isinstance(token, dict) else token
  return content if isinstance(content, str) else None


def _unused_mark(text: str) -> str:
  """Returns a character that a text does not have; raises InputError if it has all that could be."""
  mark = next((chr(number) for number in MARKS if chr(number) not in text), None)
  if mark is None:
    raise InputError('messages contain all of the noncharacters U+FDD0 to U+FDEF: leave out some of them')
  return mark
