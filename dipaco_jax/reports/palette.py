"""Colours of pages and pictures, each for a light and for a dark screen.

Pictures are drawn in the light ones. A page names them as CSS variables, which change with the reader's preference.
Text has a contrast of at least 4.5 with its background, in both, as WCAG AA asks; tests check it.
"""

import re

from dipaco_jax.algorithm.grid import Grid

INK = '#243b53'  # text
GREY = '#566b80'  # lesser text
FAINT = '#cbd6e2'  # stems
RULE = '#e6ecf2'  # lines behind pictures
PAPER = '#ffffff'  # what pictures and boxes stand on
BLUE, ORANGE = '#0068a3', '#b34700'  # this run; the base model and other things it is compared with
COLOURS = (
  *(BLUE, '#8f5a00', '#00734f', '#a33b78', '#5a49b8', '#00707c'),
  *('#882255', '#5f6a14', '#7a3ea8', '#6d4c41', '#2f6b1f', '#555f6b'),
)
PALE = {
  'blue': '#63abd9',
  'orange': '#ef9d60',
  'green': '#5cc09a',
  'red': '#ee9090',
}  # the strongest shade that ink is legible on

DARK_COLOURS = (
  *('#62b6f0', '#e0b04a', '#46c99a', '#ea8fc3', '#a99cf5', '#45c4d0'),
  *('#e8799f', '#bfc95c', '#cf9af0', '#cfa594', '#8fcf7a', '#b3bcc7'),
)
DARK_PALE = {'blue': '#2a6c9e', 'orange': '#9c5314', 'green': '#1d7757', 'red': '#9a3b46'}
DARK_PAPER = '#17222d'
SHADES = 50  # steps from paper to the strongest of a colour


def mix(start: str, end: str, share: float) -> str:
  """Returns the '#rrggbb' that lies a `share` of the way from one colour to another."""
  ends = (bytes.fromhex(colour[1:]) for colour in (start, end))
  return '#' + bytes(round(a + (b - a) * share) for a, b in zip(*ends, strict=True)).hex()


def shade(name: str, share: float) -> str:
  """Returns a shade of 'blue', 'orange', 'green' or 'red': 0 is paper, 1 the strongest that ink is legible on."""
  return mix(PAPER, PALE[name], round(min(max(share, 0), 1) * SHADES) / SHADES)


DARK = {
  **dict(zip(COLOURS, DARK_COLOURS, strict=True)),
  INK: '#e3eaf2',
  GREY: '#a3b4c6',
  FAINT: '#40566c',
  RULE: '#263645',
  PAPER: DARK_PAPER,
  ORANGE: '#f59a58',
  **{shade(x, k / SHADES): mix(DARK_PAPER, DARK_PALE[x], k / SHADES) for x in PALE for k in range(SHADES + 1)},
}
PAGE = {  # names of a page's own colours
  'ground': ('#f5f7fa', '#0e161e'),
  'ink': (INK, DARK[INK]),
  'strong': ('#102a43', '#f5f8fb'),
  'quiet': (GREY, DARK[GREY]),
  'accent': (BLUE, DARK[BLUE]),
  'paper': (PAPER, DARK[PAPER]),
  'edge': ('#dfe6ee', '#2b3b4b'),
  'loss': ('#a61b29', '#ff9a94'),
  'shadow': ('#8fa3b8', '#5a7288'),
  'notice': ('#fff4e5', '#33261a'),
}

# From pale to strong: hues of paths' texts, where there are more paths than COLOURS. Of 4 x 4 paths no two look
# alike, for any kind of colour blindness; ink is legible on all.
HUES = (
  *(('#d1dbff', '#7f93f8'), ('#f6e277', '#b9a21c'), ('#b3febf', '#67ce7d'), ('#fff1f5', '#de6d9d')),
  *(('#d3f3f8', '#54bfd6'), ('#f8dcc8', '#df8650'), ('#ecdffb', '#b58ae8'), ('#e8eaed', '#a3a9b3')),
)


def path_colours(grid: Grid, path: int) -> tuple[str, str]:
  """Returns the '#rrggbb' that a path's text stands on, light and dark.

  It is the colour of the path's line in pictures, thinned. Where lines have none, the first axis chooses the hue and
  the others the shade; if it is longer than HUES, it goes through them again in other shades.
  """
  if grid.num_paths <= len(COLOURS):
    line = COLOURS[path]
    return mix(PAPER, line, 0.3), mix(DARK[PAPER], DARK[line], 0.3)
  first = grid.shape[0] if grid.shape else 1
  along, other = divmod(path, grid.num_paths // first)
  hues = min(first, len(HUES))
  shades = -(-first // hues) * (grid.num_paths // first)
  strength = (along // hues * (grid.num_paths // first) + other) / (shades - 1) if shades > 1 else 0.5
  pale, strong = HUES[along % hues]
  return mix(pale, strong, strength), mix(DARK[PAPER], strong, 0.14 + 0.33 * strength)


def themed(svg: str) -> str:
  """Returns an SVG whose colours are a page's variables; its texts stay as they are."""

  def variables(style: re.Match[str]) -> str:
    return re.sub(r'#[0-9a-f]{6}', lambda m: f'var(--c{m[0][1:]})' if m[0] in DARK else m[0], style[0])

  return re.sub(r'\b(style|fill|stroke)="[^"]*"', variables, svg)


def page_colours(page: str) -> dict[str, tuple[str, str]]:
  """Returns the light and the dark colour of each CSS variable that a page may use, by name."""
  used = sorted(set(re.findall(r'var\(--c([0-9a-f]{6})\)', page)))
  return PAGE | {f'c{name}': (f'#{name}', DARK[f'#{name}']) for name in used}
