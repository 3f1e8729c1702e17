"""What launch/tpu_vm.sh calls, and what hosts run, as a recorder in the place of gcloud and its hosts has it."""

import re
import shlex
import shutil

import fake_cloud
import pytest
import slow
from fake_cloud import DISK, PROGRAM, ROOT, RUN, TPU

pytestmark = pytest.mark.skipif(shutil.which('flock') is None, reason='hosts are Linux, with flock')
cloud = fake_cloud.cloud


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
  _, err = cloud('create', *TPU, f'--topology={name}', '--spot', '--gcloud=--labels=who=two words')
  assert cloud.calls() == [[
    'compute', 'tpus', 'queued-resources', 'create', 'one', '--node-id=one', f'--accelerator-type={accelerator}',
    f'--runtime-version={image}', '--spot', '--labels=who=two words', '--zone=us-west4-a', '--project=mine', '--quiet',
  ]]  # fmt: skip
  assert 'one stays, and costs, until: launch/tpu_vm.sh delete --name=one --zone=us-west4-a' in err


def test_create_with_a_disk(cloud):
  cloud('create', *TPU, '--disk=d')
  (call,) = cloud.calls('create')
  assert '--data-disk=source=projects/mine/zones/us-west4-a/disks/d,mode=read-write' in call


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
    assert (clone / 'constraints.txt').read_text() == (ROOT / 'constraints.txt').read_text()
  installs = '-m uv pip install --quiet --python .venv/bin/python -c constraints.txt -e .[tpu,gcs,postgres]'
  assert cloud.lines('python3').count(installs) == 2
  assert cloud.lines('sudo').count('mount -t nfs -o lookupcache=positive 10.0.0.2:/share /mnt/dipaco') == 2


@pytest.mark.slow
def test_hosts_that_were_started_again_mount_before_they_run(cloud):
  share = '--nfs=10.0.0.2:/share'
  cloud.installed(share)
  (cloud.folder / 'sudo').unlink()
  cloud('run', *TPU, share, '--', '--config=configs/tiny.py', '--workdir=/mnt/dipaco/runs/one')
  assert cloud.lines('sudo').count('mount -t nfs -o lookupcache=positive 10.0.0.2:/share /mnt/dipaco') == 2
  cloud.put('host_bin/mountpoint', '#!/bin/sh\nexit 0\n')
  (cloud.folder / 'sudo').unlink()
  cloud('run', *TPU, share, '--', '--config=configs/tiny.py', '--workdir=/mnt/dipaco/runs/one')
  assert not cloud.lines('sudo') and len(cloud.lines('begun')) == 4


@pytest.mark.slow
def test_install_again_takes_away_what_is_gone(cloud):
  cloud.installed()
  old = cloud.folder / 'hosts' / 'one-0' / 'dipaco_jax' / 'dipaco_jax' / 'old.py'
  old.touch()
  cloud('install', *TPU)
  assert not old.exists() and (old.parent / 'main.py').exists()


def attach_disk(cloud, byte_at: int | None = None):
  """To the slice's one host: zeros, but for one byte."""
  cloud.env['FAKE_HOSTS'] = '1'
  with open(cloud.folder / 'disk', 'wb') as f:
    f.truncate(5 * 2**20)
    if byte_at is not None:
      f.seek(byte_at)
      f.write(b'x')


def test_a_blank_disk_is_formatted_once(cloud):
  attach_disk(cloud)
  cloud.installed('--disk=d')
  assert [line.split()[0] for line in cloud.lines('sudo') if DISK in line] == ['cmp', 'mkfs.ext4', 'mount']
  (cloud.folder / 'sudo').unlink()
  cloud('install', *TPU, '--disk=d')
  assert [line.split()[0] for line in cloud.lines('sudo') if DISK in line] == ['cmp', 'mount']


@pytest.mark.parametrize('byte_at', [2**22 - 1, None], ids=['not blank', 'not readable'])
def test_what_is_not_proved_blank_is_not_formatted(cloud, byte_at):
  attach_disk(cloud, byte_at)
  if byte_at is None:
    (cloud.folder / 'disk').unlink()
  cloud('create', *TPU, '--disk=d')
  assert 'wrong fs type' in cloud('install', *TPU, '--disk=d', status=32)[1]
  assert [line.split()[0] for line in cloud.lines('sudo') if DISK in line] == ['cmp', 'mount']
  assert not cloud.lines('python3')


def test_arguments_arrive_as_they_are(cloud):
  cloud.installed()
  odd = ['--config.data.train=/mnt/mine/two words/it\'s $HOME*.txt,"x"', '--config.data.text_key=', '--name=a;b&c']
  out, err = cloud(*RUN, *odd)
  for file in cloud.folder.glob('hosts/*/arguments'):
    assert file.read_text().split('\0')[:-1] == ['-m', 'dipaco_jax.main', '--distributed', *PROGRAM, *odd]
  assert out.count('finished') == 2 == len(cloud.lines('begun')) and 'one stays, and costs, until' in err
  (call,) = cloud.calls('ssh')
  assert call[:6] == ['compute', 'tpus', 'tpu-vm', 'ssh', 'one', '--worker=all']


@pytest.mark.slow
def test_several_slices(cloud):
  two = ['--topology=v5e:8x8*2']
  cloud.env['FAKE_HOSTS'] = '1'  # of each
  cloud.installed(*two)
  cloud('run', *TPU, *two, '--', *PROGRAM)
  assert len(cloud.lines('begun')) == 2
  described = [call[4] for call in cloud.calls('tpu-vm', 'describe')]
  assert described == ['one-0', 'one-1']
  (call,) = cloud.calls('ssh')
  assert call[2] == 'queued-resources' and {'--node=all', '--worker=all', '--batch-size=all'} <= set(call)
  cloud('delete', *TPU, *two)
  assert cloud.calls('delete')[0][2:6] == ['queued-resources', 'delete', 'one', '--force']


OWN_IDENTITY = ['--impersonate-service-account=me@mine.iam', '--configuration=work']
CONNECTION = ['--tunnel-through-iap', '--ssh-key-file=key']
CREATION = ['--internal-ips', '--service-account=hosts@mine.iam']
FLAGS = [f'--gcloud={flag}' for flag in (*OWN_IDENTITY, *CONNECTION, *CREATION)]


def printed_calls(out: str) -> list[list[str]]:
  """The calls of gcloud that a dry run prints."""
  lines = re.findall(r'^gcloud (.*?)(?=^gcloud|^tar|^# |\Z)', out, re.MULTILINE | re.DOTALL)
  return [shlex.split(line) for line in lines]


@pytest.mark.parametrize(
  'command', slow.all_but(['create', 'install', 'run', 'status', 'logs', 'stop', 'ssh', 'delete'], 'create', 'ssh')
)
def test_flags_of_gcloud_reach_the_calls_that_take_them(cloud, command):
  """`gcloud compute tpus tpu-vm ssh` knows --tunnel-through-iap in its alpha version alone, so another is called."""
  behind = {'run': ['--', *PROGRAM], 'ssh': ['--', 'df -h']}.get(command, [])
  calls = printed_calls(cloud(command, *TPU, *FLAGS, '--dry_run', *behind)[0])
  expected = {'create': CREATION, 'scp': CONNECTION, 'ssh': CONNECTION}
  assert calls
  for call in calls:
    flags = [word for word in call if word in {*OWN_IDENTITY, *CONNECTION, *CREATION}]
    assert sorted(flags) == sorted([*expected.get(call[3], []), *OWN_IDENTITY]), call
    assert call[2] == 'queued-resources' or call[3] == 'describe'


def test_the_project_of_a_disk_is_that_of_the_configuration(cloud):
  here = [option for option in TPU if not option.startswith('--project')]
  cloud('create', *here, '--disk=d', '--gcloud=--configuration=work')
  assert ['config', 'get-value', 'project', '--configuration=work'] in cloud.calls()
  assert '--data-disk=source=projects/configured/zones/us-west4-a/disks/d,mode=read-write' in cloud.calls('create')[0]


def test_ssh_runs_a_line_on_all_hosts(cloud):
  cloud.installed()
  cloud('ssh', *TPU, '--', 'touch "here it is"')
  assert len(list(cloud.folder.glob('hosts/*/here it is'))) == 2


CONFIRMS = slow.but(['status', 'delete'], 'status', 'delete')


@pytest.mark.parametrize('command', ['create', 'install', *CONFIRMS])
def test_a_dry_run_prints_what_is_called(cloud, command):
  cloud.installed()
  if command == 'create':
    cloud('delete', *TPU)
    (cloud.folder / 'calls').unlink()
  out, err = cloud(command, *TPU, '--dry_run')
  assert not cloud.calls() and not err
  cloud(command, *TPU)
  printed = re.findall(r'^gcloud (.*?)(?=^gcloud|^tar|\Z)', out, re.MULTILINE | re.DOTALL)
  temporary = re.compile(r'/\S*/dipaco_jax.tar.gz')
  assert [temporary.sub('', ' '.join(shlex.split(line))) for line in printed] == [
    temporary.sub('', ' '.join(call)) for call in cloud.calls()
  ]


def test_a_dry_run_of_run(cloud):
  out, _ = cloud('run', *TPU, '--dry_run', '--', *PROGRAM)
  verbs = re.findall(r'^gcloud compute tpus [\w-]+ (\w+)', out, re.MULTILINE)
  assert [verb for verb in verbs if verb != 'describe'] == ['ssh', 'delete', 'create', 'scp', 'ssh', 'ssh']
  assert not cloud.calls()
