"""The evaluator: a path's loss on its hold-out is that of its own modules, in nats per target."""

import math

import numpy as np
import one_process
import plain_transformer
import pytest

from dipaco_jax.islands import evaluator, final_files, run_history
from dipaco_jax.islands.island import Island
from dipaco_jax.models import transformer
from dipaco_jax.pipeline import validate_stage
from dipaco_jax.registry.registry import Fact, Task
from dipaco_jax.training import evaluation

made = one_process.made
ROWS = 4


def rows(path: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
  tokens = np.random.default_rng(path).integers(0, 250, (ROWS, 64)).astype(np.int32)
  return tokens[start:stop], np.ones((stop - start, 64), np.int32)


@pytest.fixture
def prepared(made, monkeypatch) -> Island:
  """A run with modules of version 1, and hold-outs of paths 0 and 3."""
  monkeypatch.setattr(Island, 'fetch_trees', lambda *trees: None)
  holdout = evaluation.Rows([ROWS, 0, 0, ROWS], rows, 2, 64)
  monkeypatch.setattr(validate_stage, 'holdout_rows', lambda run, number: holdout)
  made.run.__dict__['model'] = transformer.make_model(made.run.settings.model, made.run.settings.tokenizer.vocab_size)
  rng = np.random.default_rng(0)
  for key in made.all_modules():
    level, _ = made.parse_module(key)
    params = {name: 0.1 * rng.normal(size=made.shapes[name].shape).astype('f') for name in made.layout.names(level)}
    made.registry.put([Fact('module', key, 1, *made.write_object(f'modules/1/{key}', params), {})])
  return made


def holdout(of: Island, path: int) -> Fact:
  [fact] = evaluator.perform(of, Task(0, 'evaluate', str(path), 1, 1, '', 0), None)()
  return fact


def test_a_loss_is_that_of_the_paths_own_parameters(prepared):
  """By the transformer in numpy; a text's prefix, which routes it, is no target."""
  prefix = prepared.run.settings.routing.prefix_tokens
  for path in (0, 3):
    params, (tokens, _) = prepared.path_parameters(path, 1), rows(path, 0, ROWS)
    nll = np.array([plain_transformer.nll(params, row, prepared.run.model.config) for row in tokens])[:, prefix - 1 :]
    fact = holdout(prepared, path)
    assert fact[:3] == ('evaluation', str(path), 1) and fact.meta['targets'] == nll.size
    assert fact.meta['loss'] == pytest.approx(nll.mean(), rel=1e-5)


def test_a_path_without_a_hold_out_has_no_loss(prepared):
  fact = holdout(prepared, 1)
  assert fact.meta == {'loss': None, 'targets': 0.0}


def test_a_loss_that_is_not_finite_is_worse_than_any(prepared, monkeypatch):
  nan = [(0, np.full(ROWS, np.nan), np.ones(ROWS))]
  monkeypatch.setattr(evaluation, 'turn_losses', lambda *args: iter(nan))
  fact = holdout(prepared, 0)
  assert fact.meta['loss'] == 'inf', 'JSON has no infinity'
  prepared.registry.put([fact])
  losses, targets = run_history.holdout_losses(prepared, 1)
  assert losses == [math.inf, None, None, None] and targets == [float(ROWS), 0.0, 0.0, 0.0]


def test_a_config_that_was_removed_with_its_folder_is_written_again(made):
  file = made.run.workdir / 'config.json'
  before = file.read_bytes()
  file.unlink()
  final_files.restore_config(made)
  assert file.read_bytes() == before
