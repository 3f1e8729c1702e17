"""A picture of the grid: the network's storeys from bottom to top, each cut into the modules of its level.

Every storey shows all paths, as points of the same plane; a module is the patch of paths that share it. So a level over
one axis is cut into strips, a shared one is whole, a path-specific one is cut into single paths [2.3].
"""

import itertools
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dipaco_jax.algorithm.grid import Grid, Level
from dipaco_jax.reports import plot_style
from dipaco_jax.reports.module_drift import Storey
from dipaco_jax.reports.palette import PALE, RULE, shade
from dipaco_jax.reports.plot_style import GREY, HALF, INK, PAPER, SMALL, short, styled

SLANT = 0.42  # how far the plane's back edge is to the right of its front edge, in widths of it
LEFT = 0.25  # of the front edge's left end, where names begin
CORNER = 22  # letters of a line that has room beside a storey
MAX_VECTOR_CELLS = 1024  # modules of a level; more are drawn as pixels


class Plane(NamedTuple):
  """The place of a storey: its depth on the page, and the height of its front edge."""

  depth: float
  height: float

  def place(self, v, u):
    """Returns x and y of the point v to the back and u to the right, both in [0, 1]."""
    return u + v * SLANT, v * self.depth + self.height


def modules_of_paths(grid: Grid, level: Level) -> np.ndarray:
  """Returns the row-major index of the module that each path picks, [rows, columns]: the first axis by all others."""
  shape = grid.level_shape(level)
  index = [int(np.ravel_multi_index(grid.module(level, c), shape)) if shape else 0 for c in grid.points()]
  rows = grid.shape[0] if len(grid.shape) > 1 else 1
  return np.array(index).reshape(rows, -1)


@styled
def draw(grid: Grid, storeys: Sequence[Storey], values: Sequence[np.ndarray], title: str, colour: str):
  """Draws storeys in shades of 'blue' or 'orange', by the values of their modules, [K] in percent; nan: none."""
  depth = 0.36 if len(storeys) <= 5 else 0.24
  planes = [Plane(depth, k * (depth + 0.08)) for k in range(len(storeys))]
  wide, high = LEFT + 1 + SLANT + 0.04, planes[-1].height + depth + 0.18
  figure, ax = plot_style.axes(HALF, 0.45 + (HALF - 0.3) * high / wide)
  ax.set_axis_off()
  ax.set(aspect='equal', xlim=(-LEFT, 1 + SLANT + 0.04), ylim=(-0.15, planes[-1].height + depth + 0.03), title=title)
  largest = float(np.nanmax(np.concatenate([[0.0], *values]))) or 1.0
  for storey, numbers, plane in zip(storeys, values, planes, strict=True):
    _draw_storey(ax, modules_of_paths(grid, storey.level), numbers, plane, colour, largest)
    corner = -LEFT, plane.height + plane.depth  # which the slant leaves at the upper left
    plot_style.write(ax, short(storey.level.name, 24), corner, (0, -1), va='top', weight='bold', size=SMALL)
    plot_style.write(ax, textwrap.fill(storey.parts, CORNER), corner, (0, -13), va='top', size=SMALL, color=GREY)
    _write_count(ax, grid, storey, plane)
  shape = modules_of_paths(grid, storeys[0].level).shape
  _draw_path(ax, shape, planes)
  _draw_axes(ax, grid, planes[0])
  if not _written(shape):
    _draw_legend(ax, colour, largest)
  return figure


def _draw_storey(ax, index: np.ndarray, numbers: np.ndarray, plane: Plane, colour: str, largest: float):
  from matplotlib.collections import LineCollection, PolyCollection

  rows, columns = index.shape
  squares, borders = [], []
  for i, j in np.ndindex(rows, columns):
    corners = ((i, j), (i, j + 1), (i + 1, j + 1), (i + 1, j))
    squares.append([plane.place(v / rows, u / columns) for v, u in corners])
    # Borders stand between modules only: a module is one patch.
    if j + 1 < columns and index[i, j] != index[i, j + 1]:
      borders.append(squares[-1][1:3])
    if i + 1 < rows and index[i, j] != index[i + 1, j]:
      borders.append(squares[-1][2:4])
  shares = (numbers / largest)[index.ravel()]
  if rows * columns > MAX_VECTOR_CELLS:
    # As pixels, which page variables cannot recolour: their transparency suits light and dark pages.
    faces = [(PALE[colour], float(np.nan_to_num(share))) for share in shares]
    ax.add_collection(PolyCollection(squares, facecolors=faces, linewidths=0, antialiaseds=False, rasterized=True))
  else:
    shades = [shade(colour, 0.1 + 0.9 * share) if np.isfinite(share) else RULE for share in shares]
    ax.add_collection(PolyCollection(squares, facecolors=shades, edgecolors=shades, linewidths=0.9))
  ax.add_collection(LineCollection(borders, colors=PAPER, linewidths=0.5 if rows * columns > 64 else 1.5))
  outline = np.array([plane.place(v, u) for v, u in ((0, 0), (0, 1), (1, 1), (1, 0), (0, 0))])
  ax.plot(*outline.T, color=GREY, lw=0.8)
  for module in np.unique(index) if _written(index.shape) else ():
    value = numbers[module]
    text = 'no siblings' if np.isnan(value) else f'{value:.0f}%' if value >= 10 or not value else f'{value:.1f}%'
    x, y = plane.place(*((np.argwhere(index == module).mean(0) + 0.5) / index.shape))
    ax.text(x, y, text, ha='center', va='center', size=SMALL)


def _written(shape: tuple[int, int]) -> bool:
  """Returns whether there is room for a number in each module."""
  return max(shape) <= 4


def _draw_legend(ax, colour: str, largest: float):
  """Draws a legend of the shades at the lower right."""
  from matplotlib.collections import PolyCollection

  left = 0.86
  width = 0.3
  parts = 12
  x = np.linspace(left, left + width, parts + 1)
  cells = [[(a, -0.13), (b, -0.13), (b, -0.09), (a, -0.09)] for a, b in itertools.pairwise(x)]
  shades = [shade(colour, 0.1 + 0.9 * (k + 0.5) / parts) for k in range(parts)]
  ax.add_collection(PolyCollection(cells, facecolors=shades, edgecolors=shades, linewidths=0.4))
  ax.text(left - 0.01, -0.11, '0%', ha='right', va='center', size=SMALL)
  ax.text(left + width + 0.01, -0.11, f'{largest:.3g}%', va='center', size=SMALL)


def _write_count(ax, grid: Grid, storey: Storey, plane: Plane):
  """Writes into how many modules the storey is cut, at its lower right."""
  count, shared = grid.num_modules(storey.level), grid.paths_through(storey.level)
  corner = 1 + SLANT + 0.03, plane.height
  if grid.num_paths > 1:
    text = f'in {shared} paths' if count == 1 else f'each in {shared} paths' if shared > 1 else 'one per path'
    plot_style.write(ax, text, corner, (0, 0), ha='right', va='bottom', size=SMALL, color=GREY)
  text, above = f'{count} module{"s" if count > 1 else ""}', 11 if grid.num_paths > 1 else 0
  plot_style.write(ax, text, corner, (0, above), ha='right', va='bottom', size=SMALL)


def _draw_path(ax, shape: tuple[int, int], planes: Sequence[Plane]):
  """Draws one path as an example: up through a module of every storey, hidden where a storey is in front of it."""
  rows, columns = shape
  if rows * columns == 1:
    return
  v, u = (rows - 0.5) / rows, (columns // 3 + 0.16) / columns  # at the back, and beside the cell's number
  places = [plane.place(v, u) for plane in planes]
  for (x, low), above in zip(places, planes[1:], strict=False):
    ax.plot([x, x], [low, above.height], color=INK, lw=1, zorder=3)
  ax.plot(*np.array(places).T, 'o', color=PAPER, mec=INK, mew=1, ms=4.5, zorder=4)


def _draw_axes(ax, grid: Grid, plane: Plane):
  """Draws the directions of the axes along the front and right edges of the lowest storey."""
  arrow = {'arrowstyle': '->', 'color': GREY, 'lw': 1}
  rows, columns = (grid.shape[0] if len(grid.shape) > 1 else 1), grid.num_paths
  columns //= rows
  if columns > 1:
    names = short(' and '.join(grid.names[len(grid.shape) > 1 :]))
    ax.annotate('', (0.2, -0.05), (0, -0.05), arrowprops=arrow)
    ax.text(0.22, -0.05, f'{names}, 0 to {columns - 1}', va='center', size=SMALL, color=GREY)
  if rows > 1:
    ax.annotate('', plane.place(0.9, -0.05), plane.place(0.3, -0.05), arrowprops=arrow)
    label = f'{short(grid.names[0], 12)}, 0 to {rows - 1}'
    ax.text(-LEFT, plane.place(0.3, 0)[1], label, va='center', size=SMALL, color=GREY)
