"""Figures in sentences of the pages: computed from the results, and rejected if the results contradict them.

    <!-- lower TABLE ROW OTHER [FIELD or FIELD:FIELD] -->1.23 ± 0.10<!-- / -->

Differences are taken seed by seed, between runs of the same text. A claim that one row is lower or higher than another
needs a 90% interval of the difference that is all on one side of 0; `unclear` is for one that is not, and names the
smallest difference that would be found in 80% of cases. There are two intervals, see intervals.py:

    1.23 ± 0.10         Student's t; behind ± the standard error by seed, its variance pooled over rows of the table.
                        All seeds share one validation text, whose own chance is not in it.
    1.23 [1.02, 1.44]   over sources of validation text and seeds together, where both rows have losses by source.

`under` and `over` compare a ratio with a limit, by Student's t of its own seeds. `figure`, `first`, `percent` and
`overhead` claim nothing, and may be of one seed.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import common
import intervals
import numpy as np
import paths
import runs
import sizes
import source_losses
from common import Column, Results

from dipaco_jax.core.errors import InputError


class Difference(NamedTuple):
  """Of two rows: the mean over seeds, its standard error by seed, and its 90% interval; inf with one seed."""

  mean: float
  error: float
  low: float
  high: float
  df: float
  over_sources: bool  # whether the interval is, too

  @property
  def is_clear(self) -> bool:
    return self.low > 0 or self.high < 0

  def negated(self) -> 'Difference':
    return self._replace(mean=-self.mean, low=-self.high, high=-self.low)


def difference(results: Results, row: str, other: str, field: str) -> Difference:
  """Returns ROW minus OTHER."""
  found = pairs(results, row, other, field)
  by_seed = [mine - others for mine, others in found.values()]
  mean = statistics.fmean(by_seed)
  if len(by_seed) < 2:
    return Difference(mean, math.inf, -math.inf, math.inf, 0, False)
  pool = pooled(results, row, other, field, list(found))
  error = math.sqrt(max(statistics.variance(by_seed), pool.variance) / len(by_seed))
  half = intervals.student(pool.df)[0] * error
  over_sources = interval_over_sources(results, row, other, field, list(found), error, pool.df)
  low, high = over_sources or (mean - half, mean + half)
  return Difference(mean, error, low, high, pool.df, over_sources is not None)


def pooled(results: Results, row: str, other: str, field: str, seeds: Sequence[int]) -> intervals.Pool:
  """Returns the variance of a difference by seed, pooled over the rows of the same kinds that have these seeds."""

  def values(of: str, name: str) -> dict[str, list[float]]:
    rows = {at for at, _ in results if model_kind(results, at) == model_kind(results, of)}
    found = {at: [common.figure(results.get((at, seed)), name) for seed in seeds] for at in sorted(rows)}
    return {at: of_seeds for at, of_seeds in found.items() if None not in of_seeds}

  name, _, other_name = field.partition(':')
  mine, others = values(row, name), values(other, other_name or name)
  if row == other:
    both = sorted(mine.keys() & others.keys())
    return intervals.pool_pairs(np.array([mine[at] for at in both]) - np.array([others[at] for at in both]))
  if mine == others:
    return intervals.pool_alike(np.array([*mine.values()]))
  return intervals.pool_kinds(np.array([*mine.values()]), np.array([*others.values()]))


def model_kind(results: Results, row: str) -> tuple[bool, int]:
  """Whether the paths of a row differ, and the parameters that a token passes: rows of other kinds vary otherwise.

  Where all paths are one model, as of DiLoCo, results vary less with the seed, and of a larger model they vary more.
  """
  record = next(record for (name, _), record in results.items() if name == row)
  stored, passed = record.get('parameters_total') or 0, record.get('parameters_path') or 0
  return stored > passed, passed


def interval_over_sources(
  results: Results, row: str, other: str, field: str, seeds: Sequence[int], error: float, df: float
) -> tuple[float, float] | None:
  """Returns the interval over sources and seeds; None unless all records have losses of which the field is made."""
  records = [[results[name, seed] for seed in seeds] for name in (row, other)]
  if not all(record.get('by_source') for of_row in records for record in of_row):
    return None
  losses = [[source_losses.unpack(record['by_source']) for record in of_row] for of_row in records]
  first = losses[0][0]
  groups_GS = source_losses.groups_of(field, first.kind)
  if groups_GS is None or any(one.names != first.names for of_row in losses for one in of_row):
    return None
  if any((mine.tokens != others.tokens).any() for mine, others in zip(*losses, strict=True)):
    return None
  nats_2NS = np.array([[one.nats['paths'] for one in of_row] for of_row in losses])
  tokens_NS = np.array([one.tokens for one in losses[0]])
  of_loss = np.positive if field.endswith('loss') else np.exp
  shown = of_loss(source_losses.mean_loss(nats_2NS, tokens_NS, groups_GS))
  recorded = [[common.figure(record, field) for record in of_row] for of_row in records]
  if not np.allclose(shown, recorded, rtol=1e-3):  # as of the last version, where `paths` is the best of each path
    return None
  return intervals.over_sources(nats_2NS, tokens_NS, groups_GS, of_loss, error, df)


def lower(results: Results, row: str, other: str, field: str = 'perplexity') -> str:
  """By how much ROW is lower than OTHER."""
  found = difference(results, row, other, field)
  if not found.high < 0:
    raise InputError(f'{row} is not lower than {other} in {field}: {said(found, "+")}')
  return said(found.negated())


def higher(results: Results, row: str, other: str, field: str = 'perplexity') -> str:
  """By how much ROW is higher than OTHER."""
  return lower(results, other, row, ':'.join(reversed(field.split(':'))))


def unclear(results: Results, row: str, other: str, field: str = 'perplexity') -> str:
  """The difference of two rows that are not told apart, and the smallest that would be found in 80% of cases."""
  found = difference(results, row, other, field)
  if found.is_clear or math.isinf(found.error):
    raise InputError(f'{row} and {other} are told apart in {field}, or have one seed: {said(found, "+")}')
  return f'{said(found, "+")}, detectable from {detectable(found)}'


def detectable(found: Difference) -> str:
  """Two digits of the smallest difference that would be found."""
  smallest = intervals.smallest_detectable((found.high - found.low) / 2, found.df)
  return f'{smallest:.{max(0, 1 - math.floor(math.log10(smallest)))}f}' if smallest else '0'


def versus(results: Results, row: str, other: str, field: str = 'perplexity') -> str:
  """A cell of a table: ROW less OTHER, bold where ROW is lower, in brackets where they are not told apart."""
  found = difference(results, row, other, field)
  if math.isinf(found.error):
    raise InputError(f'{row} and {other} have one seed: a cell needs two')
  words = said(found, '+')
  return f'({words})' if not found.is_clear else f'**{words}**' if found.mean < 0 else words


def within(results: Results, row: str, other: str, field: str = 'loss') -> str:
  """The mean difference, if it is no larger than OTHER's standard deviation over seeds."""
  found = difference(results, row, other, field)
  spread = common.figures(results, other, Column('', field))
  if len(spread) < 2 or not abs(found.mean) <= statistics.stdev(spread):
    raise InputError(f'{row} is not within the spread of {other} in {field}: {found.mean:+.3g}')
  return said(found, '+')


def said(found: Difference, sign: str = '') -> str:
  """Mean and error or interval, with decimals that show a digit or two of a small difference and of its error."""
  mean, error = found.mean, found.error
  least = min(abs(mean), 5 * error) if error else abs(mean)
  form = f'{sign}.{2 if least >= 0.1 or not mean else 3 if least >= 0.002 else 4}f'
  if found.over_sources:
    return f'{mean:{form}} [{found.low:{form}}, {found.high:{form}}]'
  return f'{mean:{form}} ± {error:{form.lstrip("+")}}'


def figure(results: Results, row: str, field: str = 'perplexity', form: str = '.2f') -> str:
  """A mean over seeds."""
  found = common.figures(results, row, Column('', field))
  if not found:
    raise InputError(f'there is no run of {row} that has {field}')
  return f'{statistics.fmean(found):{form}}'


def first(results: Results, row: str, field: str = 'perplexity', form: str = '.2f') -> str:
  """The figure of the lowest seed, beside rows that have no other."""
  lowest = min(seed for name, seed in results if name == row)
  return figure({(row, lowest): results[row, lowest]}, row, field, form)


def overhead(results: Results, row: str, of: str) -> str:
  """The FLOPs of 'features' or 'scores' beside those of the paths' training, mean over seeds."""
  found = [runs.routing_flops(record)[of] for (name, _), record in results.items() if name == row]
  return f'{100 * statistics.fmean(found):.0f}%'


def percent(results: Results, row: str, other: str, field: str = 'perplexity') -> str:
  """ROW as a share of OTHER, means over the seeds that both have."""
  mine, others = zip(*pairs(results, row, other, field).values(), strict=True)
  return f'{100 * statistics.fmean(mine) / statistics.fmean(others):.1f}%'


def under(results: Results, row: str, other: str, limit: str, field: str = 'perplexity') -> str:
  """ROW as a share of OTHER, by seed, which is below LIMIT percent."""
  mean, half = ratio(results, row, other, field)
  if not mean + half < float(limit):
    raise InputError(f'{row} is not below {limit}% of {other} in {field}: {mean:.1f} ± {half:.1f}%')
  return f'{mean:.1f}%'


def over(results: Results, row: str, other: str, limit: str, field: str = 'perplexity') -> str:
  """ROW as a share of OTHER, by seed, which is above LIMIT percent."""
  mean, half = ratio(results, row, other, field)
  if not mean - half > float(limit):
    raise InputError(f'{row} is not above {limit}% of {other} in {field}: {mean:.1f} ± {half:.1f}%')
  return f'{mean:.1f}%'


def ratio(results: Results, row: str, other: str, field: str) -> tuple[float, float]:
  """ROW as a percentage of OTHER: the mean over seeds, and half of its interval; inf with one seed."""
  found = [100 * mine / others for mine, others in pairs(results, row, other, field).values()]
  return statistics.fmean(found), intervals.half_width(found)


def pairs(results: Results, row: str, other: str, field: str) -> dict[int, tuple[float, float]]:
  """A field of ROW and of OTHER, by every seed that both have; FIELD:FIELD where OTHER's is another."""
  seeds = sorted({seed for name, seed in results if name == row} & {seed for name, seed in results if name == other})
  mine, _, others = field.partition(':')
  found = {n: (common.figure(results[row, n], mine), common.figure(results[other, n], others or mine)) for n in seeds}
  if not (found := {n: pair for n, pair in found.items() if None not in pair}):
    raise InputError(f'there are no two runs of {row} and {other} that have {field}')
  return found


def exponent(results: Results, kind: str) -> str:
  """Of table (2), with its interval over seeds; kind: as in paths.KINDS."""
  found = paths.exponent(results, kind)
  if len(found) < 2:
    raise InputError(f'the exponent of {kind} has no interval: there are {len(found)} seeds')
  return common.cell(found, '.3f', interval=True)


def law(results: Results, size: str) -> str:
  """Of table (3), with the least and the most that each exponent is where one of the rows is left out."""
  log_a, *exponents = sizes.law(size, results)[0]
  ranges = sizes.ranges(size, results)
  terms = [
    f'{x}^-{b:.3f} ({low:.3f} to {high:.3f})' for x, b, (low, high) in zip('NPD', exponents, ranges, strict=True)
  ]
  return ' '.join([f'{math.exp(log_a):.2f}', *terms])


def predicted(results: Results, size: str, row: str) -> str:
  """Returns the loss of a row that the law was not fitted on, and the prediction of the law."""
  loss, said = sizes.law(size, results)[1][row]
  return f'{loss:.3f}, where the law says {said:.3f}'


KINDS = {
  f.__name__: f
  for f in (
    lower,
    higher,
    unclear,
    versus,
    within,
    figure,
    first,
    overhead,
    percent,
    under,
    over,
    exponent,
    law,
    predicted,
  )
}


def render(words: Sequence[str], results: Results, part: Callable[[str], str] = lambda row: '') -> str:
  """What stands between the markers.

  Args:
    words: the kind of claim and what it is of, without the table.
    results: of the table.
    part: maps a row to the part of the table that it belongs to; variances are pooled over the parts of a claim.
  """
  kind, *of = words
  if kind not in KINDS:
    raise InputError(f'there is no claim {kind!r}: there are {", ".join(KINDS)}')
  rows = {name for name, _ in results}
  if parts := {part(word) for word in of if word in rows}:
    results = {at: record for at, record in results.items() if part(at[0]) in parts}
  return KINDS[kind](results, *of)
