"""Several runs side by side: a table, their curves in one picture, and where their configs differ."""

import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dipaco_jax.config import settings
from dipaco_jax.core import printable
from dipaco_jax.pipeline import stage
from dipaco_jax.processes.display import duration
from dipaco_jax.reports import curve_plots, headline, history, pages, paired_runs, report_page, token_axis
from dipaco_jax.reports.amounts import count, size
from dipaco_jax.reports.plot_style import Curve, Labels, Picture
from dipaco_jax.reports.run_contents import Contents
from dipaco_jax.telemetry import metrics_log

Rows = list[list[str]]

FIGURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
  ('perplexity', 'perplexity', lambda x: f'{x:.3f}'),
  ('its 95% interval', 'perplexity_interval', lambda x: f'{x[0]:.3f} to {x[1]:.3f}'),
  ('base perplexity', 'base_perplexity', lambda x: f'{x:.3f}'),
  ('change from the base', 'ratio_to_base', lambda x: headline.change(*x)),
  ('control perplexity', 'control_perplexity', lambda x: f'{x:.3f}'),
  ('change from the control', 'ratio_to_control', lambda x: headline.change(*x)),
  ('bits per byte', 'bits_per_byte', lambda x: f'{x:.4f}'),
  ('base bits per byte', 'base_bits_per_byte', lambda x: f'{x:.4f}'),
  ('control bits per byte', 'control_bits_per_byte', lambda x: f'{x:.4f}'),
  ('mutual information of paths and domains', 'domain_nmi', lambda x: f'{x:.3f}'),
  ('paths', 'paths', str),
  ('steps of the base', 'pretrain_steps', lambda x: f'{x:,}'),
  ('steps', 'steps', lambda x: f'{x:,}'),
  ('highest learning rate', 'highest_learning_rate', lambda x: f'{x:.3g}'),
  ('training tokens', 'train_tokens', count),
  ('training FLOPs', 'train_flops', count),
  ('parameters of a path', 'parameters_path', count),
  ('parameters in all', 'parameters_total', count),
  ('bytes exchanged', 'bytes', size),
  ('tokens/s', 'tokens_per_s', lambda x: f'{x:,.0f}'),
  ('wall time', 'wall_s', lambda x: duration(sum(x.values()))),
)
PER_TOKEN = 'perplexity', 'base_perplexity', 'control_perplexity', 'ratio_to_'


def table(
  reports: Mapping[str, Mapping[str, Any]], configs: Mapping[str, settings.Settings], in_bits: bool = False
) -> Rows:
  """Returns a row of names, a row per figure, and a row per config field that is not the same in all runs.

  `in_bits` leaves out perplexities, which depend on the tokenizer and on the text.
  """
  rows = [['', *short_names(list(reports))]]
  for title, name, form in FIGURES:
    if in_bits and name.startswith(PER_TOKEN):
      continue
    values = [_value(report, name) for report in reports.values()]
    rows.append([title, *('-' if v is None else form(v) for v in values)])
    if name == 'perplexity_interval':
      rows += rerouted(list(reports.values()))
  flat = [report_page.settings_in_words(config) for config in configs.values()]
  for name in flat[0]:
    values = [config[name] for config in flat]
    if len(set(values)) > 1:
      rows.append([f'config.{name}', *values])
  return rows


def rerouted(reports: Sequence[Mapping[str, Any]]) -> Rows:
  """Returns a row of perplexities for each chooser and W that some run has evaluated, the longest W first [2.4.3]."""
  perplexities = [report['reroute'] or {} for report in reports]
  rows = []
  for chooser in sorted({chooser for one in perplexities for chooser in one}):
    for every in sorted({every for one in perplexities for every in one.get(chooser, ())}, key=int, reverse=True):
      values = [one.get(chooser, {}).get(every) for one in perplexities]
      title = f're-routed, {chooser}, W = {every}'
      rows.append([title, *('-' if v is None else f'{v:.3f}' for v in values)])
  return rows


def _value(report: Mapping[str, Any], name: str):
  if name == 'bytes':
    sent, phases = report['outer_bytes_per_phase'], report['phases']
    return None if sent is None or phases is None else sent * phases
  if name.startswith('ratio_to_'):
    return None if report[name] is None else (report[name], report[f'{name}_interval'])
  return report[name]


def short_names(workdirs: Sequence[str]) -> list[str]:
  """Returns the last parts of the directories' names, as many as they need to differ."""
  parts = [os.path.abspath(w).split(os.sep) for w in workdirs]
  for length in range(1, max(map(len, parts)) + 1):
    names = [os.sep.join(p[-length:]) for p in parts]
    if len(set(names)) == len(names):
      break
  return names


def text(rows: Rows) -> str:
  """Returns the rows in columns, for a terminal; long cells are cut."""
  rows = [[printable.name(cell, 40) for cell in row] for row in rows]
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  form = '  '.join(f'{{:{"<" if i == 0 else ">"}{width}}}' for i, width in enumerate(widths))
  return '\n'.join(form.format(*row).rstrip() for row in rows)


def warning(differences: Sequence[str]) -> str:
  """Returns a sentence about differences between runs, by `run_contents.differences`; '' if there are none."""
  if not differences:
    return ''
  named = ' and '.join(filter(None, [', '.join(differences[:-1]), differences[-1]]))
  text = f'These runs do not have the same {named}: their perplexities are left out, and bits per byte are compared'
  if 'validation set' in differences:
    text += '. Those of different documents may differ because the documents do: compare documents that both runs have'
  elif differences == ['training text']:
    text += '. A difference may be due to the text that they were trained on'
  return f'{text}.'


def paired(names: Sequence[str], contents: Sequence[Contents]) -> list[Rows]:
  """Returns a table for each run after the first, of the documents that it shares with the first."""
  comparisons = [
    (name, paired_runs.compare(contents[0], run)) for name, run in zip(names[1:], contents[1:], strict=True)
  ]
  return [paired_runs.table(pairs, (names[0], name)) for name, pairs in comparisons if pairs]


def pictures(
  workdirs: Sequence[pathlib.Path], reports: Mapping[str, Mapping[str, Any]], configs: Mapping[str, settings.Settings],
  in_bits: bool,
) -> list[Picture]:  # fmt: skip
  """Returns the curves of validation over training tokens, and over FLOPs where those of all runs are known."""
  names = short_names(list(reports))
  by_tokens = {}
  for name, workdir, report, s in zip(names, workdirs, reports.values(), configs.values(), strict=True):
    curves = history.make_curves(metrics_log.read_rows(workdir), report['paths'], stage.control_name(s))
    by_tokens[name] = token_axis.of_paths(s, curves.bits if in_bits else curves.validation)
  what, key = ('bits per byte', 'base_bits_per_byte') if in_bits else ('perplexity', 'base_perplexity')
  bases = {name: report[key] for name, report in zip(names, reports.values(), strict=True)}
  drawn = [Picture(_draw(by_tokens, bases, what, 'tokens'), caption(what, [*bases.values()]))]
  costs = {name: r['serve_flops_per_token'] for name, r in zip(names, reports.values(), strict=True)}
  if all(costs.values()) and len({*costs.values()}) > 1:  # else it is the same picture
    by_flops = {name: Curve(3 * costs[name] * curve.steps, curve.values) for name, curve in by_tokens.items()}
    drawn.append(Picture(_draw(by_flops, bases, what, 'FLOPs'), 'The same against training FLOPs.'))
  return drawn


def caption(what: str, bases: Sequence[float | None]) -> str:
  """Returns the caption of the runs' curves; `bases` are what the base models have."""
  text = f'Routed validation {what} of each run against the tokens that it was trained on, including those of its base.'
  return text + (' They start from equally good base models.' if len({*bases}) == 1 and bases[0] is not None else '')


def _draw(curves: Mapping[str, Curve], bases: Mapping[str, float | None], what: str, unit: str) -> Any:
  labels = Labels(f'Validation {what}', what, f'training {unit}, including those of the base')
  return curve_plots.perplexity_curves(curves, bases, labels, wide=True)


def render(rows: Rows, pictures: Sequence[Picture], warning: str, paired: Sequence[Rows]) -> str:
  """Returns the page."""
  split = next((i for i, row in enumerate(rows) if row[0].startswith('config.')), len(rows))
  figures = [report_page.Figure.of(f'compare-{i}', picture) for i, picture in enumerate(pictures)]
  return pages.render(
    'compare.html', head=rows[0], pictures=figures, figures=rows[1:split], configs=rows[split:], warning=warning,
    paired=paired,
  )  # fmt: skip
