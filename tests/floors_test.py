"""Imports go down only; flags and ConfigDict stay at the top; nothing heavy is loaded before it is needed."""

import ast
import functools
import graphlib
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = 'dipaco_jax'

FLOORS = {
  4: '__main__ main recipe generate serve export harness report status inspection command config_file usage',
  3: 'spmd worker outer_executor evaluator monitor stages jobs run routing rounds reuse rerouting validation evaluate '
  'corrections journal token_losses islands leases backup hosts roles history_of_islands live_islands dry_run roofline '
  'trained generation batch server driver tokenizing __init__ harness_model excerpts screening_of_islands',
  2: 'status_of_islands run_report mesh programs state run_state text tokenizer sequences shards checkpoint storage '
  'registry registry_schema registry_url database relocate processes metrics events progress history drift drawing '
  'plots grid_plot timeline_plot pictures page report_page comparison trees seals places topology hlo remote sources '
  'sources_files sources_stdlib sources_tfds sources_seqio transcript request openai_api records hf_tokenizer '
  'hf_checkpoint model_card connections seldom excerpts_panel excerpts_text headline failures palette display stopping '
  'live_report',
  1: 'attention model decode loss inner outer router kmeans classifier balance modules reroute chunk_router labels '
  'exact_sum hf chunks screening bootstrap averaging arrangement',
  0: 'grid settings checks plain',
}
FLOOR = {name: floor for floor, names in FLOORS.items() for name in names.split()}
FILES = sorted(path.stem for path in (ROOT / PACKAGE).glob('*.py'))
PLACED = [name for name in FILES if name in FLOOR]
COMMANDS = [name for name in PLACED if FLOOR[name] == 4 and name not in ('command', 'config_file', 'usage')]

FLAGS = ('absl.flags', 'absl.app', 'ml_collections')
NEVER_BEFORE_USE = ('tensorflow', 'tensorflow_datasets', 'seqio')
IMPURE = 'os sys io time datetime random pathlib shutil socket subprocess threading tempfile logging etils absl'.split()


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


def source(name: str) -> pathlib.Path:
  return ROOT / PACKAGE / f'{name}.py'


def is_in(name: str, packages) -> bool:
  return any(name == package or name.startswith(package + '.') for package in packages)


def inside(name: str) -> set[str]:
  """The files of the package that a file imports, now or later."""
  parts = [imported.split('.') for imported in imports(source(name)) if is_in(imported, [PACKAGE])]
  return {p[1] for p in parts if len(p) > 1 and p[1] in PLACED}


def test_every_file_has_one_floor():
  assert len(FLOOR) == sum(len(names.split()) for names in FLOORS.values())
  assert set(FILES) <= set(FLOOR), f'say on which floor {set(FILES) - set(FLOOR)} is'


@pytest.mark.parametrize('name', PLACED)
def test_imports_go_down_only(name):
  assert not {other for other in inside(name) if FLOOR[other] > FLOOR[name]}


def test_no_file_imports_itself_by_way_of_others():
  graphlib.TopologicalSorter({name: inside(name) for name in FILES}).prepare()


@pytest.mark.parametrize('name', [name for name in PLACED if FLOOR[name] == 1])
def test_mathematics_is_pure(name):
  assert not [imported for imported in imports(source(name)) if is_in(imported, IMPURE)]


@pytest.mark.parametrize('name', PLACED)
def test_flags_and_config_dicts_are_for_commands(name):
  assert FLOOR[name] == 4 or not [imported for imported in imports(source(name)) if is_in(imported, FLAGS)]


@pytest.mark.parametrize('path', sorted([*(ROOT / PACKAGE).glob('*.py'), *(ROOT / 'configs').glob('*.py')]), ids=str)
def test_nothing_heavy_is_imported_as_a_file_loads(path):
  assert not [name for name, loads in imports(path).items() if loads and is_in(name, NEVER_BEFORE_USE)]


def test_the_reader_of_imports_reads(tmp_path):
  path = tmp_path / 'x.py'
  path.write_text('import a.b\nfrom c import d as e\ndef f():\n  import g\nclass H:\n  import i\nif a:\n  import j')
  assert imports(path) == {'a.b': True, 'c.d': True, 'g': False, 'i': True, 'j': True}


def loaded_by(*program: str) -> set[str]:
  """Top-level modules that a fresh Python loads for `program`."""
  command = [sys.executable, '-X', 'importtime', *program]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
  assert done.returncode == 0, done.stderr
  lines = [line for line in done.stderr.splitlines() if line.startswith('import time')]
  return {line.split('|')[2].strip().split('.')[0] for line in lines}


def test_import_of_the_package_is_light():
  loaded = loaded_by('-c', f'import {PACKAGE}')
  assert PACKAGE in loaded and not loaded & {*NEVER_BEFORE_USE, 'jax', 'numpy'}


@pytest.mark.parametrize('name', COMMANDS)
def test_help_is_light(name):
  loaded = loaded_by('-m', f'{PACKAGE}.{name}', '--help')
  assert PACKAGE in loaded and not loaded & {*NEVER_BEFORE_USE, 'jax', 'starlette', 'uvicorn', 'prometheus_client'}
