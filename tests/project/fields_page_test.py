"""docs/fields.md lists every field of a config, with its default and its help text."""

import importlib.util

import pytest
from repository import ROOT

from dipaco_jax.command_line import config_file


@pytest.fixture(scope='module')
def fields_table():
  spec = importlib.util.spec_from_file_location('fields_table', ROOT / 'docs' / 'fields_table.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def test_the_page_is_current(fields_table):
  assert fields_table.PAGE.read_text() == fields_table.make_page(), 'run python docs/fields_table.py'


def test_the_page_has_a_row_for_every_field(fields_table):
  rows = [line for line in fields_table.PAGE.read_text().splitlines() if line.startswith('| `')]
  assert [row.split('`')[1] for row in rows] == list(config_file.FIELDS)
