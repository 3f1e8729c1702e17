"""Every cell of the table in docs/families.md is a test of that family, which the page names."""

import re
import subprocess
import sys

import pytest
import shapes_of_families
from repository import ROOT


def rows(text: str) -> list[list[str]]:
  """Returns the cells of the first table, its heading first."""
  lines = re.search(r'^\|.*?(?=^[^|]|\Z)', text, re.MULTILINE | re.DOTALL)[0].splitlines()
  return [[cell.strip() for cell in line.strip('| ').split(' | ')] for line in (lines[0], *lines[2:])]


@pytest.mark.slow
def test_every_cell_is_a_test():
  table, page = (ROOT / 'docs' / 'families.md').read_text().split('## What works for each family')[1].split('## Tests')
  heading, *families = rows(table)
  ids = re.findall(r'`(\w+)`', page.split('FAMILY is')[1].split('\n\n')[0])
  assert set(ids) == {*shapes_of_families.FAMILIES} and len(families) == len(ids)
  named = [(does.split(':')[0], test.strip('`')) for does, test in rows(page)[1:]]
  wanted = set()
  for family, (_, *cells) in zip(ids, families, strict=True):
    for column, cell in zip(heading[1:], cells, strict=True):
      tests = [test.replace('FAMILY', family) for does, test in named if does == column]
      assert cell in ('no', 'not tested') or (cell == 'yes' and tests), (family, column)
      wanted |= {*tests} if cell == 'yes' else set()
  command = [sys.executable, '-m', 'pytest', '--collect-only', '-q', '-n0', *sorted(wanted)]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
  found = {line for line in done.stdout.splitlines() if '::' in line}
  assert wanted <= found, done.stdout[-2000:] + done.stderr[-2000:]
