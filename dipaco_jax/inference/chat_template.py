"""The chat template of a tokenizer: how a conversation is written as one text, whose beginning chooses a path."""

import datetime
import json
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from dipaco_jax.core.errors import InputError
from dipaco_jax.data import tokenizer_files
from dipaco_jax.data.tokenizer import Tokenizer

Template = Callable[[Mapping[str, Any]], str]


class Generation(jinja2.ext.Extension):
  """Hugging Face's own tag, which marks what the model says; for the text it is nothing."""

  tags = {'generation'}

  def parse(self, parser: Any) -> Any:
    next(parser.stream)
    return parser.parse_statements(('name:endgeneration',), drop_needle=True)


def load(tokenizer: Tokenizer) -> Template | None:
  """Returns what writes a body of chat completions as text, None where the tokenizer has no template.

  Calling it raises InputError where the messages are none that the template takes.
  """
  config = json.loads(tokenizer.files.get(tokenizer_files.CONFIG, b'{}'))
  source = config.get('chat_template')
  if isinstance(source, list):  # several, by name
    source = {one.get('name'): one.get('template') for one in source}.get('default')
  if not isinstance(source, str):
    return None
  tokens = {name: _content(config.get(name)) for name in ('bos_token', 'eos_token', 'unk_token', 'pad_token')}
  try:
    template = _environment().from_string(source)
  except jinja2.TemplateError as e:
    raise InputError(f'the chat_template of tokenizer_config.json: {e}') from e

  def render(values: Mapping[str, Any]) -> str:
    names = {'tools': values.get('tools'), 'add_generation_prompt': values.get('add_generation_prompt', True)}
    extra = values.get('chat_template_kwargs')
    messages = _checked(values.get('messages'))
    try:
      text = template.render(**tokens | (extra if isinstance(extra, dict) else {}) | names, messages=messages)
    except Exception as e:  # whatever messages of another shape lead to
      raise InputError(f'messages: the chat template does not take them: {" ".join(str(e).split())[:200]}') from e
    return text.removeprefix(tokens['bos_token']) if tokenizer.bos_id >= 0 else text

  return render


def _checked(messages: Any) -> list[dict[str, Any]]:
  """Returns messages with contents of text alone."""
  if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
    raise InputError('messages should be a list of objects, as [{"role": "user", "content": "A text"}]')
  return [message | {'content': _text(message.get('content'))} for message in messages]


def _text(content: Any) -> Any:
  """Joins the parts of a content that are text."""
  if not isinstance(content, list):
    return content
  return ''.join(part['text'] for part in content if isinstance(part, dict) and isinstance(part.get('text'), str))


def _content(token: Any) -> str:
  content = token.get('content') if isinstance(token, dict) else token
  return content if isinstance(content, str) else ''


def _environment() -> jinja2.Environment:
  """Returns an environment as Hugging Face's: a template comes with a model, so that it may do nothing but write."""
  made = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, 'jinja2.ext.loopcontrols']
  )

  def raise_exception(words: str):
    raise jinja2.TemplateError(words)

  def tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, indent=indent, **{'ensure_ascii': False} | options)

  made.filters['tojson'] = tojson
  made.globals['raise_exception'] = raise_exception
  made.globals['strftime_now'] = lambda words: datetime.datetime.now().astimezone().strftime(words)
  return made
