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
from dipaco_jax.islands import island, monitor, run_history
from dipaco_jax.pipeline import stages
from dipaco_jax.reports import history
from dipaco_jax.telemetry import metrics_log

pytestmark = pytest.mark.usefixtures('one_device')
ROUNDS = {
  'routing': dict(method='discriminative', router_fraction=0.2, rounds=1, phases_per_round=1),
  'train': dict(phases=2),
  'evaluate': dict(refit_router=True),
}
SAMPLED = {'train': dict(phases=4, paths_per_phase=2)}
PUBLISHED = {'checkpoint': dict(state_every_phases=2)}
THIN = {'outer': dict(wire='thin', mix=0.25, closed_every=2), 'train': dict(phases=4)} | PUBLISHED
# By how messages are compressed: nats by which losses may differ, and a quantum of a path's moves, which are below 0.1.
LOSS_TOLERANCE = {'none': 1e-4, 'int8': 1e-2, 'int4': 1e-2, 'int2': 3e-2}
QUANTUM = {'none': 0, 'int8': 0.1 / 127, 'int4': 0.1 / 7, 'int2': 0.1 / 2}
BY_ROW = dict(optimizer='sgd', learning_rate=1.0, rescale=False, row_weights=True)
CONFIGS = {
  'plain': (None, {}),
  'own modules, sampled': (OWN_LEVELS, SAMPLED),
  'own modules': (OWN_LEVELS, {'train': dict(phases=4)} | PUBLISHED),
  'own modules, a round of re-sharding': (OWN_LEVELS, ROUNDS),
  'a round of re-sharding': (None, ROUNDS),
  'int8': (None, {'outer': dict(compress='int8', whole_every=2), 'train': dict(phases=4)}),
  'streaming': (None, {'outer': dict(stream='on', overlap_steps=2, closed_every=2), 'train': dict(phases=3)}),
  'thin, own modules': (OWN_LEVELS, THIN),
  'thin, own modules, a round of re-sharding': (OWN_LEVELS, ROUNDS | THIN),
  'int2': (None, {'outer': dict(compress='int2', whole_every=2), 'train': dict(phases=4)}),
  'row weights': (None, {'outer': BY_ROW}),
  'a cap on weights': (None, {'outer': dict(max_weight=0.5)}),
  'row weights, thin, own modules': (OWN_LEVELS, THIN | {'outer': BY_ROW | THIN['outer']}),
  'int4, own modules, sampled': (OWN_LEVELS, SAMPLED | {'outer': dict(compress='int4', whole_every=3)}),
}


one_device, machine, prepared = island_fixtures.one_device, island_fixtures.machine, island_fixtures.prepared


@pytest.mark.on('sqlite,folder')
@pytest.mark.parametrize('name', slow.all_but(CONFIGS, 'plain'))
def test_agrees_with_main(name, machine, backend, prepared, tmp_path, monkeypatch):
  monkeypatch.setattr(one_process, 'LEASE_S', 60)  # nobody dies: on a busy machine no task goes to another process
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
  check_losses(made, run)
  check_page(made, run)
  # As for placements: a rounding of a parameter and of its direction, a sum over targets, for each step. Sums of outer
  # gradients differ by less: one rounding for each path.
  # Where messages are rounded, few elements differ, by a quantum.
  steps, targets = s.train.phases * s.train.steps_per_phase, s.train.batch_size * s.model.seq_len
  quantum = QUANTUM[made.wire.compress]
  tolerance = 1.33 * 8**0.5 * steps * small.EPS * (2 + s.inner.learning_rate * targets)
  for fact in made.registry.facts('module', number=s.train.phases):
    level, _, at = fact.key.partition('/')
    file = run.workdir / 'modules' / str(s.train.phases) / level / f'{at}.safetensors'
    found, expected = made.read_weights(fact), safetensors.numpy.load_file(file)
    small.assert_close(found, expected, tolerance + 2 * quantum)
    errors = np.concatenate([np.abs(found[name] - x).ravel() for name, x in expected.items()])
    assert np.quantile(errors, 0.9) <= tolerance + quantum / 100
  check_early_stopping(made, run)
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


def check_losses(made: island.Island, run):
  """All losses are there; those before a path takes new modules over for the first time are equal to the bit."""
  expected = {
    (path, row['phase'], row['step']): loss
    for row in metrics_log.read_rows(run.workdir)
    if row['kind'] == 'step' and row['stage'] == 'train'
    for path, loss in zip(row['paths'], row['loss'], strict=True)
  }
  s = run.settings
  found = {
    (int(fact.key), fact.number, s.pretrain.steps + fact.number * s.train.steps_per_phase + after): loss
    for fact in made.registry.facts('checkpoint')
    for after, loss, *_ in fact.meta['rows']
  }
  assert found.keys() == expected.keys()
  first_taken_over = next((piece.begin for piece in made.timetable.pieces(0) if piece.mixed), made.timetable.tau)
  exact = [at for at in found if at[1] == 0 and at[2] <= s.pretrain.steps + first_taken_over]
  assert {path for path, *_ in exact} == {path for path, phase, _ in found if phase == 0} and len(exact) < len(found)
  assert {at: found[at] for at in exact} == {at: expected[at] for at in exact}
  differences = {at: abs(loss - expected[at]) for at, loss in found.items()}
  assert max(differences.values()) < LOSS_TOLERANCE[made.wire.compress], differences


def check_early_stopping(made: island.Island, run):
  """By the losses of `main`, the version that islands chose for a path is as good as the one that `main` chose.

  Without compression the two are equal. With it, losses that differ by less than the tolerance may be exchanged.
  """
  told = run_history.read(made)
  chosen = json.loads((run.workdir / 'paths' / 'best.json').read_text())['version']
  rows = [row for row in metrics_log.read_rows(run.workdir) if (row['kind'], row['stage']) == ('phase', 'train')]
  losses = {row['phase']: row['holdout_loss_by_path'] for row in rows}  # of the version after so many phases
  assert losses.keys() == {*range(1, run.settings.train.phases + 1)} and len(told.best_version) == len(chosen)
  tolerance = 0.0 if made.wire.compress == 'none' else LOSS_TOLERANCE[made.wire.compress]
  for path, (ours, theirs) in enumerate(zip(told.best_version, chosen, strict=True)):
    assert losses[ours][path] <= losses[theirs][path] + tolerance, path
  for version in {*told.best_version}:
    made.publish_version(version, told.best_version)


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
