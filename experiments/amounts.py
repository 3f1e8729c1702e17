"""(14) How much to share, by how much text there is: from one shared model to paths that share nothing [4, Table 2].

All rows of an amount read the same first documents of the text, and train as many steps. Dense models have the rate of
table (1). All others have one outer step and one rate, those of table (1)'s rows with path-specific modules, so that
they differ in nothing but what is shared. Every path is the version with the lowest loss on held-out documents [2.7]:
where there is little text, later versions overfit. The tokenizer is that of table (2).
"""

import collections
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import common
import config
import methods
import paths
from runs import Row
from tau import OUTER, TAUS

from dipaco_jax.reports import palette, plot_style

ALL = 0
DOCUMENTS = {
  'test': (60, ALL),
  'smoke': (150, ALL),
  'micro': (600, 1600, 4000, 12_000, ALL),
  'medium': (600, 4000, ALL),
}
ENDS = {'micro': (16,)}  # numbers of paths that are run with the least and with the most text alone
STEPS = {'test': 8, 'smoke': 32, 'micro': 3000, 'medium': 2000}
HOLDOUT = {'test': 0.3, 'smoke': 0.2}  # of the documents, so that each path has some
ALONE = 0.5, 0.125  # the peak rate of dense rows and of all others, as a share of the base's

# What is shared, least sharing last.
SHARING = {
  'dense': ('dense', 'dense'),
  'batch': ('dense, {paths}x batch', 'dense'),
  'diloco': ('DiLoCo: one model', 'diloco'),
  'grid': ('all shared, by axis', 'dipaco'),
  'mlps': ('path-specific MLPs', 'mlps'),
  'own': ('path-specific upper blocks', 'own'),
  'blocks': ('all blocks path-specific', 'blocks_own'),
  'flat': ('flat MoE: nothing shared', 'flat'),
}


def rows(size: str) -> list[Row]:
  usual, amounts = math.prod(config.SIZES[size].grid), DOCUMENTS[size]
  found = [row(size, kind, usual, documents) for documents in amounts for kind in SHARING]
  for num_paths in ENDS.get(size, ()):
    found += [row(size, kind, num_paths, amount) for amount in (amounts[0], amounts[-1]) for kind in list(SHARING)[1:]]
  return found


def row(size: str, kind: str, num_paths: int, documents: int) -> Row:
  """One amount of sharing, with so many paths, on the first so many documents."""
  title, method = SHARING[kind]
  if dense := method == 'dense':
    changes: dict[str, Any] = {**config.lasting(size, STEPS[size], config.SIZES[size].alone)}
  else:
    side = math.isqrt(num_paths)
    method = f'{method},{num_paths}' if kind == 'diloco' else f'{method},{side}x{side}'
    changes = {**config.lasting(size, STEPS[size], TAUS[size][1]), **OUTER['nesterov'], 'outer.row_weights': True}
  if kind == 'batch':
    changes |= {'train.batch_size': num_paths * config.SIZES[size].config['train']['batch_size']}
  text = {'data.max_documents': documents, 'data.holdout_fraction': HOLDOUT.get(size, 0.05)}
  amount = f'{documents:,} documents' if documents else 'all documents'
  return Row(
    f'{kind}_{num_paths}_{documents or "all"}',
    f'{num_paths} paths, {amount}: {title.format(paths=num_paths)}',
    method,
    changes | text | {'tokenizer.model_file': paths.tokenizer(size)} | methods.at_rate(size, ALONE[not dense]),
  )


def split_name(name: str) -> tuple[str, int, str]:
  """The kind of sharing, the number of paths and the documents of a row's name."""
  kind, num_paths, documents = name.split('_')
  return kind, int(num_paths), documents


def lines(rows: Sequence[Row], results: common.Results) -> list[list[str]]:
  """A line for each kind of sharing and number of paths; for each amount of text the lowest mean is bold."""
  amounts = list(dict.fromkeys(split_name(row.name)[2] for row in rows))
  found = {row.name: [r for (name, _), r in sorted(results.items()) if name == row.name] for row in rows}
  tokens = {amount: [r['text_tokens'] for name, of in found.items() if name.endswith(f'_{amount}') for r in of]
            for amount in amounts}  # fmt: skip
  head = [f'{statistics.median(tokens[amount]) / 1e6:.2g} M tokens' if tokens[amount] else amount for amount in amounts]
  table = [['paths', '', 'seeds', *head, 'parameters'], ['---:', '---', *['---:'] * (len(head) + 2)]]
  for kind, num_paths in dict.fromkeys(split_name(row.name)[:2] for row in rows):
    by_amount = [found.get(f'{kind}_{num_paths}_{amount}', []) for amount in amounts]
    if not any(by_amount):
      continue
    cells = []
    for amount, of in zip(amounts, by_amount, strict=True):
      rivals = [rival for kind in SHARING if (rival := found.get(f'{kind}_{num_paths}_{amount}'))]
      text = common.cell([r['perplexity'] for r in of], '.2f')
      cells.append(f'**{text}**' if of and mean_perplexity(of) == min(map(mean_perplexity, rivals)) else text)
    seeds = sorted({len(of) for of in by_amount if of})
    parameters = next(r['parameters_total'] for of in by_amount for r in of)
    seeds_text = str(seeds[0]) if len(seeds) == 1 else f'{seeds[0]} to {seeds[-1]}'
    title = SHARING[kind][0].format(paths=num_paths)
    table.append([str(num_paths), title, seeds_text, *cells, f'{parameters:,.0f}'])
  return table


def mean_perplexity(records: Sequence[common.Record]) -> float:
  """Over seeds."""
  return statistics.fmean(r['perplexity'] for r in records)


@plot_style.styled
def picture(table: common.Table, rows: Sequence[Row], results: common.Results):
  """A line for each kind of sharing, a panel for each number of paths; a ring around the lowest of each amount."""
  by_row = {row.name: [r for (name, _), r in results.items() if name == row.name] for row in rows}
  counts = sorted({split_name(name)[1] for name, of in by_row.items() if of})
  width = plot_style.WIDE * (1 + 0.4 * max(0, len(counts) - 1))
  made, axes = plot_style.axes(width, 4.6, max(1, len(counts)), sharey=True, squeeze=False)
  for ax, num_paths in zip(axes[0], counts, strict=False):
    draw(ax, num_paths, by_row)
  axes[0][0].set_ylabel('perplexity')
  return made


def draw(ax, num_paths: int, by_row: Mapping[str, Sequence[common.Record]]):
  """A panel: the rows of one number of paths."""
  colours = dict(zip(SHARING, plot_style.COLOURS * 2, strict=False))
  ends, by_amount = [], collections.defaultdict(list)
  for kind, (title, _) in SHARING.items():
    points = []
    for name, of in by_row.items():
      if split_name(name)[:2] == (kind, num_paths) and of:
        points.append((of[0]['text_tokens'] / num_paths, mean_perplexity(of)))
        by_amount[split_name(name)[2]].append(points[-1])
    if points:
      xs, ys = zip(*sorted(points), strict=True)
      ax.plot(xs, ys, 'o-', color=colours[kind], linewidth=1.6, markersize=3)
      ends.append(plot_style.End(ys[-1], title.format(paths=num_paths), colours[kind]))
  for x, y in (min(points, key=lambda at: at[1]) for points in by_amount.values()):
    ax.plot([x], [y], 'o', color=palette.INK, markersize=10, fillstyle='none')
  ax.set_xscale('log')
  ax.set_yscale('log')
  ax.xaxis.set_major_formatter('{x:,.0f}')
  ax.yaxis.set_major_formatter('{x:.0f}')
  ax.yaxis.set_minor_formatter('{x:.0f}')
  ax.set_title(f'{num_paths} paths')
  ax.set_xlabel('tokens of training text for each path')
  plot_style.label_ends(ax, ends)


COLUMNS = (
  common.Column('perplexity', 'perplexity'),
  common.Column('of the last version', 'perplexity_final'),
  common.Column('German law', f'perplexity_by_domain.{config.UNLIKE}', '.1f'),
  common.Column('without German law and code', 'perplexity_by_domain.read'),
  common.Column('text, tokens', 'text_tokens', '.2g'),
  common.Column('parameters', 'parameters_total', ',.0f'),
)

TABLE = common.Table('amounts', 'How much to share, by how much text there is', rows, COLUMNS, picture, lines)

if __name__ == '__main__':
  common.main(TABLE, paths.prepare)
