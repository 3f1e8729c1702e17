"""What `--help` says: of every command, option and field something, in a line that fits; and who stops reading it."""

import configparser
import os
import pathlib
import re
import signal
import subprocess
import sys
import zipfile

import pytest
from repository import ROOT

from dipaco_jax import main
from dipaco_jax.command_line import config_file, usage


def run(*words: str, status: int = 0, cwd: pathlib.Path = ROOT, package: pathlib.Path = ROOT) -> str:
  command = [sys.executable, '-m', *words]
  env = os.environ | {'PYTHONPATH': str(package)}
  done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=60)
  assert done.returncode == status, done.stderr
  return done.stdout + done.stderr


def script_output(script: str, *words: str, cwd: pathlib.Path, package: pathlib.Path) -> str:
  """Runs a program as an installed script is run: not by `python -m`."""
  env = os.environ | {'PYTHONPATH': str(package)}
  command = [sys.executable, '-c', script, *words]
  return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=60, check=True).stdout


def test_every_field_is_explained():
  words = usage.explanations()
  sections = {name.split('.')[0] for name in config_file.FIELDS if '.' in name}
  assert words.keys() == {*config_file.FIELDS, *sections}
  assert words['train.steps_per_phase'] == 'Number of inner steps between two outer steps, tau in the papers.'
  assert words['model.qk_norm'].endswith('together. One of none, head, all.')
  for name, text in words.items():
    assert re.fullmatch(r'[A-Z].*\.', text), f'{name}: {text!r} should be sentences that can be understood alone'
  assert words['train'] == 'Algorithm 1: phases of tau inner steps, each followed by an outer step [2.5, 2.6].'


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
  """These options are defined in a file that both share."""
  page = run(f'dipaco_jax.{name}', '--help')
  assert all(f'--{option}: ' in page for option in ('port', 'host', 'grace_s')) and '--[no]access_log: ' in page
  assert '--verbosity' not in page  # of absl


@pytest.mark.parametrize('words', ['dipaco_jax.main -h', 'dipaco_jax.generate --help', 'dipaco_jax'])
def test_who_stops_reading_is_no_error(words):
  process = subprocess.Popen(
    [sys.executable, '-m', *words.split()], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
  )
  process.stdout.close()
  assert process.stderr.read() == b'' and process.wait(60) in (0, 128 + signal.SIGPIPE)  # 0 where a buffer held it all
  process.stderr.close()


def test_wheels_take_the_configs_along():
  read = configparser.ConfigParser()
  read.read(ROOT / 'setup.cfg')
  pattern = read['options.package_data']['dipaco_jax']
  assert {f.name for f in (ROOT / 'dipaco_jax').glob(pattern)} == {f.name for f in (ROOT / 'configs').glob('*.py')}


@pytest.mark.slow
def test_an_installed_wheel(tmp_path):
  pytest.importorskip('wheel')
  names = subprocess.run(['git', 'ls-files'], cwd=ROOT, capture_output=True, text=True, check=True).stdout
  subprocess.run(f'mkdir source && tar cf - -C {ROOT} -T - | tar xf - -C source', input=names, text=True, shell=True,
                 cwd=tmp_path, check=True)  # fmt: skip
  run('pip', 'wheel', '-q', '--no-deps', '--no-build-isolation', '-w', str(tmp_path), str(tmp_path / 'source'))
  with zipfile.ZipFile(next(tmp_path.glob('*.whl'))) as wheel:
    wheel.extractall(tmp_path / 'site')
  (tmp_path / 'empty').mkdir()
  elsewhere = {'cwd': tmp_path / 'empty', 'package': tmp_path / 'site'}
  assert 'Maximum number of documents to read' in run('dipaco_jax.main', '--help', **elsewhere)
  assert '--workers WORKERS' in run('dipaco_jax.local', '--help', **elsewhere)
  entry_points = next((tmp_path / 'site').glob('*.dist-info')) / 'entry_points.txt'
  assert 'dipaco = dipaco_jax.__main__:main' in entry_points.read_text()
  script = 'import sys; sys.argv[0] = "dipaco"; from dipaco_jax.__main__ import main; main()'
  assert script_output(script, 'train', '--help', **elsewhere) == run('dipaco_jax.main', '--help', **elsewhere)
  refused = run('dipaco_jax.main', '--config=tiny:dens', '--workdir=x', status=2, **elsewhere)
  assert f'--config={tmp_path}/site/dipaco_jax/configs/tiny.py, line ' in refused and "variant 'dens'" in refused
  large = '--config.train.batch_size=100000'
  assert 'more text' in run('dipaco_jax.main', '--config=tiny', '--workdir=x', large, status=2, **elsewhere)
  assert not any((tmp_path / 'empty').iterdir())
