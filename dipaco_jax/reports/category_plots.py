"""Pictures with a row or a column for each path, stage or kind of text: plain data in, a matplotlib Figure out."""

from collections.abc import Mapping, Sequence

import numpy as np

from dipaco_jax.reports import plot_style
from dipaco_jax.reports.palette import BLUE, FAINT, GREY, INK, ORANGE, PAPER
from dipaco_jax.reports.plot_style import DASHED, HALF, HEIGHT, NAMED, SMALL, styled


@styled
def by_domain(base: Mapping[str, float | None], run: Mapping[str, float | None], limit: int = 30):
  """Draws a row for each kind of text, from the base model's perplexity to that of the paths."""
  known = [(name, before, after) for name, after in run.items() if after and (before := base.get(name))]
  known = sorted(sorted(known, key=lambda k: -k[1])[:limit], key=lambda k: k[2])
  figure, ax = plot_style.axes(HALF, max(HEIGHT, 0.9 + 0.29 * len(known)))
  for y, (_, before, after) in enumerate(known):
    ax.plot([before, after], [y, y], color=FAINT, lw=3.5, solid_capstyle='butt')
    change = f'{100 * (after / before - 1):+.0f}%'
    plot_style.write(ax, change, (max(before, after), y), (7, 0), va='center', size=SMALL, color=GREY)
  rows = np.arange(len(known))
  ax.plot([k[1] for k in known], rows, 's', color=ORANGE, ms=5.5, label='base')
  ax.plot([k[2] for k in known], rows, 'o', color=BLUE, ms=6, label='paths')
  ax.set_yticks(rows, [plot_style.short(k[0], 20) for k in known])
  ax.set_ylim(-0.7, len(known) - 0.3)
  ax.margins(x=0.16)
  ax.grid(axis='y', visible=False)
  plot_style.numbers(ax.xaxis, ticks=4)
  ax.set(xlabel='perplexity', title='By kind of text')
  plot_style.legend(ax, ncols=2, handletextpad=0.1, columnspacing=1)
  return figure


@styled
def by_path(values: Sequence[float | None], base: Sequence[float | None], labels: Sequence[str]):
  """Draws the perplexity of each path and of the base on the text routed to it, from the lowest to the highest."""
  known = sorted((v, b or np.nan, label) for v, b, label in zip(values, base, labels, strict=True) if v is not None)
  figure, ax = plot_style.axes(HALF, HEIGHT)
  x, size = np.arange(len(known)), 6 if len(known) <= NAMED else 3
  ax.vlines(x, [b for _, b, _ in known], [v for v, *_ in known], color=FAINT, lw=min(3.5, 150 / max(len(known), 1)))
  if any(base):
    ax.plot(x, [b for _, b, _ in known], 's', color=ORANGE, ms=size - 0.5, label='base')
  ax.plot(x, [v for v, *_ in known], 'o', color=BLUE, ms=size, label='path')
  ax.set_xlim(-0.7, len(known) - 0.3)
  ax.margins(y=0.12)
  plot_style.numbers(ax.yaxis)
  plot_style.legend(ax, ncols=2, handletextpad=0.1, columnspacing=1)
  plot_style.path_ticks(ax, [label for *_, label in known])
  ax.set(ylabel='perplexity', title='By path')
  return figure


@styled
def shard_sizes(tokens: Sequence[int], labels: Sequence[str]):
  """Draws the number of tokens in each path's shard."""
  figure, ax = plot_style.axes(HALF, HEIGHT)
  sizes = np.asarray(tokens)
  ax.bar(range(len(sizes)), sizes, color=BLUE, width=min(0.78, 0.2 * len(sizes)) if len(sizes) <= 64 else 1)
  ax.axhline(sizes.mean(), color=INK, lw=1, ls=DASHED)
  ax.set_xlim(-0.7, len(sizes) - 0.3)
  plot_style.numbers(ax.yaxis)
  plot_style.label_ends(ax, [(sizes.mean(), 'mean', INK)])
  plot_style.path_ticks(ax, labels)
  ax.set(ylabel='tokens', title='Shard sizes')
  return figure


@styled
def early_stopping(versions: Sequence[int], last: int, labels: Sequence[str]):
  """Draws the phase after which each path's hold-out loss was lowest; many paths as a histogram."""
  figure, ax = plot_style.axes(HALF, HEIGHT)
  if len(versions) <= 64:
    x = np.arange(len(versions))
    ax.vlines(x, versions, last, color=FAINT, lw=min(3.5, 150 / len(versions)))
    ax.plot(x, versions, 'o', color=BLUE, ms=6 if len(versions) <= NAMED else 4, clip_on=False, zorder=3)
    ax.axhline(last, color=INK, lw=1, ls=DASHED)
    ax.set_xlim(-0.7, len(versions) - 0.3)
    ax.set_ylim(0, last * 1.08)
    plot_style.steps(ax.yaxis)
    plot_style.label_ends(ax, [(last, 'last', INK)])
    plot_style.path_ticks(ax, labels)
    ax.set_ylabel('phase of the best hold-out loss')
  else:
    ax.hist(versions, bins=np.linspace(-0.5, last + 0.5, min(last + 1, 40) + 1), color=BLUE, rwidth=0.92)
    plot_style.steps(ax.xaxis)
    plot_style.steps(ax.yaxis)
    ax.set(xlabel='phase of the best hold-out loss', ylabel='paths')
  ax.set_title('Where early stopping points')
  return figure


@styled
def bars(title: str, rows: Sequence[tuple[str, Sequence[tuple[float, str]], str]]):
  """Draws horizontal bars, the first on top.

  Args:
    rows: (name, [(length, colour), ...], words), the parts end to end, the words behind them.
  """
  figure, ax = plot_style.axes(HALF, max(2.4, 0.95 + 0.4 * len(rows)))
  longest = max(sum(length for length, _ in parts) for _, parts, _ in rows) or 1
  for y, (_, parts, words) in enumerate(reversed(rows)):
    left = 0.0
    for i, (length, colour) in enumerate(parts):
      width, height = max(length, longest * 0.002), min(0.62, 0.16 * len(rows))
      hatched = {'hatch': '////', 'edgecolor': PAPER} if i else {'edgecolor': colour}
      ax.barh(y, width, left=left, height=height, color=colour, lw=0, **hatched)
      left += length
    plot_style.write(ax, words, (max(left, longest * 0.002), y), (5, 0), va='center', size=9)
  ax.set_yticks(range(len(rows)), [name for name, *_ in reversed(rows)])
  ax.set(xlim=(0, longest * 1.32), ylim=(-0.6, len(rows) - 0.4))
  ax.spines[['left', 'bottom']].set_visible(False)
  ax.grid(visible=False)
  ax.set_xticks([])
  ax.set_title(title)
  return figure
