"""Levels for which all paths of an islands run wait in every phase, although they hold few parameters [3].

A level over no axis has one module, whose next version needs the contributions of all paths. Every path waits for it
before its next phase, so the slowest worker sets the pace, as in DiLoCo. If such a level holds few parameters, little
is lost by letting it vary over an axis.
"""

from dipaco_jax.algorithm.modules import Layout, make_layout
from dipaco_jax.config.settings import Settings
from dipaco_jax.models import transformer

SMALL = 0.01  # of a path's parameters


def needless(s: Settings) -> dict[str, int]:
  """Returns the numbers of parameters of small levels that all paths share in a grid with other levels, by level."""
  shapes = transformer.shapes(transformer.make_model(s.model, s.tokenizer.vocab_size))
  return _needless(make_layout(s.grid, s.levels, shapes), {name: shape.size for name, shape in shapes.items()})


def _needless(layout: Layout, sizes: dict[str, int]) -> dict[str, int]:
  grid, path = layout.grid, sum(sizes.values())
  by_level = {level: sum(sizes[name] for name in layout.names(level)) for level in layout.levels}
  shared = {level for level in by_level if grid.num_modules(level) == 1}
  if grid.num_paths == 1 or len(shared) == len(by_level):
    return {}
  return {level.name: by_level[level] for level in shared if by_level[level] < SMALL * path}


def lines(s: Settings) -> list[str]:
  """Returns a line for each level that `needless` finds."""
  path = sum(x.size for x in transformer.shapes(transformer.make_model(s.model, s.tokenizer.vocab_size)).values())
  return [
    f'level {name!r} ({size:,} parameters, {size / path:.2%} of a path) has one module for all paths, so in islands '
    'all wait for the slowest in every phase: let it vary over an axis'
    for name, size in needless(s).items()
  ]
