"""Levels for which all paths of an islands run wait in every phase, although they hold few parameters [3].

A level over no axis has one module, whose next version needs the contributions of all paths. Every path waits for it
before its next phase, so the slowest worker sets the pace, as in DiLoCo. If such a level holds few parameters, little
is lost by letting it vary over an axis.
"""

from collections.abc import Mapping

import jax

from dipaco_jax.algorithm.modules import Layout

SMALL = 0.01  # of a path's parameters


def needless(layout: Layout, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, int]:
  """Returns the numbers of parameters of small levels that all paths share in a grid with other levels, by level.

  `shapes` are those of one path's parameters.
  """
  grid, sizes = layout.grid, layout.shared_sizes(shapes)
  shared = [level.name for level in layout.levels if grid.num_modules(level) == 1]
  if grid.num_paths == 1 or len(shared) == len(layout.levels):
    return {}
  return {level: sizes[level] for level in shared if sizes[level] < SMALL * _path_size(shapes)}


def lines(layout: Layout, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> list[str]:
  """Returns a line for each level that `needless` finds."""
  return [
    f'level {level!r} ({size:,} parameters, {size / _path_size(shapes):.2%} of a path) has one module for all paths, '
    'so in islands all wait for the slowest in every phase: let it vary over an axis'
    for level, size in needless(layout, shapes).items()
  ]


def _path_size(shapes: Mapping[str, jax.ShapeDtypeStruct]) -> int:
  return sum(shape.size for shape in shapes.values())
