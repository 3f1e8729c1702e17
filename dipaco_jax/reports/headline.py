"""The lead of a report: results, costs, and kinds of text on which the dense control is better.

Perplexities are compared on the same documents (`bootstrap`): with the base that the paths started from, and with one
dense model that was trained on from it (`evaluate.control`), since paths that train longer than their base are better
anyway. A difference is claimed only where chance cannot explain it; one that may be chance is not called none.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dipaco_jax.core import bootstrap
from dipaco_jax.data import left_out
from dipaco_jax.processes import time_use
from dipaco_jax.processes.display import duration

HELD_BACK = {
  'given': "Validation text is the source's own, or that of config.data.validation.",
  'documents': 'For validation, {share} of the documents were drawn at random and held out of training.',
  'files': 'For validation, whole files with about {share} of the text were held out of training.',
  'ends': (
    'For validation, the last {share} of each file was held out of training; there are too few files to hold out whole '
    'ones.'
  ),
}
DENSE = 'the dense control'
BUDGETS = {'steps': f'{DENSE} (as many steps)', 'flops': f'{DENSE} (as many FLOPs as all paths together)'}
NAMED_KINDS = 6  # on which the dense control is better, in the lead
AS_TRAINED = 'the same paths with the router of training'


def held_back(tokenized: Mapping[str, Any]) -> str:
  """Describes how validation text was chosen, from the record of tokenizing."""
  share = f'{100 * tokenized.get("validation_fraction", 0):.2g}%'
  return HELD_BACK.get(tokenized.get('held_back', ''), '').format(share=share)


def validation_size(report: Mapping[str, Any], tokenized: Mapping[str, Any]) -> str:
  """Describes how much of the held-out text was scored; '' if that is not known."""
  tokens, training = report.get('validation_tokens'), report.get('text_tokens')
  sequences, of_documents = tokenized.get('validation_documents'), ''
  if not tokens or not sequences:
    return ''
  if documents := report.get('validation_documents'):
    of_documents = f' from {documents:,} document{"s" * (documents > 1)}'
  share = f', {100 * tokens / training:.2g}% as many as there are training tokens' if training else ''
  return f'A sample of it was scored: {sequences:,} sequences{of_documents} with {tokens:,} scored tokens{share}.'


def early_stopping(report: Mapping[str, Any]) -> str:
  """Explains why the result differs from that after the last phase; '' if it does not."""
  stopped, final = report.get('perplexity'), report.get('perplexity_final')
  if not stopped or not final or stopped == final:
    return ''
  how = f'{"slightly " * (abs(stopped / final - 1) < 0.01)}{"worse" if stopped > final else "better"}'
  return (
    f"With early stopping, each path is taken from the phase with the lowest loss on its own shard's hold-out. The "
    f'hold-out is other text than the validation text, so the result ({stopped:.2f}) can be better or worse than that '
    f'of the last phase: here it is {how} ({final:.2f}).'
  )


def text_left_out(tokenized: Mapping[str, Any]) -> list[str]:
  """Returns sentences about text that was left out, from the record of tokenizing."""
  copies = left_out.describe_copies(tokenized), left_out.describe_equal_validation(tokenized)
  sentences = [left_out.describe_dropped(tokenized), *copies, left_out.describe_skipped(tokenized)]
  return [f'{sentence[0].upper()}{sentence[1:]}.' for sentence in sentences if sentence]


def why_no_interval(report: Mapping[str, Any]) -> str:
  """Explains why a perplexity has no interval; '' if it has one, or is not measured yet."""
  documents = report.get('validation_documents')
  if not report.get('perplexity') or report.get('perplexity_interval') or documents is None:
    return ''
  if documents >= bootstrap.MIN_DOCUMENTS:
    return 'There is no interval: a loss is not finite.'
  are = 'different document is' if documents == 1 else 'different documents are'
  return f'There is no interval: {documents} {are} too few, {bootstrap.MIN_DOCUMENTS} are needed.'


def sources(tokenized: Mapping[str, Any], weights: Mapping[str, float]) -> str:
  """Describes the training tokens of each source of a mixture, from the record of tokenizing; '' without a mixture."""
  by_domain = tokenized.get('by_domain', {})
  given = [(name, by_domain[name]) for name in weights if name in by_domain]
  total = sum(counts['tokens'] for _, counts in given) or 1
  parts = []
  for name, counts in given:
    times = counts['documents'] / max(1, counts['documents'] - counts.get('repeated', 0))
    again = f', its text {times:.1f} times' if counts.get('repeated') else ''
    parts.append(f'{name} {100 * counts["tokens"] / total:.1f}% ({counts["documents"]:,} documents{again})')
  return f'Tokens of training text: {"; ".join(parts)}.' if parts else ''


def with_interval(value: float, interval: Sequence[float] | None) -> str:
  """Returns '17.25 (16.80 to 17.71)'."""
  return f'{value:.2f} ({interval[0]:.2f} to {interval[1]:.2f})' if interval else f'{value:.2f}'


def dense(report: Mapping[str, Any]) -> str:
  """Returns the name of the dense control, with its budget."""
  return BUDGETS[report.get('control_budget') or 'steps']


def change(ratio: float, interval: Sequence[float] | None, whom: str = '') -> str:
  """Returns '9% lower (7 to 11%) than the base', or that the difference is not significant, with its interval."""
  than, off = (f' than {whom}', f' from {whom}') if whom else ('', '')
  if interval is None:
    return (
      f'{abs(100 * (ratio - 1)):.1f}% {"lower" if ratio < 1 else "higher"}{than} (too few documents for an interval)'
    )
  low, high = (100 * (x - 1) for x in interval)
  if low <= 0 <= high:
    return f'the difference{off} is not significant (interval {low:+.1f} to {high:+.1f}%)'
  ends = sorted((abs(low), abs(high)))
  digits = 0 if ends[1] >= 5 and ends[1] - ends[0] >= 1 else 1
  nearer, further = (f'{x:.{digits}f}' for x in ends)
  return f'{abs(100 * (ratio - 1)):.{digits}f}% {"lower" if high < 0 else "higher"} ({nearer} to {further}%){than}'


def epochs(report: Mapping[str, Any]) -> str:
  """Describes how often the base and the paths have read their text; '' if that is not known."""
  parts = []
  if (of_base := report.get('pretrain_epochs')) and (tokens := report.get('pretrain_text_tokens')):
    parts.append(f'base {of_base:.2f} ({of_base * tokens:,.0f} of {tokens:,} tokens)')
  if (of_paths := report.get('epochs_by_path')) and (shards := report.get('shard_tokens')):
    seen = sum(times * tokens for times, tokens in zip(of_paths, shards, strict=True))
    who = 'paths' if len(of_paths) > 1 else 'path'
    parts.append(f'{who} {span(of_paths)} ({seen:,.0f} of {sum(shards):,} tokens)')
  return ', '.join(parts)


def span(values: Sequence[float]) -> str:
  """Returns '0.50 to 2.00', or '0.50' where all are equal."""
  low, high = f'{min(values):.2f}', f'{max(values):.2f}'
  return low if low == high else f'{low} to {high}'


def stage_seconds(report: Mapping[str, Any]) -> dict[str, float]:
  """Returns the time of each stage: by the account of causes, with what was lost to restarts.

  In an islands run, that account adds up the times of all workers: then it is the wall time of the stages.
  """
  seconds = report.get('seconds') or {}
  if report.get('island_bytes') or not set(report['wall_s']) <= set(seconds):
    return dict(report['wall_s'])
  return {name: sum(of_stage.values()) for name, of_stage in seconds.items()}


def total_time(report: Mapping[str, Any], extent: str = '') -> str:
  """Returns '35 min 2 s in all, of which 11 min 49 s were lost to restarts', with the extent ' in all'."""
  seconds = stage_seconds(report)
  causes = {} if report.get('island_bytes') else report.get('seconds') or {}
  lost_s = sum(causes.get(name, {}).get(time_use.LOST, 0.0) for name in seconds)
  lost = f', of which {duration(lost_s)} were lost to restarts' if lost_s >= 1 else ''
  return f'{duration(sum(seconds.values()))}{extent}{lost}'


def wall_time(report: Mapping[str, Any]) -> str:
  """Describes how long the run and each of its stages took."""
  seconds = stage_seconds(report)
  return f'{total_time(report)}: {", ".join(f"{name} {duration(s)}" for name, s in seconds.items())}'


def outcome(about: Mapping[str, Any]) -> list[str]:
  """Returns the result of an islands run in words, from its last fact."""
  if about['perplexity'] is None:
    return ['training diverged']
  return [
    f'perplexity {with_interval(about["perplexity"], about.get("perplexity_interval"))}',
    *about.get('changes', []),
  ]


def changes(report: Mapping[str, Any]) -> list[str]:
  """Returns the comparisons that were made, the fairest first."""
  kept = (report.get('router_refit') or {'kept_the_last': True})['kept_the_last']
  refitted = () if kept else (('as_trained', AS_TRAINED),)
  started = 'the base that they started from' if report['paths'] > 1 else 'the base that it started from'
  return [
    change(report[f'ratio_to_{name}'], report[f'ratio_to_{name}_interval'], whom)
    for name, whom in (('control', dense(report)), *refitted, ('base', started))
    if report[f'ratio_to_{name}'] is not None
  ]


def is_significant(interval: Sequence[float] | None) -> bool:
  """Returns whether an interval of ratios says which of two models is better."""
  return interval is not None and not interval[0] <= 1 <= interval[1]


def signed_change(ratio: float | None, interval: Sequence[float] | None) -> str:
  """Returns '-4.2% (-6.0 to -2.1%)' for a table; it says where that is not significant. '-' where nothing is known."""
  if ratio is None:
    return '-'
  value = f'{100 * (ratio - 1):+.1f}%'
  if interval is None:
    return f'{value}, too few documents'
  ends = f'({100 * (interval[0] - 1):+.1f} to {100 * (interval[1] - 1):+.1f}%)'
  return f'{value} {ends}' if is_significant(interval) else f'{value}, not significant {ends}'


def dense_ahead(report: Mapping[str, Any], with_changes: bool = True) -> str:
  """Names the kinds of text on which the dense control has the lower perplexity; '' if there are none."""
  ratios = {kind: x for kind, x in (report.get('ratio_to_control_by_domain') or {}).items() if x is not None}
  intervals = report.get('ratio_to_control_interval_by_domain') or {}
  ahead = sorted((kind for kind, x in ratios.items() if x > 1), key=lambda kind: -ratios[kind])
  if not ahead:
    return ''
  kinds = [
    f'{kind} {signed_change(ratios[kind], intervals.get(kind))}' if with_changes else kind
    for kind in ahead[:NAMED_KINDS]
  ]
  more = [f'{len(ahead) - NAMED_KINDS} more'] if len(ahead) > NAMED_KINDS else []
  if len(ratios) == 1:
    where = 'on the only kind of text'
  else:
    where = 'on every kind of text' if len(ahead) == len(ratios) else f'on {len(ahead)} of {len(ratios)} kinds of text'
  return f'The dense control is better {where}: {", ".join([*kinds, *more])}'


def budget(report: Mapping[str, Any]) -> str:
  """Compares the tokens and FLOPs of the dense control with those of the paths; '' if they are not known."""
  control, paths = report.get('control_tokens'), report.get('paths_tokens')
  if not control or not paths:
    return ''
  if is_of_equal_cost(report):
    return f'The dense control read as many tokens as all paths together, with as many FLOPs{_in_sequence(report)}'
  share = f'{100 * float(control) / float(paths):.3g}%'
  return f'The dense control read {share} of the tokens that all paths read together, with {share} of their FLOPs'


def _in_sequence(report: Mapping[str, Any]) -> str:
  """Compares the sequential steps of the dense control and a path; '' if they are equal or unknown."""
  steps, of_path = report.get('control_steps'), report.get('steps')
  if not steps or not of_path or steps <= of_path:
    return ''
  return f', but in {steps / of_path:.3g} times as many sequential steps ({steps:,} instead of {of_path:,})'


def is_of_equal_cost(report: Mapping[str, Any]) -> bool:
  """Returns whether the dense control was trained with as many FLOPs as all paths together, to 1%."""
  control, paths = report.get('control_tokens'), report.get('paths_tokens')
  return bool(control) and bool(paths) and abs(float(control or 0) / float(paths or 1) - 1) < 0.01


def results(report: Mapping[str, Any]) -> list[str]:
  """Returns the lines of a result: comparisons, what the dense control cost, and where it is ahead."""
  compared = [budget(report), dense_ahead(report)] if report['ratio_to_control'] is not None else []
  return [*changes(report), *(f'{comparison[:1].lower()}{comparison[1:]}' for comparison in compared if comparison)]


def lead(report: Mapping[str, Any]) -> str:
  """Returns the lead of a finished run: one sentence, which also says what was not compared."""
  paths, who = report['paths'], 'one path, trained on from the base, reaches'
  who = f'{paths} paths, each as small as the base model, reach' if paths > 1 else who
  comparisons = '; '.join(changes(report))
  sentence = f'On unseen text {who} a perplexity of {report["perplexity"]:.2f}' + (
    f': {comparisons}' if comparisons else ''
  )
  if report['ratio_to_control'] is None:
    more = f'{report["steps"]:,} steps fewer' if report['steps'] else 'fewer steps'
    transition = ', which was' if comparisons else f'; the base, at {report["base_perplexity"]:.2f}, was'
    sentence += f'{transition} trained for {more}'
    sentence += f', and they were not compared with {dense(report)}' if paths > 1 else ''
  else:
    sentence = '. '.join(part for part in (sentence, budget(report), dense_ahead(report, False)) if part)
  intervals = any(report[f'ratio_to_{name}_interval'] for name in ('control', 'base'))
  if not intervals:
    return f'{sentence}.'
  return f'{sentence}. In brackets: {bootstrap.LEVEL:.0%} intervals over the validation documents.'
