"""The list of mutants fits the source, and each invariant has a quick test with a mutant that kills it."""

import ast
import functools
import pathlib
import re
import runpy

import pytest
import repository

TESTS = repository.ROOT / 'tests'
MUTANTS = runpy.run_path(str(TESTS / 'mutants.py'))['read_mutants']()
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
ROW = re.compile(r'^\| (\d+) \| .+ \| `(.+?)` \| `(.+?)` \|$', re.MULTILINE)


def test_there_are_many_and_they_cover_the_program():
  assert len(MUTANTS) >= 40
  rooms = {mutant.file.partition('/')[0] for mutant in MUTANTS}
  assert rooms >= {'algorithm', 'models', 'routing', 'islands', 'storage', 'data', 'training'}


@pytest.mark.parametrize('name', BY_NAME)
def test_a_mutant_changes_text_that_occurs_once_and_has_tests(name):
  mutant = BY_NAME[name]
  source = (repository.ROOT / 'dipaco_jax' / mutant.file).read_text()
  assert source.count(mutant.old) == 1, f'{mutant.old!r} in {mutant.file}: change tests/mutants.toml'
  assert mutant.old != mutant.new
  ast.parse(source.replace(mutant.old, mutant.new))
  assert mutant.tests
  for test in mutant.tests:
    file, _, function = test.partition('::')
    assert is_quick(TESTS / file, function.partition('[')[0]), test


@functools.cache
def tree_of(file: pathlib.Path) -> ast.Module:
  return ast.parse(file.read_text())


def is_quick(file: pathlib.Path, function: str) -> bool:
  """Returns whether a test is there and CI runs it, as far as its own decorators and its file's marks tell."""
  tree = tree_of(file)
  marks = [n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == 'pytestmark']
  found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function]
  decorators = [ast.unparse(decorator) for node in found for decorator in node.decorator_list]
  return bool(found) and 'pytest.mark.slow' not in decorators and not any('slow' in ast.unparse(m) for m in marks)


def test_each_invariant_has_a_quick_test_and_a_mutant_that_kills_it():
  rows = ROW.findall((TESTS / 'README.md').read_text())
  assert [int(number) for number, *_ in rows] == [*range(1, 16)]
  for _, test, name in rows:
    assert BY_NAME[name].tests == (test,), name
