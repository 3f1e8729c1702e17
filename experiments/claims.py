"""Figures in sentences of README.md: computed from the results, and rejected if the results contradict them.

    <!-- lower TABLE ROW OTHER [FIELD or FIELD:FIELD] -->1.23 ± 0.10<!-- / -->

Differences are taken seed by seed, between runs of the same text; behind ± is the standard error of their mean. A claim
that one row is lower or higher than another needs a difference that is above chance with 95% by Student's t, of two
seeds or more, and above twice the standard error; `unclear` is for a difference that is not. `under` and `over` compare
a ratio with a limit, likewise. All seeds share one validation text, whose own chance is not in these. `figure`,
`first`, `percent` and `overhead` claim nothing, and may be of one seed.
"""

import math
import statistics
from collections.abc import Sequence

import common
import intervals
import paths
import runs
import sizes
from common import Column, Results

from dipaco_jax.core.errors import InputError


def difference(results: Results, row: str, other: str, field: str) -> tuple[float, float, float]:
  """Returns the mean over seeds of ROW minus OTHER, its standard error, and its minimum; inf with one seed."""
  found = [mine - others for mine, others in pairs(results, row, other, field)]
  error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.inf
  return statistics.fmean(found), error, intervals.half_width(found)


def lower(results: Results, row: str, other: str, field: str = 'perplexity') -> str:
  """By how much ROW is lower than OTHER."""
  mean, error, sure = difference(results, row, other, field)
  if not mean < -sure:
    raise InputError(f'{row} is not lower than {other} in {field}: {mean:+.3g} ± {error:.2g}')
  return said(-mean, error)


def higher(results: Results, row: str, other: str, field: str = 'perplexity') -> str:
  """By how much ROW is higher than OTHER."""
  return lower(results, other, row, ':'.join(reversed(field.split(':'))))


def unclear(results: Results, row: str, other: str, field: str = 'perplexity') -> str:
  """The difference of two rows that the seeds do not tell apart."""
  mean, error, sure = difference(results, row, other, field)
  if not abs(mean) <= sure < math.inf:
    raise InputError(f'{row} and {other} are told apart in {field}: {mean:+.3g} ± {error:.2g}')
  return said(mean, error, '+')


def versus(results: Results, row: str, other: str, field: str = 'perplexity') -> str:
  """A cell of a table: ROW less OTHER, bold where ROW is lower, in brackets where they are not told apart."""
  mean, error, sure = difference(results, row, other, field)
  if math.isinf(sure):
    raise InputError(f'{row} and {other} have one seed: a cell needs two')
  words = said(mean, error, '+')
  return f'({words})' if abs(mean) <= sure else f'**{words}**' if mean < 0 else words


def within(results: Results, row: str, other: str, field: str = 'loss') -> str:
  """The mean difference, if it is no larger than OTHER's standard deviation over seeds."""
  mean, error, _ = difference(results, row, other, field)
  spread = common.figures(results, other, Column('', field))
  if len(spread) < 2 or not abs(mean) <= statistics.stdev(spread):
    raise InputError(f'{row} is not within the spread of {other} in {field}: {mean:+.3g}')
  return said(mean, error, '+')


def said(mean: float, error: float, sign: str = '') -> str:
  """Both, with decimals that show a digit or two of a small difference and of its standard error."""
  least = min(abs(mean), 5 * error) if error else abs(mean)
  places = 2 if least >= 0.1 or not mean else 3 if least >= 0.002 else 4
  return f'{mean:{sign}.{places}f} ± {error:.{places}f}'


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
  mine, others = zip(*pairs(results, row, other, field), strict=True)
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
  found = [100 * mine / others for mine, others in pairs(results, row, other, field)]
  return statistics.fmean(found), intervals.half_width(found)


def pairs(results: Results, row: str, other: str, field: str) -> list[tuple[float, float]]:
  """A field of ROW and of OTHER, of every seed that both have; FIELD:FIELD where OTHER's is another."""
  seeds = sorted({seed for name, seed in results if name == row} & {seed for name, seed in results if name == other})
  mine, _, others = field.partition(':')
  found = [(common.figure(results[row, n], mine), common.figure(results[other, n], others or mine)) for n in seeds]
  if not (found := [pair for pair in found if None not in pair]):
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


def render(words: Sequence[str], results: Results) -> str:
  """What stands between the markers; words: the kind of claim and what it is of, without the table."""
  kind, *of = words
  if kind not in KINDS:
    raise InputError(f'there is no claim {kind!r}: there are {", ".join(KINDS)}')
  return KINDS[kind](results, *of)
