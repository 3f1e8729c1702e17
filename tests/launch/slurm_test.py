"""The scripts of launch/slurm on a real Slurm, where it is installed: what jobs run, and which are queued again."""

import json
import os
import sys

import ports
import pytest
import quick_xla
import slurm
import tiny_run
from repository import ROOT

SCRIPTS = ROOT / 'launch' / 'slurm'
OPTIONS = '--config=configs/tiny.py', '--workdir=/shared/runs/two words'
# In the place of Python: says what it was told, and ends as the test wants it to.
PROGRAM = """#!/usr/bin/env bash
line="$SLURM_PROCID: $(printf '<%s> ' "$@"; echo .)"
echo "${line%.}" >> "$TOLD"  # at once: others write there too
ends=($ENDS)
ends=${ends[SLURM_PROCID]-$ends}
[[ $ends != never ]] || exec sleep 600
exit "$ends"
"""


@pytest.fixture(scope='module')
def cluster():
  with slurm.running() as made:
    (made.folder / 'bin').mkdir()
    (made.folder / 'bin' / 'python').write_text(PROGRAM)
    (made.folder / 'bin' / 'python').chmod(0o755)
    yield made


@pytest.fixture
def submit(cluster, monkeypatch, tmp_path):
  """Submits a script in the clone; PROGRAM ends with a status, or never, all tasks alike or each with its own."""
  monkeypatch.chdir(ROOT)

  def job(script: str, ends: object, *more: str) -> str:
    (tmp_path / 'told').touch()
    path = f'{cluster.folder}/bin:{cluster.env["PATH"]}'
    env = {'PATH': path, 'TOLD': f'{tmp_path}/told', 'ENDS': str(ends)}
    return cluster.submit(*more, SCRIPTS / script, *OPTIONS, **env)

  return job


def told(tmp_path) -> list[str]:
  return sorted((tmp_path / 'told').read_text().splitlines())


@pytest.mark.parametrize('script', ['job.sh', 'workers.sh', 'roles.sh'])
def test_slurm_takes_the_script(script, cluster):
  assert 'to start at' in cluster('sbatch', '--test-only', SCRIPTS / script, *OPTIONS)


def test_a_job_of_two_nodes(cluster, submit, tmp_path):
  job = submit('job.sh', 0)
  cluster.wait_for('COMPLETED', job)
  coordinator = f'--coordinator=127.0.0.1:{61440 + int(job) % 4096}'
  main = ['-m', 'dipaco_jax.main', '--distributed', coordinator, '--num_processes=2']
  lines = [(*main, f'--process_id={i}', *OPTIONS) for i in (0, 1)]
  assert told(tmp_path) == [f'{i}: ' + ''.join(f'<{word}> ' for word in lines[i]) for i in (0, 1)]


def test_workers_are_each_their_own_job(cluster, submit, tmp_path):
  job = submit('workers.sh', 0, '--array=0-1')
  cluster.until(lambda: len(told(tmp_path)) == 2, job)
  name = f'<--name=worker-{job}-{{}}>'
  assert [words.split()[4] for words in told(tmp_path)] == [name.format(0), name.format(1)]


def test_roles(cluster, submit, tmp_path):
  cluster.wait_for('COMPLETED', submit('roles.sh', 0))
  assert [words.split()[3] for words in told(tmp_path)] == [f'<--role={r}>' for r in ('outer', 'evaluator', 'monitor')]


@pytest.mark.parametrize('status, state, restarts', [(2, 'FAILED', '0'), (143, 'PENDING', '1'), (75, 'PENDING', '1')])
def test_what_is_queued_again(status, state, restarts, cluster, submit):
  job = submit('job.sh', status)
  cluster.until(lambda: cluster.field(job, 'JobState') == state and cluster.field(job, 'Restarts') == restarts, job)
  assert (cluster.field(job, 'Reason') == 'job_requeued_in_held_state') == (status == 75)
  if state == 'PENDING':
    cluster('scancel', job)


@pytest.mark.parametrize('status', [2, 137])
def test_a_role_that_ends_badly_ends_the_job(status, cluster, submit):
  job = submit('roles.sh', f'never {status} never')
  cluster.wait_for('FAILED', job)
  assert cluster.field(job, 'ExitCode') == f'{status}:0' and cluster.field(job, 'Restarts') == '0'


def test_roles_are_held_where_one_has_to_wait(cluster, submit):
  job = submit('roles.sh', 'never never 75')
  cluster.until(lambda: cluster.field(job, 'Reason') == 'job_requeued_in_held_state', job)
  cluster('scancel', job)


def test_roles_that_are_preempted_are_queued_again(cluster, submit, tmp_path):
  job = submit('roles.sh', 'never')
  cluster.until(lambda: len(told(tmp_path)) == 3, job)
  cluster('scancel', '--signal=TERM', job)
  cluster.until(lambda: cluster.field(job, 'Restarts') == '1', job)
  cluster('scancel', job)


def test_one_task_of_an_array_is_queued_again(cluster, submit, tmp_path):
  job = submit('workers.sh', 'never', '--array=0-1')
  cluster.until(lambda: len(told(tmp_path)) == 2, job)
  cluster('scancel', '--signal=TERM', f'{job}_1')  # as at its time limit
  cluster.until(lambda: cluster.field(f'{job}_1', 'Restarts') == '1', job)
  assert cluster.field(f'{job}_0', 'JobState') == 'RUNNING' and cluster.field(f'{job}_0', 'Restarts') == '0'
  cluster('scancel', job)


@pytest.mark.slow
def test_a_job_whose_time_is_nearly_up_is_queued_again(cluster, submit):
  job = submit('job.sh', 'never', '--time=1', '--signal=TERM@60')
  cluster.until(lambda: cluster.field(job, 'Restarts') == '1', job)
  cluster('scancel', job)


def test_what_its_user_cancels_is_not_queued_again(cluster, submit, tmp_path):
  job = submit('job.sh', 'never')
  cluster.until(lambda: len(told(tmp_path)) == 2, job)
  cluster('scancel', job)
  cluster.wait_for('CANCELLED', job)
  assert cluster.field(job, 'Restarts') == '0'


@pytest.mark.slow
def test_a_run_continues_after_a_preemption_and_a_requeue(cluster, tmp_path, monkeypatch):
  monkeypatch.chdir(ROOT)
  config, options = tiny_run.write_config(tmp_path), ['--config.train.phases=20', tiny_run.RARELY]
  workdir, control = tmp_path / 'run', tmp_path / 'control'
  env = {'PATH': f'{os.path.dirname(sys.executable)}:{slurm.PATH}', 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'}
  env['XLA_FLAGS'] = quick_xla.on(1)
  job = cluster.submit(SCRIPTS / 'job.sh', f'--config={config}', f'--workdir={workdir}', *options, **env)
  cluster.until(lambda: tiny_run.updates(workdir, 'train') > 0, job)
  other = cluster.submit('--partition=owner', '--nodes=2', '--exclusive', '--wrap=true')
  cluster.wait_for('COMPLETED', other)
  reached = tiny_run.updates(workdir, 'train')
  assert cluster.field(job, 'Restarts') == '1' and cluster.log(job).count('the same command goes on') == 2
  cluster.start_now(job)
  cluster.until(lambda: tiny_run.updates(workdir, 'train') > reached, job)
  cluster('scontrol', 'requeue', job)
  cluster.wait_for('PENDING', job)
  cluster.start_now(job)
  cluster.wait_for('COMPLETED', job)
  assert cluster.field(job, 'Restarts') == '2'
  together = ['--distributed', f'--coordinator=localhost:{ports.free_port()}', '--num_processes=2']
  pair = [tiny_run.start(config, control, *options, *together, f'--process_id={i}') for i in (0, 1)]
  for process in pair:
    tiny_run.finish(process)
  assert tiny_run.modules_sha256(workdir) == tiny_run.modules_sha256(control)
  assert json.loads((workdir / 'report.json').read_text())['phases'] == 20
