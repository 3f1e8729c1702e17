"""One style for every picture: plain, light, safe for colour-blind eyes, lines labelled where they end."""

import contextlib
import functools
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from dipaco_jax import plain

WIDE, HALF = 10.0, 4.9  # inches; pages show 104 pixels an inch
INK, GREY, FAINT = '#243b53', '#829ab1', '#d9e2ec'
BLUE, ORANGE = '#0072B2', '#D55E00'  # this run; the base model and other things it is compared with
COLOURS = (BLUE, '#E69F00', '#009E73', '#CC79A7', '#56B4E9', '#332288', '#882255', '#999933', '#44AA99', '#AA4499',
           '#117733', '#888888')  # fmt: skip
NAMED = 32  # paths that an axis has room to name
MAX_NAME = 32  # characters
MAX_COLOURED = len(COLOURS)  # more paths are thin grey lines around their median
STYLE: dict[Any, Any] = {
  'font.family': 'sans-serif',
  'font.sans-serif': ['Inter', 'Helvetica Neue', 'Helvetica', 'Arial', 'Liberation Sans', 'DejaVu Sans'],
  'font.size': 9.5,
  'text.color': INK,
  'axes.labelcolor': INK,
  'axes.edgecolor': GREY,
  'axes.linewidth': 0.8,
  'axes.titlesize': 10.5,
  'axes.titleweight': 'bold',
  'axes.titlelocation': 'left',
  'axes.titlepad': 10,
  'axes.spines.top': False,
  'axes.spines.right': False,
  'axes.axisbelow': True,
  'axes.grid': True,
  'grid.color': '#edf2f7',
  'grid.linewidth': 0.8,
  'xtick.color': GREY,
  'ytick.color': GREY,
  'xtick.labelcolor': INK,
  'ytick.labelcolor': INK,
  'xtick.major.size': 3,
  'ytick.major.size': 0,
  'figure.facecolor': 'white',
  'svg.fonttype': 'none',
  'text.parse_math': False,  # what others have named is text, dollars and all
  'figure.constrained_layout.use': True,
}


class Curve(NamedTuple):
  """Values against the training step."""

  steps: np.ndarray  # [T]
  values: np.ndarray  # [T], or [T, P] with nan where a path has none


def styled(draw: Callable[..., Any]) -> Callable[..., Any]:
  """Draws in the report's style."""

  @functools.wraps(draw)
  def wrapper(*args, **kwargs):
    import matplotlib

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
      # A box stands for a character that no font has, in a png; in a page the reader's fonts may have it.
      warnings.filterwarnings('ignore', r'Glyph \d+ .* missing from', UserWarning)
      return draw(*args, **kwargs)

  return wrapper


@contextlib.contextmanager
def left_out(name: str) -> Iterator[None]:
  """A picture that cannot be drawn is left out: no run goes without a report for it."""
  try:
    yield
  except Exception:
    logging.exception('the picture %s is left out of the report, for it cannot be drawn', name)


def short(name: str, most: int = MAX_NAME) -> str:
  """What others have named, so that the picture beside it has room."""
  return plain.name(name, most)


def axes(width: float, height: float, columns: int = 1, **kwargs):
  from matplotlib.figure import Figure

  figure = Figure((width, height))
  return figure, figure.subplots(1, columns, **kwargs)


@styled
def to_png(figure) -> bytes:
  data = io.BytesIO()
  figure.savefig(data, format='png', dpi=160)
  return data.getvalue()


@styled
def to_svg(figure, name: str) -> str:
  """One <svg> element, to stand in a page beside others: its references are its own."""
  import matplotlib

  data = io.StringIO()
  with matplotlib.rc_context({'svg.hashsalt': name}):
    figure.savefig(data, format='svg', metadata={'Date': None, 'Creator': None, 'Format': None, 'Type': None})
  svg = data.getvalue()
  svg = re.sub(r'<metadata>.*?</metadata>', '', svg[svg.index('<svg') :], flags=re.DOTALL)
  return re.sub(r' id="[a-zA-Z][\w.]*_\d+"', '', svg)  # names of groups, which repeat from figure to figure


def thousands(axis):
  axis.set_major_formatter(lambda x, _: f'{x:,.0f}')


def _spread(positions: Sequence[float], gap: float) -> np.ndarray:
  """Moves labels apart until they are at least `gap` from each other, keeping their order."""
  order, placed = np.argsort(positions), np.sort(np.asarray(positions, float))
  for _ in range(100):
    overlap = gap - np.diff(placed)
    if not (overlap > 1e-9 * gap).any():
      break
    push = np.maximum(overlap, 0) / 2
    placed[:-1] -= push
    placed[1:] += push
  result = np.empty_like(placed)
  result[order] = placed
  return result


def label_ends(ax, ends: Sequence[tuple[float, str, str]], size: float = 8.5):
  """Writes (y, text, colour) right of the axes, where lines end, none over another."""
  if not ends:
    return
  low, high = ax.get_ylim()
  height = ax.figure.get_figheight() * 0.75 * 72
  places = _spread([min(max(y, low), high) for y, *_ in ends], (high - low) * size * 1.25 / height)
  for (_, text, colour), y in zip(ends, places, strict=True):
    ax.annotate(text, (1, y), (6, 0), xycoords=ax.get_yaxis_transform(), textcoords='offset points', va='center',
                color=colour, size=size, annotation_clip=False)  # fmt: skip
