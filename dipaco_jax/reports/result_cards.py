"""The first cards of a report: whether the paths beat the dense control, and what each model reached, read and cost."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from dipaco_jax.reports import headline
from dipaco_jax.reports.amounts import count


class Card(NamedTuple):
  """A key figure, its title, and details."""

  figure: str
  title: str
  details: Sequence[str] = ()
  is_wide: bool = False
  kind: str = ''  # of a verdict: 'gain', 'loss', or 'open' where chance may explain the difference


def of_result(r: dict[str, Any]) -> list[Card]:
  """Returns the cards of an evaluated run, the comparison with the dense control first."""
  return [*_verdict(r), _paths(r), *_control(r), *_base(r)]


def _verdict(r: dict[str, Any]) -> list[Card]:
  ratio, interval = r['ratio_to_control'], r['ratio_to_control_interval']
  if ratio is None:
    return []
  value = f'{abs(100 * (ratio - 1)):.1f}%'
  kind = ('gain' if ratio < 1 else 'loss') if headline.is_significant(interval) else 'open'
  figure = {
    'gain': f'Better than the dense control: perplexity {value} lower{_at_what_cost(r)}',
    'loss': f'Worse than the dense control: perplexity {value} higher{_at_what_cost(r)}',
    'open': f'No significant difference from the dense control: {100 * (ratio - 1):+.1f}%{_at_what_cost(r)}',
  }[kind]
  against = f'Perplexity of the paths against {headline.dense(r)}'
  ends = f'interval {100 * (interval[0] - 1):+.1f} to {100 * (interval[1] - 1):+.1f}%' if interval else 'no interval'
  ahead = headline.dense_ahead(r)
  if not ahead and (kinds := r['ratio_to_control_by_domain']):
    ahead = f'The paths are better on {"every" if len(kinds) > 1 else "the only"} kind of text'
  serving = 'A path and the dense control cost the same to serve, per token' if headline.budget(r) else ''
  other = ('steps', 'steps') if headline.is_of_equal_cost(r) else ('training FLOPs', 'flops')
  other_budget = f'To compare at equal {other[0]}, set --config.evaluate.control_budget={other[1]}'
  other_budget = other_budget if headline.budget(r) and r['paths'] > 1 else ''
  details = [f'{detail}.' for detail in (headline.budget(r), serving, other_budget, ahead, _certainty(r)) if detail]
  return [Card(figure, f'{against}: {ends}{"" if interval else ", as documents are too few"}.', details, True, kind)]


def _certainty(r: dict[str, Any]) -> str:
  """Explains the sources of chance that an interval covers, and those that it does not."""
  if not r['ratio_to_control_interval']:
    return 'This is one training run with one seed'
  known = r['validation_documents_by_domain'] or {}
  kinds = sum(bool(n) for n in known.values())
  source = f' of {kinds} kinds of text' if kinds > 1 else ''
  return (
    'Both models were scored on the same documents, and the interval is that of the ratio of their perplexities. It '
    f'covers only the choice of validation documents{source}: it is that of one training run with one seed, and does '
    'not include the noise of training'
  )


def _at_what_cost(r: dict[str, Any]) -> str:
  """Returns ', with 4 times the training FLOPs', or ', at equal training FLOPs'; '' if that is not known."""
  if not r['paths_tokens'] or not r['control_tokens']:
    return ''
  if headline.is_of_equal_cost(r):
    return ', at equal training FLOPs'
  return f', with {r["paths_tokens"] / r["control_tokens"]:.3g} times the training FLOPs'


def _paths(r: dict[str, Any]) -> Card:
  many = r['paths'] > 1
  whose = 'paths' if many else 'path'
  together = ', all paths together' if many else ''
  cost = _cost(r['paths_tokens'], r['paths_flops'], f'after the base{together}')
  details = [cost, _epochs(r['epochs_by_path'], 'its shard', many), _serving(r, many)]
  return _perplexity(r, '', f'validation perplexity of the {whose}', details)


def _control(r: dict[str, Any]) -> list[Card]:
  if not r['control_perplexity']:
    return []
  steps = f'{r["control_steps"]:,} steps after the base' if r['control_steps'] else 'after the base'
  cost = _cost(r['control_tokens'], r['control_flops'], steps)
  details = [cost, _epochs(r['control_epochs'], 'all training text'), _serving(r, False)]
  return [_perplexity(r, 'control_', f'validation perplexity of {headline.dense(r)}', details)]


def _base(r: dict[str, Any]) -> list[Card]:
  steps = f'{r["pretrain_steps"]:,} steps' if r['pretrain_steps'] else ''
  details = [
    _cost(r['pretrain_tokens'], r['pretrain_flops'], steps),
    _epochs(r['pretrain_epochs'], 'all training text'),
  ]
  name = 'validation perplexity of the base model, from which all start'
  return [_perplexity(r, 'base_', name, details)] if r['base_perplexity'] else []


def _epochs(epochs: float | Sequence[float] | None, text: str, of_many: bool = False) -> str:
  """Returns 'Each path read its shard 0.50 to 2.00 times.'; '' if that is not known."""
  if not epochs:
    return ''
  times = headline.span(epochs if isinstance(epochs, Sequence) else [epochs])
  return f'{"Each path" if of_many else "It"} read {text} {times} times.'


def _perplexity(r: dict[str, Any], whose: str, name: str, details: Sequence[str]) -> Card:
  value = headline.with_interval(r[f'{whose}perplexity'], r[f'{whose}perplexity_interval'])
  number, space, ends = value.partition(' ')
  return Card(number, f'{name}{space}{ends}', [detail for detail in details if detail])


def _cost(tokens: int | None, flops: float | None, how: str) -> str:
  """Returns 'Trained on 1.5 M tokens, 6.1 T FLOPs: 96 steps after the base'; '' if nothing is known."""
  if not tokens:
    return ''
  return (
    f'Trained on {count(tokens)} tokens{f" with {count(flops)} FLOPs" if flops else ""}{f", {how}" if how else ""}.'
  )


def _serving(r: dict[str, Any], has_router: bool) -> str:
  """Describes the cost of serving a token."""
  if not r['serve_flops_per_token']:
    return ''
  more = '; to choose the path of a text, the base model also reads its first tokens once' if has_router else ''
  return f'Serving takes {count(r["serve_flops_per_token"])} FLOPs a token{more}.'
