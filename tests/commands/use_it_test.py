"""The pages on using a run: every command of them, as it is written, on a run in `runs/tiny`."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import quick_xla
import slow
from repository import ROOT

PAGES = [(ROOT / 'docs' / f'{name}.md').read_text() for name in ('trained_runs', 'serving')]
BLOCKS = [found for page in PAGES for found in re.findall(r'^```(\w*)\n(.*?)^```$', page, re.MULTILINE | re.DOTALL)]
COMMANDS = [line for kind, block in BLOCKS if not kind for line in block.replace('\\\n', ' ').splitlines()]
# What they need is not here: an address to listen on for good, tasks to download, a model of the Hub.
ELSEWHERE = {
  'dipaco_jax.serve': ('helpers/serving.py', "{'serve': "),
  'dipaco_jax.route': ('helpers/serving.py', "'route': "),
  'dipaco_jax.harness': ('inference/lm_eval_model_test.py', 'dipaco_jax.harness'),
  'dipaco_jax.main': ('huggingface/pretrained_test.py', 'upcycle:'),
  'dipaco_jax.merge': ('commands/merge_test.py', 'merge'),
}


def module_of(command: str) -> str:
  words = shlex.split(command)
  return words[2] if words[:2] == ['python', '-m'] else words[0]


@pytest.fixture(scope='module')
def folder(undisturbed, tmp_path_factory):
  folder = tmp_path_factory.mktemp('use')
  for name in ('tiny', 'dense'):
    shutil.copytree(undisturbed, folder / 'runs' / name)
  return folder


RUN = [c for c in COMMANDS if module_of(c) not in {*ELSEWHERE, 'curl'}]


@pytest.mark.parametrize('command', slow.all_but(RUN, RUN[1]))
def test_every_command_of_the_readme_runs(folder, command):
  words = shlex.split(command)
  assert words[:2] == ['python', '-m'], f'{command}: add it to this test'
  path = os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])
  env = os.environ | {'XLA_FLAGS': quick_xla.FLAGS, 'PYTHONPATH': path}
  done = subprocess.run([sys.executable, *words[1:]], cwd=folder, env=env, capture_output=True, text=True, timeout=240)
  assert done.returncode == 0 and (done.stdout or done.stderr), done.stderr


@pytest.mark.parametrize('module', sorted(ELSEWHERE))
def test_other_commands_have_tests_of_their_own(module):
  assert [command for command in COMMANDS if module_of(command) == module]
  file, words = ELSEWHERE[module]
  assert words in (ROOT / 'tests' / file).read_text()


def test_the_python_of_the_readme_runs(folder, monkeypatch):
  monkeypatch.chdir(folder)
  (program,) = [block for kind, block in BLOCKS if kind == 'python']
  space: dict = {}
  exec(program, space)
  assert space['logits'].shape[1] == 300 and 0 <= space['number'] < 4
