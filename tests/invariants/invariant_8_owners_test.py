"""Invariant 8 of owners: islands whose text stays with its owners agree with those that have the text of all."""

import dataclasses
import json
import pathlib

import one_process
import owners_run
import pytest
import small
from owners_run import OWNERS, OwnersRun

from dipaco_jax.pipeline import run as run_lib, stages
from dipaco_jax.storage import tensors
from dipaco_jax.telemetry import metrics_log

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> pathlib.Path:
  """The text of all; that of validation has the names of owners as domains where it is read with theirs."""
  folder = tmp_path_factory.mktemp('texts')
  owners_run.write_text(folder)
  lines = (folder / 'public-validation.jsonl').read_text().splitlines()
  rows = [json.dumps(json.loads(line) | {'domain': OWNERS[i % 2]}) + '\n' for i, line in enumerate(lines)]
  (folder / 'pooled-validation.jsonl').write_text(''.join(rows))
  return folder


@pytest.fixture(scope='module')
def apart(folder) -> OwnersRun:
  """A whole run whose text stays with its owners."""
  with one_process.one_device():
    run = OwnersRun(folder, owners_run.settings(folder))
    with run.members() as members:
      run.to('finished', members)
      for member in members[1:]:
        owners_run.owner_workdir.complete(member.island)
    yield run


def test_modules_are_those_of_islands_with_the_text_of_all(apart, folder):
  together = OwnersRun(folder, owners_run.pooled(folder, apart.place), apart.programs)
  together.place = folder / 'together'
  with together.members(()) as members:
    together.to('checkpoint', members)
    for _ in range(owners_run.TURNS):
      for member in members:
        member.turn()
      if f'module shared/shared {apart.settings.train.phases}' in together.outcome():
        break
  modules = {name: sha256 for name, sha256 in together.outcome().items() if name.startswith('module')}
  assert modules == {name: sha256 for name, sha256 in apart.outcome().items() if name.startswith('module')}
  assert len(modules) == 3 * (apart.settings.train.phases + 1)


def test_modules_and_losses_are_those_of_one_job_with_the_text_of_all(apart, folder):
  s = owners_run.pooled(folder, apart.place)
  (folder / 'main').mkdir()
  run = run_lib.unattended(folder / 'main', s)
  with metrics_log.Metrics(run.workdir) as metrics:
    stages.run_all(dataclasses.replace(run, metrics=metrics), 'train')
  # As in invariant_8_islands_test: a rounding of a parameter and of its direction, a sum over targets, for each step.
  steps, targets = s.train.phases * s.train.steps_per_phase, s.train.batch_size * s.model.seq_len
  tolerance = 1.33 * 8**0.5 * steps * small.EPS * (2 + s.inner.learning_rate * targets)
  for path, owner in enumerate(OWNERS):
    for module in ('shared/shared', f'own/{path}'):
      name = f'modules/{s.train.phases}/{module}.safetensors'
      found, expected = (tensors.read_arrays(place / name) for place in (apart.store(owner), run.workdir))
      small.assert_close(found, expected, tolerance)
  ours, theirs = (json.loads((place / 'paths' / 'best.json').read_text()) for place in (apart.place, run.workdir))
  assert ours['version'] == theirs['version']
  assert ours['holdout_loss'] == pytest.approx(theirs['holdout_loss'], abs=1e-4)
