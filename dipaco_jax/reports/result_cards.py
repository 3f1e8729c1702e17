"""The first cards of a report: whether the grid beats one dense model, and what each model reached, read and cost."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from dipaco_jax.reports import headline
from dipaco_jax.reports.amounts import count


class Card(NamedTuple):
  """A key figure, what it is, and more lines about it."""

  figure: str
  words: str
  details: Sequence[str] = ()
  is_wide: bool = False


def of_result(r: dict[str, Any]) -> list[Card]:
  """Returns the cards of an evaluated run, the comparison with the dense control first."""
  return [*_verdict(r), _paths(r), *_control(r), *_base(r)]


def _verdict(r: dict[str, Any]) -> list[Card]:
  ratio, interval = r['ratio_to_control'], r['ratio_to_control_interval']
  if ratio is None:
    return []
  value = f'{abs(100 * (ratio - 1)):.1f}%'
  if headline.is_significant(interval):
    figure = f'Paths {value} {"better" if ratio < 1 else "worse"}{_at_what_cost(r)}'
  else:
    figure = f'Not significant: {100 * (ratio - 1):+.1f}%{_at_what_cost(r)}'
  against = f'perplexity of the paths against {headline.dense(r)}'
  ends = f'interval {100 * (interval[0] - 1):+.1f} to {100 * (interval[1] - 1):+.1f}%' if interval else 'no interval'
  ahead = headline.dense_ahead(r)
  if not ahead and (kinds := r['ratio_to_control_by_domain']):
    ahead = f'The paths are ahead on {"all" if len(kinds) > 1 else "the one"} of {len(kinds)} kinds of text'
  serving = 'A token costs as much to serve by a path as by the dense model' if headline.budget(r) else ''
  details = [f'{words}.' for words in (headline.budget(r), serving, ahead) if words]
  if headline.budget(r) and not headline.is_of_equal_cost(r):
    details.insert(2, "A comparison at equal training FLOPs: config.evaluate.control_budget='flops'.")
  return [Card(figure, f'{against}: {ends}{"" if interval else ", as documents are too few"}', details, True)]


def _at_what_cost(r: dict[str, Any]) -> str:
  """Returns ', with 4 times the training FLOPs'; '' where the paths cost as much as the dense control, or unknown."""
  if not r['paths_tokens'] or not r['control_tokens'] or headline.is_of_equal_cost(r):
    return ''
  return f', with {r["paths_tokens"] / r["control_tokens"]:.3g} times the training FLOPs'


def _paths(r: dict[str, Any]) -> Card:
  many = r['paths'] > 1
  whose = 'paths' if many else 'path'
  together = ', all paths together' if many else ''
  details = [_cost(r['paths_tokens'], r['paths_flops'], f'after the base{together}'), _serving(r, many)]
  return _perplexity(r, '', f'validation perplexity of the {whose}', details)


def _control(r: dict[str, Any]) -> list[Card]:
  if not r['control_perplexity']:
    return []
  steps = f'{r["control_steps"]:,} steps after the base' if r['control_steps'] else 'after the base'
  details = [_cost(r['control_tokens'], r['control_flops'], steps), _serving(r, False)]
  return [_perplexity(r, 'control_', f'of {headline.dense(r)}', details)]


def _base(r: dict[str, Any]) -> list[Card]:
  steps = f'{r["pretrain_steps"]:,} steps' if r['pretrain_steps'] else ''
  details = [_cost(r['pretrain_tokens'], r['pretrain_flops'], steps)]
  return [_perplexity(r, 'base_', 'of the base model, from which all start', details)] if r['base_perplexity'] else []


def _perplexity(r: dict[str, Any], whose: str, name: str, details: Sequence[str]) -> Card:
  value = headline.with_interval(r[f'{whose}perplexity'], r[f'{whose}perplexity_interval'])
  number, space, ends = value.partition(' ')
  return Card(number, f'{name}{space}{ends}', [words for words in details if words])


def _cost(tokens: int | None, flops: float | None, how: str) -> str:
  """Returns 'Trained on 1.5 M tokens, 6.1 T FLOPs: 96 steps after the base'; '' where nothing is known."""
  if not tokens:
    return ''
  return (
    f'Trained on {count(tokens)} tokens{f" with {count(flops)} FLOPs" if flops else ""}{f", {how}" if how else ""}.'
  )


def _serving(r: dict[str, Any], has_router: bool) -> str:
  """Says what it costs to serve a token."""
  if not r['serve_flops_per_token']:
    return ''
  more = ', and once for each text the base reads what the router looks at' if has_router else ''
  return f'To serve: {count(r["serve_flops_per_token"])} FLOPs a token{more}.'
