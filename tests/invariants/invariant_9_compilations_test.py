"""Invariant 9: one compilation per program in a whole run; a resumed run has none."""

import collections
import shutil

import jax
import numpy as np
import pytest
import small
import tiny_run

from dipaco_jax.telemetry import performance
from dipaco_jax.training import evaluation, programs

OF_WIRE = 'mix', 'leave', 'fresh_residuals'  # programs of streaming and of compression


@pytest.mark.slow
def test_with_streaming_there_is_one_for_each_set_of_levels(tmp_path):
  s = small.settings({'a': 2, 'b': 2}, small.MIXED_LEVELS, outer=dict(wire='thin'), train=dict(phases=4))
  made = small.make_programs(s, 1)
  counts = performance.count_compilations()
  small.train(small.make_job(made), tmp_path)
  pieces = [piece for phase in range(4) for piece in made.timetable.pieces(phase)]
  sets = {'accumulate': {p.sent for p in pieces}, 'outer': {p.sent for p in pieces}, 'mix': {p.mixed for p in pieces}}
  expected = {name: len(found - {()}) for name, found in sets.items()}
  assert {name: counts[name] for name in expected} == expected and expected['outer'] > 1
  assert counts['steps'] == counts['gather_path'] == counts['fresh_residuals'] == 1


def test_every_program_of_a_job_is_compiled_once(tmp_path):
  s = small.settings({'a': 2, 'b': 2}, small.MIXED_LEVELS, mesh=dict(data=2, shard_states=True))
  made = small.make_programs(s, 4)
  rows = evaluation.Rows([3, 5, 0, 9], lambda path, start, stop: small.batch(path, 100, stop - start), 4, small.LENGTH)
  validated = []

  def validate(params_of_turn):
    validated.append(evaluation.losses(made, params_of_turn, rows))
    return {}

  job = small.make_job(made, holdout=rows, validate=validate, validate_every=1, publish=True)
  counts = performance.count_compilations()
  small.train(job, tmp_path)
  assert len(validated) == job.schedule.phases
  assert {name: counts[name] for name in programs.NAMES} == {name: int(name not in OF_WIRE) for name in programs.NAMES}
  jax.jit(lambda x: x + 1)(np.zeros(3))
  assert counts['<lambda>'] == 1  # so that the count is seen to count


def cached(workdir):
  """How many programs of each name XLA's cache has."""
  names = (file.name.split('-')[0] for file in tiny_run.cache_of(workdir).glob('jit_*-cache'))
  return {name: n for name, n in collections.Counter(names).items() if name.removeprefix('jit_') in programs.NAMES}


def test_every_program_of_a_run_is_compiled_once(undisturbed, pytestconfig):
  # Of the base model and of the grid; paths inherit their inner states, so that only the base needs a fresh one, and
  # with one device nothing is in pieces.
  unused = 'unshard', *OF_WIRE
  expected = {f'jit_{name}': 1 if name == 'fresh_state' else 2 for name in programs.NAMES if name not in unused}
  if pytestconfig.getoption('--slow'):  # else the cache is that of all tests
    assert cached(undisturbed) == expected
  assert tiny_run.record(undisturbed, 'train')['result']['compilations'] == sum(expected.values())


@pytest.mark.slow
def test_a_resumed_run_takes_its_programs_from_the_cache(undisturbed, tmp_path):
  workdir = shutil.copytree(undisturbed, tmp_path / 'run')
  shutil.copytree(tiny_run.cache_of(undisturbed), tiny_run.cache_of(workdir))
  for stage in ('train', 'evaluate'):
    (workdir / 'stages' / f'{stage}.json').unlink()
  checkpoints = workdir / 'checkpoints' / 'train'
  shutil.rmtree(checkpoints / max((p.name for p in checkpoints.iterdir() if p.name.isdigit()), key=int))
  before = {file.name for file in tiny_run.cache_of(workdir).glob('*-cache')}
  tiny_run.run(undisturbed.parent / 'config.py', workdir, own_cache=True)
  assert {file.name for file in tiny_run.cache_of(workdir).glob('*-cache')} == before
  assert tiny_run.modules_sha256(workdir) == tiny_run.modules_sha256(undisturbed)
