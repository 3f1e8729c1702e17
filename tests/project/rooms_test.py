"""Rooms: imports go one way between them, mathematics is pure, flags stay with commands, nothing heavy loads early."""

import ast
import fnmatch
import functools
import graphlib
import pathlib
import re
import subprocess
import sys

import pytest
from repository import ROOT

PACKAGE = 'dipaco_jax'

ROOMS = (  # each imports from those before it, and from itself
  'algorithm core config models processes storage routing data buckets telemetry registry huggingface training '
  'planning pipeline inference serving reports islands gateway command_line'
).split()
PURE = ('algorithm', 'core', 'config', 'models', 'routing')
COMMANDS = (
  'main size recipe local hub join gateway status registry owners assemble generate serve route export merge harness '
  'inspect report'
).split()
FOLDERS = {'gateway', 'inspect', 'registry'}  # commands that are a __main__.py
TOP = {'__init__', '__main__', *COMMANDS, *(f'{name}.__main__' for name in FOLDERS)} - FOLDERS

FLAGS = ('absl.flags', 'absl.app', 'ml_collections')
NEVER_BEFORE_USE = ('tensorflow', 'tensorflow_datasets', 'seqio', 'pyarrow', 'fsspec', 'backports', 'wandb', 'mlflow')
IMPURE = 'sys io time datetime random pathlib shutil socket subprocess threading tempfile logging etils absl'.split()


@functools.cache
def imports(path: pathlib.Path) -> dict[str, bool]:
  """Dotted names that a file imports, and whether it does so as it loads (else inside a function)."""
  found: dict[str, bool] = {}

  def visit(node: ast.AST, as_it_loads: bool):
    for child in ast.iter_child_nodes(node):
      names = []
      if isinstance(child, ast.Import):
        names = [alias.name for alias in child.names]
      elif isinstance(child, ast.ImportFrom):
        assert not child.level, f'{path.name}: a relative import'
        names = [f'{child.module}.{alias.name}' for alias in child.names]
      found.update({name: found.get(name, False) or as_it_loads for name in names})
      visit(child, as_it_loads and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))

  visit(ast.parse(path.read_text()), True)
  return found


def name_of(path: pathlib.Path) -> str:
  """'algorithm.grid' of dipaco_jax/algorithm/grid.py."""
  return '.'.join(path.relative_to(ROOT / PACKAGE).with_suffix('').parts)


SOURCES = {
  name_of(path): path
  for path in sorted((ROOT / PACKAGE).rglob('*.py'))
  if path.parent.resolve() != ROOT / 'configs' and 'configs' not in path.parts
}
FILES = {name: path for name, path in SOURCES.items() if '.' in name and name not in TOP}


def room(name: str) -> str:
  return name.split('.')[0]


def is_in(name: str, packages) -> bool:
  return any(name == package or name.startswith(package + '.') for package in packages)


def inside(name: str) -> set[str]:
  """The files of the package that a file imports, now or later."""
  found = [imported.split('.')[1:] for imported in imports(SOURCES[name]) if is_in(imported, [PACKAGE])]
  return {'.'.join(parts[:n]) for parts in found for n in (1, 2) if '.'.join(parts[:n]) in SOURCES}


def test_every_file_is_in_a_room_or_a_command():
  assert {room(name) for name in FILES} == set(ROOMS)
  assert SOURCES.keys() - FILES.keys() == TOP


@pytest.mark.parametrize('name', [name for name in ROOMS if name != 'algorithm'])  # whose names are public
def test_a_room_says_what_lives_there_and_nothing_else(name):
  tree = ast.parse(SOURCES[f'{name}.__init__'].read_text())
  assert ast.get_docstring(tree) and len(tree.body) == 1


@pytest.mark.parametrize('name', ROOMS)
def test_a_room_names_each_of_its_files(name):
  text = ast.get_docstring(ast.parse(SOURCES[f'{name}.__init__'].read_text())).partition('\nImports from ')[0]
  patterns = re.findall(r'`([\w*]+)`', text)
  files = [file.partition('.')[2] for file in SOURCES if room(file) == name and file != f'{name}.__init__']
  assert [file for file in files if not any(fnmatch.fnmatch(file, pattern) for pattern in patterns)] == []


@pytest.mark.parametrize('name', [name for name in ROOMS if name != 'algorithm'])
def test_a_room_says_which_rooms_it_imports_from(name):
  text = ast.get_docstring(ast.parse(SOURCES[f'{name}.__init__'].read_text()))
  named = re.findall(r'`(\w+)`', text.partition('\nImports from ')[2])
  imported = {room(other) for file in FILES if room(file) == name for other in inside(file) if other in FILES}
  assert named == [other for other in ROOMS if other in imported - {name}]


@pytest.mark.parametrize('at', range(len(ROOMS)), ids=ROOMS)
def test_imports_go_one_way_between_rooms(at):
  ahead = ROOMS[at + 1 :]
  for name in (name for name in FILES if room(name) == ROOMS[at]):
    assert not {other for other in inside(name) if room(other) in ahead or other in TOP - {'__init__'}}, name


def test_no_file_imports_itself_by_way_of_others():
  graphlib.TopologicalSorter({name: inside(name) for name in SOURCES}).prepare()


def test_mathematics_is_pure():
  for name in (name for name in FILES if room(name) in PURE):
    assert not [imported for imported in imports(SOURCES[name]) if is_in(imported, IMPURE)], name


def test_the_algorithm_imports_nothing_else():
  for name in (name for name in FILES if room(name) == 'algorithm'):
    others = {imported.split('.')[0] for imported in imports(SOURCES[name])} - sys.stdlib_module_names
    assert others <= {'jax', 'numpy', 'optax', PACKAGE}, name
    assert {room(other) for other in inside(name)} <= {'algorithm'}, name


# It loads the room's own files when they are first asked for; and it asks whether JAX has its kernels for GPUs.
MAY_LOOK_UP = 'algorithm.__init__', 'models.flash'


def test_mathematics_imports_nothing_by_name():
  for name in (name for name in FILES if room(name) in PURE and name not in MAY_LOOK_UP):
    by_name = [imported for imported in imports(SOURCES[name]) if is_in(imported, ['importlib', 'runpy', 'pkgutil'])]
    assert not by_name, name


def test_flags_and_config_dicts_are_for_commands():
  for name in (name for name in FILES if room(name) != 'command_line'):
    assert not [imported for imported in imports(SOURCES[name]) if is_in(imported, FLAGS)], name


def test_nothing_heavy_is_imported_as_a_file_loads():
  for path in (*SOURCES.values(), *sorted((ROOT / 'configs').glob('*.py'))):
    assert not [name for name, loads in imports(path).items() if loads and is_in(name, NEVER_BEFORE_USE)], path


def test_the_reader_of_imports_reads(tmp_path):
  path = tmp_path / 'x.py'
  path.write_text('import a.b\nfrom c import d as e\ndef f():\n  import g\nclass H:\n  import i\nif a:\n  import j')
  assert imports(path) == {'a.b': True, 'c.d': True, 'g': False, 'i': True, 'j': True}


def loaded_by(*program: str) -> set[str]:
  """Top-level modules that a fresh Python loads for `program`."""
  return output_of(*program)[0]


def output_of(*program: str) -> tuple[set[str], str, list[str]]:
  """Top-level modules that a fresh Python loads for `program`, what it prints, and its other lines of stderr."""
  command = [sys.executable, '-X', 'importtime', *program]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
  assert done.returncode == 0, done.stderr
  is_import = [(line, line.startswith('import time')) for line in done.stderr.splitlines()]
  loaded = {line.split('|')[2].strip().split('.')[0] for line, loads in is_import if loads}
  return loaded, done.stdout, [line for line, loads in is_import if not loads]


def test_import_of_the_package_is_light():
  loaded = loaded_by('-c', f'import {PACKAGE}')
  assert PACKAGE in loaded and not loaded & {*NEVER_BEFORE_USE, 'jax', 'numpy', 'jinja2'}


@pytest.mark.parametrize('name', COMMANDS)
def test_help_is_light(name):
  loaded, printed, complaints = output_of('-m', f'{PACKAGE}.{name}', '--help')
  assert ('--workdir' in printed or name in ('size', 'join')) and not complaints
  assert PACKAGE in loaded and not loaded & {
    *NEVER_BEFORE_USE,
    'jax',
    'jinja2',
    'starlette',
    'uvicorn',
    'prometheus_client',
    'aiohttp',
    *(['numpy'] if name == 'main' else []),
  }
