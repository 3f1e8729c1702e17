"""Writes docs/fields.md: every field of a config, its default and its help text.

    python docs/fields_table.py [--check]

With --check nothing is written: the exit status is 1 if the page is not current.
"""

import dataclasses
import pathlib
import sys

from dipaco_jax.command_line import config_file, usage
from dipaco_jax.config import settings

PAGE = pathlib.Path(__file__).with_name('fields.md')
OPENING = """# Every field

All fields of a config with their defaults, as defined in [settings.py](../dipaco_jax/config/settings.py). `python -m
dipaco_jax.main --help` prints the same list. Numbers in brackets are sections of the DiPaCo paper (arXiv 2403.10616).
`python docs/fields_table.py` writes this page."""


def make_page() -> str:
  """Returns the page: a table of fields for every section of a config."""
  about = usage.explanations()
  sections: dict[str, list[str]] = {}
  for name, default in config_file.FIELDS.items():
    row = f'| `{name}` | `{_escape_bars(repr(default))}` | {_cell(about.get(name, ""))} |'
    sections.setdefault(name.rpartition('.')[0], []).append(row)
  order = ['', *(field.name for field in dataclasses.fields(settings.Settings))]
  parts = [OPENING]
  for section, rows in sorted(sections.items(), key=lambda item: order.index(item[0])):
    heading = f'## {section}\n\n{_cell(about.get(section, ""))}' if section else '## The whole run'
    parts.append('\n'.join([heading, '', '| field | default | description |', '|---|---|---|', *rows]))
  return '\n\n'.join(parts) + '\n'


def _cell(text: str) -> str:
  return _escape_bars(text).replace('_', r'\_').replace('*', r'\*')


def _escape_bars(text: str) -> str:
  return text.replace('|', r'\|')


def main():
  if sys.argv[1:] not in ([], ['--check']):
    sys.exit(__doc__)
  page = make_page()
  if sys.argv[1:] and page != PAGE.read_text():
    sys.exit(f'{PAGE.name} is not current: run python docs/fields_table.py')
  PAGE.write_text(page)


if __name__ == '__main__':
  main()
