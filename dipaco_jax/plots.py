"""The pictures of a report: plain data in, a matplotlib Figure out."""

import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from dipaco_jax import drawing
from dipaco_jax.drawing import BLUE, COLOURS, FAINT, GREY, HALF, INK, MAX_COLOURED, NAMED, ORANGE, WIDE, Curve, styled


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
      ax.plot(x, y, color=COLOURS[p], lw=1.4, marker='o' if len(x) < 3 else None, ms=3)
      ends.append((y[-1], f'path {labels[p]}' if num_paths > 1 else labels[p], COLOURS[p]))
  if num_paths > 1 and len(curve.steps):
    middle, colour = _median(curve.values), BLUE if num_paths > MAX_COLOURED else INK
    ax.plot(curve.steps, middle, color=colour, lw=2)
    ends += [(middle[-1], f'median of\n{num_paths} paths' if num_paths > MAX_COLOURED else 'median', colour)]
  return [end for end in ends if np.isfinite(end[0])]


@styled
def losses(base: Curve, training: Curve, holdout: Curve | None, labels: Sequence[str]):
  """Training loss, the base model's first; beside it each path's loss on its own hold-out."""
  figure, axes = drawing.axes(WIDE, 3.9, 2 if holdout else 1, sharey=True, squeeze=False)
  left = axes[0, 0]
  tail = base.values[len(base.values) // 3 :]
  seen = [training.values[np.isfinite(training.values)], tail[np.isfinite(tail)]]
  seen += [holdout.values[np.isfinite(holdout.values)]] if holdout else []
  low, high = (np.concatenate(seen).min(), np.concatenate(seen).max()) if any(map(len, seen)) else (0, 1)
  left.set_ylim(low - 0.05 * (high - low), high + 0.1 * (high - low))  # the base's first steps are far above
  left.margins(x=0.02)
  ends = _paths(left, training, labels)
  if len(base.steps):
    left.plot(base.steps, base.values, color=ORANGE, lw=1.6)
    left.annotate('base model', (base.steps[len(base.steps) // 2], tail[0]), (6, 10), textcoords='offset points',
                  color=ORANGE, size=8.5)  # fmt: skip
  drawing.label_ends(left, ends)
  left.set_title('Training')
  left.set_ylabel('loss (nats per token)')
  if holdout:
    axes[0, 1].margins(x=0.02)
    axes[0, 1].set_title('Held back from each shard')
    drawing.label_ends(axes[0, 1], _paths(axes[0, 1], holdout, labels))
  for ax in axes[0]:
    ax.set_xlabel('training step')
    drawing.thousands(ax.xaxis)
  return figure


@styled
def perplexity_curves(
  runs: Mapping[str, Curve], base: Mapping[str, float | None], stopped: float | None = None, wide: bool = False
):
  """Validation perplexity against steps; the base model's as a line across, that with early stopping as a ring."""
  figure, ax = drawing.axes(WIDE if wide else HALF, 4.4 if wide else 3.6)
  ends = []
  for i, (name, curve) in enumerate(runs.items()):
    if len(curve.steps):
      colour = COLOURS[i % MAX_COLOURED]
      ax.plot(curve.steps, curve.values, color=colour, lw=2, marker='o', ms=3.5 if len(curve.steps) < 60 else 0)
      ends.append((curve.values[-1], f'{drawing.short(name)} {curve.values[-1]:.2f}', colour))
  for value in sorted({v for v in base.values() if v}):
    ax.axhline(value, color=ORANGE, lw=1.4, ls=(0, (5, 3)))
    ends.append((value, f'base {value:.2f}', ORANGE))
  if stopped:
    ax.plot(max(curve.steps[-1] for curve in runs.values()), stopped, 'o', color='white', mec=BLUE, mew=1.6, ms=6)
    ends.append((stopped, f'stopped early {stopped:.2f}', BLUE))
  ax.margins(x=0.03, y=0.12)
  drawing.label_ends(ax, ends)
  ax.set(xlabel='training step', ylabel='perplexity', title='Validation perplexity')
  drawing.thousands(ax.xaxis)
  return figure


@styled
def by_domain(base: Mapping[str, float | None], run: Mapping[str, float | None], limit: int = 30):
  """Of each kind of text, from the base model's perplexity to the paths'."""
  known = [(name, before, after) for name, after in run.items() if after and (before := base.get(name))]
  known = sorted(sorted(known, key=lambda k: -k[1])[:limit], key=lambda k: k[2])
  figure, ax = drawing.axes(HALF, max(1.9, 0.9 + 0.29 * len(known)))
  for y, (_, before, after) in enumerate(known):
    ax.plot([before, after], [y, y], color=FAINT, lw=3.5, solid_capstyle='butt')
    ax.annotate(f'{100 * (after / before - 1):+.0f}%', (max(before, after), y), (7, 0), textcoords='offset points',
                va='center', size=8.5, color=GREY)  # fmt: skip
  rows = np.arange(len(known))
  ax.plot([k[1] for k in known], rows, 'o', color=ORANGE, ms=6, label='base')
  ax.plot([k[2] for k in known], rows, 'o', color=BLUE, ms=6, label='paths')
  ax.set_yticks(rows, [drawing.short(k[0], 20) for k in known])
  ax.set_ylim(-0.7, len(known) - 0.3)
  ax.margins(x=0.14)
  ax.grid(axis='y', visible=False)
  ax.set(xlabel='perplexity', title='By kind of text')
  ax.legend(loc='lower right', bbox_to_anchor=(1, 1), ncols=2, frameon=False, handletextpad=0.1, columnspacing=1)
  return figure


@styled
def by_path(values: Sequence[float | None], base: Sequence[float | None], labels: Sequence[str]):
  """Perplexity of each path, and of the base, on the validation text routed to it, from the lowest to the highest."""
  known = sorted((v, b or np.nan, label) for v, b, label in zip(values, base, labels, strict=True) if v is not None)
  figure, ax = drawing.axes(HALF, 3.6)
  x, size = np.arange(len(known)), 6 if len(known) <= NAMED else 3
  ax.vlines(x, [b for _, b, _ in known], [v for v, *_ in known], color=FAINT, lw=min(3.5, 150 / max(len(known), 1)))
  ax.plot(x, [b for _, b, _ in known], 'o', color=ORANGE, ms=size, label='base')
  ax.plot(x, [v for v, *_ in known], 'o', color=BLUE, ms=size, label='path')
  ax.set_xlim(-0.7, len(known) - 0.3)
  ax.margins(y=0.12)
  ax.legend(loc='upper left', ncols=2, frameon=False, handletextpad=0.1, columnspacing=1)
  _path_ticks(ax, [label for *_, label in known])
  ax.set(ylabel='perplexity', title='By path')
  return figure


def _path_ticks(ax, labels: Sequence[str], order: str = ''):
  """Names of paths under an axis; where there is no room for them, how many there are, and in which order."""
  few = len(labels) <= NAMED
  ax.set_xticks(range(len(labels)) if few else [], labels if few else [])
  ax.tick_params(axis='x', length=0, labelsize=8 if len(labels) > 12 else 9, rotation=60 if len(labels) > 12 else 0)
  ax.grid(axis='x', visible=False)
  ax.set_xlabel('path' if few else f'{len(labels)} paths{order}')


@styled
def shard_sizes(tokens: Sequence[int], labels: Sequence[str]):
  """Tokens in each path's shard."""
  figure, ax = drawing.axes(WIDE, 2.6)
  scale, unit = next((s, u) for s, u in ((1e9, 'billion '), (1e6, 'million '), (1e3, 'thousand '), (1, ''))
                     if max(tokens) >= s or s == 1)  # fmt: skip
  sizes = np.asarray(tokens) / scale
  ax.bar(range(len(sizes)), sizes, color=BLUE, width=0.78 if len(sizes) <= 64 else 1)
  ax.axhline(sizes.mean(), color=INK, lw=1, ls=(0, (5, 3)))
  ax.set_xlim(-0.7, len(sizes) - 0.3)
  drawing.label_ends(ax, [(sizes.mean(), 'mean', INK)])
  _path_ticks(ax, labels)
  ax.set(ylabel=f'{unit}tokens', title='Shard sizes')
  return figure


@styled
def kinds_by_paths(counts: np.ndarray, kinds: Sequence[str], labels: Sequence[str], limit: int = 24):
  """What each path reads: the share of each kind of text among its sequences. counts: [P, D]."""
  order = np.argsort(-counts.sum(0), kind='stable')
  shown, rest = order[:limit], order[limit:]
  table = np.concatenate([counts[:, shown], counts[:, rest].sum(1, keepdims=True)[:, : len(rest)]], axis=1)
  names = [drawing.short(kinds[i]) for i in shown] + ([f'{len(rest)} others'] if len(rest) else [])
  share = (table / np.maximum(table.sum(1, keepdims=True), 1)).T * 100
  if len(labels) > NAMED:
    share = share[:, np.lexsort((-share.max(0), share.argmax(0)))]
  figure, ax = drawing.axes(WIDE, max(2.4, 1.3 + 0.27 * len(names)))
  image = _heat(ax, share, [names, labels], 'Blues', 0, 100, '{:.0f}', share.size <= 400)
  _path_ticks(ax, labels, ', in the order of their main kind')
  figure.colorbar(image, ax=ax, label='% of a path’s sequences', pad=0.01, aspect=14).outline.set_visible(False)  # noqa: RUF001
  ax.set_title('Kinds of text by path')
  return figure


def _heat(ax, values: np.ndarray, labels, colours: str, low: float, high: float, form: str, written: bool):
  image = ax.imshow(values, cmap=colours, vmin=low, vmax=high, aspect='auto', interpolation='nearest')
  ax.grid(visible=False)
  ax.spines[:].set_visible(False)
  ax.set_yticks(range(len(labels[0])), labels[0])
  for (i, j), value in np.ndenumerate(values) if written else ():
    if np.isfinite(value) and value >= 0.5:
      dark = (value - low) / max(high - low, 1e-9) > 0.55
      ax.text(j, i, form.format(value), ha='center', va='center', size=7.5, color='white' if dark else INK)
  return image


@styled
def loss_matrix(matrix: np.ndarray, labels: Sequence[str]):
  """Every path on every shard's hold-out: loss above the own path's, in nats. matrix: [P path, P shard]."""
  above = matrix - np.diag(matrix)
  figure, ax = drawing.axes(6.2, 5)
  span = max(float(np.nanmax(np.abs(above))), 1e-3)
  image = _heat(ax, above, [labels if len(labels) <= NAMED else [], labels], 'RdBu_r', -span, span, '{:.2f}', False)
  _path_ticks(ax, labels)
  figure.colorbar(image, ax=ax, label='nats above the shard’s own path', pad=0.02).outline.set_visible(False)  # noqa: RUF001
  ax.set(ylabel='path', xlabel='shard', title='Every path on every shard')
  return figure


@styled
def early_stopping(versions: Sequence[int], last: int, labels: Sequence[str]):
  """After which phase each path was at its best on its hold-out; many paths as a histogram."""
  figure, ax = drawing.axes(HALF, 3.2)
  if len(versions) <= 64:
    x = np.arange(len(versions))
    ax.vlines(x, versions, last, color=FAINT, lw=min(3.5, 150 / len(versions)))
    ax.plot(x, versions, 'o', color=BLUE, ms=6 if len(versions) <= NAMED else 4)
    ax.axhline(last, color=INK, lw=1, ls=(0, (5, 3)))
    ax.set_xlim(-0.7, len(versions) - 0.3)
    ax.set_ylim(-0.03 * last, last * 1.08)
    drawing.label_ends(ax, [(last, 'last', INK)])
    _path_ticks(ax, labels)
    ax.set_ylabel('phase of the best hold-out loss')
  else:
    ax.hist(versions, bins=np.linspace(-0.5, last + 0.5, min(last + 1, 40) + 1), color=BLUE, rwidth=0.92)
    ax.set(xlabel='phase of the best hold-out loss', ylabel='paths')
  ax.set_title('Where early stopping points')
  return figure


@styled
def bars(title: str, rows: Sequence[tuple[str, Sequence[tuple[float, str]], str]], unit: str = ''):
  """Horizontal bars, the first row on top: (name, [(length, colour), ...] end to end, words at the end)."""
  figure, ax = drawing.axes(HALF, 0.95 + 0.4 * len(rows))
  longest = max(sum(length for length, _ in parts) for _, parts, _ in rows) or 1
  for y, (_, parts, words) in enumerate(reversed(rows)):
    left = 0.0
    for length, colour in parts:
      ax.barh(y, max(length, longest * 0.002), left=left, height=0.62, color=colour)
      left += length
    ax.annotate(words, (max(left, longest * 0.002), y), (5, 0), textcoords='offset points', va='center', size=9)
  ax.set_yticks(range(len(rows)), [name for name, *_ in reversed(rows)])
  ax.set_xlim(0, longest * 1.32)
  ax.spines[['left', 'bottom']].set_visible(False)
  ax.grid(visible=False)
  ax.set_xticks([])
  ax.set_title(f'{title} ({unit})' if unit else title)
  return figure


@styled
def outer_gradients(phases: np.ndarray, norms: Mapping[str, np.ndarray], cosines: Mapping[str, np.ndarray]):
  """By level: norm of the outer gradient (median over modules), and how much the paths behind it agree."""
  figure, axes = drawing.axes(WIDE, 3.2, 2 if cosines else 1, squeeze=False)
  titles = ('Outer gradients: norm', 'Agreement of the paths behind them')
  for ax, title, series in zip(axes[0], titles, (norms, cosines), strict=False):
    ends = []
    for i, name in enumerate(norms):
      if name in series:
        ax.plot(phases, series[name], color=COLOURS[i % MAX_COLOURED], lw=1.8, marker='o' if len(phases) < 3 else None)
        ends.append((series[name][-1], drawing.short(name), COLOURS[i % MAX_COLOURED]))
    ax.margins(x=0.03, y=0.1)
    drawing.label_ends(ax, [e for e in ends if np.isfinite(e[0])])
    ax.set(title=title, xlabel='phase', ylabel='L2 norm, median over modules' if series is norms else 'cosine, mean')
  return figure
