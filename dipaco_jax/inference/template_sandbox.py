"""The environment of chat templates: as transformers has it, and with limits, for a template comes with a model.

A template can do nothing but write. A render that takes too many steps (turns of loops and calls), or makes too long a
text, ends with an error.
"""

import datetime
import json
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

MAX_STEPS = 1_000_000
MAX_CHARS = 1 << 24  # of a text, and of any part that a template puts together


class Generation(jinja2.ext.Extension):
  """The tag of transformers that marks what the model says; it does not change the text."""

  tags = {'generation'}

  def parse(self, parser: Any) -> Any:
    next(parser.stream)
    return parser.parse_statements(('name:endgeneration',), drop_needle=True)


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
  intercepted_binops = frozenset(['*', '+', '**', '%'])

  def __init__(self):
    # Without the optimizer, which would compute constants before a render, and so without limits.
    extensions = [Generation, 'jinja2.ext.loopcontrols']
    super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=extensions)
    self._counts = threading.local()
    self.filters |= {'tojson': _tojson, 'count_turns': self._count_turns, 'check_size': _check_size}
    self.globals |= {'raise_exception': _raise_exception, 'strftime_now': _strftime_now}

  def render(self, template: jinja2.Template, values: dict[str, Any]) -> str:
    """Renders a template; raises whatever the template or its values lead to."""
    self._counts.steps = 0
    parts: list[str] = []
    size = 0
    for part in template.generate(values):
      parts.append(part)
      size += len(part)
      if size > MAX_CHARS:
        raise _too_long()
    return ''.join(parts)

  def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
    """Parses a template; loops count their turns, and `~` checks the size of what it joins."""
    parsed = super()._parse(source, name, filename)
    for loop in [*parsed.find_all(jinja2.nodes.For)]:
      loop.iter = _filtered(loop.iter, 'count_turns')
    for concatenation in [*parsed.find_all(jinja2.nodes.Concat)]:
      concatenation.nodes = [_filtered(node, 'check_size') for node in concatenation.nodes]
    return parsed

  def call(self, context: Any, obj: Any, /, *args, **kwargs) -> Any:
    self._count()
    return _check_size(super().call(context, obj, *args, **kwargs))

  def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
    self._count()
    sizes = [len(x) for x in (left, right) if isinstance(x, str | list | tuple)]
    numbers = [abs(x) for x in (left, right) if isinstance(x, int)]
    too_large = {
      '*': sizes and numbers and sizes[0] * numbers[0] > MAX_CHARS,
      '+': sum(sizes) > MAX_CHARS,
      '**': max(numbers, default=0) > 1000,
      '%': isinstance(left, str),  # whose format may ask for any width
    }
    if too_large[operator]:
      raise jinja2.TemplateError(f'{operator} would make something too large')
    return super().call_binop(context, operator, left, right)

  def _count_turns(self, values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
      self._count()
      yield value

  def _count(self):
    self._counts.steps += 1
    if self._counts.steps > MAX_STEPS:
      raise jinja2.TemplateError(f'it takes more than {MAX_STEPS:,} steps')


def _filtered(node: Any, name: str) -> Any:
  """Returns a node of the template's syntax tree, with a filter behind it."""
  return jinja2.nodes.Filter(node, name, [], [], None, None).set_lineno(node.lineno).set_environment(node.environment)


def _check_size(value: Any) -> Any:
  if isinstance(value, str) and len(value) > MAX_CHARS:
    raise _too_long()
  return value


def _too_long() -> jinja2.TemplateError:
  return jinja2.TemplateError(f'it makes more than {MAX_CHARS:,} characters')


def _raise_exception(message: str):
  raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
  return datetime.datetime.now().astimezone().strftime(pattern)


def _tojson(value: Any, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
  return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
