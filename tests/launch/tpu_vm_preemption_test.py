"""A run of launch/tpu_vm.sh that is preempted, stopped, cut off, joined, or fails, with a recorder for gcloud."""

import json
import os
import shlex
import shutil
import signal
import sys

import fake_cloud
import ports
import pytest
import quick_xla
import slow
import tiny_run
from fake_cloud import PROGRAM, RUN, TPU, ended, wait_for

pytestmark = pytest.mark.skipif(shutil.which('flock') is None, reason='hosts are Linux, with flock')
cloud = fake_cloud.cloud
TINY = (
  'data.max_documents=30 tokenizer.vocab_size=400 model.width=16 model.head_dim=8 model.mlp_dim=24 pretrain.steps=4 '
  'pretrain.batch_size=4 train.steps_per_phase=4 train.batch_size=4 train.phases=4 checkpoint.every_steps=4 '
  'inner.warmup_steps=2'
)


@pytest.mark.slow
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


def test_what_cannot_be_created_again_is_the_end(cloud):
  cloud.put('coming', 'SUSPENDED')
  cloud('create', *TPU)
  gcloud = (cloud.folder / 'bin' / 'gcloud').read_text()
  refused = 'case "$*" in *" create "*) echo quota >&2; echo create >> "$FAKE_CLOUD/refused"; exit 1 ;; esac'
  cloud.put('bin/gcloud', gcloud.replace('exec', f'{refused}\nexec'))
  _, err = cloud(*RUN, status=1)
  assert len(cloud.lines('refused')) == 3 == err.count('quota\n')
  assert 'for what gcloud says above, 3 times: launch/tpu_vm.sh create --name=one' in err and 'costs' not in err


@pytest.mark.parametrize(
  'coming, words',
  [
    (None, 'there is no one in us-west4-a: launch/tpu_vm.sh create --name=one'),
    ('PROVISIONING FAILED', 'no TPU was given to one: launch/tpu_vm.sh status'),
  ],
)
@pytest.mark.parametrize('command', slow.but([['install', *TPU], RUN], RUN), ids=['install', 'run'])
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


@pytest.mark.parametrize('status, times', slow.all_but([(2, 1), (75, 3), (1, 3)], (75, 3)))
def test_a_run_that_fails(cloud, status, times):
  cloud.env['FAKE_HOSTS'] = '1'
  cloud.installed()
  cloud.put('ends', str(status))
  _, err = cloud(*RUN, status=status)
  assert len(cloud.lines('begun')) == times and 'one stays, and costs, until' in err
  assert (f'the run ended (status {status}): once more' in err) == (times > 1)


@pytest.mark.slow
def test_a_lost_connection_stops_no_run(cloud):
  cloud.env['FAKE_HOSTS'] = '1'
  cloud.installed()
  cloud.put('ends', 'never')
  lost = 'case "$*" in *" ssh "*) [ -e "$FAKE_CLOUD/lost" ] || { touch "$FAKE_CLOUD/lost"; LOSE=1; } ;; esac'
  gcloud = (cloud.folder / 'bin' / 'gcloud').read_text()
  away = 'if [ "$LOSE" ]; then (exec ' + gcloud.partition('exec ')[2].strip() + ') & sleep 3; kill $!; exit 255; fi'
  cloud.put('bin/gcloud', gcloud.replace('exec', f'{lost}\n{away}\nexec', 1))
  process = cloud.start(*RUN)
  wait_for(lambda: len(cloud.processes('tail')) == 2)  # the second has joined the run of the first
  cloud.put('ends', '0')
  _, err = ended(process, 0)
  assert 'the connection was lost: once more' in err and len(cloud.lines('begun')) == 1


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


@pytest.mark.slow
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
def test_the_program_itself_continues_where_it_was(cloud):
  cloud.put('program', f'#!/bin/sh\nexec {sys.executable} "$@"\n')
  cloud.env |= {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': quick_xla.FLAGS, 'FAKE_HOSTS': '1'}
  cloud.installed()
  workdir = cloud.folder / 'run'
  alone = [f'--coordinator=localhost:{ports.free_port()}', '--num_processes=1', '--process_id=0']
  options = [*alone, *(f'--config.{field}' for field in TINY.split())]
  process = cloud.start('run', *TPU, '--', PROGRAM[0], f'--workdir=/mnt/..{workdir}', *options)
  wait_for(lambda: (workdir / 'modules' / '1').exists() or process.poll() is not None)
  cloud.preempt()
  pretrained = (workdir / 'stages' / 'pretrain.json').stat().st_mtime_ns
  out, err = process.communicate(timeout=tiny_run.PATIENCE_S)
  assert process.returncode == 0 and 'one is PREEMPTED: creating it again' in err, (out, err)
  assert (workdir / 'stages' / 'pretrain.json').stat().st_mtime_ns == pretrained
  assert json.loads((workdir / 'report.json').read_text())['phases'] == 4
