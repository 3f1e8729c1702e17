"""Invariant 10: perplexity equals a direct computation, document by document."""

import json
import math

import numpy as np
import plain_transformer
import pytest
import safetensors.numpy
import sentencepiece
import small

from dipaco_jax.algorithm import modules
from dipaco_jax.config import settings
from dipaco_jax.data import loader, sequences
from dipaco_jax.models import transformer
from dipaco_jax.storage import module_store
from dipaco_jax.training import evaluation

PREFIX = 32
# Sums of float32 in the model against float64: relative, of losses of a few nats made of sums over 64 tokens or 300.
CLOSE = 300 * small.EPS


class Direct:
  """The finished run, and its validation losses computed anew: {which: [(path, domain, nats, targets, bytes)]}."""

  def __init__(self, workdir):
    self.workdir = workdir
    self.settings = settings.from_dict(json.loads((workdir / 'config.json').read_text()))
    self.report = json.loads((workdir / 'report.json').read_text())
    s, pieces = self.settings, sentencepiece.SentencePieceProcessor(model_file=str(workdir / 'tokenizer.model'))
    made = transformer.make_model(s.model, pieces.vocab_size())
    self.layout = modules.make_layout(s.grid, s.levels, transformer.shapes(made))
    domains = json.loads((workdir / 'sequences' / 'meta.json').read_text())['domains']
    paths = np.load(workdir / 'routing' / '0' / 'validation.npy')
    found = sequences.Sequences(workdir / 'sequences', 'validation')
    base = safetensors.numpy.load_file(workdir / 'base' / 'params.safetensors')
    control = module_store.load_path(workdir / 'control', modules.make_layout((), (('all', '.*', ()),), base), 0)
    self.rows = {'best': [], 'final': [], 'base': [], 'control': []}
    for i, path in enumerate(paths):
      sequence = found[i]
      tokens = sequence.tokens.astype(int)
      late = tokens[PREFIX:].tolist()
      size = len(pieces.decode(tokens.tolist()).encode()) - len(pieces.decode(tokens[:PREFIX].tolist()).encode())
      models = {'best': self.params(path), 'final': self.params(path, s.train.phases), 'base': base, 'control': control}
      for which, params in models.items():
        nats = plain_transformer.nll(params, tokens, s.model)[PREFIX - 1 :]
        assert len(nats) == len(late)
        self.rows[which].append((int(path), domains[sequence.domain], nats.sum(), len(late), size))

  def params(self, path, version=None):
    return module_store.load_path(self.workdir, self.layout, int(path), version)

  def perplexity(self, which, keep=lambda row: True):
    kept = [row for row in self.rows[which] if keep(row)]
    return math.exp(sum(row[2] for row in kept) / sum(row[3] for row in kept))


@pytest.fixture(scope='module')
def direct(undisturbed):
  return Direct(undisturbed)


def test_perplexity(direct):
  assert direct.report['validation_tokens'] == sum(row[3] for row in direct.rows['best'])
  assert direct.report['perplexity'] == pytest.approx(direct.perplexity('best'), rel=CLOSE)
  assert direct.report['perplexity_final'] == pytest.approx(direct.perplexity('final'), rel=CLOSE)
  assert direct.report['base_perplexity'] == pytest.approx(direct.perplexity('base'), rel=CLOSE)
  assert direct.report['control_perplexity'] == pytest.approx(direct.perplexity('control'), rel=CLOSE)


def test_ratios_are_of_the_same_documents(direct):
  for other in ('base', 'control'):
    expected = direct.perplexity('best') / direct.perplexity(other)
    assert direct.report[f'ratio_to_{other}'] == pytest.approx(expected, rel=2 * CLOSE)
    low, high = direct.report[f'ratio_to_{other}_interval']
    assert low < expected < high
  low, high = direct.report['perplexity_interval']
  assert low < direct.report['perplexity'] < high
  tokens = [sum(row[3] for row in direct.rows['best'] if row[0] == path) for path in range(4)]
  assert direct.report['validation_tokens_by_path'] == tokens
  assert direct.report['validation_documents'] == len(direct.rows['best'])


def test_by_path(direct):
  for path, found in enumerate(direct.report['perplexity_by_path']):
    assert found == pytest.approx(direct.perplexity('best', lambda row, path=path: row[0] == path), rel=CLOSE)
    base = direct.perplexity('base', lambda row, path=path: row[0] == path)
    assert direct.report['base_perplexity_by_path'][path] == pytest.approx(base, rel=CLOSE)


def test_by_domain(direct):
  assert set(direct.report['perplexity_by_domain']) == {'vowels', 'consonants'}
  for name, which in (('perplexity_by_domain', 'best'), ('base_perplexity_by_domain', 'base')):
    for domain, found in direct.report[name].items():
      expected = direct.perplexity(which, lambda row, domain=domain: row[1] == domain)
      assert found == pytest.approx(expected, rel=CLOSE)


def test_bits_per_byte(direct):
  rows = direct.rows['best']
  expected = sum(row[2] for row in rows) / math.log(2) / sum(row[4] for row in rows)
  assert direct.report['bits_per_byte'] == pytest.approx(expected, rel=CLOSE)


def test_validation_while_training_is_that_of_its_version(direct):
  rows = [json.loads(line) for line in (direct.workdir / 'metrics.jsonl').read_text().splitlines()]
  last = [row for row in rows if (row['kind'], row['stage']) == ('evaluation', 'train')][-1]
  assert last['phase'] == direct.settings.train.phases
  assert last['perplexity'] == pytest.approx(direct.perplexity('final'), rel=CLOSE)


def test_packed_holdout_rows_count_every_sequence_as_if_alone(direct):
  s = direct.settings
  rows = [json.loads(line) for line in (direct.workdir / 'metrics.jsonl').read_text().splitlines()]
  found = [row['holdout_loss_by_path'] for row in rows if (row['kind'], row['stage']) == ('phase', 'train')][-1]
  packed = 0
  for path in range(4):
    file = direct.workdir / 'shards' / '0' / str(path) / 'holdout.array_record'
    nats, count = 0.0, 0
    for tokens, segments in zip(*loader.read_rows(str(file), 0, 10**6, s.model.seq_len), strict=True):
      packed += segments.max() > 1
      for segment in range(1, segments.max() + 1):
        alone = tokens[segments == segment]
        losses = plain_transformer.nll(direct.params(path, s.train.phases), alone, s.model)[PREFIX - 1 :]
        nats, count = nats + losses.sum(), count + len(losses)
    assert found[path] == pytest.approx(nats / count, rel=CLOSE)


def test_losses_of_packed_rows_by_program(tmp_path):
  """Rows that are packed for certain, of paths with unequal numbers of rows, more than a batch of them, or none."""
  s = small.settings({'a': 4})
  made = small.make_programs(s, 2)
  params = {path: small.base(made.model, path) for path in range(4)}
  rows = evaluation.Rows([3, 6, 0, 4], lambda path, start, stop: whole(path, start, stop), 4, small.LENGTH)
  found = evaluation.losses(made, lambda turn: evaluation.in_flight(made, turn, params.get), rows)
  for path, num_rows in enumerate(rows.counts):
    assert len(found.nll[path]) == len(found.targets[path]) == num_rows
    for row in range(num_rows):
      (tokens,), (segments,) = whole(path, row, row + 1)
      each = [plain_transformer.nll(params[path], tokens[segments == k], s.model)[7:] for k in (1, 2)]
      assert found.targets[path][row] == sum(map(len, each)) == 20 - 8 + 16 - 8
      assert found.nll[path][row] == pytest.approx(sum(x.sum() for x in each), rel=CLOSE)
  means = evaluation.mean_by_path(found)
  assert means[2] is None and means[0] == pytest.approx(found.nll[0].sum() / 60)


def whole(path, start, stop):
  tokens, segments = small.batch(path, 9, 8)
  return tokens[start:stop], segments[start:stop]
