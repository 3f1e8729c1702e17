"""The tour of the code: its links lead to the definitions that it names, and its walks are short."""

import importlib.util
import itertools
import re

import pytest
from repository import ROOT

PAGE = ROOT / 'docs' / 'tour.md'
MOST = {
  'One batch, from a text file to the outer step': 22,
  'One phase of a path, through islands': 14,
  'One request, from HTTP to tokens': 14,
}
WALKS = {title: PAGE.read_text().split(f'## {title}\n')[1].split('\n## ')[0] for title in MOST}


@pytest.fixture(scope='module')
def tour_lines():
  spec = importlib.util.spec_from_file_location('tour_lines', ROOT / 'docs' / 'tour_lines.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def test_every_link_leads_to_the_line_that_defines_its_name(tour_lines):
  words = PAGE.read_text()
  assert len(tour_lines.LINK.findall(words)) == words.count('.py#L') > 30
  assert tour_lines.rewritten(words, PAGE.parent) == words, 'run python docs/tour_lines.py'


def test_the_names_of_symbols_are_in_the_code():
  table = (ROOT / 'docs' / 'concepts.md').read_text().split('## Symbols and names\n')[1].split('\n## ')[0]
  in_code = re.findall(r'\| ([^|]+) \|$', table, re.MULTILINE)
  names = [name for cell in in_code for name in re.findall(r'`(\w+)`', cell)]
  code = ''.join(file.read_text() for file in (ROOT / 'dipaco_jax').rglob('*.py'))
  assert len(names) > 25 and [name for name in names if not re.search(rf'\b{name}\b', code)] == []


@pytest.mark.parametrize('title', MOST)
def test_a_walk_is_short_and_never_goes_back(title, tour_lines):
  steps = re.split(r'^\d+\. ', WALKS[title], flags=re.MULTILINE)[1:]
  files = [[path for _, path, _ in tour_lines.LINK.findall(step)] for step in steps]
  assert all(files), 'every step has a link'
  visits = [path for path, _ in itertools.groupby(itertools.chain(*files))]
  assert 5 < len(visits) <= MOST[title] and len(visits) == len(set(visits))


@pytest.mark.parametrize('title', MOST)
def test_a_step_is_one_sentence(title):
  for step in re.split(r'^\d+\. ', WALKS[title], flags=re.MULTILINE)[1:]:
    text = re.sub(r'\[`[^`]*`\]\([^)]*\)', 'it', ' '.join(step.split()))
    assert text.endswith('.') and not re.search(r'\. [A-Z]', text), text


def test_numbers_follow_the_code_and_what_is_gone_is_named(tmp_path, tour_lines):
  (tmp_path / 'x.py').write_text('import a\n\n\nclass A:\n  @a\n  def b(self):\n    pass\n')
  assert tour_lines.rewritten('[`A.b`](x.py#L1), [`A`](x.py#L9)', tmp_path) == '[`A.b`](x.py#L6), [`A`](x.py#L4)'
  for gone in ('[`A.c`](x.py#L1)', '[`A`](y.py#L1)'):
    with pytest.raises(ValueError, match=r'[xy]\.py does not define'):
      tour_lines.rewritten(gone, tmp_path)
