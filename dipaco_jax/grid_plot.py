"""The grid, drawn: the network's storeys from bottom to top, each cut into the modules of its level.

Every storey shows all paths, as points of the same plane; a module is the patch of paths that share it. So a level over
one axis is cut into strips, a shared one is whole, a path-specific one is cut into single paths [2.3].
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dipaco_jax.drawing import GREY, INK, WIDE, short, styled
from dipaco_jax.grid import Grid, Level

SLANT = 0.42  # how far the plane's back edge is to the right of its front edge, in widths of it


class Storey(NamedTuple):
  """A slab of the network with one number per module."""

  level: Level
  parts: str  # what it holds, in words
  values: tuple[np.ndarray, ...]  # one [K] per picture, in percent, nan where there is none


class Plane(NamedTuple):
  """Where a storey is: its depth on the page, and the height of its front edge."""

  depth: float
  height: float

  def place(self, v, u):
    """A point, v to the back and u to the right in [0, 1], to x and y."""
    return u + v * SLANT, v * self.depth + self.height


def modules_of_paths(grid: Grid, level: Level) -> np.ndarray:
  """Row-major index of the module that each path picks, [rows, columns]: the first axis by all others."""
  shape = grid.level_shape(level)
  index = [int(np.ravel_multi_index(grid.module(level, c), shape)) if shape else 0 for c in grid.points()]
  rows = grid.shape[0] if len(grid.shape) > 1 else 1
  return np.array(index).reshape(rows, -1)


@styled
def draw(grid: Grid, storeys: Sequence[Storey], titles: Sequence[str], colours: Sequence[str]):
  """One picture per title, side by side, in colours of their own; one without any number is left out."""
  from matplotlib.figure import Figure

  kept = [i for i in range(len(titles)) if any(np.isfinite(s.values[i]).any() for s in storeys)] or [0]
  depth = 0.36 if len(storeys) <= 5 else 0.24
  planes = [Plane(depth, k * (depth + 0.13)) for k in range(len(storeys))]
  figure = Figure((WIDE if len(kept) > 1 else 6.1, 0.85 + 2.45 * (planes[-1].height + depth + 0.17)))
  axes = figure.subplots(1, len(kept), squeeze=False)[0]
  for ax, i in zip(axes, kept, strict=True):
    first, last = i == kept[0], i == kept[-1]
    values = [storey.values[i] for storey in storeys]
    scale = _scale(colours[i], float(np.nanmax(np.concatenate([[0.0], *values]))))
    ax.set_axis_off()
    ax.set_aspect('equal')
    ax.set_xlim(-0.5 if first else -0.03, 1 + SLANT + (0.5 if last else 0.03))
    ax.set_ylim(-0.14, planes[-1].height + depth + 0.03)
    for storey, plane, numbers in zip(storeys, planes, values, strict=True):
      _storey(ax, modules_of_paths(grid, storey.level), numbers, plane, scale)
      if first:
        _name(ax, storey, plane)
      if last:
        _cut(ax, grid, storey, plane)
    _one_path(ax, modules_of_paths(grid, storeys[0].level).shape, planes)
    _axis_names(ax, grid, planes[0])
    ax.set_title(titles[i])
    bar = figure.colorbar(scale, ax=ax, orientation='horizontal', shrink=0.5, aspect=28, pad=0.02)
    bar.outline.set_visible(False)
    bar.set_label('% of the norm of the base’s parameters', size=8.5)  # noqa: RUF001
  return figure


def _scale(colour: str, high: float):
  import matplotlib
  from matplotlib import cm, colors

  # Not from white: a module that has not moved is still seen.
  shades = matplotlib.colormaps[colour](np.linspace(0.08, 0.95, 256))
  return cm.ScalarMappable(colors.Normalize(0, high or 1), colors.LinearSegmentedColormap.from_list(colour, shades))


def _storey(ax, index: np.ndarray, numbers: np.ndarray, plane: Plane, scale):
  from matplotlib.collections import LineCollection, PolyCollection

  rows, columns = index.shape
  values = numbers[index]
  faces = np.where(np.isfinite(values)[..., None], scale.to_rgba(np.nan_to_num(values)), [0.93, 0.95, 0.97, 1])
  squares, borders = [], []
  for i, j in np.ndindex(rows, columns):
    corners = ((i, j), (i, j + 1), (i + 1, j + 1), (i + 1, j))
    squares.append([plane.place(v / rows, u / columns) for v, u in corners])
    # Borders stand between modules only: a module is one patch.
    if j + 1 < columns and index[i, j] != index[i, j + 1]:
      borders.append(squares[-1][1:3])
    if i + 1 < rows and index[i, j] != index[i + 1, j]:
      borders.append(squares[-1][2:4])
  patches = faces.reshape(-1, 4)
  many = rows * columns > 64
  style = {'facecolors': patches, 'edgecolors': patches, 'linewidths': 0.9, 'rasterized': rows * columns > 1024}
  ax.add_collection(PolyCollection(squares, **style))
  ax.add_collection(LineCollection(borders, colors='white', linewidths=0.5 if many else 1.5))
  outline = np.array([plane.place(v, u) for v, u in ((0, 0), (0, 1), (1, 1), (1, 0), (0, 0))])
  ax.plot(*outline.T, color=GREY, lw=0.8)
  if rows <= 4 and columns <= 4:
    _write_values(ax, index, values, plane, scale)


def _write_values(ax, index: np.ndarray, values: np.ndarray, plane: Plane, scale):
  for module in np.unique(index):
    cells = np.argwhere(index == module)
    value = values[tuple(cells[0])]
    dark = np.isfinite(value) and np.mean(scale.to_rgba(value)[:3]) < 0.6
    text = f'{value:.0f}%' if np.isfinite(value) else 'no siblings'
    x, y = plane.place(*((cells.mean(0) + 0.5) / index.shape))
    ax.text(x, y, text, ha='center', va='center', size=7.5, color='white' if dark else INK)


def _name(ax, storey: Storey, plane: Plane):
  """At its left: which level, and what of the network."""
  y = plane.height + plane.depth / 2
  ax.text(0.04, y + 0.01, short(storey.level.name), ha='right', va='bottom', weight='bold')
  ax.text(0.04, y - 0.01, storey.parts, ha='right', va='top', size=8, color=GREY)


def _cut(ax, grid: Grid, storey: Storey, plane: Plane):
  """At its right: how many modules it is cut into."""
  x, y = 1 + SLANT - 0.03, plane.height + plane.depth / 2
  count, shared = grid.num_modules(storey.level), grid.paths_through(storey.level)
  ax.text(x, y + 0.01, f'{count} module{"s" if count > 1 else ""}', va='bottom')
  if grid.num_paths > 1:
    words = f'in {shared} paths' if count == 1 else f'each in {shared} paths' if shared > 1 else 'one per path'
    ax.text(x, y - 0.01, words, va='top', size=8, color=GREY)


def _one_path(ax, shape: tuple[int, int], planes: Sequence[Plane]):
  """An example of a path: up through one module of every storey, hidden where a storey is in front of it."""
  rows, columns = shape
  if rows * columns == 1:
    return
  v, u = (rows - 0.5) / rows, (columns // 3 + 0.16) / columns  # at the back, and beside the cell's number
  places = [plane.place(v, u) for plane in planes]
  for (x, low), above in zip(places, planes[1:], strict=False):
    ax.plot([x, x], [low, above.height], color=INK, lw=1, zorder=3)
  ax.plot(*np.array(places).T, 'o', color='white', mec=INK, mew=1, ms=4.5, zorder=4)


def _axis_names(ax, grid: Grid, plane: Plane):
  """Which way the axes go, along the lowest storey's front and right edges."""
  arrow = {'arrowstyle': '->', 'color': GREY, 'lw': 1}
  rows, columns = (grid.shape[0] if len(grid.shape) > 1 else 1), grid.num_paths
  columns //= rows
  if columns > 1:
    ax.annotate('', (0.3, -0.06), (0, -0.06), arrowprops=arrow)
    names = short(' and '.join(grid.names[len(grid.shape) > 1 :]))
    ax.text(0.32, -0.06, f'{names}, 0 to {columns - 1}', va='center', size=8,
            color=GREY)  # fmt: skip
  if rows > 1:
    start, end = plane.place(0, 1.05), plane.place(0.45, 1.05)
    ax.annotate('', end, start, arrowprops=arrow)
    ax.text(start[0], -0.06, f'{short(grid.names[0])}, 0 to {rows - 1}', ha='center', va='center', size=8, color=GREY)
