"""Colours of pages and pictures, each for a light and for a dark screen.

Pictures are drawn in the light ones. A page names them as CSS variables, which change with the reader's preference.
Text has a contrast of 4.5 at least on what it stands on, in both, as WCAG AA asks; a test looks.
"""

import re

INK, GREY, FAINT, RULE = '#243b53', '#566b80', '#cbd6e2', '#e6ecf2'  # text, lesser text, stems, lines behind pictures
PAPER = '#ffffff'  # what pictures and boxes stand on
BLUE, ORANGE = '#0068a3', '#b34700'  # this run; the base model and other things it is compared with
COLOURS = (BLUE, '#8f5a00', '#00734f', '#a33b78', '#5a49b8', '#00707c', '#882255', '#5f6a14', '#7a3ea8', '#6d4c41',
           '#2f6b1f', '#555f6b')  # fmt: skip
PALE = {'blue': '#63abd9', 'orange': '#ef9d60', 'green': '#5cc09a'}  # the strongest shade that ink is legible on

DARK = {
  INK: '#e3eaf2', GREY: '#a3b4c6', FAINT: '#40566c', RULE: '#263645', PAPER: '#17222d',
  BLUE: '#62b6f0', ORANGE: '#f59a58',
  **dict(zip(COLOURS[1:], ('#e0b04a', '#46c99a', '#ea8fc3', '#a99cf5', '#45c4d0', '#e8799f', '#bfc95c', '#cf9af0',
                           '#cfa594', '#8fcf7a', '#b3bcc7'), strict=True)),
  PALE['blue']: '#2a6c9e', PALE['orange']: '#9c5314', PALE['green']: '#1d7757',
}  # fmt: skip
SHADES = 50  # steps from paper to the strongest of a colour


def mix(start: str, end: str, share: float) -> str:
  """'#rrggbb' that is so far on the way from one colour to another."""
  ends = (bytes.fromhex(colour[1:]) for colour in (start, end))
  return '#' + bytes(round(a + (b - a) * share) for a, b in zip(*ends, strict=True)).hex()


def shade(name: str, share: float) -> str:
  """A shade of 'blue', 'orange' or 'green': 0 is paper, 1 the strongest that ink is legible on."""
  return mix(PAPER, PALE[name], round(min(max(share, 0), 1) * SHADES) / SHADES)


DARK |= {
  shade(name, k / SHADES): mix(DARK[PAPER], DARK[pale], k / SHADES)
  for name, pale in PALE.items()
  for k in range(SHADES)
}


def themed(svg: str) -> str:
  """An svg whose colours are the page's variables; those in its texts stay."""

  def variables(style: re.Match[str]) -> str:
    return re.sub(r'#[0-9a-f]{6}', lambda m: f'var(--c{m[0][1:]})' if m[0] in DARK else m[0], style[0])

  return re.sub(r'\b(style|fill|stroke)="[^"]*"', variables, svg)


def variables(page: str) -> str:
  """CSS that gives the variables of a page their colours."""
  names = sorted(set(re.findall(r'var\(--c([0-9a-f]{6})\)', page)))
  light, dark = (
    ''.join(f'--c{name}:{colour};' for name, colour in pairs)
    for pairs in (((n, f'#{n}') for n in names), ((n, DARK[f'#{n}']) for n in names))
  )
  return f':root{{{light}}}\n@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}\n'


def luminance(colour: str) -> float:
  """Relative luminance, as WCAG has it."""
  parts = [c / 255 for c in bytes.fromhex(colour[1:])]
  linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
  return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
  """From 1 to 21."""
  low, high = sorted((luminance(one), luminance(other)))
  return (high + 0.05) / (low + 0.05)
