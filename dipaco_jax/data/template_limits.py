"""What a chat template may spend: steps, seconds of the CPU, and the size of each text and list that it makes.

A template comes with a model, and the person who serves the model did not write it. One operation, such as the filter
`center`, can make a text of any length, so sizes are checked before an operation that could make something large.
"""

import re
import threading
import time
from collections.abc import Iterable
from typing import Any

import jinja2
import jinja2.utils

MAX_STEPS = 1_000_000
MAX_CPU_S = 10
MAX_CHARS = 1 << 24  # of a text, and of any part that a template puts together
MAX_ALL_CHARS = 1 << 29  # of all texts together that a template puts together
MAX_ITEMS = 1 << 19  # of a list or an object, those inside it included
MAX_BITS = 1024  # of an integer

# Methods and filters that no chat template needs, and that make a text of any length.
METHODS = frozenset('center encode expandtabs format_map ljust rjust to_bytes translate zfill'.split())
FILTERS = frozenset('batch center filesizeformat format pprint slice urlize wordwrap xmlattr'.split())
UNLIMITED_FORMAT = re.compile(r'[:.][^}]*(\{|\d{5})')  # a width or a precision that is an argument, or over 9,999


class Spent(threading.local):
  """What the render of this thread has spent."""

  steps = 0
  num_chars = 0
  deadline = float('inf')

  def restart(self):
    self.steps = self.num_chars = 0
    self.deadline = time.thread_time() + MAX_CPU_S

  def step(self):
    self.steps += 1
    if self.steps > MAX_STEPS:
      raise jinja2.TemplateError(f'it takes more than {MAX_STEPS:,} steps')
    self._check_time()

  def _check_time(self):
    if time.thread_time() > self.deadline:
      raise jinja2.TemplateError(f'it takes more than {MAX_CPU_S} s')

  def check(self, value: Any) -> Any:
    """Returns a value that a template has made or is about to write; raises TemplateError if it is too large."""
    self._check_time()
    if isinstance(value, str):
      self.num_chars += len(value)
      check_length(len(value))
      if self.num_chars > MAX_ALL_CHARS:
        raise jinja2.TemplateError(f'it makes more than {MAX_ALL_CHARS:,} characters in all')
    elif isinstance(value, int):
      if value.bit_length() > MAX_BITS:
        raise jinja2.TemplateError('a number is too large')
    elif isinstance(value, dict | list | tuple | jinja2.utils.Namespace):
      _check_items(value)
    return value


def check_length(num_chars: int):
  if num_chars > MAX_CHARS:
    raise jinja2.TemplateError(f'it makes more than {MAX_CHARS:,} characters')


def _check_items(value: Any):
  """Counts what `str(value)` would write: a list that is in another twice counts twice."""
  waiting = [value]
  num_items = 0
  num_chars = 0
  while waiting:
    item = waiting.pop()
    num_items += 1
    if isinstance(item, str):
      num_chars += len(item)
    elif isinstance(item, jinja2.utils.Namespace):
      waiting.append(item._Namespace__attrs)
    elif isinstance(item, dict):
      waiting += [*item.keys(), *item.values()]
    elif isinstance(item, list | tuple):
      waiting += item
    if num_items + len(waiting) > MAX_ITEMS:
      raise jinja2.TemplateError(f'it makes a list of more than {MAX_ITEMS:,} items')
  check_length(num_chars)


def check_join(separator: str, parts: Iterable[Any]) -> list[Any]:
  """Returns the parts of a text that is about to be joined."""
  parts = list(parts)
  check_length(len(separator) * len(parts) + sum(len(part) for part in parts if isinstance(part, str)))
  return parts


def check_replace(text: str, old: str, new: str):
  check_length(len(text) + text.count(old) * len(new))


def check_format(text: str, values: Iterable[Any]):
  if UNLIMITED_FORMAT.search(text):
    raise jinja2.TemplateError('the format would make something too large')
  check_length(len(text) + text.count('{') * max((len(str(value)) for value in values), default=0))
