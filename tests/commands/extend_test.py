"""The page on parts of one's own: its examples, each in a file of its name, train, generate and go on as it says."""

import os
import signal
import subprocess
import sys

import own_modules
import pytest
import tiny_run

pytestmark = pytest.mark.slow  # its fixture is a whole run, or several

OPTIONS = {  # of the examples, by file
  'my_outer.py': '--config.outer.optimizer=my_outer:make',
  'my_inner.py': '--config.inner.optimizer=my_inner:make',
  'my_schedule.py': '--config.inner.schedule=my_schedule:make',
  'my_sink.py': '--config.metrics.sinks=my_sink:Csv',
  'my_block.py': '--config.model.block=my_block:make',
  'my_router.py': '--config.routing.method=my_router:make',
}
ELSEWHERE = {'my_source.py', 'my_tokenizer.py'}  # in extend_data_test.py


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A folder with the examples, where Python finds them, and a config."""
  folder = tmp_path_factory.mktemp('extend')
  for file, source in own_modules.examples().items():
    (folder / file).write_text(source)
  tiny_run.write_config(folder)
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(folder)  # where the sink writes
    patch.setenv('PYTHONPATH', os.pathsep.join([str(folder), os.environ.get('PYTHONPATH', '')]))
    yield folder


@pytest.fixture(scope='module')
def workdir(folder):
  """A run with all of them."""
  tiny_run.run(folder / 'config.py', folder / 'run', *OPTIONS.values())
  return folder / 'run'


def command(name: str, workdir, *options: str) -> subprocess.CompletedProcess:
  words = [sys.executable, '-m', f'dipaco_jax.{name}', f'--workdir={workdir}', *options]
  path = os.pathsep.join([str(tiny_run.repository.ROOT), os.environ['PYTHONPATH']])
  env = os.environ | {'PYTHONPATH': path, 'JAX_PLATFORMS': 'cpu'}
  return subprocess.run(words, env=env, capture_output=True, text=True, timeout=240)


def test_every_example_is_tried():
  assert own_modules.examples().keys() == OPTIONS.keys() | ELSEWHERE


def test_a_run_of_all_examples_has_a_report_and_generates(workdir):
  assert (workdir / 'report.html').exists()
  done = command('generate', workdir, '--prompt=aeiou', '--max_tokens=5', '--trust_modules=my_block,my_router')
  assert done.returncode == 0 and '5 tokens' in done.stderr, done.stderr


def test_a_command_does_not_execute_what_only_the_run_names(workdir):
  done = command('generate', workdir, '--prompt=aeiou', '--trust_modules=my_block')
  assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1
  assert 'my_router.py (sha256 ' in done.stderr and 'add --trust_modules=my_router' in done.stderr


def test_what_has_no_counterpart_elsewhere_is_not_exported(workdir, tmp_path):
  done = command('export', workdir, '--all', f'--out={tmp_path / "out"}')
  assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1
  assert "config.model.block='my_block:make' has no counterpart in transformers" in done.stderr
  assert not (tmp_path / 'out').exists()


def test_a_command_that_cannot_import_a_part_says_so(workdir, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('PYTHONPATH', '')
  done = command('generate', workdir, '--prompt=aeiou', '--trust_modules=my_block,my_router')
  assert done.returncode == 2 and done.stderr.strip().splitlines()[-1].count("'my_block:make' cannot be imported") == 1


@pytest.mark.parametrize('file', OPTIONS)
def test_each_continues_after_sigkill_to_the_same_modules(folder, file, tmp_path):
  config, option = folder / 'config.py', OPTIONS[file]
  tiny_run.run(config, tmp_path / 'whole', option)
  begun = tiny_run.start(config, tmp_path / 'killed', option)
  tiny_run.stop_when(begun, lambda: tiny_run.updates(tmp_path / 'killed', 'train') >= 8, signal.SIGKILL)
  tiny_run.run(config, tmp_path / 'killed', option)
  assert tiny_run.modules_sha256(tmp_path / 'killed') == tiny_run.modules_sha256(tmp_path / 'whole')
