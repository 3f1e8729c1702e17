"""Claims on the page of experiments are computed from results, and rejected if the results contradict them."""

import doctest
import itertools
import sys

import numpy as np
import pytest
import repository

from dipaco_jax.core import bootstrap

sys.path.insert(0, str(repository.ROOT / 'experiments'))
import claims  # after the path
import fits
import intervals
import readme
import source_losses


def test_a_claim_needs_an_interval_on_one_side_of_0():
  def of(name, *found):
    return {(name, seed): {'perplexity': x} for seed, x in enumerate(found)}

  sure = of('dense', 10.0, 12.0, 11.0) | of('grid', 9.0, 10.9, 9.8)  # less by 1.0, 1.1, 1.2
  assert claims.render(['lower', 'grid', 'dense'], sure) == '1.10 ± 0.06'
  assert claims.render(['higher', 'dense', 'grid'], sure) == '1.10 ± 0.06'
  assert claims.render(['percent', 'grid', 'dense'], sure) == '90.0%'
  assert claims.render(['under', 'grid', 'dense', '93'], sure) == '90.0%'  # 90.0, 90.8, 89.1
  assert claims.render(['over', 'grid', 'dense', '88'], sure) == '90.0%'
  assert claims.render(['figure', 'grid', 'perplexity', '.1f'], sure) == '9.9'
  assert claims.render(['within', 'grid', 'dense', 'perplexity'], of('dense', 10.0, 12.0) | of('grid', 9.0, 12.1)) == (
    '-0.45 ± 0.55'
  )
  both = {at: record | {'again': record['perplexity'] - 2 - at[1] / 10} for at, record in of('grid', 9.0, 9.5).items()}
  assert claims.render(['lower', 'grid', 'grid', 'again:perplexity'], both) == '2.05 ± 0.05'
  assert claims.render(['higher', 'grid', 'grid', 'perplexity:again'], both) == '2.05 ± 0.05'
  unsure = of('dense', 10.0, 12.0, 11.0) | of('grid', 9.0, 12.5, 10.9)
  assert claims.render(['unclear', 'grid', 'dense'], unsure) == '-0.20 ± 0.44, detectable from 1.7'
  assert claims.render(['versus', 'grid', 'dense'], sure) == '**-1.10 ± 0.06**'
  assert claims.render(['versus', 'dense', 'grid'], sure) == '+1.10 ± 0.06'
  assert claims.render(['versus', 'grid', 'dense'], unsure) == '(-0.20 ± 0.44)'
  for words, results in (
    (['lower', 'dense', 'grid'], sure),
    (['unclear', 'grid', 'dense'], sure),
    (['lower', 'grid', 'dense'], unsure),
    (['under', 'grid', 'dense', '91'], sure),  # the mean is, its interval's end is not
    (['over', 'grid', 'dense', '89'], sure),
    (['under', 'grid', 'dense', '200'], of('dense', 10.0) | of('grid', 1.0)),
    (['under', 'grid', 'gone', '200'], sure),
    (['within', 'grid', 'dense', 'perplexity'], sure),  # 1.1 of 1.0
    (['within', 'grid', 'dense', 'perplexity'], of('dense', 10.0) | of('grid', 10.0)),
    (['lower', 'grid', 'dense'], of('dense', 10.0) | of('grid', 1.0)),
    (['unclear', 'grid', 'gone'], sure),
    (['unclear', 'grid', 'dense'], of('dense', 10.0) | of('grid', 10.0)),
    (['versus', 'grid', 'dense'], of('dense', 10.0) | of('grid', 10.0)),
    (['nicer', 'grid', 'dense'], sure),
  ):
    with pytest.raises(ValueError):
      claims.render(words, results)


def of_kind(name: str, models: int, *found: float, by_source=()) -> dict:
  """Results of a row by seed, whose paths are so many models."""
  of = {'parameters_path': 10, 'parameters_total': 10 * models}
  by_source = by_source or [None] * len(found)
  return {
    (name, seed): of | {'perplexity': x, 'by_source': losses}
    for seed, (x, losses) in enumerate(zip(found, by_source, strict=True))
  }


def test_a_variance_is_pooled_over_rows_of_the_same_kinds_and_is_never_below_its_own():
  grids = {'grid': (9.0, 10.0, 11.0), 'own': (8.8, 9.8, 10.8), 'flat': (9.0, 10.4, 11.0)}
  dense = {'dense': (9.5, 9.5, 9.5), 'long': (9.4, 9.5, 9.3)}
  results = {}
  for models, rows in ((4, grids), (1, dense)):
    for name, found in rows.items():
      results |= of_kind(name, models, *found)
  # Of the grids' differences the variances are 0, 0.16 / 3 and 0.16 / 3, of the dense rows' one 0.01.
  assert claims.difference(results, 'long', 'dense', 'perplexity').error == pytest.approx((0.01 / 3) ** 0.5)
  assert claims.difference(results, 'own', 'grid', 'perplexity').error == pytest.approx((0.32 / 9 / 3) ** 0.5)
  assert claims.difference(results, 'flat', 'grid', 'perplexity').error == pytest.approx((0.16 / 3 / 3) ** 0.5)
  assert claims.difference(results, 'grid', 'dense', 'perplexity').error > (0.9 / 3) ** 0.5
  other_part = results | of_kind('paths_own', 4, 5.0, 9.0, 20.0)
  assert claims.difference(other_part, 'own', 'grid', 'perplexity').error > 1
  of_part = claims.render(['unclear', 'own', 'grid'], other_part, readme.beginnings.part)
  assert of_part == claims.render(['unclear', 'own', 'grid'], results) == '-0.20 ± 0.11, detectable from 0.33'


def test_rows_with_losses_are_compared_over_sources_too():
  """Of sources that differ in what a grid gains: seeds agree, so that the interval is that of sources."""
  rng = np.random.default_rng(0)
  tokens, kind = rng.integers(60, 900, 60).astype(float), np.array(['law_de', 'code'] * 30)
  base = rng.normal(3.0, 0.3, 60)

  def row(name: str, models: int, of: np.ndarray) -> dict:
    losses = source_losses.Losses('x', kind, tokens, {'paths': of * tokens, 'base': base * tokens})
    packed = [source_losses.pack(losses)] * 3
    found = source_losses.perplexity(losses, ['law_de', 'code'])
    results = of_kind(name, models, found, found, found, by_source=packed)
    by_domain = {k: source_losses.perplexity(losses, [k]) for k in ('law_de', 'code')}
    return {at: record | {'perplexity_by_domain': by_domain, 'other': found - 1} for at, record in results.items()}

  results = row('dense', 1, base) | row('own', 4, base - 0.05 + rng.normal(0, 0.5, 60))
  found = claims.difference(results, 'own', 'dense', 'perplexity')
  assert found.over_sources and found.low < -0.5 < found.high and found.low < found.mean < found.high
  assert claims.render(['unclear', 'own', 'dense'], results).startswith(f'{found.mean:+.2f} [{found.low:+.2f}, ')
  assert claims.difference(results, 'own', 'dense', 'perplexity_by_domain.law_de').over_sources
  assert not claims.difference(results, 'own', 'dense', 'other').over_sources  # no losses are known of it
  wrong = results | {at: record | {'perplexity': 2.0} for at, record in results.items() if at == ('own', 1)}
  assert not claims.difference(wrong, 'own', 'dense', 'perplexity').over_sources  # of other versions
  without = results | {('own', 0): results['own', 0] | {'by_source': None}}
  assert claims.render(['lower', 'own', 'dense'], without).endswith(' ± 0.00') == (found.mean < 0)


def test_means_over_kinds_of_text_leave_out_those_that_they_name():
  kinds = {'law_de': 2.0, 'code': 8.0, 'wiki_en': 16.0, 'law_en': 4.0, 'none': None}
  results = {('grid', seed): {'perplexity': 1.0 + seed, 'by': kinds} for seed in (0, 1)}
  assert claims.render(['figure', 'grid', 'by.others'], results) == '8.00'
  assert claims.render(['figure', 'grid', 'by.read'], results) == '8.00'  # 4 and 16
  assert claims.render(['figure', 'grid', 'by.law_de'], results) == '2.00'
  assert claims.render(['first', 'grid'], results) == '1.00' and claims.render(['figure', 'grid'], results) == '1.50'


def test_what_routing_takes_beside_training():
  """Of width 32, 2 blocks of MLP 86, 1,024 tokens of vocabulary, rows of 128, prefixes of 32, 1.5% router data."""
  blocks, head, attention = 2 * (2 * 32 * 64 + 3 * 32 * 86), 32 * 1024, 12 * 2 * 32
  tokens, trained = 128_000, 256_000
  record = {'variant': 'micro,dipaco', 'text_tokens': tokens, 'paths': 4}
  results = {('grid', 0): record | {'train_tokens': trained + 5, 'pretrain_tokens': 5}}
  whole, prefix = 6 * (blocks + head) + attention * 128, 6 * blocks + attention * 32
  features, scores = tokens / 4 * prefix / 3 / (trained * whole), 4 * 0.015 * tokens / 3 / trained
  assert claims.render(['overhead', 'grid', 'features'], results) == f'{100 * features:.0f}%' == '2%'
  assert claims.render(['overhead', 'grid', 'scores'], results) == f'{100 * scores:.0f}%' == '1%'


def test_a_surface_is_found_again():
  points = [(n, p, d, 5 * n**-0.1 * p**-0.2 * d**-0.3) for n in (1, 2, 3) for p in (1, 4) for d in (10, 40)]
  assert fits.at(fits.surface(points), 7, 9, 100) == pytest.approx(5 * 7**-0.1 * 9**-0.2 * 100**-0.3)
  with pytest.raises(ValueError, match='vary each'):
    fits.surface([point for point in points if point[1] == 1])


def test_laws_of_the_tables():
  grids = {(f'dense_{n}', seed): {'perplexity': 9.0} for n in (1, 4) for seed in (0, 1)}  # one of more than one path
  grids |= {(f'grid_{n}', seed): {'perplexity': 2 * n**-b} for n in (4, 16, 36) for seed, b in enumerate((0.1, 0.12))}
  assert claims.render(['exponent', 'grid'], grids) == '0.110 (0.047 to 0.173)'
  with pytest.raises(ValueError, match='no interval'):
    claims.render(['exponent', 'dense'], grids)
  found = {}
  for row in readme.sizes.rows('micro'):
    width, n, steps = map(int, row.name.split('_'))
    figures = {'parameters_path': (width + 1024) * width, 'paths': n * n, 'train_tokens': steps * n * n}
    figures |= {'pretrain_tokens': 0, 'variant': f'micro,{row.method}'}
    figures['changes'] = {} if width == 32 else row.changes  # as a run has it that another table has trained
    loss = 9 * (width**2) ** -0.05 * (n * n) ** -0.02 * steps**-0.1
    found[row.name, 0] = figures | {'validation_loss': loss}
  assert claims.render(['law', 'micro'], found) == (
    '9.00 N^-0.050 (0.050 to 0.050) P^-0.020 (0.020 to 0.020) D^-0.100 (0.100 to 0.100)'
  )
  loss, said = claims.render(['predicted', 'micro', '48_3_1000'], found).split(', where the law says ')
  assert loss == said


def test_examples_of_intervals_run():
  assert doctest.testmod(intervals, extraglobs={'np': np}) == (0, 3)


def test_quantiles_are_those_of_student():
  from scipy import stats  # a second

  for df, quantiles in intervals.STUDENT.items():
    assert quantiles == pytest.approx(stats.t.ppf([0.95, 0.8], df), abs=6e-4)


def test_a_pooled_variance_is_the_mean_over_pairs_of_rows():
  rng = np.random.default_rng(0)
  rows_RN, others_QN = rng.normal(size=(5, 3)), rng.normal(size=(4, 3))

  def mean_over(pairs):
    return np.mean([(a - b).var(ddof=1) for a, b in pairs])

  alike = intervals.pool_alike(rows_RN)
  assert alike == pytest.approx((mean_over(itertools.combinations(rows_RN, 2)), 8))
  kinds = intervals.pool_kinds(rows_RN, others_QN)
  assert kinds.variance == pytest.approx(mean_over(itertools.product(rows_RN, others_QN))) and 2 < kinds.df < 16
  pairs = intervals.pool_pairs(rows_RN)
  assert pairs.variance == pytest.approx(np.mean(rows_RN.var(axis=1, ddof=1))) and 2 < pairs.df < 10
  assert intervals.pool_pairs(rows_RN[:1]) == pytest.approx((rows_RN[0].var(ddof=1), 2))
  assert intervals.pool_kinds(rows_RN[:1] * 0, others_QN * 0).variance == 0


def test_an_interval_over_sources_covers_the_truth_where_either_noise_is_most(monkeypatch):
  """88% in 1,000 draws; here of 100, less three standard errors."""
  monkeypatch.setattr(bootstrap, 'RESAMPLES', 300)
  rng = np.random.default_rng(0)
  for of_seed, of_source in ((0.3, 0.1), (0.1, 3.0)):
    covered = 0
    for _ in range(100):
      mine_NS = of_seed * rng.normal(size=(3, 1)) + of_source * rng.normal(size=40)
      error = of_seed * (rng.chisquare(12) / 12 / 3) ** 0.5
      nats_2NS = np.stack([3 + mine_NS, np.full((3, 40), 3.0)])
      low, high = intervals.over_sources(nats_2NS, np.ones((3, 40)), np.ones((1, 40), bool), np.positive, error, 12)
      covered += low < 0 < high
    assert covered >= 78, (of_seed, of_source)


def test_an_interval_is_of_the_sources_of_its_groups():
  """Without noise of seeds: of one kind, or a mean of kinds with equal weights; none of too few sources."""
  rng = np.random.default_rng(0)
  kind_S = np.arange(60) < 50
  tokens_NS = rng.integers(50, 200, (2, 60)).astype(float)
  loss_S = np.where(kind_S, 3.0, 5.0)
  nats_2NS = np.stack([(loss_S - 0.5) * tokens_NS, loss_S * tokens_NS])

  def interval(*groups):
    found = intervals.over_sources(nats_2NS, tokens_NS, np.stack(groups), np.exp, 0.0, 2)
    return found and pytest.approx(found, rel=1e-6)

  both = np.exp(3.5) - np.exp(4.0)
  assert (np.exp(2.5) - np.exp(3),) * 2 == interval(kind_S) and (both,) * 2 == interval(kind_S, ~kind_S)
  assert interval(kind_S & (np.arange(60) < 7)) is None
