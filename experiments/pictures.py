"""Pictures of tables: a dot for every seed, lines through means."""

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from common import Column, Results, Table, figure, figures
from intervals import half_width
from runs import Row

from dipaco_jax.reports import palette, plot_style


@plot_style.styled
def dots(table: Table, rows: Sequence[Row], results: Results):
  """The first column: a line for every row that was run, a dot for every seed, a bar at their mean."""
  rows = [row for row in rows if any(name == row.name for name, _ in results)]
  made, ax = plot_style.axes(plot_style.WIDE, 1.0 + 0.32 * len(rows))
  draw_dots(ax, table, rows, results)
  return made


def draw_dots(ax, table: Table, rows: Sequence[Row], results: Results):
  for y, row in enumerate(rows):
    found = figures(results, row.name, table.columns[0])
    ax.plot(found, [y] * len(found), 'o', color=palette.BLUE, markersize=4, alpha=0.6)
    if found:
      ax.plot([statistics.fmean(found)], [y], '|', color=palette.INK, markersize=14)
  ax.set_yticks(range(len(rows)), [row.title for row in rows])
  ax.set_ylim(len(rows) - 0.5, -0.5)
  ax.set_xlabel(f'{table.columns[0].title}, a dot per seed and their mean')


def differences(column: Column, panels: Mapping[str, str]):
  """A picture of a column of differences, {beginning of rows' names: title of their panel}: dots, mean and interval.

  The band is the standard deviation over seeds of what they are taken from.
  """

  @plot_style.styled
  def picture(table: Table, rows: Sequence[Row], results: Results):
    run = {in_panel(row) for row in rows if figures(results, row.name, column)}
    rows = [row for row in rows if in_panel(row) in run]
    made, axes = plot_style.axes(
      plot_style.WIDE, 1.2 + 0.32 * len(rows) / len(panels), len(panels), sharex=True, sharey=True
    )
    for ax, (beginning, title) in zip(axes, panels.items(), strict=True):
      mine = [row for row in rows if row.name.startswith(f'{beginning}_')]
      of = column.against.replace('*', beginning)
      own = figures(results, of, column._replace(against=''))
      if len(own) > 1:
        ax.axvspan(-statistics.stdev(own), statistics.stdev(own), color=palette.RULE, zorder=0)
      draw_differences(ax, column, mine, results)
      ax.set_yticks(range(len(mine)), [in_panel(row) for row in mine])
      ax.set_ylim(len(mine) - 0.5, -0.5)
      ax.locator_params(axis='x', nbins=5)
      ax.set_title(title)
      ax.set_xlabel(column.title)
    return made

  return picture


def in_panel(row: Row) -> str:
  """What a row is called where its panel has the rest of its title."""
  return row.title.partition(', ')[2]


def draw_differences(ax, column: Column, rows: Sequence[Row], results: Results):
  ax.axvline(0, color=palette.FAINT, linewidth=1, zorder=1)
  for y, row in enumerate(rows):
    found = figures(results, row.name, column)
    ax.plot(found, [y] * len(found), 'o', color=palette.BLUE, markersize=4, alpha=0.6)
    if found:
      ax.plot([statistics.fmean(found)], [y], '|', color=palette.INK, markersize=14)
    if len(found) > 1:
      ax.errorbar(statistics.fmean(found), y, xerr=half_width(found), color=palette.INK, linewidth=1.2)


@plot_style.styled
def curves(table: Table, rows: Sequence[Row], results: Results):
  """Perplexity while training, means over seeds: against what one path has read, and against all FLOPs.

  Lines have the same colours and end at the same heights in both panels; their names are beside the second.
  """
  from matplotlib import ticker

  made, panels = plot_style.axes(plot_style.WIDE * 1.2, 5.0, 2, sharey=True)
  for ax, title, of in zip(panels, ('tokens that a path has read', 'FLOPs of training'), (tokens, flops), strict=True):
    lines = {row.title: along(row, results, of) for row in rows}
    draw_lines(ax, lines, named=ax is panels[-1])
    ax.set_xscale('log')
    ax.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter('{x:.0e}')  # the style shows mathematical text as it is written
    ax.xaxis.set_minor_formatter('')
    ax.set_yscale('log')
    ax.yaxis.set_major_formatter('{x:.0f}')
    ax.yaxis.set_minor_formatter('{x:.0f}')
    ax.set_xlabel(title)
  panels[0].set_ylabel('perplexity')
  return made


def along(row: Row, results: Results, of: Callable[[Mapping[str, Any], int], float]) -> list[tuple[float, float]]:
  """[x, mean perplexity] where all seeds of a row were measured; of(record, step of a path): x."""
  found = [record for (name, _), record in results.items() if name == row.name]
  by_step = [{step: p for step, p in record['perplexity_by_step'] if p} for record in found]
  steps = sorted(set.intersection(*map(set, by_step))) if by_step else []
  return [(of(found[0], step), statistics.fmean(one[step] for one in by_step)) for step in steps]


def tokens(record: Mapping[str, Any], step: int) -> float:
  """The base's too."""
  own, earlier = record['train_tokens'] - record['pretrain_tokens'], record.get('before', {}).get('tokens', 0)
  return (
    earlier + record['pretrain_tokens'] + own / record['paths'] * (step - record['pretrain_steps']) / record['steps']
  )


def flops(record: Mapping[str, Any], step: int) -> float:
  """In proportion to all tokens that were read up to there, the base's too."""
  own = record['train_tokens'] - record['pretrain_tokens']
  read = record['pretrain_tokens'] + own * (step - record['pretrain_steps']) / record['steps']
  earlier = record.get('before', {}).get('flops', 0)
  return earlier + (record['train_flops'] - earlier) * read / record['train_tokens']


def against_number(title: str, series: Callable[[Row], Sequence[str]]):
  """As `against`, with the number that the row's name ends with."""
  return against(None, title, series)


def against(field: str | None, title: str, series: Callable[[Row], Sequence[str]], level: str = ''):
  """A picture of the first column against a field of the results, on a log scale; `series(row)`: the lines it is on.

  A row called `level`, which is on none, is a line across.
  """

  @plot_style.styled
  def picture(table: Table, rows: Sequence[Row], results: Results):
    made, ax = plot_style.axes(plot_style.WIDE * 0.8, 4.2)
    lines: dict[str, list[tuple[float, float]]] = {name: [] for row in rows for name in series(row)}
    colours = by_name(lines)
    for row in rows:
      x = place(row, results, field) if field else float(row.name.split('_')[-1])
      found = figures(results, row.name, table.columns[0])
      for name in series(row) if found else ():
        lines[name].append((x, statistics.fmean(found)))
        ax.plot([x] * len(found), found, 'o', color=colours[name], markersize=4, alpha=0.5)
    xs = sorted({x for points in lines.values() for x, _ in points})
    if xs and (found := figures(results, level, table.columns[0])):
      mean = statistics.fmean(found)
      lines[next(row.title for row in rows if row.name == level)] = [(x, mean) for x in (xs[0], xs[-1])]
    draw_lines(ax, lines)
    ax.set_xscale('log')
    ax.set_xticks(xs, [f'{x:,.0f}' for x in xs])
    ax.minorticks_off()
    ax.set_xlabel(title)
    ax.set_ylabel(table.columns[0].title)
    return made

  return picture


def place(row: Row, results: Results, field: str) -> float:
  """A field that is the same for all seeds of a row; nan where it was not run."""
  return next((figure(record, field) for (name, _), record in results.items() if name == row.name), float('nan'))


def by_name(lines: Iterable[str]) -> dict[str, str]:
  """The colour of each line, whichever of them have points."""
  return dict(zip(lines, itertools.cycle(plot_style.COLOURS), strict=False))


def draw_lines(ax, lines: Mapping[str, Sequence[tuple[float, Any]]], named: bool = True):
  """{name: points}, which may be none; names, if they are wanted, stand where the lines end."""
  ends = []
  of_lines = {at for points in lines.values() if len(points) > 1 for at in points}
  for name, colour in by_name(lines).items():
    if points := [at for at in lines[name] if len(lines[name]) > 1 or at not in of_lines]:  # no name for a shared start
      xs, ys = zip(*sorted(points), strict=True)
      ax.plot(xs, ys, color=colour, linewidth=1.6)
      ends.append(plot_style.End(ys[-1], name, colour))
  plot_style.label_ends(ax, ends if named else [])
