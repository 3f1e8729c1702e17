"""Text is legible on every colour that it stands on, on light and on dark screens."""

import numpy as np
import pytest

from dipaco_jax.algorithm.grid import Grid
from dipaco_jax.reports import palette

FOUR = Grid({'a': 2, 'b': 2})


def luminance(colour: str) -> float:
  """Returns the relative luminance, as WCAG defines it."""
  parts = [c / 255 for c in bytes.fromhex(colour[1:])]
  linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
  return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
  """Returns the contrast of two colours as WCAG defines it, from 1 to 21."""
  low, high = sorted((luminance(one), luminance(other)))
  return (high + 0.05) / (low + 0.05)


def test_text_is_legible_on_light_and_dark():
  for colour in (palette.INK, palette.GREY, palette.ORANGE, *palette.COLOURS):
    assert contrast(colour, palette.PAPER) > 4.5
    assert contrast(palette.DARK[colour], palette.DARK[palette.PAPER]) > 4.5
  for shade in (palette.shade(name, share) for name in palette.PALE for share in np.linspace(0, 1, 51)):
    assert contrast(palette.INK, shade) > 4.5
    assert contrast(palette.DARK[palette.INK], palette.DARK[shade]) > 4.5
  light, dark = ({name: pair[i] for name, pair in palette.PAGE.items()} for i in (0, 1))
  for theme in (light, dark):
    for ink in ('ink', 'strong', 'quiet', 'accent', 'loss'):
      assert min(contrast(theme[ink], theme[ground]) for ground in ('ground', 'paper', 'notice')) > 4.5


@pytest.mark.parametrize(
  'axes', [{}, {'a': 1}, {'a': 2, 'b': 2}, {'a': 4, 'b': 4}, {'w': 16}, {'a': 2, 'b': 2, 'c': 4}, {'a': 16, 'b': 16}]
)
def test_every_path_has_a_colour_that_ink_is_legible_on(axes):
  grid = Grid(axes)
  colours = [palette.path_colours(grid, path) for path in range(grid.num_paths)]
  inks = palette.PAGE['strong']
  for i, of_screen in enumerate(zip(*colours, strict=True)):  # light, and dark
    assert len(set(of_screen)) == grid.num_paths
    assert min(contrast(inks[i], c) for c in of_screen) > 4.5


def test_a_path_has_the_colour_of_its_line():
  for path in range(4):
    found, line = palette.path_colours(FOUR, path), palette.COLOURS[path]
    assert found[0] == palette.mix('#ffffff', line, 0.3)
