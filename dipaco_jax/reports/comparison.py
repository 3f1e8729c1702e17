"""Several runs side by side: a table, their curves in one picture, and what their configs differ in."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dipaco_jax.core import printable, settings
from dipaco_jax.reports import headline, html_page, plot_style
from dipaco_jax.reports.figures import count, size
from dipaco_jax.reports.report_page import fields
from dipaco_jax.training.progress import duration

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
  ('training tokens', 'train_tokens', count),
  ('training FLOPs', 'train_flops', count),
  ('parameters of a path', 'parameters_path', count),
  ('parameters in all', 'parameters_total', count),
  ('bytes exchanged', 'bytes', size),
  ('tokens/s', 'tokens_per_s', lambda x: f'{x:,.0f}'),
  ('wall time', 'wall_s', lambda x: duration(sum(x.values()))),
)


def table(reports: Mapping[str, Mapping[str, Any]], configs: Mapping[str, settings.Settings]) -> Rows:
  """A row of names, a row per figure, a row per config field that is not the same in all runs."""
  rows = [['', *short_names(list(reports))]]
  for words, name, form in FIGURES:
    values = [_value(report, name) for report in reports.values()]
    rows.append([words, *('-' if v is None else form(v) for v in values)])
  rows[2:2] = rerouted(list(reports.values()))
  flat = [fields(config) for config in configs.values()]
  for name in flat[0]:
    values = [config[name] for config in flat]
    if len(set(values)) > 1:
      rows.append([f'config.{name}', *values])
  return rows


def rerouted(reports: Sequence[Mapping[str, Any]]) -> Rows:
  """A row of perplexities for each chooser and each W that some run has evaluated, the longest W first [2.4.3]."""
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
  """Last parts of the directories' names, as long as they need be to differ."""
  parts = [os.path.abspath(w).split(os.sep) for w in workdirs]
  for length in range(1, max(map(len, parts)) + 1):
    names = [os.sep.join(p[-length:]) for p in parts]
    if len(set(names)) == len(names):
      break
  return names


def text(rows: Rows) -> str:
  """In columns, for a terminal; long cells are cut."""
  rows = [[printable.name(cell, 40) for cell in row] for row in rows]
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  form = '  '.join(f'{{:{"<" if i == 0 else ">"}{width}}}' for i, width in enumerate(widths))
  return '\n'.join(form.format(*row) for row in rows)


def make(rows: Rows, figure) -> str:
  """The page."""
  split = next((i for i, row in enumerate(rows) if row[0].startswith('config.')), len(rows))
  same_base = any(row[0] == 'base perplexity' and len(set(row[1:])) == 1 for row in rows)
  caption = 'Routed validation perplexity of each run against training steps, those of the base model included.'
  parts = [
    html_page.element('h1', f'{len(rows[0]) - 1} runs side by side'),
    html_page.figure(plot_style.to_svg(figure, 'compare'), 'compare', plot_style.title(figure), caption + (
      ' They start from equally good base models.' if same_base else ''), 'wide'),
    html_page.section('Figures'),
    html_page.box(html_page.table(rows[1:split], rows[0])),
  ]  # fmt: skip
  if rows[split:]:
    parts += [html_page.section('What differs in their configs'), html_page.box(html_page.table(rows[split:], rows[0]))]
  return html_page.page('Runs side by side', parts)
