"""The pictures of a report: plain data in, a matplotlib Figure out."""

import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from dipaco_jax.reports import plot_style
from dipaco_jax.reports.palette import PALE, shade
from dipaco_jax.reports.plot_style import (
  BLUE,
  COLOURS,
  FAINT,
  GREY,
  HALF,
  HEIGHT,
  INK,
  MAX_COLOURED,
  NAMED,
  ORANGE,
  PAPER,
  SMALL,
  WIDE,
  Curve,
  styled,
)

DASHED = (0, (5, 3))
STRIPES = ('-', (0, (6, 1.5)), (0, (3, 1, 1, 1)), (0, (1.5, 1)))  # of lines in turn, for eyes that see no colours
MANY = 4000  # cells, which are too many for shapes of their own
BESIDE = 8  # paths that a picture of half the width has room to write numbers in columns for


def _median(values: np.ndarray) -> np.ndarray:
  with warnings.catch_warnings():  # of steps where no path has a value
    warnings.simplefilter('ignore', RuntimeWarning)
    return np.nanmedian(values, axis=-1)


def _paths(ax, curve: Curve, labels: Sequence[str]):
  """A line for each path, labelled at its end; many paths are thin and grey, and their median is labelled."""
  num_paths = curve.values.shape[1]
  ends = []
  for p in range(num_paths):
    known = np.isfinite(curve.values[:, p])
    x, y = curve.steps[known], curve.values[known, p]
    if not len(x):
      continue
    if num_paths > MAX_COLOURED:
      ax.plot(x, y, color=GREY, lw=0.6, alpha=max(0.12, min(0.55, 10 / num_paths)), rasterized=num_paths > 64)
    else:
      ax.plot(x, y, color=COLOURS[p], lw=1.4, ls=STRIPES[p % 4], marker='o' if len(x) < 3 else None, ms=3)
      ends.append((y[-1], f'path {labels[p]}' if num_paths > 1 else labels[p], COLOURS[p]))
  if num_paths > 1 and len(curve.steps):
    middle, colour = _median(curve.values), BLUE if num_paths > MAX_COLOURED else INK
    ax.plot(curve.steps, middle, color=colour, lw=2)
    ends += [(middle[-1], 'median', colour)]
  return [end for end in ends if np.isfinite(end[0])]


def _finish(ax, ends, title: str, ylabel: str, xlabel: str = 'training step'):
  plot_style.steps(ax.xaxis)
  plot_style.numbers(ax.yaxis)
  plot_style.label_ends(ax, ends)
  ax.set(xlabel=xlabel, ylabel=ylabel, title=title)


def _seen(curves: Sequence[np.ndarray], margin: float = 0.08) -> tuple[float, float] | None:
  """Limits of an axis that shows all of them."""
  known = np.concatenate([np.ravel(c)[np.isfinite(np.ravel(c))] for c in curves])
  if not len(known):
    return None
  room = margin * (known.max() - known.min() or abs(known.max()) or 1)
  return known.min() - room, known.max() + room


@styled
def training(title: str, ylabel: str, base: Curve, paths: Curve, labels: Sequence[str], settled: bool = True):
  """A figure of the base model's training, then of the paths'.

  Args:
    settled: the axis leaves out what only the base's first third has: its loss begins far above. Else it shows all
      from zero.
  """
  figure, ax = plot_style.axes(HALF, HEIGHT)
  ax.margins(x=0.02)
  ends = _paths(ax, paths, labels)
  first = len(base.steps) // 3
  if len(base.steps):
    ax.plot(base.steps, base.values, color=ORANGE, lw=1.6, ls=DASHED, label='base')
    ax.legend(loc='lower right', bbox_to_anchor=(1, 1), frameon=False, handlelength=2.6, labelcolor=ORANGE)
  if limits := _seen([paths.values, base.values[first if settled else 0 :]]):
    ax.set_ylim(limits if settled else (0, limits[1]))
  _finish(ax, ends, title, ylabel)
  return figure


@styled
def holdout(curve: Curve, labels: Sequence[str]):
  """Each path's loss on its own hold-out."""
  figure, ax = plot_style.axes(HALF, HEIGHT)
  ax.margins(x=0.03, y=0.08)
  _finish(ax, _paths(ax, curve, labels), 'Loss on what each shard holds back', 'nats per token')
  return figure


@styled
def perplexity_curves(
  runs: Mapping[str, Curve], base: Mapping[str, float | None], stopped: float | None = None, wide: bool = False
):
  """Validation perplexity against steps; the base model's as a line across, that with early stopping as a ring."""
  figure, ax = plot_style.axes(WIDE, 4.4) if wide else plot_style.axes(HALF, HEIGHT)
  ends = []
  for i, (name, curve) in enumerate(runs.items()):
    if len(curve.steps):
      colour = COLOURS[i % MAX_COLOURED]
      ax.plot(curve.steps, curve.values, color=colour, lw=2, ls=STRIPES[i % 4], marker='o',
              ms=3.5 if len(curve.steps) < 60 else 0)  # fmt: skip
      ends.append((curve.values[-1], f'{plot_style.short(name)} {curve.values[-1]:.2f}', colour))
  for value in sorted({v for v in base.values() if v}):
    ax.axhline(value, color=ORANGE, lw=1.4, ls=DASHED)
    ends.append((value, f'base {value:.2f}', ORANGE))
  if stopped:
    ax.plot(max(curve.steps[-1] for curve in runs.values()), stopped, 'o', color=PAPER, mec=BLUE, mew=1.6, ms=6)
    ends.append((stopped, f'stopped\nearly {stopped:.2f}', BLUE))
  ax.margins(x=0.03, y=0.12)
  _finish(ax, ends, 'Validation perplexity', 'perplexity')
  return figure


@styled
def by_domain(base: Mapping[str, float | None], run: Mapping[str, float | None], limit: int = 30):
  """Of each kind of text, from the base model's perplexity to the paths'."""
  known = [(name, before, after) for name, after in run.items() if after and (before := base.get(name))]
  known = sorted(sorted(known, key=lambda k: -k[1])[:limit], key=lambda k: k[2])
  figure, ax = plot_style.axes(HALF, max(HEIGHT, 0.9 + 0.29 * len(known)))
  for y, (_, before, after) in enumerate(known):
    ax.plot([before, after], [y, y], color=FAINT, lw=3.5, solid_capstyle='butt')
    ax.annotate(f'{100 * (after / before - 1):+.0f}%', (max(before, after), y), (7, 0), textcoords='offset points',
                va='center', size=SMALL, color=GREY)  # fmt: skip
  rows = np.arange(len(known))
  ax.plot([k[1] for k in known], rows, 's', color=ORANGE, ms=5.5, label='base')
  ax.plot([k[2] for k in known], rows, 'o', color=BLUE, ms=6, label='paths')
  ax.set_yticks(rows, [plot_style.short(k[0], 20) for k in known])
  ax.set_ylim(-0.7, len(known) - 0.3)
  ax.margins(x=0.16)
  ax.grid(axis='y', visible=False)
  plot_style.numbers(ax.xaxis, ticks=4)
  ax.set(xlabel='perplexity', title='By kind of text')
  ax.legend(loc='lower right', bbox_to_anchor=(1, 1), ncols=2, frameon=False, handletextpad=0.1, columnspacing=1)
  return figure


@styled
def by_path(values: Sequence[float | None], base: Sequence[float | None], labels: Sequence[str]):
  """Perplexity of each path, and of the base, on the validation text routed to it, from the lowest to the highest."""
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
  ax.legend(loc='lower right', bbox_to_anchor=(1, 1), ncols=2, frameon=False, handletextpad=0.1, columnspacing=1)
  _path_ticks(ax, [label for *_, label in known])
  ax.set(ylabel='perplexity', title='By path')
  return figure


def _path_ticks(ax, labels: Sequence[str], order: str = ''):
  """Names of paths under an axis; where there is no room for them, how many there are, and in which order."""
  few = len(labels) <= NAMED
  ax.set_xticks(range(len(labels)) if few else [], labels if few else [])
  ax.tick_params(axis='x', length=0, labelsize=SMALL, rotation=90 if len(labels) > 20 else 0)
  ax.grid(axis='x', visible=False)
  ax.set_xlabel('path' if few else f'{len(labels)} paths{order}')


@styled
def shard_sizes(tokens: Sequence[int], labels: Sequence[str]):
  """Tokens in each path's shard."""
  figure, ax = plot_style.axes(HALF, HEIGHT)
  sizes = np.asarray(tokens)
  ax.bar(range(len(sizes)), sizes, color=BLUE, width=min(0.78, 0.2 * len(sizes)) if len(sizes) <= 64 else 1)
  ax.axhline(sizes.mean(), color=INK, lw=1, ls=DASHED)
  ax.set_xlim(-0.7, len(sizes) - 0.3)
  plot_style.numbers(ax.yaxis)
  plot_style.label_ends(ax, [(sizes.mean(), 'mean', INK)])
  _path_ticks(ax, labels)
  ax.set(ylabel='tokens', title='Shard sizes')
  return figure


@styled
def kinds_by_paths(counts: np.ndarray, kinds: Sequence[str], labels: Sequence[str], limit: int = 24):
  """What each path reads: the share of each kind of text among its sequences. counts: [P, D]."""
  order = np.argsort(-counts.sum(0), kind='stable')
  shown, rest = order[:limit], order[limit:]
  table = np.concatenate([counts[:, shown], counts[:, rest].sum(1, keepdims=True)[:, : len(rest)]], axis=1)
  names = [plot_style.short(kinds[i], 20) for i in shown] + ([f'{len(rest)} others'] if len(rest) else [])
  share = (table / np.maximum(table.sum(1, keepdims=True), 1)).T
  if len(labels) > NAMED:
    share = share[:, np.lexsort((-share.max(0), share.argmax(0)))]
  few = len(labels) <= BESIDE
  figure, ax = plot_style.axes(HALF if few else WIDE, max(HEIGHT if few else 2.4, 1.3 + 0.27 * len(names)))
  _heat(ax, share, 'blue', '{:.0%}' if few else '{:.0f}', 1 if few else 100, len(labels) <= NAMED)
  ax.set_yticks(range(len(names)), names)
  _path_ticks(ax, labels, ', in the order of their main kind')
  ax.set_title('Kinds of text by path' + ('' if few or len(labels) > NAMED else ': % of each path’s sequences'))  # noqa: RUF001
  return figure


def _heat(ax, shares: np.ndarray, colour: str, form: str, scale: float, written: bool, below: str = ''):
  """Cells, the stronger the more: shares in [0, 1], those below 0 in another colour."""
  from matplotlib.collections import PolyCollection

  places = [(i, j) for i, j in np.ndindex(shares.shape) if np.isfinite(shares[i, j])]
  cells = [[(j - 0.5, i - 0.5), (j + 0.5, i - 0.5), (j + 0.5, i + 0.5), (j - 0.5, i + 0.5)] for i, j in places]
  names = [colour if shares[at] >= 0 else below for at in places]
  if shares.size > MANY:  # pixels, which no variable of a page's changes: seen through, they do on light and dark
    faces = [(PALE[name], abs(shares[at])) for name, at in zip(names, places, strict=True)]
    ax.add_collection(PolyCollection(cells, facecolors=faces, linewidths=0, rasterized=True))
  else:
    shades = [shade(name, float(abs(shares[at]))) for name, at in zip(names, places, strict=True)]
    ax.add_collection(PolyCollection(cells, facecolors=shades, edgecolors=PAPER, linewidths=min(1, 200 / shares.size)))
  ax.set(xlim=(-0.5, shares.shape[1] - 0.5), ylim=(shares.shape[0] - 0.5, -0.5))
  ax.grid(visible=False)
  ax.spines[:].set_visible(False)
  for i, j in places if written else ():
    if abs(shares[i, j]) >= 0.005:
      ax.text(j, i, form.format(shares[i, j] * scale), ha='center', va='center', size=SMALL)


@styled
def loss_matrix(matrix: np.ndarray, labels: Sequence[str]):
  """Every path on every shard's hold-out: loss above the own path's, in nats. matrix: [P path, P shard]."""
  above = matrix - np.diag(matrix)
  few = len(labels) <= BESIDE
  figure, ax = plot_style.axes(HALF if few else WIDE * 0.7, HEIGHT if few else WIDE * 0.6)
  span = max(float(np.nanmax(np.abs(above))), 1e-3)
  _heat(ax, above / span, 'orange', '{:+.2f}', span, few, below='blue')
  if len(labels) <= NAMED:
    ax.set_yticks(range(len(labels)), labels)
  else:
    ax.set_yticks([])
  _path_ticks(ax, labels)
  ax.set(ylabel='path', xlabel='shard', title='Every path on every shard')
  return figure


@styled
def early_stopping(versions: Sequence[int], last: int, labels: Sequence[str]):
  """After which phase each path was at its best on its hold-out; many paths as a histogram."""
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
    _path_ticks(ax, labels)
    ax.set_ylabel('phase of the best hold-out loss')
  else:
    ax.hist(versions, bins=np.linspace(-0.5, last + 0.5, min(last + 1, 40) + 1), color=BLUE, rwidth=0.92)
    plot_style.steps(ax.xaxis)
    plot_style.steps(ax.yaxis)
    ax.set(xlabel='phase of the best hold-out loss', ylabel='paths')
  ax.set_title('Where early stopping points')
  return figure


@styled
def bars(title: str, rows: Sequence[tuple[str, Sequence[tuple[float, str]], str]], unit: str = ''):
  """Horizontal bars, the first row on top: (name, [(length, colour), ...] end to end, words at the end)."""
  figure, ax = plot_style.axes(HALF, max(2.4, 0.95 + 0.4 * len(rows)))
  longest = max(sum(length for length, _ in parts) for _, parts, _ in rows) or 1
  for y, (_, parts, words) in enumerate(reversed(rows)):
    left = 0.0
    for i, (length, colour) in enumerate(parts):
      ax.barh(y, max(length, longest * 0.002), left=left, height=min(0.62, 0.16 * len(rows)), color=colour,
              hatch='////' if i else None, edgecolor=PAPER if i else colour, lw=0)  # fmt: skip
      left += length
    ax.annotate(words, (max(left, longest * 0.002), y), (5, 0), textcoords='offset points', va='center', size=9)
  ax.set_yticks(range(len(rows)), [name for name, *_ in reversed(rows)])
  ax.set(xlim=(0, longest * 1.32), ylim=(-0.6, len(rows) - 0.4))
  ax.spines[['left', 'bottom']].set_visible(False)
  ax.grid(visible=False)
  ax.set_xticks([])
  ax.set_title(f'{title} ({unit})' if unit else title)
  return figure


@styled
def by_level(title: str, ylabel: str, phases: np.ndarray, series: Mapping[str, np.ndarray], levels: Sequence[str]):
  """A curve over phases for each level that has one, in the level's colour."""
  figure, ax = plot_style.axes(HALF, HEIGHT)
  ends = []
  for i, name in enumerate(levels):
    if name in series:
      colour = COLOURS[i % MAX_COLOURED]
      ax.plot(phases, series[name], color=colour, lw=1.8, ls=STRIPES[i % 4], marker='o' if len(phases) < 3 else None)
      ends.append((series[name][-1], plot_style.short(name, 20), colour))
  ax.margins(x=0.03, y=0.1)
  _finish(ax, [e for e in ends if np.isfinite(e[0])], title, ylabel, 'phase')
  return figure
