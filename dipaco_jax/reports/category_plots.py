"""Pictures with rows or columns for paths, stages or kinds of text: plain data in, a matplotlib Figure out."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from dipaco_jax.reports import plot_style
from dipaco_jax.reports.palette import BLUE, FAINT, GREY, INK, ORANGE, PALE, PAPER, shade
from dipaco_jax.reports.plot_style import DASHED, HALF, HEIGHT, NAMED, SMALL, WIDE, styled

MAX_VECTOR_CELLS = 4000  # more cells are drawn as pixels
WORTH = {  # marker, colour and name of each model
  'base': ('s', ORANGE, 'base'),
  'alone': ('D', GREY, 'alone'),
  'federation': ('o', BLUE, 'in the federation'),
}
BESIDE = 8  # paths that a picture of half the width has room to write numbers in columns for


@styled
def by_domain(
  base: Mapping[str, float | None], run: Mapping[str, float | None],
  control: Mapping[str, float | None] = MappingProxyType({}), what: str = 'kind of text', limit: int = 30,
):  # fmt: skip
  """Draws a row for each kind of text, which is called `what`, with perplexities of base, paths and dense control.

  The percentage is that of the paths against the control, or against the base if there is no control.
  """
  known = [(name, before, after) for name, after in run.items() if after and (before := base.get(name))]
  known = sorted(sorted(known, key=lambda k: -k[1])[:limit], key=lambda k: k[2])
  figure, ax = plot_style.axes(HALF, max(HEIGHT, 0.9 + 0.29 * len(known)))
  for y, (_, before, after) in enumerate(known):
    dense = control.get(known[y][0])
    points = [before, after, *([dense] if dense else [])]
    ax.plot([min(points), max(points)], [y, y], color=FAINT, lw=3.5, solid_capstyle='butt')
    change = f'{100 * (after / (dense or before) - 1):+.0f}%'
    plot_style.write(ax, change, (max(points), y), (7, 0), va='center', size=SMALL, color=INK)
  rows = np.arange(len(known))
  ax.plot([k[1] for k in known], rows, 's', color=ORANGE, ms=5.5, label='base')
  if any(control.values()):
    ax.plot([control.get(k[0]) or np.nan for k in known], rows, 'D', color=GREY, ms=5, label='dense control')
  ax.plot([k[2] for k in known], rows, 'o', color=BLUE, ms=6, label='paths')
  ax.set_yticks(rows, [plot_style.short(k[0], 20) for k in known])
  ax.set_ylim(-0.7, len(known) - 0.3)
  ax.margins(x=0.16)
  ax.grid(axis='y', visible=False)
  plot_style.numbers(ax.xaxis, ticks=4)
  against = 'dense control' if any(control.values()) else 'base'
  ax.set(xlabel=f'perplexity; in %: paths against {against}')
  ax.set_title(f'By {what}', pad=26)  # above the legend, which is as wide as the axes
  plot_style.legend(ax, ncols=3, handletextpad=0.1, columnspacing=1)
  return figure


@styled
def worth(groups: Mapping[str, Sequence[tuple[float | None, tuple[float, float] | None]]]):
  """Draws three rows for each path: perplexity and interval of the base, of a model alone, and of the federation's.

  groups: {path: [(perplexity, interval) in the order of WORTH]}.
  """
  figure, ax = plot_style.axes(HALF, max(HEIGHT, 1.1 + 0.75 * len(groups)))
  for marker, colour, label in WORTH.values():
    ax.plot([], [], marker, color=colour, ms=6, label=label)
  for row, values in enumerate(groups.values()):
    for model, (marker, colour, _), (value, interval) in zip(WORTH, WORTH.values(), values, strict=True):
      y = row + {'base': -0.22, 'alone': 0.0, 'federation': 0.22}[model]
      if interval:
        ax.plot(interval, [y, y], color=colour, lw=2, solid_capstyle='butt')
      if value:
        ax.plot([value], [y], marker, color=colour, ms=6)
        plot_style.write(ax, f'{value:.2f}', (max(value, *(interval or [value])), y), (7, 0), va='center', size=SMALL)
  ax.set_yticks(range(len(groups)), [plot_style.short(name, 20) for name in groups])
  ax.set_ylim(len(groups) - 0.5, -0.5)  # the first on top
  ax.margins(x=0.16)
  ax.grid(axis='y', visible=False)
  plot_style.numbers(ax.xaxis, ticks=4)
  ax.set(xlabel='perplexity')
  ax.set_title('Alone and in the federation', pad=26)
  plot_style.legend(ax, ncols=3, handletextpad=0.1, columnspacing=1)
  return figure


@styled
def by_path(
  values: Sequence[float | None], base: Sequence[float | None], labels: Sequence[str],
  control: Sequence[float | None] = (),
):  # fmt: skip
  """Draws the perplexities of path, base and dense control on the text of each path, from the lowest to the highest."""
  dense = control or [None] * len(values)
  rows = zip(values, base, labels, dense, strict=True)
  known = sorted((v, b or np.nan, label, d or np.nan) for v, b, label, d in rows if v is not None)
  figure, ax = plot_style.axes(HALF, HEIGHT)
  x, size = np.arange(len(known)), 6 if len(known) <= NAMED else 3
  points_P3 = np.array([(v, b, d) for v, b, _, d in known], float).reshape(-1, 3)
  if len(known):
    low_P, high_P = np.nanmin(points_P3, axis=1), np.nanmax(points_P3, axis=1)
    ax.vlines(x, low_P, high_P, color=FAINT, lw=min(3.5, 150 / len(known)))
  if any(base):
    ax.plot(x, points_P3[:, 1], 's', color=ORANGE, ms=size - 0.5, label='base')
  if any(dense):
    ax.plot(x, points_P3[:, 2], 'D', color=GREY, ms=size - 1, label='dense control')
  ax.plot(x, [v for v, *_ in known], 'o', color=BLUE, ms=size, label='path')
  ax.set_xlim(-0.7, len(known) - 0.3)
  ax.margins(y=0.12)
  plot_style.numbers(ax.yaxis)
  plot_style.legend(ax, ncols=3, handletextpad=0.1, columnspacing=1)
  plot_style.path_ticks(ax, [label for _, _, label, _ in known])
  ax.set_ylabel('perplexity')
  ax.set_title('By path', pad=26)
  return figure


@styled
def shard_sizes(tokens: Sequence[int], labels: Sequence[str]):
  figure, ax = plot_style.axes(HALF, HEIGHT)
  sizes = np.asarray(tokens)
  ax.bar(range(len(sizes)), sizes, color=BLUE, width=min(0.78, 0.2 * len(sizes)) if len(sizes) <= 64 else 1)
  ax.axhline(sizes.mean(), color=INK, lw=1, ls=DASHED)
  ax.set_xlim(-0.7, len(sizes) - 0.3)
  plot_style.numbers(ax.yaxis)
  plot_style.label_ends(ax, [plot_style.End(sizes.mean(), 'mean', INK)])
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
    plot_style.numbers(ax.yaxis, integer=True)
    plot_style.label_ends(ax, [plot_style.End(last, 'last', INK)])
    plot_style.path_ticks(ax, labels)
    ax.set_ylabel('phase of the best hold-out loss')
  else:
    ax.hist(versions, bins=np.linspace(-0.5, last + 0.5, min(last + 1, 40) + 1), color=BLUE, rwidth=0.92)
    plot_style.numbers(ax.xaxis, integer=True)
    plot_style.numbers(ax.yaxis, integer=True)
    ax.set(xlabel='phase of the best hold-out loss', ylabel='paths')
  ax.set_title('Phase that each path is taken from')
  return figure


@styled
def bars(title: str, rows: Sequence[tuple[str, Sequence[tuple[float, str]], str]]):
  """Draws horizontal bars, the first on top; rows are (name, [(length, colour) of each part, end to end], words)."""
  figure, ax = plot_style.axes(HALF, max(2.4, 0.95 + 0.4 * len(rows)))
  longest = max(sum(length for length, _ in parts) for _, parts, _ in rows) or 1
  for y, (_, parts, label) in enumerate(reversed(rows)):
    left = 0.0
    for i, (length, colour) in enumerate(parts):
      width, height = max(length, longest * 0.002), min(0.62, 0.16 * len(rows))
      hatched = {'hatch': '////', 'edgecolor': PAPER} if i else {'edgecolor': colour}
      ax.barh(y, width, left=left, height=height, color=colour, lw=0, **hatched)
      left += length
    plot_style.write(ax, label, (max(left, longest * 0.002), y), (5, 0), va='center', size=SMALL)
  ax.set_yticks(range(len(rows)), [name for name, *_ in reversed(rows)])
  ax.set(xlim=(0, longest * 1.32), ylim=(-0.6, len(rows) - 0.4))
  ax.spines[['left', 'bottom']].set_visible(False)
  ax.grid(visible=False)
  ax.set_xticks([])
  ax.set_title(title)
  return figure


@styled
def kinds_by_paths(counts: np.ndarray, kinds: Sequence[str], labels: Sequence[str], limit: int = 24):
  """Draws the share of each kind of text among each path's sequences. counts: [P, D]."""
  order = np.argsort(-counts.sum(0), kind='stable')
  shown, rest = order[:limit], order[limit:]
  table = np.concatenate([counts[:, shown], counts[:, rest].sum(1, keepdims=True)[:, : len(rest)]], axis=1)
  names = [plot_style.short(kinds[i], 20) for i in shown] + ([f'{len(rest)} others'] if len(rest) else [])
  share = (table / np.maximum(table.sum(1, keepdims=True), 1)).T
  if len(labels) > NAMED:
    share = share[:, np.lexsort((-share.max(0), share.argmax(0)))]
  few = len(labels) <= BESIDE
  figure, ax = plot_style.axes(HALF if few else WIDE, max(HEIGHT if few else 2.4, 1.3 + 0.27 * len(names)))
  write = (lambda cell: f'{cell:.0%}') if few else (lambda cell: f'{100 * cell:.0f}')
  _heat(ax, share, ('blue', ''), write if len(labels) <= NAMED else None)
  ax.set_yticks(range(len(names)), names)
  plot_style.path_ticks(ax, labels, ', in the order of their main kind')
  ax.set_title('Kinds of text by path' + ('' if few or len(labels) > NAMED else ': % of each path’s sequences'))  # noqa: RUF001
  return figure


@styled
def loss_matrix(matrix: np.ndarray, labels: Sequence[str]):
  """Draws how far each path's loss lies above that of a shard's own path; [P path, P shard] nats per token."""
  above = matrix - np.diag(matrix)
  few = len(labels) <= BESIDE
  figure, ax = plot_style.axes(HALF if few else WIDE * 0.7, HEIGHT if few else WIDE * 0.6)
  span = max(float(np.nanmax(np.abs(above))), 1e-3)
  _heat(ax, above / span, ('orange', 'blue'), (lambda cell: f'{cell * span:+.2f}') if few else None)
  ax.set_yticks(*((range(len(labels)), labels) if len(labels) <= NAMED else ([],)))
  plot_style.path_ticks(ax, labels)
  ax.set(ylabel='path', xlabel='shard', title='Every path on every shard')
  return figure


def _heat(ax, shares: np.ndarray, colours: tuple[str, str], write: Callable[[float], str] | None):
  """Draws cells, the stronger the larger: shares in [-1, 1].

  `colours` are those of shares above and below 0; `write` returns the text of a share, None writes nothing.
  """
  from matplotlib.collections import PolyCollection

  places = [(i, j) for i, j in np.ndindex(shares.shape) if np.isfinite(shares[i, j])]
  cells = [[(j - 0.5, i - 0.5), (j + 0.5, i - 0.5), (j + 0.5, i + 0.5), (j - 0.5, i + 0.5)] for i, j in places]
  names = [colours[int(shares[at] < 0)] for at in places]
  if shares.size > MAX_VECTOR_CELLS:
    # As pixels, which page variables cannot recolour: their transparency suits light and dark pages.
    faces = [(PALE[name], abs(shares[at])) for name, at in zip(names, places, strict=True)]
    ax.add_collection(PolyCollection(cells, facecolors=faces, linewidths=0, rasterized=True))
  else:
    shades = [shade(name, float(abs(shares[at]))) for name, at in zip(names, places, strict=True)]
    ax.add_collection(PolyCollection(cells, facecolors=shades, edgecolors=PAPER, linewidths=min(1, 200 / shares.size)))
  ax.set(xlim=(-0.5, shares.shape[1] - 0.5), ylim=(shares.shape[0] - 0.5, -0.5))
  ax.grid(visible=False)
  ax.spines[:].set_visible(False)
  if write is None:
    return
  for i, j in places:
    if abs(shares[i, j]) >= 0.005:
      ax.text(j, i, write(float(shares[i, j])), ha='center', va='center', size=SMALL)
