"""One style for every picture: plain, safe for colour-blind eyes, lines labelled where they end."""

import contextlib
import functools
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from dipaco_jax.core import printable
from dipaco_jax.reports import amounts, palette
from dipaco_jax.reports.palette import COLOURS, GREY, INK, PAPER
from dipaco_jax.storage import seals

# Inches. A page has two halves side by side, or, on a telephone, one that is as wide: its smallest text is then 10
# pixels high.
WIDE = 9.6
HALF = 4.5
HEIGHT = 3.2
SMALL = 9.3  # points, of the smallest text
NAMED = 32  # paths that an axis has room to name
MAX_NAME = 32  # characters
DASHED = (0, (5, 3))
DOTTED = (0, (1, 2.5))
DASHDOT = (0, (7, 2, 1.5, 2))
MAX_COLOURED = len(COLOURS)  # more paths are thin grey lines around their median
STYLE: dict[Any, Any] = {
  'font.family': 'sans-serif',
  'font.sans-serif': ['Inter', 'Helvetica Neue', 'Helvetica', 'Arial', 'Liberation Sans', 'DejaVu Sans'],
  'font.size': 9.5,
  **dict.fromkeys(('text.color', 'axes.labelcolor', 'xtick.labelcolor', 'ytick.labelcolor'), INK),
  **dict.fromkeys(('axes.edgecolor', 'xtick.color', 'ytick.color'), GREY),
  **dict.fromkeys(('axes.linewidth', 'grid.linewidth'), 0.8),
  'axes.titlesize': 10.5,
  'axes.titleweight': 'bold',
  'axes.titlelocation': 'left',
  'axes.titlepad': 10,
  **dict.fromkeys(('axes.spines.top', 'axes.spines.right'), False),
  **dict.fromkeys(('axes.axisbelow', 'axes.grid', 'figure.constrained_layout.use'), True),
  'grid.color': palette.RULE,
  'xtick.major.size': 3,
  'ytick.major.size': 0,
  'figure.facecolor': PAPER,
  'svg.fonttype': 'none',
  'text.parse_math': False,  # what others have named is text, dollars and all
}


class Curve(NamedTuple):
  """Values against the training step."""

  steps: np.ndarray  # [T]
  values: np.ndarray  # [T], or [T, P] with nan where a path has none


class Curves(NamedTuple):
  """The same value of the base model, of the paths after it, and of the dense control if there is one."""

  base: Curve
  paths: Curve  # [T, P]
  control: Curve | None = None


class Labels(NamedTuple):
  """The title of a chart and the labels of its axes."""

  title: str
  ylabel: str
  xlabel: str = 'training step'


class Picture(NamedTuple):
  figure: Any  # matplotlib's
  caption: str


def styled(draw: Callable[..., Any]) -> Callable[..., Any]:
  """Makes a function draw in the report's style."""

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
  """Leaves out a picture that cannot be drawn, and logs why; seals.Damaged is raised."""
  try:
    yield
  except seals.Damaged:
    raise
  except Exception:  # a run gets its report all the same
    logging.exception('the picture %s is left out of the report, because it cannot be drawn', name)


def short(name: str, most: int = MAX_NAME) -> str:
  """Returns a name from outside, cut so that the picture next to it has room."""
  return printable.name(name, most)


def axes(width: float, height: float, columns: int = 1, **kwargs):
  """Returns a figure of this size in inches, and its axes."""
  from matplotlib.figure import Figure

  figure = Figure((width, height))
  return figure, figure.subplots(1, columns, **kwargs)


@styled
def to_png(figure) -> bytes:
  data = io.BytesIO()
  _save(figure, data, format='png', dpi=160)
  return data.getvalue()


@styled
def to_svg(figure, name: str) -> str:
  """Returns one <svg> element for a page with others: its references are unique to it, its colours the page's."""
  import matplotlib

  data = io.StringIO()
  with matplotlib.rc_context({'svg.hashsalt': name}):
    metadata = {'Date': None, 'Creator': None, 'Format': None, 'Type': None}
    _save(figure, data, format='svg', metadata=metadata, transparent=True)
  svg = data.getvalue()
  svg = re.sub(r'<metadata>.*?</metadata>', '', svg[svg.index('<svg') :], flags=re.DOTALL)
  svg = re.sub(r' id="[a-zA-Z][\w.]*_\d+"', '', svg)  # names of groups, which repeat from figure to figure
  return palette.themed(svg)


def _save(figure, file, **options):
  """Saves a figure with a layout that is computed only once, as that takes long."""
  import matplotlib

  figure.savefig(file, **options)
  with matplotlib.rc_context({'figure.constrained_layout.use': False}):
    figure.set_layout_engine(None)  # 'none' would be an engine for which all is drawn once more, to no effect


# -- axes


def tick_words(ticks: Sequence[float]) -> list[str]:
  """Returns evenly spaced numbers as texts, without rounding; large ones in thousands or millions."""
  largest, gap = max(map(abs, ticks), default=0.0), abs(ticks[1] - ticks[0]) if len(ticks) > 1 else 1.0
  units = ((1e9, ' B'), (1e6, ' M'), (1e3, ' K'))
  scale, unit = next(((s, u) for s, u in units if largest >= max(s, 1e5)), (1, ''))
  gap /= scale
  decimals = next((n for n in range(12) if abs(gap * 10**n - round(gap * 10**n)) < 1e-6 * gap * 10**n), 12)
  return [f'{x / scale:,.{decimals}f}{unit if x else ""}' for x in ticks]


def numbers(axis, integer: bool = False, ticks: int = 5):
  """Sets ticks at round numbers, written out; integers for counts."""
  from matplotlib import ticker

  formatter: Any = ticker.FuncFormatter(lambda x, pos: f'{x:g}')
  formatter.format_ticks = tick_words
  axis.set_major_locator(ticker.MaxNLocator(ticks, integer=integer, steps=[1, 2, 2.5, 5, 10]))
  axis.set_major_formatter(formatter)


def flops(axes):
  """Sets ticks of the x axis above a picture, in words such as '4 T'."""
  from matplotlib import ticker

  formatter: Any = ticker.FuncFormatter(lambda x, pos: f'{x:g}')
  formatter.format_ticks = lambda ticks: [amounts.count(x) if x > 0 else '' for x in ticks]
  axes.xaxis.set_major_locator(ticker.MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
  axes.xaxis.set_major_formatter(formatter)
  axes.tick_params(axis='x', labelsize=SMALL)
  axes.set_xlabel('training FLOPs', size=SMALL, loc='right')


def time_unit(span_s: float) -> tuple[int, str]:
  """Returns the unit for the labels of an axis of this length, in seconds, and its name."""
  units = ((3600, 'hours'), (60, 'minutes'), (1, 'seconds'))
  return next((seconds, name) for seconds, name in units if span_s >= 5 * seconds or seconds == 1)


def path_ticks(ax, labels: Sequence[str], order: str = ''):
  """Names the paths under an axis; if there is no room, says how many there are, and in which order."""
  few = len(labels) <= NAMED
  ax.set_xticks(range(len(labels)) if few else [], labels if few else [])
  ax.tick_params(axis='x', length=0, labelsize=SMALL, rotation=90 if len(labels) > 20 else 0)
  ax.grid(axis='x', visible=False)
  ax.set_xlabel('path' if few else f'{len(labels)} paths{order}')


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


def legend(ax, **options):
  """Draws a legend above the axes, at their right end."""
  ax.legend(loc='lower right', bbox_to_anchor=(1, 1), frameon=False, **options)


def write(ax, text: str, place: tuple[float, float], offset: tuple[float, float], **options):
  """Writes words at a place of the axes, `offset` points to the right and up."""
  ax.annotate(text, place, offset, textcoords='offset points', **options)


class End(NamedTuple):
  """The label of a line, at the line's last point."""

  y: float
  text: str
  colour: str
  x: float | None = None  # of a line that may end before the right edge of the axes


def label_ends(ax, ends: Sequence[End]):
  """Writes labels to the right of the axes, without overlaps, each with a line to its y; dotted from an earlier end."""
  if not ends:
    return
  low, high = ax.get_ylim()
  height = ax.figure.get_figheight() * 0.75 * 72
  lines = max(1 + end.text.count('\n') for end in ends)
  true = [min(max(end.y, low), high) for end in ends]
  places = _spread(true, (high - low) * SMALL * 1.3 * lines / height)
  across = ax.get_yaxis_transform()
  right = ax.get_xlim()[1]
  for (_, text, colour, x), y, place in zip(ends, true, places, strict=True):
    if x is not None and x < right:
      ax.plot((x, right), (y, y), color=colour, lw=0.8, ls=DOTTED, scalex=False, scaley=False)
    ax.plot((1, 1.035), (y, place), transform=across, color=colour, lw=0.7, clip_on=False, scalex=False, scaley=False)
    beside = {'xycoords': across, 'annotation_clip': False}
    write(ax, text, (1.035, place), (3, 0), va='center', color=colour, size=SMALL, **beside)
