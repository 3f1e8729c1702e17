"""The environment of chat templates: as transformers has it, and with the limits of `template_limits`."""

import datetime
import functools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils

from dipaco_jax.data import template_limits

MAX_WIDTH = 100  # that a filter may indent by, or round to
ANY_SIZE = frozenset(['attr', 'count', 'd', 'default', 'first', 'last', 'length'])  # filters that make nothing


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
    self.spent = template_limits.Spent()
    super().__init__(
      trim_blocks=True, lstrip_blocks=True, optimized=False, finalize=self.spent.check, extensions=extensions
    )
    self.filters |= {'tojson': _tojson, 'join': _join, 'replace': _replace, 'indent': _indent}
    self.filters |= {'round': _round, 'sum': _sum}
    self.filters = {
      name: function if name in ANY_SIZE else self._limited(function)
      for name, function in self.filters.items()
      if name not in template_limits.FILTERS
    }
    self.filters |= {'count_turns': self._count_turns, 'check_size': self.spent.check, 'count_step': self._count_step}
    self.tests = {name: self._counted(function) for name, function in self.tests.items()}
    self.globals |= {'raise_exception': _raise_exception, 'strftime_now': _strftime_now}
    del self.globals['lipsum']

  def render(self, template: jinja2.Template, values: dict[str, Any]) -> str:
    """Renders a template; raises any error that the template or its values cause."""
    self.spent.restart()
    parts: list[str] = []
    size = 0
    for part in template.generate(values):
      parts.append(part)
      size += len(part)
      template_limits.check_length(size)
    return ''.join(parts)

  def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
    """Parses a template; loops, comparisons and slices count as steps, and the size of new texts is checked."""
    parsed = super()._parse(source, name, filename)
    for comparison in [*parsed.find_all(jinja2.nodes.Compare)]:
      comparison.expr = _filtered(comparison.expr, 'count_step')
    for item in [*parsed.find_all(jinja2.nodes.Getitem)]:
      if isinstance(item.arg, jinja2.nodes.Slice):
        item.node = _filtered(item.node, 'count_step')
    for loop in [*parsed.find_all(jinja2.nodes.For)]:
      loop.iter = _filtered(loop.iter, 'count_turns')
    for concatenation in [*parsed.find_all(jinja2.nodes.Concat)]:
      concatenation.nodes = [_filtered(node, 'check_size') for node in concatenation.nodes]
    values: Any
    for values in [*parsed.find_all((jinja2.nodes.List, jinja2.nodes.Tuple))]:
      values.items = [_filtered(node, 'check_size') if _is_computed(node) else node for node in values.items]
    for pair in [*parsed.find_all(jinja2.nodes.Pair)]:
      pair.value = _filtered(pair.value, 'check_size')
    return parsed

  def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
    return attr not in template_limits.METHODS and super().is_safe_attribute(obj, attr, value)

  def call(self, context: Any, obj: Any, /, *args, **kwargs) -> Any:
    self.spent.step()
    method = getattr(obj, '__wrapped__', obj)  # Jinja wraps str.format
    text, name = getattr(method, '__self__', None), getattr(method, '__name__', '')
    if isinstance(text, str) or obj in (dict, jinja2.utils.Namespace):
      for value in [*args, *kwargs.values()]:
        self.spent.check(value)
    if isinstance(text, str) and name == 'join':
      args = tuple(template_limits.check_join(text, parts) for parts in args)
    elif isinstance(text, str) and name == 'replace':
      template_limits.check_replace(text, *args[:2])
    elif isinstance(text, str) and name == 'format':
      template_limits.check_format(text, [*args, *kwargs.values()])
    return self.spent.check(super().call(context, obj, *args, **kwargs))

  def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
    self.spent.step()
    texts = [len(x) for x in (left, right) if isinstance(x, str)]
    lists = [len(x) for x in (left, right) if isinstance(x, list | tuple)]
    numbers = [abs(x) for x in (left, right) if isinstance(x, int)]
    times = max(numbers, default=1)
    too_large = {
      '*': sum(texts) * times > template_limits.MAX_CHARS or sum(lists) * times > template_limits.MAX_ITEMS,
      '+': sum(texts) > template_limits.MAX_CHARS or sum(lists) > template_limits.MAX_ITEMS,
      '**': times > 1000,
      '%': isinstance(left, str),  # whose format may ask for any width
    }
    if too_large[operator]:
      raise jinja2.TemplateError(f'{operator} would make something too large')
    result = super().call_binop(context, operator, left, right)
    return result if lists else self.spent.check(result)  # items of lists were counted when the lists were made

  def _limited(self, function: Callable) -> Callable:
    """Returns a filter that counts as a step, and whose arguments and result have limits."""

    @functools.wraps(function)
    def filtered(*args, **kwargs) -> Any:
      self.spent.step()
      for value in [*args, *kwargs.values()]:
        self.spent.check(value)
      return self.spent.check(function(*args, **kwargs))

    return filtered

  def _counted(self, function: Any) -> Callable:
    """Returns a test, such as `in`, that counts as a step."""

    @functools.wraps(function)
    def counted(*args, **kwargs) -> Any:
      self.spent.step()
      return function(*args, **kwargs)

    return counted

  def _count_step(self, value: Any) -> Any:
    self.spent.step()
    return value

  def _count_turns(self, values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
      self.spent.step()
      yield value


def _filtered(node: Any, name: str) -> Any:
  """Returns a node of the template's syntax tree, with a filter behind it."""
  return jinja2.nodes.Filter(node, name, [], [], None, None).set_lineno(node.lineno).set_environment(node.environment)


def _is_computed(node: Any) -> bool:
  """Returns whether a part of a list is neither a constant nor, as in `for a, b in pairs`, a name to assign to."""
  return not isinstance(node, jinja2.nodes.Const) and getattr(node, 'ctx', 'load') == 'load'


def _raise_exception(message: str):
  raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
  return datetime.datetime.now().astimezone().strftime(pattern)


def _tojson(value: Any, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
  _check_width(indent)
  return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@jinja2.pass_environment
def _join(environment: jinja2.Environment, value: Iterable[Any], d: str = '', attribute: Any = None) -> str:
  if attribute is not None:
    value = map(jinja2.filters.make_attrgetter(environment, attribute), value)
  return str(d).join(template_limits.check_join(str(d), [str(part) for part in value]))


def _replace(text: Any, old: str, new: str, count: int | None = None) -> str:
  template_limits.check_replace(str(text), str(old), str(new))
  return str(text).replace(str(old), str(new), -1 if count is None else count)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
  _check_width(width)
  template_limits.check_length(len(text) + (text.count('\n') + 1) * MAX_WIDTH)
  return jinja2.filters.do_indent(text, width, first, blank)


def _round(value: Any, precision: int = 0, method: Any = 'common') -> Any:
  _check_width(precision)
  return jinja2.filters.do_round(value, precision, method)


@jinja2.pass_environment
def _sum(environment: jinja2.Environment, values: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
  if not isinstance(start, int | float):
    raise jinja2.TemplateError('sum adds numbers; use join for texts')
  if attribute is not None:
    values = map(jinja2.filters.make_attrgetter(environment, attribute), values)
  return sum(values, start)


def _check_width(width: Any):
  if (len(width) if isinstance(width, str) else width or 0) > MAX_WIDTH:
    raise jinja2.TemplateError(f'a width is more than {MAX_WIDTH}')
