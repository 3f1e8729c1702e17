"""(14) How much to share, by how much text there is: from one shared model to paths that share nothing [4, Table 2].

All rows of an amount read the same first documents of the text, with equal FLOPs. Dense models have the rates of table
(1). All others have one outer step and one rate, those of table (1)'s rows with path-specific modules, so that they
differ in nothing but what is shared. Every path is the version with the lowest loss on held-out documents [2.7]: where
there is little text, later versions overfit. A path that stops early has not come to the end of its cosine, which costs
it more than sharing gains; so little text is trained on for fewer steps too, with a cosine of its own, and hold-outs
choose between the two. The tokenizer is that of table (2).
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
import pictures
from matplotlib import ticker
from runs import Row
from tau import OUTER

from dipaco_jax.reports import palette, plot_style

PERPLEXITY = common.Column('perplexity', 'perplexity')
ALL = 0
DOCUMENTS = {
  'test': (60, ALL),
  'smoke': (150, ALL),
  'micro': (600, 1600, 4000, 12_000, ALL),
  'medium': (600, 4000, ALL),
}
ENDS = {'micro': ((16,), (4000, ALL))}  # numbers of paths that are run with these amounts of text alone
STEPS = {'test': 8, 'smoke': 32, 'micro': 1000, 'medium': 2000}
TAU = {'test': 4, 'smoke': 8, 'micro': 10, 'medium': 50}
LITTLE = {'test': 60, 'smoke': 150, 'micro': 600, 'medium': 600}  # documents: so few are trained on for two lengths
SHORTER = {'micro': 2}  # times; elsewhere 4
HOLDOUT_ROWS = {'micro': 256}  # of a path, that are looked at after every phase; elsewhere all
HOLDOUT = {'test': 0.3, 'smoke': 0.2}  # of the documents, so that each path has some; elsewhere a twentieth
OF_LITTLE = {'micro': 0.15}  # of little text
RATES = {'dense': 0.5, 'larger': 1}  # peak rates as a share of the base's
OF_PATHS = 0.125  # that of all others

# What is shared, by the parameters that are stored.
SHARING = {
  'batch': ('dense, {paths}x batch', 'dense'),
  'diloco': ('DiLoCo: one model', 'diloco'),
  'grid': ('all shared, by axis', 'dipaco'),
  'own': ('path-specific upper blocks', 'own'),
  'two': ('flat MoE of 2 paths', 'flat'),
  'blocks': ('all blocks path-specific', 'blocks_own'),
  'ends': ('path-specific embedding', 'ends'),
  'flat': ('flat MoE: nothing shared', 'flat'),
  'larger': ('one larger dense model', 'larger'),
}
SUFFIX = 'short'  # of the names of rows with fewer steps


def rows(size: str) -> list[Row]:
  usual, amounts = math.prod(config.SIZES[size].grid), DOCUMENTS[size]
  table = [one for documents in amounts for kind in SHARING for one in lengths(size, kind, usual, documents)]
  numbers, ends = ENDS.get(size, ((), ()))
  for num_paths in numbers:
    kinds = [kind for kind in SHARING if kind != 'larger']  # whose FLOPs are those of the size's own grid
    table += [row(size, kind, num_paths, documents) for documents in ends for kind in kinds]
  return table


def lengths(size: str, kind: str, num_paths: int, documents: int) -> list[Row]:
  """The row, and with little text the one of fewer steps."""
  short = [row(size, kind, num_paths, documents, SHORTER.get(size, 4))] if is_little(size, documents) else []
  return [row(size, kind, num_paths, documents), *short]


def is_little(size: str, documents: int) -> bool:
  return 0 < documents <= LITTLE[size]


def row(size: str, kind: str, num_paths: int, documents: int, times: int = 1) -> Row:
  """One amount of sharing, with so many paths, on the first so many documents; with that many times fewer steps."""
  (title, method), steps = SHARING[kind], max(STEPS[size] // times, TAU[size])
  batch, changes = config.SIZES[size].config['train']['batch_size'], dict[str, Any]()
  share = RATES.get(method, OF_PATHS)
  if method == 'dense':
    changes |= config.lasting(size, steps, config.SIZES[size].alone) | {'train.batch_size': num_paths * batch}
  elif method == 'larger':
    changes |= config.lasting_larger(size, steps)
  else:
    changes |= {**config.lasting(size, steps, TAU[size]), **OUTER['nesterov'], 'outer.row_weights': True}
    changes |= {'train.batch_size': num_paths * batch // 2} if kind == 'two' else {}
    side = math.isqrt(num_paths)
    numbers = {'two': '2', 'diloco': f'{num_paths}'}
    method = f'{method},{numbers.get(kind, f"{side}x{side}")}'
  holdout = HOLDOUT.get(size, 0.05)
  holdout = OF_LITTLE.get(size, holdout) if is_little(size, documents) else holdout
  text: dict[str, Any] = {'data.max_documents': documents, 'data.holdout_fraction': holdout}
  text |= {'train.max_holdout_rows': HOLDOUT_ROWS.get(size, 0), 'tokenizer.model_file': paths.tokenizer(size)}
  amount = f'{documents:,} documents' if documents else 'all documents'
  words = title.format(paths=num_paths) + (f', {steps:,} steps' if times > 1 else '')
  return Row(
    '_'.join([kind, str(num_paths), str(documents or 'all'), *([SUFFIX] if times > 1 else [])]),
    f'{num_paths} paths, {amount}: {words}',
    method,
    changes | text | methods.at_rate(size, share),
  )


def chosen(rows: Sequence[Row], results: common.Results) -> common.Results:
  """The results of rows of all steps; where one of fewer steps has the lower loss on hold-outs, that instead."""
  found = {at: record for at, record in results.items() if not at[0].endswith(f'_{SUFFIX}')}
  for (name, seed), record in results.items():
    of_all = name.removesuffix(f'_{SUFFIX}'), seed
    if of_all != (name, seed) and (of_all not in found or record['holdout_loss'] < found[of_all]['holdout_loss']):
      found[of_all] = record
  return {at: record for at, record in found.items() if at[0] in {row.name for row in rows}}


def split_name(name: str) -> tuple[str, int, str]:
  """The kind of sharing, the number of paths and the documents of a row's name, without that of its steps."""
  kind, num_paths, documents = name.split('_')[:3]
  return kind, int(num_paths), documents


def means(rows: Sequence[Row], results: common.Results) -> dict[str, float]:
  """The mean perplexity of every row that was run."""
  by_row = {row.name: common.figures(results, row.name, PERPLEXITY) for row in rows}
  return {name: statistics.fmean(of_seeds) for name, of_seeds in by_row.items() if of_seeds}


def lowest(means: Mapping[str, float]) -> dict[tuple[int, str], str]:
  """The row with the lowest mean of those whose tokens cost as much to serve, by number of paths and documents."""
  rivals = collections.defaultdict(list)
  for name in means:
    kind, num_paths, documents = split_name(name)
    if kind != 'larger':
      rivals[num_paths, documents].append(name)
  return {shared: min(names, key=means.__getitem__) for shared, names in rivals.items()}


def lines(rows: Sequence[Row], results: common.Results) -> list[list[str]]:
  """A line for each kind of sharing and number of paths; for each amount of text the mean of `lowest` is bold."""
  results = chosen(rows, results)
  amounts = list(dict.fromkeys(split_name(row.name)[2] for row in rows))
  best = set(lowest(means(rows, results)).values())
  tokens = {amount: [r['text_tokens'] for (name, _), r in results.items() if split_name(name)[2] == amount]
            for amount in amounts}  # fmt: skip
  head = [f'{statistics.median(tokens[amount]) / 1e6:.2g} M tokens' if tokens[amount] else amount for amount in amounts]
  table = [['paths', '', 'seeds', *head, 'parameters'], ['---:', '---', *['---:'] * (len(head) + 2)]]
  for kind, num_paths in dict.fromkeys(split_name(row.name)[:2] for row in rows):
    records = [r for (name, _), r in results.items() if split_name(name)[:2] == (kind, num_paths)]
    if not records:
      continue
    names = [f'{kind}_{num_paths}_{amount}' for amount in amounts]
    by_amount = [common.figures(results, name, PERPLEXITY) for name in names]
    cells = [common.cell(of_seeds, PERPLEXITY.form) for of_seeds in by_amount]
    cells = [f'**{cell}**' if name in best else cell for name, cell in zip(names, cells, strict=True)]
    seeds = sorted({len(of_seeds) for of_seeds in by_amount if of_seeds})
    seeds_text = ' to '.join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))
    title, parameters = SHARING[kind][0].format(paths=num_paths), records[0]['parameters_total']
    table.append([str(num_paths), title, seeds_text, *cells, f'{parameters:,.0f}'])
  return table


@plot_style.styled
def picture(table: common.Table, rows: Sequence[Row], results: common.Results):
  """A line for each kind of sharing, a panel for each number of paths; a ring around the lowest of each amount.

  The larger dense model, of which a token costs more to serve, has a line and no ring.
  """
  results = chosen(rows, results)
  counts = sorted({split_name(name)[1] for name in means(rows, results)})
  width = plot_style.WIDE * (1 + 0.4 * max(0, len(counts) - 1))
  figure, axes = plot_style.axes(width, 4.6, max(1, len(counts)), sharey=True, squeeze=False)
  for ax, num_paths in zip(axes[0], counts, strict=False):
    draw(ax, num_paths, [row for row in rows if split_name(row.name)[1] == num_paths], results)
  axes[0][0].set_ylabel('perplexity')
  return figure


def draw(ax, num_paths: int, rows: Sequence[Row], results: common.Results):
  """A panel: the rows of one number of paths, with a dot for each mean."""
  by_row = means(rows, results)
  at = {
    row.name: (pictures.place(row, results, 'text_tokens') / num_paths, by_row[row.name])
    for row in rows if row.name in by_row
  }  # fmt: skip
  titles = {kind: title.format(paths=num_paths) for kind, (title, _) in SHARING.items()}
  points = {title: [at[name] for name in at if split_name(name)[0] == kind] for kind, title in titles.items()}
  for title, colour in pictures.by_name(points).items():
    for place in points[title]:
      ax.plot(*place, 'o', color=colour, markersize=4)
  for name in lowest(by_row).values():
    ax.plot(*at[name], 'o', color=palette.INK, markersize=10, fillstyle='none')
  ax.set_xscale('log')
  ax.set_yscale('log')
  ax.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
  ax.xaxis.set_major_formatter('{x:,.0f}')
  ax.xaxis.set_minor_formatter('')
  ax.yaxis.set_major_formatter('{x:.0f}')
  ax.yaxis.set_minor_formatter('{x:.0f}')
  ax.set_title(f'{num_paths} paths')
  ax.set_xlabel('tokens of training text for each path')
  pictures.draw_lines(ax, points)


TABLE = common.Table('amounts', 'How much to share, by how much text there is', rows, (PERPLEXITY,), picture, lines)

if __name__ == '__main__':
  common.main(TABLE, paths.prepare)
