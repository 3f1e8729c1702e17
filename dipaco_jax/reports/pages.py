"""Renders pages and cards from the templates in the folder next to this file.

An HTML page stands alone: one file with its style and pictures inside, nothing fetched, for light and dark screens.
Whatever it is given is escaped; only pictures, which matplotlib made, are marked as HTML.
"""

import functools
from typing import Any

import jinja2

from dipaco_jax.core import printable
from dipaco_jax.reports import palette


def render(template: str, **values: Any) -> str:
  """Returns the text of a template, such as 'report.html', without control characters."""
  return printable.text(environment().get_template(template).render(values))


@functools.cache
def environment() -> jinja2.Environment:
  """Returns the templates; only HTML is escaped, and a value that a template lacks is an error."""
  options: Any = {'trim_blocks': True, 'lstrip_blocks': True, 'keep_trailing_newline': True}
  options |= {'autoescape': jinja2.select_autoescape(), 'undefined': jinja2.StrictUndefined}
  templates = jinja2.Environment(loader=jinja2.PackageLoader('dipaco_jax.reports'), **options)
  templates.globals['page_colours'] = palette.page_colours
  templates.filters['cell'] = table_cell
  return templates


def table_cell(text: str) -> str:
  return printable.name(text, 1000).replace('|', '\\|')
