"""The dense control: trained from the base on text that the base has not read, for as many steps as a path."""

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tiny_run
from repository import HELPERS, ROOT

from dipaco_jax.config import dense_control, settings
from dipaco_jax.data import loader
from dipaco_jax.pipeline import jobs, run as run_lib, stage_records, stages
from dipaco_jax.storage import module_store
from dipaco_jax.telemetry import metrics_log


@pytest.fixture
def unattended():
  """Runs in a workdir, with fields of `train` changed, on one device."""
  with contextlib.ExitStack() as stack:

    def make(workdir, **train):
      s = stage_records.read_settings(workdir)
      s = dataclasses.replace(s, train=dataclasses.replace(s.train, **train))
      run = run_lib.unattended(workdir, s, 1)
      stack.callback(run.metrics.close)
      return run

    yield make


@pytest.mark.parametrize('batch_size', [4, 5, 1])
def test_it_continues_with_the_text_that_the_base_has_not_read(undisturbed, unattended, batch_size):
  run = unattended(undisturbed, batch_size=batch_size)
  s, job = run.settings, jobs.control_job(run)
  assert (
    (job.schedule.phases, job.schedule.steps_per_phase, job.schedule.first_step)
    == (4, 6, s.pretrain.steps)
    == (4, 6, 12)
  )
  files = [str(undisturbed / 'shards' / 'base' / str(part) / 'train.array_record') for part in range(s.data.parts)]
  one_by_one = loader.Shard(files, 1, s.model.seq_len, s.seed, 0)
  read = s.pretrain.steps * s.pretrain.batch_size
  begin = -(-read // batch_size) * batch_size
  for step in range(3):
    tokens, ids = job.data.batch(0, job.schedule.first_step + step)
    at = range(begin + step * batch_size, begin + (step + 1) * batch_size)
    expected = [one_by_one.batch(position) for position in at]
    assert (tokens == np.concatenate([t for t, _ in expected])).all()
    assert (ids == np.concatenate([i for _, i in expected])).all()
  assert begin - read < batch_size


def test_it_has_the_programs_of_the_base(undisturbed, unattended):
  run = unattended(undisturbed)
  assert run.control_programs is run.base_programs


@pytest.mark.parametrize(
  ('train', 'steps_per_phase'),
  [({}, 24), ({'paths_per_phase': 2}, 12), ({'schedule': ((0, (0, 1, 2)), (2, (0,)))}, 12)],
)
def test_with_the_budget_of_all_paths_it_reads_as_many_tokens(undisturbed, unattended, train, steps_per_phase):
  run = unattended(undisturbed, **train)
  s = dataclasses.replace(run.settings, evaluate=dataclasses.replace(run.settings.evaluate, control_budget='flops'))
  run = dataclasses.replace(run, settings=s)
  job, paths = jobs.control_job(run), jobs.paths_job(run)
  trained = sum(int((paths.weights(phase) > 0).sum()) for phase in range(4)) * 6
  assert (job.schedule.phases, job.schedule.steps_per_phase) == (4, steps_per_phase)
  assert job.schedule.phases * job.schedule.steps_per_phase == trained and job.data.batch_size == paths.data.batch_size
  assert job.name == 'control_flops'
  assert run.control_programs.settings.decay_steps == s.pretrain.steps + trained
  assert run.control_programs is not run.base_programs


def test_a_given_decay_is_as_much_longer_as_its_training():
  inner = settings.Inner(decay_steps=112)
  s = settings.Settings(
    grid=(('a', 3),), pretrain=settings.Pretrain(steps=12), train=settings.Train(phases=4, steps_per_phase=6),
    inner=inner, evaluate=settings.Evaluate(control_budget='flops'),
  )  # fmt: skip
  assert dense_control.control_settings(s).decay_steps == 12 + 3 * 100
  as_steps = dataclasses.replace(s, evaluate=settings.Evaluate())
  assert dense_control.control_settings(as_steps).decay_steps == 112


@pytest.mark.parametrize('budget, steps, decay', [('steps', 4, 36), ('flops', 12, 12 + 72)])
def test_it_takes_as_many_steps_as_paths_have_taken(budget, steps, decay):
  """Which are not those of the config where phases end by time; and its rate decays as theirs do."""
  train = settings.Train(phases=4, steps_per_phase=6, steps_per_dispatch=2)
  s = settings.Settings(
    grid=(('a', 3),), pretrain=settings.Pretrain(steps=12), train=train,
    evaluate=settings.Evaluate(control_budget=budget),
  )  # fmt: skip
  control = dense_control.control_settings(s, (24, 15, 5))
  assert (control.train.phases, control.train.steps_per_phase) == (4, steps)
  assert control.decay_steps == decay


def test_its_hold_out_is_that_of_all_text(undisturbed, unattended):
  run = unattended(undisturbed)
  rows = jobs.control_job(run).evaluation.holdout
  everything = [
    loader.read_rows(f'{undisturbed}/shards/base/{part}/holdout.array_record', 0, 10**6, run.settings.model.seq_len)
    for part in range(run.settings.data.parts)
  ]
  expected = [np.concatenate(arrays) for arrays in zip(*everything, strict=True)]
  assert rows.counts == [len(expected[0])] and rows.counts[0] > 3
  for start, stop in ((0, rows.counts[0]), (1, 2), (2, rows.counts[0] - 1)):
    assert all((x == y[start:stop]).all() for x, y in zip(rows.load(0, start, stop), expected, strict=True))
  few = jobs.control_job(unattended(undisturbed, max_holdout_rows=3)).evaluation.holdout
  assert few.counts == [3]  # of each of the parts one
  assert (few.load(0, 0, 3)[0] == [tokens[0] for tokens, _ in everything]).all()


@pytest.mark.slow
def test_more_phases_lengthen_it(undisturbed, unattended, tmp_path):
  names = ('stages', 'control', 'base', 'shards', 'sequences')
  for name in names:
    shutil.copytree(undisturbed / name, tmp_path / name)
  for name in ('config.json', 'tokenizer.model', 'metrics.jsonl'):
    shutil.copy(undisturbed / name, tmp_path / name)
  before = [row for row in metrics_log.read_rows(tmp_path) if row['stage'] == 'control']
  run = unattended(tmp_path, phases=5)
  with metrics_log.Metrics(tmp_path) as rows:
    found = stages.train_control(dataclasses.replace(run, metrics=rows))
  after = [row for row in metrics_log.read_rows(tmp_path) if row['stage'] == 'control']
  assert after[: len(before)] == before, 'what was made is not made again'
  of = functools.partial(lambda rows, kind: [row['updates'] for row in rows if row['kind'] == kind], after)
  assert of('phase') == of('evaluation') == [6, 12, 18, 24, 30] and of('step') == list(range(2, 31, 2))
  assert module_store.versions(tmp_path / 'control')[-1] == 5
  (best,) = module_store.best_versions(tmp_path / 'control')
  assert best in (*module_store.best_versions(undisturbed / 'control'), 5)
  assert found['control_tokens'] == 30 * 4 * 64
  told = json.loads((undisturbed / 'report.json').read_text())
  assert told['control_tokens'] == 24 * 4 * 64 and told['wall_s']['control'] > 0


@pytest.mark.slow
def test_a_control_that_diverges_is_left_out_of_the_comparison(tmp_path):
  """Path 0 is poisoned in the second phase, and so is the control, which has no other path."""
  config = tiny_run.write_config(tmp_path)
  options = f'--config={config}', f'--workdir={tmp_path / "run"}', tiny_run.CONTROL
  command = [sys.executable, HELPERS / 'poison.py', '0', '19', 'nan', *options]
  env = os.environ | {'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'}
  done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=tiny_run.PATIENCE_S)
  assert done.returncode == 0, done.stderr
  assert 'the dense control is left out of the comparison: control diverged in phase 2' in done.stderr
  report = json.loads((tmp_path / 'run' / 'report.json').read_text())
  assert report['control_perplexity'] is None and report['perplexity'] < report['base_perplexity']
  assert [(x['phase'], x['path']) for x in report['excluded']] == [(2, 0)]


@pytest.mark.slow
def test_another_budget_trains_it_again(undisturbed, unattended, tmp_path):
  for name in ('stages', 'control', 'base', 'shards', 'sequences'):
    shutil.copytree(undisturbed / name, tmp_path / name)
  for name in ('config.json', 'tokenizer.model'):
    shutil.copy(undisturbed / name, tmp_path / name)
  run = unattended(tmp_path)
  evaluate = dataclasses.replace(run.settings.evaluate, control_budget='flops')
  run = dataclasses.replace(run, settings=dataclasses.replace(run.settings, evaluate=evaluate))
  found = stages.train_control(run)
  assert (found['control_steps'], found['control_tokens']) == (4 * 24, 4 * 24 * 4 * 64)
  assert found['control_flops'] > 0 and found['control_budget'] == 'flops'
  assert not (tmp_path / 'control' / 'checkpoints' / 'control').exists()
  assert (tmp_path / 'control' / 'checkpoints' / 'control_flops').exists()
