"""`--help` explains every command, option and field in lines that fit; its output may be closed early."""

import configparser
import os
import pathlib
import re
import signal
import subprocess
import sys
import tarfile

import pytest
from clone import copy_tracked_files, tracked_files
from repository import ROOT

from dipaco_jax import main
from dipaco_jax.command_line import command, config_file, usage


def run(*words: str, status: int = 0) -> str:
  command = [sys.executable, '-m', *words]
  env = os.environ | {'PYTHONPATH': str(ROOT)}
  done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)
  assert done.returncode == status, done.stderr
  return done.stdout + done.stderr


def call(*arguments, cwd: pathlib.Path, python: str | pathlib.Path = sys.executable, status: int = 0) -> str:
  """Runs Python without this repository on its path, and returns what it prints."""
  env = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
  done = subprocess.run([python, *arguments], env=env, cwd=cwd, capture_output=True, text=True, timeout=1200)
  assert done.returncode == status, done.stdout + done.stderr
  return done.stdout + done.stderr


def test_every_field_has_a_help_text():
  texts = usage.explanations()
  sections = {name.split('.')[0] for name in config_file.FIELDS if '.' in name}
  assert texts.keys() == {*config_file.FIELDS, *sections}
  assert texts['train.steps_per_phase'].startswith('Number of inner steps in a phase')
  assert texts['mesh.shard_states'].startswith('Whether to shard') and texts['model.qk_norm'].endswith(
    ' none, head, all.'
  )
  for name, text in texts.items():
    assert re.fullmatch(r'[A-Z].*\.', text), f'{name}: {text!r} should be sentences that can be understood alone'
  assert texts['train'] == 'Algorithm 1: phases of tau inner steps, each followed by an outer step [2.5, 2.6].'


@pytest.mark.parametrize('width', [40, 100, 300])
def test_help_has_everything_in_lines_that_fit(monkeypatch, width):
  monkeypatch.setenv('COLUMNS', str(width))
  page = usage.main_help('About.', {name: main.FLAGS[name].help for name in main.OPTIONS})
  assert max(map(len, page.splitlines())) <= max(80, min(120, width))
  for name, value in config_file.FIELDS.items():
    assert re.search(rf'^  {re.escape(f"{name}={value!r}")}( |$)', page, re.MULTILINE)
  assert all(f'\n  --{name} ' in page for name in main.OPTIONS) and ' upcycle, in ' in ' '.join(page.split())


def test_commands_are_listed(capfd):
  page = run('dipaco_jax')
  for name, module in usage.MODULES.items():
    assert f'  dipaco {name} ' in page
    assert (ROOT / 'dipaco_jax' / f'{module}.py').exists() or (ROOT / 'dipaco_jax' / module / '__main__.py').exists()
  page = (ROOT / 'docs' / 'commands.md').read_text()
  assert all(f'`dipaco {name} ' in page for name in usage.MODULES)
  assert 'main: there is no such command; did you mean dipaco train?' in run('dipaco_jax', 'main', status=2)
  assert run('dipaco_jax', '--version') == run('dipaco_jax.main', '--version') == run('dipaco_jax.status', '--version')


@pytest.mark.parametrize('name', ['train', 'serve', 'inspect', 'local'])
def test_the_first_word_names_the_command(name):
  assert run('dipaco_jax', name, '--help') == run(f'dipaco_jax.{usage.MODULES[name]}', '--help')


@pytest.mark.slow
def test_a_command_starts_and_ends_as_its_module_does():
  expected = run('dipaco_jax.status', '--workdir=nowhere', status=2)
  assert run('dipaco_jax', 'status', '--workdir=nowhere', status=2) == expected
  assert run('dipaco_jax', 'train', '--config=tiny', status=2) == run('dipaco_jax.main', '--config=tiny', status=2)


@pytest.mark.parametrize('name', ['serve', 'route'])
def test_the_help_of_a_server_shows_where_it_listens(name):
  """Both servers share the file that defines these options."""
  page = run(f'dipaco_jax.{name}', '--help')
  assert all(f'--{option}: ' in page for option in ('port', 'host', 'grace_s')) and '--[no]access_log: ' in page
  assert '--verbosity' not in page  # of absl


@pytest.mark.parametrize('words', ['dipaco_jax.main -h', 'dipaco_jax.generate --help', 'dipaco_jax'])
def test_a_closed_output_is_no_error(words):
  process = subprocess.Popen(
    [sys.executable, '-m', *words.split()], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
  )
  process.stdout.close()
  assert process.stderr.read() == b'' and process.wait(60) in (0, 128 + signal.SIGPIPE)  # 0 where a buffer held it all
  process.stderr.close()


def test_wheels_contain_the_configs():
  read = configparser.ConfigParser()
  read.read(ROOT / 'setup.cfg')
  pattern = read['options.package_data']['dipaco_jax']
  assert {f.name for f in (ROOT / 'dipaco_jax').glob(pattern)} == {f.name for f in (ROOT / 'configs').glob('*.py')}


def test_wheels_contain_every_file_of_the_package():
  read = configparser.ConfigParser()
  read.read(ROOT / 'setup.cfg')
  packages = read['options.package_data'].items()
  packed = {file for name, pattern in packages for file in (ROOT / name.replace('.', '/')).glob(pattern)}
  others = {ROOT / name for name in tracked_files() if name.startswith('dipaco_jax/') and not name.endswith('.py')}
  assert ROOT / 'dipaco_jax/serving/page.html' in others and {file for file in others if file.is_file()} <= packed


@pytest.fixture(scope='module')
def distributions(tmp_path_factory) -> tuple[pathlib.Path, pathlib.Path]:
  """The wheel and the source distribution of the tracked files; the wheel is built from the latter."""
  pytest.importorskip('build')
  pytest.importorskip('twine')
  folder = tmp_path_factory.mktemp('release')
  copy_tracked_files(folder / 'source')
  call('-m', 'build', '--outdir', folder / 'dist', folder / 'source', cwd=folder)
  (wheel,) = (folder / 'dist').glob('*.whl')
  (sources,) = (folder / 'dist').glob('*.tar.gz')
  return wheel, sources


@pytest.mark.slow
def test_distributions_are_complete_and_their_page_renders(distributions, tmp_path):
  call('-m', 'twine', 'check', '--strict', *distributions, cwd=tmp_path)
  with tarfile.open(distributions[1]) as archive:
    packed = {name.partition('/')[2] for name in archive.getnames() if '.egg-info' not in name}
    files = {member.name.partition('/')[2] for member in archive.getmembers() if member.isfile()}
  tracked = {name for name in tracked_files() if name not in ('.gitignore', 'dipaco_jax/configs')}
  assert tracked <= packed
  generated = {'PKG-INFO', *(f'dipaco_jax/{name}' for name in tracked if name.startswith('configs/'))}
  assert {name for name in files - tracked - generated if 'egg-info' not in name} == set()
  assert distributions[1].stat().st_size < 6e6


@pytest.mark.slow
def test_a_wheel_works_in_an_empty_environment(distributions, tmp_path):
  """Installs the wheel with its dependencies, from the package index."""
  call('-m', 'venv', tmp_path / 'venv', cwd=tmp_path)
  python, empty = tmp_path / 'venv' / 'bin' / 'python', tmp_path / 'empty'
  empty.mkdir()
  call('-m', 'pip', 'install', '-q', '-c', ROOT / 'constraints.txt', distributions[0], cwd=empty, python=python)

  def installed(*arguments: str, status: int = 0) -> str:
    return call(*arguments, cwd=empty, python=python, status=status)

  assert installed('-c', 'import dipaco_jax, sys; assert "jax" not in sys.modules') == ''
  assert 'dipaco train' in installed(python.with_name('dipaco'), '--help')
  train_help = installed('-m', 'dipaco_jax.main', '--help')
  assert 'train.steps_per_phase' in train_help
  assert installed(python.with_name('dipaco'), 'train', '--help') == train_help
  assert '--workers WORKERS' in installed('-m', 'dipaco_jax.local', '--help')
  package = installed('-c', 'import dipaco_jax; print(dipaco_jax.__path__[0])').strip()
  error = installed('-m', 'dipaco_jax.main', '--config=tiny:dens', '--workdir=x', status=2)
  assert f'--config={package}/configs/tiny.py, line ' in error and "variant 'dens'" in error
  large = '--config.train.batch_size=100000'
  assert 'more text' in installed('-m', 'dipaco_jax.main', '--config=tiny', '--workdir=x', large, status=2)
  assert not any(empty.iterdir())


def test_a_link_that_leads_to_itself_ends_a_command_in_one_line():
  words = "Symlink loop from '/a'"  # of Path.resolve
  assert command.ending(RuntimeError(words)) == (f'{words}: remove the link, or name another folder', 2)
  assert command.ending(RuntimeError('another')) is None
