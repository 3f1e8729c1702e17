"""Experiments: rows are the runs that their titles describe, and splits and scores of text are right."""

import dataclasses
import functools
import itertools
import json
import math
import sys

import jax
import numpy as np
import pytest
import repository
import slow

from dipaco_jax.algorithm import modules
from dipaco_jax.config import settings
from dipaco_jax.inference import trained_run
from dipaco_jax.models import transformer
from dipaco_jax.pipeline import stage
from dipaco_jax.telemetry import performance

sys.path.insert(0, str(repository.ROOT / 'experiments'))
import beginnings
import config
import mixtures
import readme
import runs
import split
from runs import Row

FOLDER = runs.HERE


@functools.cache
def shapes(of: settings.Model, vocab_size: int):
  return transformer.shapes(transformer.make_model(of, vocab_size))


def settings_of(size: str, method: str, **changes) -> settings.Settings:
  return runs.make(size, Row('', '', method, changes), 0).settings


def flops(s: settings.Settings) -> float:
  """Returns the training FLOPs of the base and of all paths."""
  paths = math.prod(dict(s.grid).values()) * s.train.phases * s.train.steps_per_phase * s.train.batch_size
  tokens = (paths + s.pretrain.steps * s.pretrain.batch_size) * s.model.seq_len
  return tokens * performance.flops_per_token(s.model, s.tokenizer.vocab_size, s.model.seq_len)


@pytest.mark.parametrize('size', slow.all_but(config.SIZES, 'test'))
def test_every_row_is_a_valid_run_with_levels_for_all_parameters(size):
  for table, row in ((of, row) for of in readme.TABLES for row in of.rows(size)):
    s = runs.make(size, row, 0).settings
    layout = modules.make_layout(s.grid, s.levels, shapes(s.model, s.tokenizer.vocab_size))
    assert len(layout.owner) == len(shapes(s.model, s.tokenizer.vocab_size)), (table.name, row.name)
    assert s.decay_steps == s.pretrain.steps + s.train.phases * s.train.steps_per_phase, (table.name, row.name)


@pytest.mark.slow
def test_rows_of_a_table_are_different_runs():
  for size in config.SIZES:
    for table in readme.TABLES:
      rows = table.rows(size)
      assert len({row.name for row in rows}) == len({row.title for row in rows}) == len(rows)
      assert len({runs.make(size, row, 0).config for row in rows}) == len(rows), table.name


@pytest.mark.parametrize('size', config.SIZES)
def test_rows_of_tau_differ_only_in_tau(size):
  rows = [row for row in readme.tau.rows(size) if row.name.startswith('tau_')]
  found = [runs.make(size, row, 0).settings for row in rows]
  assert len({s.train.phases * s.train.steps_per_phase for s in found}) == 1 < len(found)
  tau = dataclasses.replace(found[0].train, phases=1, steps_per_phase=1)
  assert len({dataclasses.replace(s, train=tau) for s in found}) == 1


@pytest.mark.parametrize('size', config.SIZES)
def test_all_rows_of_tables_of_equal_steps_train_the_same_number_of_steps(size):
  for table in (readme.tau, readme.sharing, readme.wire, readme.upcycle):
    found = [runs.make(size, row, 0).settings for row in table.rows(size)]
    assert len({s.pretrain.steps + s.train.phases * s.train.steps_per_phase for s in found}) == 1, table.__name__


@pytest.mark.parametrize('size', config.SIZES)
def test_methods_share_a_base_model(size):
  def base(method):
    depends = [field for earlier in stage.up_to('pretrain') for field in earlier.depends]
    return settings.digest(settings_of(size, method), *depends)

  methods = ('dense', 'diloco', 'fragments', 'flat', 'dipaco', 'own', 'ends', 'rerouted', 'discriminative')
  assert len({base(method) for method in methods}) == 1
  assert base('dense,2') != base('dense')  # its cosine is longer


@pytest.mark.parametrize('size', [size for size in config.SIZES if size not in ('test', 'smoke')])
def test_methods_of_equal_flops_have_equal_flops(size):
  num_paths = math.prod(config.SIZES[size].grid)
  equal = [flops(settings_of(size, method)) for method in ('dipaco', 'diloco', 'flat', f'dense,{num_paths}')]
  assert len(set(equal)) == 1
  assert flops(settings_of(size, 'larger')) == pytest.approx(equal[0], rel=0.02)  # whole phases of tau
  fewer = ('dense', 'dense_tokens', 'short')
  for row in (row for row in readme.baselines.rows(size) if row.name not in fewer):
    found = flops(runs.make(size, row, 0).settings)
    assert found == pytest.approx(equal[0], rel=0.02), row.name  # whole rows of a batch


def test_holdouts_choose_between_two_lengths_of_training():
  rows = readme.amounts.rows('micro')
  losses = {
    ('own_4_600', 0): 4.0,
    ('own_4_600_short', 0): 3.5,
    ('own_4_600', 1): 3.0,
    ('own_4_600_short', 1): 3.5,
    ('flat_4_all', 0): 2.0,
  }
  results = {at: {'holdout_loss': loss, 'perplexity': 10 * loss} for at, loss in losses.items()}
  found = readme.amounts.chosen(rows, results)
  assert {at: record['holdout_loss'] for at, record in found.items()} == {
    ('own_4_600', 0): 3.5, ('own_4_600', 1): 3.0, ('flat_4_all', 0): 2.0
  }  # fmt: skip
  means = {'own_4_600': 35.0, 'flat_4_600': 34.0, 'larger_4_600': 30.0}
  assert readme.amounts.lowest(means) == {(4, '600'): 'flat_4_600'}
  phases = [{'holdout_loss_by_path': losses} for losses in ([None, 4.0], [3.0, 5.0], [2.5, None])]
  assert runs.lowest_holdout_loss(phases) == (2.5 + 4.0) / 2 and runs.lowest_holdout_loss(phases[:0]) is None


def test_rows_of_tuning_differ_from_those_of_baselines_in_the_rate_alone():
  rows = {row.name: row for row in readme.baselines.alone('micro', readme.baselines.SHARES['micro'])}
  tuned = [row for row in readme.tune.rows('micro') if row.name.startswith('baselines_')]
  assert len(tuned) == 3 * len(rows)
  for row in tuned:
    name, _, rate = row.name.removeprefix('baselines_').rpartition('_')
    found, expected = (runs.make('micro', one, 0).settings for one in (row, rows[name]))
    assert found.train.learning_rate in (float(rate), 0.0)  # 0: that of the base
    assert dataclasses.replace(found, train=dataclasses.replace(found.train, learning_rate=0.0)) == dataclasses.replace(
      expected, train=dataclasses.replace(expected.train, learning_rate=0.0)
    )


def test_a_mixture_of_paths_mixes_probabilities_of_tokens():
  rng = np.random.default_rng(0)
  nll_PNL, distance_NP = rng.uniform(0, 5, (3, 4, 6)), rng.uniform(0, 9, (4, 3))
  weights_NP = np.exp(-distance_NP / 2.0)
  weights_NP /= weights_NP.sum(1, keepdims=True)
  expected_NL = -np.log(np.einsum('NP,PNL->NL', weights_NP, np.exp(-nll_PNL)))
  np.testing.assert_allclose(mixtures.mixture_nats(nll_PNL, distance_NP, 2.0), expected_NL, rtol=1e-5)
  nearest_NL = nll_PNL[distance_NP.argmin(1), np.arange(4)]
  np.testing.assert_allclose(mixtures.mixture_nats(nll_PNL, distance_NP, 1e-3), nearest_NL, rtol=1e-5)


def test_averages_of_versions_give_the_newest_the_most_weight():
  versions = [{'x': np.full(2, value, 'f')} for value in (0.0, 1.0, 3.0)]
  np.testing.assert_allclose(mixtures.averages(versions, 0.8)['x'], 0.8 * 0.2 * 1 + 0.2 * 3, rtol=1e-6)


def test_lines_of_baselines_join_the_lowest_rows_of_equal_flops():
  def point(flops, stored, of_path, perplexity):
    numbers = {'train_flops': flops, 'parameters_total': stored, 'parameters_path': of_path}
    return numbers | {'perplexity': perplexity}

  worse, low, high = point(1e13, 1, 1, 9.0), point(1e13, 1, 1, 8.0), point(1.01e13, 4, 4, 5.0)
  paths, cheaper = point(1e13, 4, 1, 6.0), point(4e12, 1, 1, 12.0)
  assert readme.baselines.lowest([worse, high, low, paths, cheaper]) == [[low, high], [paths], [cheaper]]


def test_path_specific_ends_leave_a_block_of_each_level():
  # Blocks 0, 5, 6 and 11 of 12 are the paper's [4].
  assert config.own_blocks(12) == [0, 5, 6, 11]
  assert config.own_blocks(8) == [0, 3, 4, 7]
  assert config.own_blocks(4) == [0, 3]
  assert config.own_blocks(2) == []


def test_a_digest_depends_on_the_config_and_the_bytes_of_the_text(tmp_path):
  one = tmp_path / 'one.txt'
  two = tmp_path / 'two.txt'
  one.write_text('text')
  two.write_text('text')
  row = Row('x', 'x', 'dipaco')
  base = runs.make('micro', row, 0, str(one))
  assert base.settings.data.train == (str(one),) and base.settings.data.source == 'files'
  assert runs.make('micro', row, 0, str(two)).key == base.key
  assert runs.make('micro', row, 0, str(one), str(two)).text != base.text
  assert runs.make('micro', row, 1, str(one)).config != base.config
  assert runs.make('micro', row._replace(changes={'outer.reweigh': False}), 0, str(one)).config != base.config
  two.write_text('texts')
  assert runs.make('micro', row, 0, str(two)).text != base.text


def test_a_row_starts_from_the_base_with_its_current_settings(monkeypatch):
  def start():
    row = next(row for row in readme.methods.rows('micro') if row.name == 'diloco_own')
    return row.changes['pretrain.init'], runs.make('micro', row, 0).config

  place, digest = start()
  shares = readme.methods.SHARES['micro']
  monkeypatch.setitem(readme.methods.SHARES, 'micro', shares | {'diloco': shares['diloco'] / 2})
  other, other_digest = start()
  assert other != place and other_digest != digest  # though the row itself is the same


def test_validation_text_is_cut_into_pieces_that_begin_with_a_word():
  text = ' '.join(f'word{n}' for n in range(300))
  line = json.dumps({'text': text, 'domain': 'books'}).encode()
  found = [json.loads(piece) for piece in split.pieces(line)]
  assert len(found) > 3 and {piece['domain'] for piece in found} == {'books'}
  assert all(len(piece['text']) == split.PIECE and piece['text'].startswith('word') for piece in found)
  places = [text.index(piece['text']) for piece in found]
  assert all(split.PIECE <= b - a < split.PIECE + len('word000 ') for a, b in itertools.pairwise(places))
  short = json.dumps({'text': 'short'}).encode()
  assert list(split.pieces(short)) == [short]


def test_kinds_of_text_are_left_out():
  lines = [json.dumps({'text': 'a', 'domain': kind}).encode() for kind in ('law_de', 'code', 'wiki_en')]
  assert list(split.kept(lines, ['law_de', 'code'])) == lines[2:]
  assert list(split.kept(lines, [])) == lines


def test_any_first_documents_have_as_many_bytes_of_each_kind():
  lines = [
    json.dumps({'text': 'x' * size, 'domain': kind}).encode() for kind, size in (('a', 30),) * 6 + (('b', 10),) * 18
  ]
  found = list(split.interleaved(lines))
  assert sorted(found) == sorted(lines)
  for end in range(1, len(found) + 1):
    of_kind = dict.fromkeys('ab', 0)
    for line in found[:end]:
      of_kind[json.loads(line)['domain']] += len(json.loads(line)['text'])
    assert abs(of_kind['a'] - of_kind['b']) <= 30


@pytest.mark.slow
def test_beginnings_are_scored_like_single_documents(undisturbed):
  run = trained_run.TrainedRun(str(undisturbed))
  first, length = run.settings.routing.prefix_tokens, run.settings.model.seq_len
  lines = (undisturbed.parent / 'text.jsonl').read_text().splitlines()[:12]
  documents = [json.loads(line) for line in lines] + [{'text': 'as', 'domain': 'short'}]
  losses, prefixes = beginnings.score(run, documents)
  paths = beginnings.routed(run.router, prefixes)
  found, best = losses.figures(paths), losses.figures(losses.nll.argmin(1))

  nll, counts, chosen = [], [], []
  for document in documents[:-1]:  # the last has only tokens that the router reads
    tokens = run.tokenizer.encode(document['text'])[:length]
    assert len(tokens) > first
    counts.append(len(tokens) - first)
    chosen.append(run.router.path(tokens))
    by_path = [jax.nn.log_softmax(run.path(n).logits(tokens)) for n in range(4)]
    nll.append([-sum(float(logp[i - 1, tokens[i]]) for i in range(first, len(tokens))) for logp in by_path])
  own = [row[n] for row, n in zip(nll, chosen, strict=True)]

  def perplexity(nll, every=slice(None)):
    return pytest.approx(math.exp(sum(nll[every]) / sum(counts[every])), rel=1e-4)

  assert paths.tolist() == chosen and len(set(chosen)) > 1
  assert found['perplexity'] == perplexity(own)
  assert best['perplexity'] == perplexity(list(map(min, nll)))
  kinds = {'consonants': slice(1, None, 2), 'vowels': slice(0, None, 2)}
  by_kind = {kind: perplexity(own, every) for kind, every in kinds.items()}
  assert found['perplexity_by_domain'] == by_kind
  assert found['kinds'] == pytest.approx(math.prod(found['perplexity_by_domain'].values()) ** 0.5)
