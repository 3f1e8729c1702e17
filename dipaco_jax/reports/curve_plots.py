"""Plots of curves over training steps or phases: plain data in, a matplotlib Figure out."""

import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from dipaco_jax.reports import plot_style
from dipaco_jax.reports.palette import BLUE, COLOURS, GREY, INK, ORANGE, PAPER
from dipaco_jax.reports.plot_style import (
  DASHDOT,
  DASHED,
  HALF,
  HEIGHT,
  MAX_COLOURED,
  WIDE,
  Curve,
  Curves,
  End,
  Labels,
  styled,
)

# Line styles in turn, for readers who cannot tell the colours apart.
STRIPES = ('-', (0, (6, 1.5)), (0, (3, 1, 1, 1)), (0, (1.5, 1)))


@styled
def training(labels: Labels, curves: Curves, names: Sequence[str], settled: bool = True):
  """Draws the training curves of the base model, the paths and, if there is one, the dense control.

  If `settled`, the y axis ignores the first third of the base's steps; otherwise it begins at zero.
  """
  base, paths, control = curves
  figure, ax = plot_style.axes(HALF, HEIGHT)
  ax.margins(x=0.02)
  ends = _paths(ax, paths, names)
  first = len(base.steps) // 3
  if len(base.steps):
    ax.plot(base.steps, base.values, color=ORANGE, lw=1.6, ls=DASHED, label='base')
    plot_style.legend(ax, handlelength=2.6, labelcolor=ORANGE)
  dense = _control(ax, control)
  ends += dense
  shown = [paths.values, base.values[first if settled else 0 :], *([control.values] if control and dense else [])]
  if limits := _limits(shown):
    ax.set_ylim(limits if settled else (0, limits[1]))
  _finish(ax, ends, labels)
  return figure


@styled
def holdout(curve: Curve, names: Sequence[str], xlabel: str = 'training step', control: Curve | None = None):
  figure, ax = plot_style.axes(HALF, HEIGHT)
  ax.margins(x=0.03, y=0.08)
  ends = _paths(ax, curve, names) + _control(ax, control)
  _finish(ax, ends, Labels('Loss on the hold-outs', 'nats per token', xlabel))
  return figure


@styled
def perplexity_curves(
  runs: Mapping[str, Curve],
  base: Mapping[str, float | None],
  labels: Labels = Labels('Validation perplexity', 'perplexity'),
  stopped: float | None = None,
  wide: bool = False,
  flops_per_token: float | None = None,
):
  """Draws validation curves, with the base model as a horizontal line and early stopping as a ring.

  If x is in tokens, `flops_per_token` adds an axis of FLOPs at the top.
  """
  figure, ax = plot_style.axes(WIDE, 4.4) if wide else plot_style.axes(HALF, HEIGHT)
  digits = 2 if labels.ylabel == 'perplexity' else 3
  ends = []
  for i, (name, curve) in enumerate(runs.items()):
    if len(curve.steps):
      colour = COLOURS[i % MAX_COLOURED]
      dots = {'marker': 'o', 'ms': 3.5 if len(curve.steps) < 60 else 0}
      ax.plot(curve.steps, curve.values, color=colour, lw=2, ls=STRIPES[i % 4], **dots)
      text = f'{plot_style.short(name)} {curve.values[-1]:.{digits}f}'
      ends.append(End(curve.values[-1], text.replace('dense control', 'dense\ncontrol'), colour, curve.steps[-1]))
  for value in sorted({v for v in base.values() if v}):
    ax.axhline(value, color=ORANGE, lw=1.4, ls=DASHED)
    ends.append(End(value, f'base {value:.{digits}f}', ORANGE))
  if stopped:
    last = next(iter(runs.values())).steps[-1]
    ax.plot(last, stopped, 'o', color=PAPER, mec=BLUE, mew=1.6, ms=6)
    ends.append(End(stopped, f'stopped\nearly {stopped:.2f}', BLUE, last))
  ax.margins(x=0.03, y=0.12)
  _finish(ax, ends, labels)
  if flops_per_token:
    scales = lambda tokens: tokens * flops_per_token, lambda flops: flops / flops_per_token
    above = ax.secondary_xaxis('top', functions=scales)
    plot_style.flops(above)
  return figure


@styled
def by_phase(
  labels: Labels, phases: np.ndarray, series: Mapping[str, np.ndarray], names: Sequence[str], from_zero: bool = False
):
  """Draws a curve over phases for each name in `series`."""
  figure, ax = plot_style.axes(HALF, HEIGHT)
  ends = []
  for i, name in enumerate(names):
    if name in series:
      colour = COLOURS[i % MAX_COLOURED]
      ax.plot(phases, series[name], color=colour, lw=1.8, ls=STRIPES[i % 4], marker='o' if len(phases) < 3 else None)
      ends.append(End(series[name][-1], plot_style.short(name, 20), colour))
  ax.margins(x=0.03, y=0.1)
  if from_zero:
    ax.set_ylim(bottom=0)
  _finish(ax, [end for end in ends if np.isfinite(end.y)], labels._replace(xlabel='phase'))
  return figure


@styled
def over_time(title: str, ylabel: str, seconds: np.ndarray, shares: np.ndarray):
  """Draws a percentage for each interval of time; `seconds` are the ends of the intervals."""
  figure, ax = plot_style.axes(HALF, HEIGHT)
  scale, unit = plot_style.time_unit(seconds[-1])
  ax.step([0, *(seconds / scale)], [shares[0], *shares], where='pre', color=BLUE, lw=2)
  ax.set(xlim=(0, None), ylim=(0, 100))
  _finish(ax, [], Labels(title, ylabel, unit))
  plot_style.numbers(ax.xaxis)
  return figure


def _paths(ax, curve: Curve, names: Sequence[str]):
  """Draws a line per path and their median; returns labels of the ends, only of the median if there are many paths."""
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
      ends.append(End(y[-1], f'path {names[p]}' if num_paths > 1 else names[p], COLOURS[p], x[-1]))
  if num_paths > 1 and len(curve.steps):
    with warnings.catch_warnings():  # steps where no path has a value
      warnings.simplefilter('ignore', RuntimeWarning)
      middle = np.nanmedian(curve.values, axis=-1)
    colour = BLUE if num_paths > MAX_COLOURED else INK
    ax.plot(curve.steps, middle, color=colour, lw=2)
    ends += [End(middle[-1], 'median', colour, curve.steps[-1])]
  return [end for end in ends if np.isfinite(end.y)]


def _control(ax, curve: Curve | None) -> list[End]:
  """Draws the dense control's line; returns the label at its end."""
  if curve is None or not np.isfinite(curve.values).any():
    return []
  ax.plot(curve.steps, curve.values, color=GREY, lw=1.6, ls=DASHDOT)
  return [End(y, 'dense\ncontrol', GREY, curve.steps[-1]) for y in curve.values[-1:] if np.isfinite(y)]


def _limits(curves: Sequence[np.ndarray], margin: float = 0.08) -> tuple[float, float] | None:
  """Returns the limits of an axis that shows all curves; None if they have no values."""
  known = np.concatenate([np.ravel(c)[np.isfinite(np.ravel(c))] for c in curves])
  if not len(known):
    return None
  room = margin * (known.max() - known.min() or abs(known.max()) or 1)
  return known.min() - room, known.max() + room


def _finish(ax, ends: Sequence[End], labels: Labels):
  plot_style.numbers(ax.xaxis, integer=True)
  plot_style.numbers(ax.yaxis)
  plot_style.label_ends(ax, ends)
  ax.set(**labels._asdict())
