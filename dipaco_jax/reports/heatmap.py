"""Tables drawn as cells, darker for larger numbers: plain data in, a matplotlib Figure out."""

from collections.abc import Sequence

import numpy as np

from dipaco_jax.reports import plot_style
from dipaco_jax.reports.palette import PALE, PAPER, shade
from dipaco_jax.reports.plot_style import HALF, HEIGHT, NAMED, SMALL, WIDE, styled

MAX_VECTOR_CELLS = 4000  # more cells are drawn as pixels
BESIDE = 8  # paths that a picture of half the width has room to write numbers in columns for


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
  _heat(ax, share, 'blue', '{:.0%}' if few else '{:.0f}', 1 if few else 100, len(labels) <= NAMED)
  ax.set_yticks(range(len(names)), names)
  plot_style.path_ticks(ax, labels, ', in the order of their main kind')
  ax.set_title('Kinds of text by path' + ('' if few or len(labels) > NAMED else ': % of each path’s sequences'))  # noqa: RUF001
  return figure


@styled
def loss_matrix(matrix: np.ndarray, labels: Sequence[str]):
  """Draws how far every path's loss on every shard lies above that of the shard's own path.

  Args:
    matrix: [P path, P shard] nats per token on the shards' hold-outs.
  """
  above = matrix - np.diag(matrix)
  few = len(labels) <= BESIDE
  figure, ax = plot_style.axes(HALF if few else WIDE * 0.7, HEIGHT if few else WIDE * 0.6)
  span = max(float(np.nanmax(np.abs(above))), 1e-3)
  _heat(ax, above / span, 'orange', '{:+.2f}', span, few, below='blue')
  if len(labels) <= NAMED:
    ax.set_yticks(range(len(labels)), labels)
  else:
    ax.set_yticks([])
  plot_style.path_ticks(ax, labels)
  ax.set(ylabel='path', xlabel='shard', title='Every path on every shard')
  return figure


def _heat(ax, shares: np.ndarray, colour: str, form: str, scale: float, written: bool, below: str = ''):
  """Draws cells, the stronger the larger: shares in [-1, 1], those below 0 in the colour `below`."""
  from matplotlib.collections import PolyCollection

  places = [(i, j) for i, j in np.ndindex(shares.shape) if np.isfinite(shares[i, j])]
  cells = [[(j - 0.5, i - 0.5), (j + 0.5, i - 0.5), (j + 0.5, i + 0.5), (j - 0.5, i + 0.5)] for i, j in places]
  names = [colour if shares[at] >= 0 else below for at in places]
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
  for i, j in places if written else ():
    if abs(shares[i, j]) >= 0.005:
      ax.text(j, i, form.format(shares[i, j] * scale), ha='center', va='center', size=SMALL)
