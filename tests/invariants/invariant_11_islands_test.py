"""Invariant 11 in islands: a poisoned path is named and left out; later results equal those of one job [3]."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import one_process
import pytest
import quick_xla
import safetensors.numpy
import small
import tiny_run
from invariant_8_islands_test import machine, of_main, one_device, prepared  # noqa: F401
from one_process import Faults, Machine, changed, close
from poison import poisoned
from repository import ROOT

from dipaco_jax.command_line import command
from dipaco_jax.core.errors import Diverged
from dipaco_jax.islands import island, run_history
from dipaco_jax.registry import registry
from dipaco_jax.telemetry import metrics_log

pytestmark = [
  pytest.mark.slow,
  pytest.mark.usefixtures('one_device'),
  pytest.mark.filterwarnings('ignore:Explicitly requested dtype:UserWarning'),
]

FIRST, TAU = 12, 6  # global steps: of pretraining, of a phase
PATH = 2


def begin(machine: Machine, prepared, place, paths, step: int, kind: str, phases: int) -> Machine:  # noqa: F811
  """A machine on which these paths are poisoned, and where it is to begin."""
  alone = machine.other().begin(prepared, place, changed(machine.settings, train=dict(phases=phases)))
  alone.programs = {name: x for name, x in machine.programs.items() if name != 'programs'}
  made = alone.island(place)
  alone.programs['programs'] = programs = made.run.programs
  close(made)
  if paths:
    programs.__dict__['steps'] = poisoned(programs, programs.steps, paths, step, kind)
  return alone


@pytest.mark.parametrize('kind', ['nan', 'noise'])
def test_agrees_with_main(kind, machine, prepared, tmp_path, caplog):  # noqa: F811
  place = tmp_path / 'islands'
  alone = begin(machine, prepared, place, [PATH], FIRST + TAU + 1, kind, 3)
  alone.to_the_end(place, Faults(), end=one_process.TRAINED)
  assert 'train, phase 2, step 24: path 2 (a1 b0) of all takes no part in the outer step: its outer' in caplog.text
  made, run = alone.island(place), of_main(alone, tmp_path)
  steps, targets = 3 * TAU, alone.settings.train.batch_size * alone.settings.model.seq_len
  tolerance = 1.33 * 8**0.5 * steps * small.EPS * (2 + alone.settings.inner.learning_rate * targets)
  for fact in made.registry.facts('module', number=3):
    level, _, at = fact.key.partition('/')
    found = made.read_object(fact.uri, fact.sha256)
    file = run.workdir / 'modules' / '3' / level / f'{at}.safetensors'
    small.assert_close(found, safetensors.numpy.load_file(file), tolerance)
  expected, found = phases(run.workdir), rows_of(made, tmp_path / 'rows')
  for one, other in zip(found, expected, strict=True):
    assert one.keys() == other.keys() and one.get('skipped_by_path') == other.get('skipped_by_path')
    # Relative, too: a path that is full of noise has a loss of thousands of nats.
    assert one['loss_by_path'] == pytest.approx(other['loss_by_path'], rel=1e-5, abs=1e-4)
    named = {path: f'{why}; trained by all' for path, why in other.get('excluded', {}).items()}
    assert one.get('excluded', {}) == named
  assert [list(row.get('excluded', {})) for row in found] == [[], [str(PATH)], []]
  close(made)


def phases(workdir: pathlib.Path) -> list[dict]:
  return [row for row in metrics_log.read_rows(workdir) if row['kind'] == 'phase' and row['stage'] == 'train']


def rows_of(made: island.Island, folder: pathlib.Path) -> list[dict]:
  """That islands write in the end."""
  folder.mkdir()
  own = dataclasses.replace(made.run, metrics=metrics_log.Metrics(folder))
  run_history.write_rows(made, own, run_history.read(made))
  own.metrics.close()
  return phases(folder)


def test_a_run_that_has_diverged_continues_as_if_it_had_not(machine, prepared, tmp_path):  # noqa: F811
  expected, place = tmp_path / 'expected', tmp_path / 'run'
  well = begin(machine, prepared, expected, [], 0, '', 2)
  well.to_the_end(expected, Faults(), end=one_process.TRAINED)
  ill = begin(machine, prepared, place, [0, 1], FIRST + TAU + 1, 'nan', 2)
  with pytest.raises(Diverged, match='train diverged in phase 2: no path of module low/0'):
    ill.to_the_end(place, Faults())
  assert not [name for name in ill.backend.outcome(place) if name.startswith('module') and name.endswith(' 2')]
  well.to_the_end(place, Faults(), end=one_process.TRAINED)
  assert well.backend.outcome(place) == well.backend.outcome(expected)


# As a user would, but that the roles are those of poison.py.
POISONED = """
import runpy, sys
sys.executable, sys.argv = sys.argv[1], sys.argv[2:]
runpy.run_path(sys.argv[0], run_name='__main__')
"""


def test_all_roles_end_with_the_status_of_main_and_the_same_command_continues(tmp_path):
  config, place, local = tiny_run.write_config(tmp_path), tmp_path / 'run', str(ROOT / 'launch' / 'local.py')
  python = tmp_path / 'python'
  python.write_text(
    f'#!/bin/sh\nshift 2\nexec {sys.executable} {ROOT}/tests/helpers/poison.py {PATH} {FIRST + 1} nan "$@"\n'
  )
  python.chmod(0o755)
  options = [local, f'--config={config}', f'--workdir={place}', '--config.outer.max_excluded=0']
  run = lambda *how: subprocess.run(  # noqa: E731
    [sys.executable, *how, *options], capture_output=True, text=True, timeout=2 * tiny_run.PATIENCE_S, env=env
  )
  env = os.environ | {'XLA_FLAGS': quick_xla.on(1), 'PYTHONPATH': str(ROOT)}
  ended = run('-c', POISONED, str(python))
  why = f'train diverged in phase 1: path {PATH} was excluded in 1 phases in a row, more than '
  why += 'config.outer.max_excluded=0'
  assert ended.returncode == command.DIVERGED and f'local.py: {why}; {command.AFTER_DIVERGENCE}' in ended.stderr
  assert f'excluded: phase 1, step 18: path {PATH}, trained by worker-' in ended.stderr
  for name in ('monitor-0', 'outer-0', 'worker-0', 'worker-1', 'evaluator-0'):
    assert (place / 'logs' / f'{name}.log').read_text().splitlines()[-1].startswith(f'dipaco_jax: {why}'), name
  done = run()
  assert done.returncode == 0 and 'perplexity' in done.stdout, done.stderr
  facts = registry.Registry(f'sqlite:///{place}/registry.db')
  assert not facts.facts('excluded') and len(facts.facts('diverged')) == 2
  facts.close()
  assert json.loads((place / 'report.json').read_text())['perplexity']
