"""SkyPilot's own parser takes launch/skypilot; `main` takes the command lines there, and what xpk makes is a JobSet."""

import json
import re
import shlex
import subprocess
import sys

import kubernetes_validate
import pytest
import tools
import yaml
from repository import ROOT

from dipaco_jax.command_line import command as command_lib
from dipaco_jax.islands import roles
from dipaco_jax.registry import registry_url

FOLDER = ROOT / 'launch' / 'skypilot'
FILES = ('worker.yaml', 'roles.yaml')
ENVS = {'CONFIG': 'configs/tiny.py', 'WORKDIR': 's3://BUCKET/runs/one'}
PAGE = (ROOT / 'docs' / 'launching.md').read_text()
XPK = [shlex.split(line) for line in re.findall(r'^xpk \w+ create .*', PAGE.replace('\\\n', ' '), re.MULTILINE)]
PARSE = """
import json, sys
from sky.utils import dag_utils
for file in json.loads(sys.argv[1]):
  envs, secrets = ([(name, 'x') for name in names] for names in json.loads(sys.argv[2]))
  (task,) = dag_utils.load_chain_dag_from_yaml(file, envs, secrets).tasks
  print(json.dumps([[r.use_spot, r.job_recovery] for r in task.resources]))
"""


def load(name: str) -> dict:
  return yaml.safe_load((FOLDER / name).read_text())


def option(words: list[str], name: str) -> str:
  (found,) = [word.split('=', 1)[1] for word in words if word.startswith(f'--{name}=')]
  return found


def accepted(line: str) -> str:
  """The role in a command line of main, which parses it."""
  words = shlex.split(line)
  program = 'import sys\nfrom dipaco_jax import main\nmain.parse(sys.argv)\nprint(main.FLAGS.role)'
  arguments = words[words.index('dipaco_jax.main') + 1 :]
  done = subprocess.run([sys.executable, '-c', program, *arguments], cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  return done.stdout.strip()


@pytest.mark.parametrize('name', FILES)
def test_command_lines_are_accepted(name):
  task = load(name)
  assert set(task['envs']) == set(ENVS)
  line = re.search(r'python (-m dipaco_jax.main .*?)(?: &)?$', task['run'], re.MULTILINE)[1]
  values = ENVS | {'SKYPILOT_TASK_ID': 'sky-1', 'role': 'outer'}
  assert accepted(re.sub(r'\$\{?(\w+)\}?', lambda m: values[m[1]], line)) == {'worker.yaml': 'worker'}.get(
    name, 'outer'
  )


def test_they_are_all_roles_and_know_the_registry():
  named = set(re.search(r'for role in (.*); do\n', load('roles.yaml')['run'])[1].split())
  assert named | {'worker'} == set(roles.ROLES)
  assert (
    {registry_url.VARIABLE, 'AWS_REGION'} <= set(load('worker.yaml')['secrets']) == set(load('roles.yaml')['secrets'])
  )
  assert load('worker.yaml')['resources']['job_recovery']['recover_on_exit_codes'] == [command_lib.TRY_AGAIN, 143]


@pytest.mark.slow
def test_skypilot_takes_them(tmp_path):
  python = tools.install('skypilot', tmp_path) / 'python'
  names = [[*load('worker.yaml')[kind]] for kind in ('envs', 'secrets')]
  call = [python, '-c', PARSE, json.dumps([str(FOLDER / name) for name in FILES]), json.dumps(names)]
  done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=300)
  assert done.returncode == 0, done.stderr
  worker, others = map(json.loads, done.stdout.splitlines()[-2:])
  assert len(worker) == len(load('worker.yaml')['resources']['accelerators'])
  assert all(spot and recovery['recover_on_exit_codes'] == [75, 143] for spot, recovery in worker)
  assert [spot for spot, _ in others] == [False]


def test_what_xpk_runs_is_accepted():
  (workload,) = [words for words in XPK if words[1] == 'workload']
  assert accepted(option(workload, 'command')) == 'worker' and '--distributed' in option(workload, 'command')
  assert int(option(workload, 'restart-on-exit-codes')) == 69  # another process of the worker is gone


@pytest.mark.slow
def test_xpk_makes_a_jobset_of_it(tmp_path):
  xpk = tools.install('xpk', tmp_path) / 'xpk'
  (tmp_path / 'dipaco.env').write_text('DIPACO_REGISTRY=postgresql://HOST/dipaco\n')
  (tmp_path / 'clone').mkdir()
  manifest = tmp_path / 'jobset.yaml'
  for words in XPK:
    call = [xpk, *words[1:], '--dry-run', '--skip-validation']
    call += [f'--output-manifest-file={manifest}'] if words[1] == 'workload' else []
    done = subprocess.run(call, cwd=tmp_path / 'clone', capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
  made = yaml.safe_load(manifest.read_text())
  (replicated,) = made['spec']['replicatedJobs']
  job = {'apiVersion': 'batch/v1', 'kind': 'Job', 'metadata': made['metadata'], **replicated['template']}
  kubernetes_validate.validate(job, '1.31')
  (rule,) = job['spec']['podFailurePolicy']['rules']
  again = set(rule['onExitCodes']['values'])  # all others end the JobSet
  assert {69, 134, 137, 143} <= again and not again & {0, 2, command_lib.DIVERGED, command_lib.TRY_AGAIN}
