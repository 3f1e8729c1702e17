"""Several runs side by side: a table, their curves in one picture, and where their configs differ."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dipaco_jax.core import printable, settings
from dipaco_jax.reports import headline, pages, report_page
from dipaco_jax.reports.amounts import count, size
from dipaco_jax.reports.plot_style import Picture
from dipaco_jax.training.display import duration

Rows = list[list[str]]

FIGURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
  ('perplexity', 'perplexity', lambda x: f'{x:.3f}'),
  ('its 95% interval', 'perplexity_interval', lambda x: f'{x[0]:.3f} to {x[1]:.3f}'),
  ('base perplexity', 'base_perplexity', lambda x: f'{x:.3f}'),
  ('change from the base', 'ratio_to_base', lambda x: headline.change(*x)),
  ('control perplexity', 'control_perplexity', lambda x: f'{x:.3f}'),
  ('change from the control', 'ratio_to_control', lambda x: headline.change(*x)),
  ('bits per byte', 'bits_per_byte', lambda x: f'{x:.4f}'),
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


def table(reports: Mapping[str, Mapping[str, Any]], configs: Mapping[str, settings.Settings]) -> Rows:
  """Returns a row of names, a row per figure, and a row per config field that is not the same in all runs."""
  rows = [['', *short_names(list(reports))]]
  for words, name, form in FIGURES:
    values = [_value(report, name) for report in reports.values()]
    rows.append([words, *('-' if v is None else form(v) for v in values)])
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
  found = [report['reroute'] or {} for report in reports]
  rows = []
  for chooser in sorted({chooser for one in found for chooser in one}):
    for every in sorted({every for one in found for every in one.get(chooser, ())}, key=int, reverse=True):
      values = [one.get(chooser, {}).get(every) for one in found]
      words = f're-routed, {chooser}, W = {every}'
      rows.append([words, *('-' if v is None else f'{v:.3f}' for v in values)])
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


def render(rows: Rows, figure) -> str:
  split = next((i for i, row in enumerate(rows) if row[0].startswith('config.')), len(rows))
  [bases] = [set(row[1:]) for row in rows if row[0] == 'base perplexity']
  same_base = len(bases) == 1 and bases != {'-'}
  caption = 'Routed validation perplexity of each run against training steps, those of the base model included.'
  caption += ' They start from equally good base models.' if same_base else ''
  picture = report_page.Figure.of('compare', Picture(figure, caption))
  return pages.render('compare.html', head=rows[0], picture=picture, figures=rows[1:split], configs=rows[split:])
