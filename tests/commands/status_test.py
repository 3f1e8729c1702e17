"""What status says of runs in every state, while another process holds them and when none does."""

import json
import os
import subprocess
import sys
import time

import pytest
import repository
import slow
import synthetic

from dipaco_jax import status
from dipaco_jax.config import settings
from dipaco_jax.processes import display
from dipaco_jax.storage import object_store, seals
from dipaco_jax.telemetry import metrics_log

HOLDER = """
import fcntl, json, os, sys
file = open(sys.argv[1], 'a+')
fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
file.write(json.dumps({'pid': os.getpid(), 'host': 'island-1', 'started': '2026-01-02 03:04:05'}))
file.flush()
print('held', flush=True)
sys.stdin.read()
"""


@pytest.fixture
def held(tmp_path):
  """Another process holds the lock of tmp_path."""
  with subprocess.Popen(
    [sys.executable, '-c', HOLDER, str(tmp_path / 'lock')], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
  ) as process:
    assert process.stdout.readline() == 'held\n'
    yield process
    process.stdin.close()


def test_a_finished_run_has_its_result_and_report(tmp_path):
  synthetic.make(tmp_path, phases=2)
  first, quality, last = status.status(tmp_path).splitlines()
  assert first == f'{tmp_path}: finished'
  assert quality == (
    'validation perplexity 10.31 (10.02 to 10.61), of the base model 13.52 (13.11 to 13.95), of the dense control (as '
    'many steps) 11.47 (11.15 to 11.79)'
  )
  assert last.endswith('report.html')


@pytest.mark.parametrize(
  'result',
  [
    {'perplexity': 'low'},
    {'perplexity': 1.0, 'perplexity_interval': 7},
    {'perplexity': 1.0, 'control_perplexity': 2.0, 'control_budget': ['x']},
  ],
)
def test_a_forged_record_is_named_and_the_rest_is_shown(result, tmp_path):
  synthetic.make(tmp_path, phases=2)
  file = tmp_path / 'stages' / 'evaluate.json'
  file.write_text(seals.dumps({'digest': '', 'wall_s': 1.0, 'result': result}))
  first, forged, last = status.status(tmp_path).splitlines()
  assert first == f'{tmp_path}: finished' and last.endswith('report.html')
  assert forged.startswith(f'{file} holds what no run writes there (')


@pytest.mark.parametrize('change', [{'wall_s': 'long'}, {'wall_s': 1e400}, {'ended': []}, {'result': []}])
def test_a_record_that_is_none_is_damaged(change, tmp_path):
  synthetic.make(tmp_path, phases=2)
  file = tmp_path / 'stages' / 'evaluate.json'
  file.write_text(seals.dumps(json.loads(file.read_text()) | change))
  with pytest.raises(seals.Damaged, match=r'evaluate\.json, made by the stage evaluate, is damaged'):
    status.status(tmp_path)


def test_forged_rows_and_folders_are_named_and_the_rest_is_shown(tmp_path):
  synthetic.make(tmp_path, stages=3)
  (tmp_path / 'checkpoints' / 'train' / '²').mkdir(parents=True)
  with open(tmp_path / 'metrics.jsonl', 'ab') as file:
    row = {'kind': 'step', 'stage': 'train', 'updates': 'many', 'time': 0, 'excluded': {'x': 1}, 'phase': 1, 'step': 1}
    file.write(metrics_log.to_line(row))
  lines = status.status(tmp_path).splitlines()
  assert sum('metrics.jsonl holds what no run writes there' in line for line in lines) == 2
  assert 'no checkpoint of this stage yet' in lines and lines[-1].startswith('no process is working on it')


def test_training_while_it_runs(tmp_path, held):
  config = synthetic.make(tmp_path, stages=3)
  (tmp_path / 'checkpoints' / 'train' / '250').mkdir(parents=True)
  (tmp_path / 'checkpoints' / 'train' / '50').mkdir()
  lines = status.status(tmp_path).splitlines()
  assert lines[0] == f'{tmp_path}: training the paths (stage 4 of 5)'
  assert lines[1] == 'phase 6 of 12, step 600 of 900, 50% of this stage'
  assert lines[2].startswith('mean loss of 16 paths 2.') and '13,905 tokens/s' in lines[2]
  assert 'to go in this stage' in lines[2]
  assert lines[3].startswith('validation perplexity 10.84 after phase 6')
  assert lines[4].startswith('phase 6, averaging gap of +0.060')
  assert lines[5].startswith('last checkpoint after 250 updates')
  assert lines[6] == f'held by process {held.pid} on island-1 since 2026-01-02 03:04:05'
  assert config.train.phases == 12


def test_training_the_dense_control(tmp_path, held):
  synthetic.make(tmp_path, stages=4, phases=3, tau=10)
  (tmp_path / 'control').mkdir()
  with metrics_log.Metrics(tmp_path) as writer:
    writer.write('step', 'control', 15, step=315, phase=1, paths=[0], loss=[2.5], tokens_per_s=100.0)
  lines = status.status(tmp_path).splitlines()
  assert lines[:3] == [
    f'{tmp_path}: evaluating (stage 5 of 5)',
    'first the dense control:',
    'phase 2 of 3, step 315 of 330, 50% of it',
  ]
  assert lines[3].startswith('loss 2.500, 100 tokens/s')


def test_time_to_go_is_that_of_recent_steps(tmp_path, held):
  synthetic.make(tmp_path, stages=1, pretrain_steps=1000)
  rows, when = [], time.time()
  for step in range(500, 0, -10):
    row = {'kind': 'step', 'stage': 'pretrain', 'updates': step, 'time': when, 'step': step, 'phase': 0, 'paths': [0]}
    rows.append(metrics_log.to_line(row | {'loss': [3.0], 'tokens_per_s': None}))
    when -= 10_000 if step == 300 else 20  # a pause between two sittings
  (tmp_path / 'metrics.jsonl').write_bytes(b''.join(reversed(rows)))
  lines = status.status(tmp_path).splitlines()
  assert lines[1] == 'step 500 of 1,000, 50% of this stage'
  # The paths' 12 phases of 50 steps of 16 paths, and as many steps of the control, have as many rows a step.
  later_s = (12 * 50 * 16 + 12 * 50) * 2
  assert lines[2] == (
    f'loss 3.000, about 16 min 40 s to go in this stage, about {display.duration(1000 + later_s)} in the whole run '
    '(0 s ago)'
  )


def test_progress_of_paths_that_take_turns_is_that_of_all(tmp_path):
  synthetic.make(tmp_path, stages=2, phases=3, tau=10)
  synthetic.write_json(tmp_path / 'stages' / 'route.json', {'digest': '', 'wall_s': 1.0, 'result': {}})
  with metrics_log.Metrics(tmp_path) as writer:
    # The first phase of 16 paths, one at a time: the fifth path is at its fourth step.
    writer.write('step', 'train', 44, step=304, phase=0, paths=[4], loss=[2.5], tokens_per_s=100.0)
  assert 'phase 1 of 3, step 304 of 330, 9% of this stage' in status.status(tmp_path)


def test_a_stopped_run_says_how_to_continue(tmp_path):
  synthetic.make(tmp_path, stages=3, phases=2)
  (tmp_path / 'lock').write_text('{"pid": 1}')  # left by a run that is over
  lines = status.status(tmp_path).splitlines()
  assert lines[0].endswith('stopped while training the paths (stage 4 of 5)')
  assert lines[-1].startswith('no process is working on it') and 'to go' not in ' '.join(lines)


@pytest.mark.parametrize(('stages', 'words'), [(0, 'reading and tokenizing text'), (2, 'routing'), (4, 'evaluating')])
def test_every_stage_is_named_and_counted(tmp_path, held, stages, words):
  synthetic.make(tmp_path, stages=stages, phases=2)
  assert f'{tmp_path}: {words} (stage {stages + 1} of 5)' in status.status(tmp_path)


def test_before_the_first_step_it_says_that_there_is_none(tmp_path, held):
  synthetic.make(tmp_path, stages=1)
  (tmp_path / 'metrics.jsonl').write_text('')
  assert 'no step is made yet: the first compiles' in status.status(tmp_path)


def test_the_owner_is_not_disturbed(tmp_path, held):
  before = (tmp_path / 'lock').read_bytes()
  assert status.owner(tmp_path)['pid'] == held.pid
  assert status.owner(tmp_path)['pid'] == held.pid  # the first look has not taken it over
  assert (tmp_path / 'lock').read_bytes() == before


def test_a_look_leaves_the_lock_free(tmp_path):
  from dipaco_jax.storage import lock

  (tmp_path / 'lock').touch()
  assert status.owner(tmp_path) is None
  with lock.hold(tmp_path):
    assert status.owner(tmp_path)['pid'] == os.getpid()
  assert status.owner(tmp_path) is None


def command(*args):
  env = os.environ | {'PYTHONPATH': str(repository.ROOT)}
  return subprocess.run(
    [sys.executable, '-m', 'dipaco_jax.status', *args], capture_output=True, text=True, env=env, timeout=60
  )


@pytest.mark.parametrize(
  'config', slow.all_but([None, '{}', '{"architectures": ["Llama"]}', '[1]', 'no JSON'], None, 'no JSON')
)
def test_a_folder_without_a_run_is_an_error_of_one_line(tmp_path, config):
  if config:
    (tmp_path / 'config.json').write_text(config)
  done = command(f'--workdir={tmp_path}')
  assert done.returncode == 2 and not done.stdout
  assert done.stderr.startswith(f'dipaco_jax: --workdir={tmp_path}: ') and len(done.stderr.splitlines()) == 1


def test_the_command_prints_the_status(tmp_path):
  synthetic.make(tmp_path, phases=2)
  done = command(f'--workdir={tmp_path}')
  assert (done.returncode, done.stdout.strip()) == (0, status.status(tmp_path))


def test_neither_jax_nor_matplotlib_is_loaded():
  program = 'import sys, dipaco_jax.status; print([m for m in ("jax", "matplotlib") if m in sys.modules])'
  done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, timeout=60)
  assert json.loads(done.stdout) == []


def test_a_run_in_a_bucket_is_read_there(tmp_path):
  synthetic.make(tmp_path / 'run', stages=3)
  place = object_store.open_storage((tmp_path / 'run').as_uri())
  for name in ('checkpoints/train/250.index.json', 'checkpoints/train/250/a', 'checkpoints/train/300/a'):
    place.write(name, b'{}')
  asked = ask(f'--workdir={place.url}/').stdout.splitlines()
  assert asked[0] == f'{place.url}: stopped while training the paths (stage 4 of 5)'
  assert any(line.startswith('last checkpoint after 250 updates, ') for line in asked)
  assert asked[-1].startswith('no process is working on it')
  holder = {'pid': 7, 'host': 'island-1', 'started': '2026-01-02 03:04:05', 'scratch': 'a', 'time': time.time()}
  place.write('lock', seals.dumps(holder).encode())
  asked = ask(f'--workdir={place.url}').stdout.splitlines()
  assert asked[0] == f'{place.url}: training the paths (stage 4 of 5)'
  assert asked[-1] == 'held by process 7 on island-1 since 2026-01-02 03:04:05'
  place.write('registry.id', b'1')
  asked = ask(f'--workdir={place.url}')
  assert asked.returncode == 2 and f'{place.url} is a run of islands: name its --registry' in asked.stderr


def ask(*options: str) -> subprocess.CompletedProcess:
  command = [sys.executable, '-m', 'dipaco_jax.status', *options]
  return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_an_islands_run_has_a_table_of_tasks_and_workers(tmp_path):
  from dipaco_jax.registry import registry

  synthetic.make(tmp_path, stages=3)
  (tmp_path / 'report.json').unlink(missing_ok=True)
  url = f'sqlite:///{tmp_path}/registry.db'
  tasks = registry.Registry(url)
  tasks.add_tasks([registry.NewTask('train', str(path), 0) for path in range(4)])
  for options in ([f'--workdir={tmp_path}'], ['--workdir=s3://bucket/run', f'--registry={url}']):
    tasks.beat('worker-0', 'worker', {'task': 'train 3 0', 'step': 8, 'of': 16, 'tokens_per_s': 1234.5})
    first, _, worker, legend = ask(*options).stdout.splitlines()
    assert legend.startswith('tasks: train PATH PHASE, ')
    assert first == 'tasks so far: train 0 of 4'
    assert worker.split()[:6] == ['worker-0', 'train', '3', '0', '8/16', '1,234']
  tasks.beat('worker-0', 'worker', {'task': 'train 3 9', 'step': 4, 'of': 16, 'replay': [5, 3, 9]})
  assert 'train 3 9 (first phase 5 again, of 3 to 9)  4/16' in ask(*options).stdout
  tasks.put([registry.Fact('finished', '', 0, '', '', {'perplexity': 17.123})])
  said = ask('--workdir=s3://bucket/run/', f'--registry={url}').stdout.splitlines()
  assert said[0] == 's3://bucket/run: finished, perplexity 17.12' and said[1] == first and len(said) == 6
  assert said[-1] == 'the report: s3://bucket/run/report.html'
  missing = ask(f'--workdir={tmp_path}', f'--registry=sqlite:///{tmp_path}/other.db')
  assert missing.returncode == 2 and 'there is no such file' in missing.stderr
  assert not (tmp_path / 'other.db').exists()


@pytest.mark.slow
def test_an_islands_run_says_what_paths_wait_for(tmp_path):
  from dipaco_jax.registry import registry

  config = settings.recorded(synthetic.make(tmp_path, stages=3))
  (tmp_path / 'report.json').unlink(missing_ok=True)
  tasks = registry.Registry(f'sqlite:///{tmp_path}/registry.db')
  tasks.put([registry.Fact('config', '', 0, '', '', {'config': config})])
  asked = ask(f'--workdir={tmp_path}')
  assert 'no process works on this run: start its roles' in asked.stdout
  assert asked.stdout.splitlines()[-1] == f'waiting for prepare: path {", ".join(map(str, range(16)))}', asked.stderr


def test_a_run_of_islands_is_not_taken_for_one_that_has_stopped(tmp_path, monkeypatch):
  """Its registry is elsewhere, and maybe another is here, which knows nothing of it."""
  from dipaco_jax.registry import registry

  monkeypatch.delenv('DIPACO_REGISTRY', raising=False)
  synthetic.make(tmp_path / 'run', stages=3)
  (tmp_path / 'run' / 'report.json').write_text('{}')  # of `dipaco report` while the run is going on
  (tmp_path / 'run' / 'registry.id').write_text('a1')
  place, url = str(tmp_path / 'run'), f'sqlite:///{tmp_path}/elsewhere.db'
  with pytest.raises(ValueError, match='another --registry: name that one, or set DIPACO_REGISTRY'):
    status.find_registry(place, None)
  tasks = registry.Registry(url)
  with pytest.raises(ValueError, match='a run with another --registry'):
    status.of_islands(place, url)  # an empty one
  tasks.put([registry.Fact('config', '', 0, '', '', {'id': 'b2', 'config': {}})])
  with pytest.raises(ValueError, match='a run with another --registry'):
    status.of_islands(place, url)
  tasks.close()
  monkeypatch.setenv('DIPACO_REGISTRY', url)
  (tmp_path / 'run' / 'command.txt').write_text('main ...')  # which has begun the run that islands continue
  assert status.find_registry(place, None) == url
  (tmp_path / 'run' / 'registry.id').unlink()
  assert status.find_registry(place, None) == ''
  (tmp_path / 'run' / 'registry.id').write_bytes(b'\xff')
  with pytest.raises(ValueError, match='a run with another --registry'):
    status.of_islands(place, url)
  (tmp_path / 'run' / 'registry.id').write_text('b2')
  assert 'no process works on this run' in status.of_islands(place, url)


def test_roles_that_are_gone_or_stopped_are_not_shown_as_idle(tmp_path):
  import sqlalchemy as sa

  from dipaco_jax.islands import status_table
  from dipaco_jax.registry import database, registry, registry_schema

  tasks = registry.Registry(url := f'sqlite:///{tmp_path}/registry.db')
  tasks.add_tasks([registry.NewTask('train', '3', 0)])
  tasks.claim('killed', ['train'])
  tasks.beat('killed', 'worker', {'task': 'train 3 0', 'step': 1, 'of': 9})
  tasks.beat('also-killed', 'worker', {'task': ''})
  tasks.beat('monitor-0', 'monitor', {'task': '', 'stuck': 'no process has the role worker: start one'})
  assert status_table.describe_stop(tasks) == []
  engine = database.connect(url)
  with engine.begin() as connection:
    connection.execute(sa.update(registry_schema.ROLES).values(seen=registry_schema.ROLES.c.seen - 3600))
    connection.execute(sa.update(registry_schema.TASKS).values(lease=registry_schema.TASKS.c.lease - 3600))
  engine.dispose()
  tasks.beat('worker-0', 'worker', {'task': '', 'stopped': True})
  shown = '\n'.join(status_table.lines(tasks))
  assert 'gone during train 3 0' in shown and '1/9' not in shown and 'idle ' not in shown and 'stuck' not in shown
  assert [line.split()[1] for line in shown.splitlines()[3:6]] == ['gone', 'gone', 'stopped']
  assert status_table.describe_stop(tasks)[0].startswith('no process works on this run (last heard ')
  assert status_table.time_left(tasks, settings.Settings()) == [], 'the worker of the running task is gone'
  tasks.beat('worker-1', 'worker', {'task': ''})
  assert status_table.describe_stop(tasks) == []
  tasks.close()


def test_prepare_has_its_stage_its_step_and_the_time_left():
  from dipaco_jax.islands import status_table

  about = {'task': 'prepare 0', 'stage': 'training the base model', 'step': 30, 'of': 120, 'left_s': 90.4}
  role = {'name': 'w', 'role': 'worker', 'silent_s': 1.0, 'about': about | {'tokens_per_s': 1234.0}}
  cells = status_table.row(role, False)
  assert cells[1:4] == ('prepare 0 (training the base model, 1 min 30 s left)', '30/120', '1,234')
  role['about'] = {'task': 'prepare 0', 'stage': 'routing'}
  assert status_table.row(role, False)[1:4] == ('prepare 0 (routing)', '', '')


@pytest.mark.slow
def test_an_islands_run_says_what_replays_would_cost(tmp_path):
  from dipaco_jax.registry import registry

  config = settings.recorded(synthetic.make(tmp_path, stages=3))
  (tmp_path / 'report.json').unlink(missing_ok=True)
  config['checkpoint']['state_every_phases'], config['train']['phases'] = 3, 9
  tasks = registry.Registry(f'sqlite:///{tmp_path}/registry.db')
  facts = [
    registry.Fact('checkpoint', path, phase, '', '', {}) for path, phase in (('0', 0), ('3', 3), ('5', 4), ('7', 5))
  ]
  facts += [registry.Fact('state', path, phase, '', '', {}) for path, phase in (('3', 2), ('5', 2), ('7', 5))]
  tasks.put([registry.Fact('config', '', 0, '', '', {'config': config}), *facts])
  lines = [line for line in ask(f'--workdir={tmp_path}').stdout.splitlines() if line.startswith('without')]
  assert lines == ['without its worker, 2 phases again: path 5', 'without its worker, 1 phase again: path 0, 3']


@pytest.mark.slow
def test_an_islands_run_says_which_line_it_takes(tmp_path):
  from dipaco_jax.registry import registry

  config = settings.recorded(synthetic.make(tmp_path, stages=3))
  (tmp_path / 'report.json').unlink(missing_ok=True)
  tasks = registry.Registry(f'sqlite:///{tmp_path}/registry.db')
  tasks.put([registry.Fact('config', '', 0, '', '', {'config': config})])
  tasks.put([registry.Fact('checkpoint', '0', 0, '', '', {'timed_s': 5.0, 'timed_steps': 10})])
  tasks.beat('worker-0', 'worker', {'bytes_in': 10**6, 'reading_s': 1.0, 'bytes_out': 10**6, 'writing_s': 2.0})
  asked = ask(f'--workdir={tmp_path}')
  assert asked.stdout.splitlines()[-1].startswith('bandwidth that each worker needs to spend 95% '), asked.stderr
  assert '(16 paths each, 0.5 s a step' in asked.stdout
  assert asked.stdout.endswith('so far theirs did 8 Mbit/s reading and 4 Mbit/s writing\n')
