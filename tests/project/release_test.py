"""A release: one version everywhere, links that work on PyPI, and workflows whose actions are pinned."""

import configparser
import importlib.util
import re

import pytest
from repository import ROOT

import dipaco_jax


@pytest.fixture(scope='module')
def absolute_links():
  spec = importlib.util.spec_from_file_location('absolute_links', ROOT / 'docs' / 'absolute_links.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def test_the_version_is_the_same_everywhere():
  cited = re.search(r'^version: (.*)$', (ROOT / 'CITATION.cff').read_text(), re.MULTILINE)[1]
  unreleased, newest, *_ = re.findall(r'^## (.*)$', (ROOT / 'CHANGELOG.md').read_text(), re.MULTILINE)
  assert unreleased == 'Unreleased' and cited == newest == dipaco_jax.__version__


def test_links_are_made_absolute(absolute_links):
  page = '![a](docs/a.png) [b](docs/b.md#c) [d](#d) [e](https://e.org) [`f`](LICENSE)'
  expected = (
    '![a](https://h/o/n/raw/v1/docs/a.png) [b](https://h/o/n/blob/v1/docs/b.md#c) [d](#d) [e](https://e.org) '
    '[`f`](https://h/o/n/blob/v1/LICENSE)'
  )
  assert absolute_links.make_links_absolute(page, 'https://h/o/n', 'v1') == expected


def test_the_repository_is_among_the_urls_of_the_package(absolute_links):
  setup = absolute_links.add_project_urls((ROOT / 'setup.cfg').read_text(), 'https://h/o/n', 'v1')
  config = configparser.ConfigParser()
  config.read_string(setup)
  assert 'Source = https://h/o/n' in config['metadata']['project_urls'].splitlines()
  with pytest.raises(ValueError, match='project_urls'):
    absolute_links.add_project_urls('', 'https://h/o/n', 'v1')


def test_actions_are_pinned_by_commit_and_alike_in_all_workflows():
  pinned: dict[str, set[str]] = {}
  for workflow in (ROOT / '.github' / 'workflows').glob('*.yml'):
    for action, reference in re.findall(r'uses: ([\w/-]+)@(.*)$', workflow.read_text(), re.MULTILINE):
      assert re.fullmatch(r'[0-9a-f]{40}  # v\d+\.\d+\.\d+', reference), (workflow.name, action)
      pinned.setdefault(action, set()).add(reference)
  assert {action for action, references in pinned.items() if len(references) > 1} == set()
  assert {'actions/checkout', 'pypa/gh-action-pypi-publish'} <= pinned.keys()
