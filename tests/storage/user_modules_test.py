"""Whose code a run may execute: that of the command's own config and of modules that the user trusts."""

import ast
import concurrent.futures
import importlib.util
import json
import os
import py_compile
import subprocess
import sys

import own_modules
import pytest
import repository

import dipaco_jax
from dipaco_jax.config import extension, settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.huggingface import pretrained
from dipaco_jax.inference import trained_run
from dipaco_jax.storage import publishing, user_modules

SOURCE = 'import pathlib\npathlib.Path(__file__).with_suffix(".ran").touch()\n\ndef make(*config):\n  return 1\n'


@pytest.fixture
def hostile(tmp_path, monkeypatch):
  """A stranger's run in the folder `strange`, found from here; its config names a module inside it."""
  monkeypatch.setattr(sys, 'dont_write_bytecode', True)
  monkeypatch.setattr(extension, '_importers', {})
  extension.load.cache_clear()
  for package in ('', 'inside'):
    folder = tmp_path / 'strange' / package
    folder.mkdir(exist_ok=True)
    (folder / '__init__.py').write_text(SOURCE)
  (tmp_path / 'strange' / 'inside' / 'evil.py').write_text(SOURCE)
  monkeypatch.syspath_prepend(tmp_path)
  yield tmp_path / 'strange'
  for name in [name for name in sys.modules if name.partition('.')[0] in ('strange', 'beside')]:
    del sys.modules[name]


def write_run(folder, reference: str, name: str = 'model.block'):
  section, field = name.split('.')
  publishing.write_json(folder / 'config.json', settings.recorded(settings.from_dict({section: {field: reference}})))


def ran(folder) -> list[str]:
  return sorted(file.name for file in folder.rglob('*.ran'))


@pytest.mark.parametrize('name', user_modules.READERS)
@pytest.mark.parametrize('read', [dipaco_jax.load, dipaco_jax.load_router])
def test_a_run_alone_imports_nothing(hostile, name, read):
  write_run(hostile, 'strange.inside.evil:make', name)
  words = rf"{name}='strange.inside.evil:make' .*inside/evil.py \(sha256 [0-9a-f]{{64}}\).*--trust_modules=strange.i"
  with pytest.raises(InputError, match=words):
    read(str(hostile))
  assert not ran(hostile) and 'strange' not in sys.modules  # nor the packages that it is in


@pytest.mark.parametrize('url', ['{}', 'file://{}'])
def test_a_module_in_the_run_is_not_imported_even_if_it_is_trusted(hostile, url):
  write_run(hostile, 'strange.inside.evil:make')
  with pytest.raises(InputError, match='a file inside the run itself'):
    dipaco_jax.load(url.format(hostile), trust_modules=['strange.inside.evil'])
  with pytest.raises(InputError, match='a file inside the run itself'):
    user_modules.admit_own(settings.from_dict({'model': {'block': 'strange.inside.evil:make'}}), str(hostile))
  assert not ran(hostile)


def test_a_link_in_the_run_is_a_module_in_the_run(hostile, monkeypatch):
  (hostile.parent / 'elsewhere').write_text(SOURCE)
  (hostile / 'beside.py').symlink_to(hostile.parent / 'elsewhere')
  monkeypatch.syspath_prepend(hostile)
  write_run(hostile, 'beside:make')
  with pytest.raises(InputError, match='a file inside the run itself'):
    dipaco_jax.load(str(hostile), trust_modules='beside')


def test_threads_get_a_module_when_all_of_it_is_there(hostile):
  (hostile.parent / 'beside.py').write_text('import time\ntime.sleep(0.1)\nmake = len\n')
  user_modules.trust('other,beside')
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    modules = [*pool.map(lambda _: user_modules.import_checked('beside').make, range(4))]
  assert modules == [len] * 4 and extension.is_admitted('other')


@pytest.mark.parametrize('program', [
  ['-m', 'dipaco_jax.status', '--help'],
  ['-P', '-c', 'import sys; sys.argv = ["dipaco", "status", "--help"]; from dipaco_jax.__main__ import main; main()'],
], ids=['python', 'dipaco'])  # fmt: skip
def test_files_of_the_current_folder_do_not_take_the_place_of_libraries(program, tmp_path):
  for name in ('absl', 'json', 'numpy', 'logging', 'ml_collections'):
    (tmp_path / f'{name}.py').write_text(f'raise SystemExit("{name}.py of this folder was imported")\n')
  env = os.environ | {'PYTHONPATH': str(repository.ROOT)}
  done = subprocess.run([sys.executable, *program], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
  assert done.returncode == 0 and '--workdir' in done.stdout, done.stderr


def test_a_trusted_module_beside_the_run_is_imported(hostile):
  (hostile.parent / 'beside.py').write_text(SOURCE)
  write_run(hostile, 'beside:make')
  run = trained_run.TrainedRun(str(hostile), ['beside'])
  assert not ran(hostile.parent)  # until it is needed
  assert extension.make('model.block', run.settings.model.block, None) == 1 and ran(hostile.parent) == ['beside.ran']


def test_the_config_of_the_command_is_trusted(hostile):
  (hostile.parent / 'beside.py').write_text(SOURCE)
  write_run(hostile, 'beside:make')
  with pytest.raises(InputError, match='--trust_modules=beside'):
    trained_run.TrainedRun(str(hostile))
  user_modules.admit_own(settings.from_dict({'model': {'block': 'beside:make'}}), str(hostile))
  assert trained_run.TrainedRun(str(hostile))


@pytest.mark.parametrize('name', ['inner.schedule', 'outer.optimizer', 'data.source'])
def test_parts_that_no_reader_needs_are_not_imported_and_need_no_trust(hostile, name):
  write_run(hostile, 'strange.inside.evil:make', name)
  run = trained_run.TrainedRun(str(hostile))
  reference = extension.references(run.settings)[name]
  with pytest.raises(InputError, match=r'add --trust_modules=strange\.inside\.evil'):
    extension.make(name, reference, None)
  assert not ran(hostile)


def test_what_python_itself_has_is_no_part_of_a_run(hostile):
  write_run(hostile, 'os:abort')
  with pytest.raises(InputError, match='--trust_modules=os'):
    dipaco_jax.load(str(hostile))


def test_a_source_that_changes_after_it_was_read_is_not_imported(hostile):
  file = hostile.parent / 'beside.py'
  file.write_text(SOURCE)
  s = user_modules.admit_own(settings.from_dict({'outer': {'optimizer': 'beside:make'}}))
  file.write_text(SOURCE + '# other\n')
  with pytest.raises(InputError, match='has changed since this command began'):
    extension.make('outer.optimizer', s.outer.optimizer, None)
  assert not ran(hostile.parent)


def test_bytecode_beside_a_source_is_not_executed(hostile):
  """Bytecode says which source it is of by time and size alone."""
  file, other = hostile.parent / 'beside.py', hostile.parent / 'other.py'
  file.write_text('def make(*config):\n  return 1\n')
  other.write_text('def make(*config):\n  return 2\n')
  cached = importlib.util.cache_from_source(str(file))
  py_compile.compile(str(other), cached, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
  user_modules.trust(['beside'])
  assert extension.make('outer.optimizer', 'beside:make', None) == 1


def test_packages_and_folders_without_init_are_found(hostile, monkeypatch):
  for name in ('strange.inside.evil', 'strange.inside', 'json.decoder'):
    assert user_modules.find_spec(name).origin == importlib.util.find_spec(name).origin
  plain = hostile.parent / 'beside' / 'deeper'
  plain.mkdir(parents=True)
  (plain / 'part.py').write_text(SOURCE)
  assert user_modules.read_source('beside.deeper.part') == SOURCE
  for name in ('beside.deeper', 'beside.none', 'none.part', 'sys', 'builtins'):
    assert user_modules.read_source(name) is None


@pytest.mark.parametrize('words', ['', 'a b', '../a', 'a:make', 'a-b'])
def test_trusted_modules_are_names(words):
  with pytest.raises(InputError, match='should be names of Python modules'):
    user_modules.trust([words])


def test_a_workdir_that_was_begun_from_a_model_names_no_code(tmp_path):
  """Its config.json fills in the config of the command, which is trusted."""
  s = settings.from_dict({'model': {'block': 'evil:make'}, 'pretrain': {}}).to_dict()
  s['pretrain']['init'] = str(tmp_path / 'gone')
  (tmp_path / 'config.json').write_text(json.dumps(s))
  values = settings.Settings().to_dict()
  values['pretrain']['init'] = str(tmp_path / 'gone')
  pretrained.fill(values, (), str(tmp_path))
  assert values['model']['block'] == ''


def test_every_command_that_loads_a_run_has_the_option():
  package = repository.ROOT / 'dipaco_jax'
  commands = [*package.glob('*.py'), *package.glob('inspect/*.py')]
  readers = [file for file in commands if 'TrainedRun(' in file.read_text()]
  assert {file.stem for file in readers} == {'generate', 'serve', 'route', '__main__', 'export', 'merge'}
  for file in [*readers, package / 'harness.py']:
    text = file.read_text()
    names = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    runs_none = file.stem in ('export', 'merge')
    assert runs_none or {'define_trust', 'trust_modules'} <= names, file
    assert not runs_none or 'needs_modules=False' in text


def test_the_examples_of_the_page_are_checked_by_their_source(tmp_path, monkeypatch):
  name = own_modules.write(tmp_path, monkeypatch, own_modules.examples()['my_outer.py'])
  s = user_modules.admit_own(settings.from_dict({'outer': {'optimizer': f'{name}:make'}}))
  assert s.extensions == ((name, user_modules.digest((tmp_path / f'{name}.py').read_text())),)
