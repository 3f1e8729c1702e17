"""Invariant 8: islands agree with `main`, and any number of workers has the bits of one process [3]."""

import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys

import island_fixtures
import numpy as np
import one_process
import pytest
import quick_xla
import safetensors.numpy
import slow
import small
import tiny_run
from backends import Backend
from one_process import OWN_LEVELS, Faults, Machine, changed
from repository import HELPERS, ROOT

from dipaco_jax.data import tokenizer_files
from dipaco_jax.islands import island, monitor, registry, run_history
from dipaco_jax.pipeline import stages
from dipaco_jax.reports import history
from dipaco_jax.training import metrics_log

pytestmark = pytest.mark.usefixtures('one_device')
ROUNDS = {
  'routing': dict(method='discriminative', router_fraction=0.2, rounds=1, phases_per_round=1),
  'train': dict(phases=2),
  'evaluate': dict(refit_router=True),
}
SAMPLED = {'train': dict(phases=4, paths_per_phase=2)}
CLOSED = {'checkpoint': dict(state_every_phases=2)}
THIN = {'outer': dict(wire='thin', mix=0.25), 'train': dict(phases=4)} | CLOSED
CONFIGS = {
  'plain': (None, {}),
  'own modules, sampled': (OWN_LEVELS, SAMPLED),
  'own modules': (OWN_LEVELS, {'train': dict(phases=4)} | CLOSED),
  'own modules, a round of re-sharding': (OWN_LEVELS, ROUNDS),
  'a round of re-sharding': (None, ROUNDS),
  'int8': (None, {'outer': dict(compress='int8', whole_every=2), 'train': dict(phases=4)}),
  'streaming': (None, {'outer': dict(stream='on', overlap_steps=2), 'train': dict(phases=3)} | CLOSED),
  'thin, own modules': (OWN_LEVELS, THIN),
  'thin, own modules, a round of re-sharding': (OWN_LEVELS, ROUNDS | THIN),
  'int4, own modules, sampled': (OWN_LEVELS, SAMPLED | {'outer': dict(compress='int4', whole_every=3)}),
}


one_device, machine, prepared = island_fixtures.one_device, island_fixtures.machine, island_fixtures.prepared


@pytest.mark.on('sqlite,s3')
@pytest.mark.parametrize(
  'name',
  slow.but(CONFIGS, *(name for name in CONFIGS if name != 'thin, own modules, a round of re-sharding')),
)
def test_agrees_with_main(name, machine, backend, prepared, tmp_path):
  levels, sections = CONFIGS[name]
  s = changed(machine.settings, levels, **sections)
  place = tmp_path / 'islands'
  if 'routing' in sections:  # its text is cut otherwise
    place.mkdir()
    alone = machine.other(s, backend)
  else:
    alone = machine.other(s, backend).begin(prepared, place, s)
  alone.to_the_end(place, Faults(), end=one_process.TRAINED)
  made, run = alone.island(place), of_main(alone, tmp_path)
  check_losses(made.registry, run, made.wire)
  check_page(made, run)
  # As for placements: a rounding of a parameter and of its direction, a sum over targets, for each step. Sums of outer
  # gradients differ by less: one rounding for each path.
  # Where messages are rounded, few elements differ, by a quantum; a path's moves are below 0.1.
  steps, targets = s.train.phases * s.train.steps_per_phase, s.train.batch_size * s.model.seq_len
  quantum = {'none': 0, 'int8': 0.1 / 127, 'int4': 0.1 / 7}[made.wire.compress]
  tolerance = 1.33 * 8**0.5 * steps * small.EPS * (2 + s.inner.learning_rate * targets)
  for fact in made.registry.facts('module', number=s.train.phases):
    level, _, at = fact.key.partition('/')
    file = run.workdir / 'modules' / str(s.train.phases) / level / f'{at}.safetensors'
    found, expected = made.read_weights(fact), safetensors.numpy.load_file(file)
    small.assert_close(found, expected, tolerance + 2 * quantum)
    errors = np.concatenate([np.abs(found[name] - x).ravel() for name, x in expected.items()])
    assert np.quantile(errors, 0.9) <= tolerance + quantum / 100
  told = run_history.read(made)
  best = json.loads((run.workdir / 'paths' / 'best.json').read_text())
  assert made.wire.compress != 'none' or told.best_version == best['version']
  for version in {*told.best_version}:
    made.publish_version(version, told.best_version)
  check_rounds(made, run)
  one_process.close(made)


def of_main(machine: Machine, folder: pathlib.Path):
  """The same config as one program, from the same text."""
  place, made = folder / 'main', machine.island(folder / 'islands')
  one_process.close(made)
  place.mkdir()
  names = 'sequences', 'base', 'features', 'stages', tokenizer_files.MODEL, 'routing/0', 'shards/0'
  one_process.copy(made.run.workdir, place, *names)
  rarely = changed(made.run.settings, checkpoint=dict(every_steps=24))
  run = dataclasses.replace(made.run, workdir=place, metrics=metrics_log.Metrics(place), settings=rarely)
  run.__dict__.update(machine.programs)
  stages.run_all(run, 'train')
  run.metrics.close()
  return run


def check_losses(facts: registry.Registry, run, wire):
  """Of the first phase, which begins from the base: equal to the bit. And all that are there."""
  expected = {
    (path, row['phase'], row['step']): loss
    for row in metrics_log.read_rows(run.workdir)
    if row['kind'] == 'step' and row['stage'] == 'train'
    for path, loss in zip(row['paths'], row['loss'], strict=True)
  }
  s = run.settings
  found = {
    (int(fact.key), fact.number, s.pretrain.steps + fact.number * s.train.steps_per_phase + after): loss
    for fact in facts.facts('checkpoint')
    for after, loss, *_ in fact.meta['rows']
  }
  assert found.keys() == expected.keys()
  for at, loss in found.items():
    is_exact = at[1] == 0 and not wire.stream  # before modules are taken over
    assert (
      loss == expected[at] if is_exact else abs(loss - expected[at]) < (1e-4 if wire.compress == 'none' else 1e-2)
    ), at


def check_page(made: island.Island, run):
  """What the monitor writes while the run trains: a point for each path and phase, from facts alone."""
  page, s = monitor.LivePage(made, every_s=0), run.settings
  page.write_if_due()
  assert not page.failed and not made.storage.exists('report.html'), 'the report of the whole is being made'
  rows = page.make_rows()
  assert page.phases == s.train.phases
  num_paths = run.layout.grid.num_paths
  first, expected = history.make_curves(rows, num_paths), {path: [] for path in range(num_paths)}
  for row in metrics_log.read_rows(run.workdir):
    if (row['kind'], row['stage'], row.get('phase')) == ('step', 'train', 0):
      for path, loss in zip(row['paths'], row['loss'], strict=True):
        expected[path].append(loss)
  for path, losses in expected.items():
    found = first.training.values[0, path]
    assert found == pytest.approx(sum(losses) / len(losses)) if losses else math.isnan(found)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(made.registry, 'counts', dict)  # as long as there is no task to finish
    page.write()
  words = f'still training: phase {s.train.phases} of {s.train.phases} is done'
  assert words in bytes(made.storage.fetch('report.html')).decode()


def check_rounds(made: island.Island, run):
  """What a round of re-sharding has found, as the report is told."""
  made.publish_version(run.settings.train.phases)
  told = run_history.figures(made, made.run, run_history.read(made))
  expected = run.result('train')['rounds']
  assert len(told['rounds']) == len(expected) == run.settings.rounds
  for ours, theirs in zip(told['rounds'], expected, strict=True):
    assert ours.keys() == theirs.keys()
    for name in ('scored_pairs', 'not_finite_by_path', 'given_by_path', 'router_sequences'):
      assert ours[name] == theirs[name]


ALONE = """
import pathlib, sys, one_process
from dipaco_jax import settings
found = {}
exec(pathlib.Path(sys.argv[1]).read_text(), found)
place = pathlib.Path(sys.argv[2])
one_process.Machine(settings.from_dict(found['get_config']().to_dict()), {}).to_the_end(place, one_process.Faults())
"""


@pytest.mark.slow
def test_three_workers_as_one_process(tmp_path):
  """Processes of one fake device each, unlike this one: eight share a pool of threads, and round otherwise."""
  file = tiny_run.write_config(tmp_path)
  shorter = file.read_text().replace('phases=4', 'phases=2')
  file.write_text(shorter.replace('  c.grid', '  c.evaluate.control = True\n  c.grid'))
  env = os.environ | {
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': quick_xla.on(1),
    'PYTHONPATH': f'{HELPERS}:{ROOT}',
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
  }
  alone, three = tmp_path / 'alone', tmp_path / 'three'
  local = str(ROOT / 'launch' / 'local.py')
  for command in (
    [sys.executable, '-c', ALONE, str(file), str(alone)],
    [sys.executable, local, f'--config={file}', f'--workdir={three}', '--workers=3'],
  ):
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=tiny_run.PATIENCE_S)
    assert done.returncode == 0, done.stderr
  expected, found = Backend().outcome(alone), Backend().outcome(three)
  assert found == expected and len(found) == 1 + 8 + 5 * 3 + 8 + 1
  assert tiny_run.modules_sha256(three) == tiny_run.modules_sha256(alone)
  reports = [json.loads((place / 'report.json').read_text()) for place in (alone, three)]
  assert reports[0]['perplexity'] == reports[1]['perplexity']
  assert reports[0]['control_perplexity'] == reports[1]['control_perplexity'] > 1
  words = f'perplexity {reports[1]["perplexity"]:.2f}'
  assert words in done.stdout
  logs = {file.stem: file.read_text() for file in (three / 'logs').iterdir()}
  assert 'phases of all paths' in logs['monitor-0'] and f'{three}: finished\n{words}' in logs['monitor-0']
  for role, last in (('worker', 'train'), ('outer', 'outer'), ('evaluator', 'finish')):
    assert any(f'tasks done  last {last} ' in log for name, log in logs.items() if name.startswith(role)), logs
