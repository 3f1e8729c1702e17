"""Text coloured by the path that reads it, as a part of a page; the same in a terminal."""

import html
from typing import NamedTuple

from dipaco_jax.core import printable
from dipaco_jax.core.grid import Grid
from dipaco_jax.reports import html_page, palette
from dipaco_jax.routing.chunk_losses import Chunk, Excerpt, Excerpts

MANY = 32  # paths; of more, the legend has those that are met
LEGEND = (
  'Each stretch has the colour of its path, whose number stands where the path changes; point at it for its losses. '
  'Underlined: the base model does better. In italics: the first {} tokens, which no loss counts.'
)

# Of more paths than pictures have colours for, from pale to strong. Of 4 x 4 paths no two are alike, whatever the eyes'
# cones lack; ink is legible on all of them.
HUES = (
  ('d1dbff', '7f93f8'), ('f6e277', 'b9a21c'), ('b3febf', '67ce7d'), ('fff1f5', 'de6d9d'), ('d3f3f8', '54bfd6'),
  ('f8dcc8', 'df8650'), ('ecdffb', 'b58ae8'), ('e8eaed', 'a3a9b3'),
)  # fmt: skip


class Colour(NamedTuple):
  """'#rrggbb' that a path's text stands on."""

  light: str
  dark: str

  @property
  def style(self) -> str:
    return f'--light:{self.light};--dark:{self.dark}'


def colour(grid: Grid, path: int) -> Colour:
  """That of the path's line in pictures, thinned; where lines have none, the first axis is the hue, the rest the shade.

  As far as there are hues: then the shade goes on.
  """
  if grid.num_paths <= len(palette.COLOURS):
    line = palette.COLOURS[path]
    paper = palette.DARK[palette.PAPER]
    return Colour(palette.mix(palette.PAPER, line, 0.3), palette.mix(paper, palette.DARK[line], 0.3))
  first = grid.shape[0] if grid.shape else 1
  along, other = divmod(path, grid.num_paths // first)
  hues = min(first, len(HUES))
  shades = -(-first // hues) * (grid.num_paths // first)
  strength = (along // hues * (grid.num_paths // first) + other) / (shades - 1) if shades > 1 else 0.5
  pale, strong = (f'#{end}' for end in HUES[along % hues])
  return Colour(palette.mix(pale, strong, strength), palette.mix('#17222d', strong, 0.14 + 0.33 * strength))


def make(found: Excerpts, grid: Grid) -> str:
  """What the colours mean, and every text with its losses, side by side where there is room."""
  how = html_page.element('b', 'Text by the path that reads it') + html_page.element('p', words(found))
  how += html_page.element('p', LEGEND.format(found.prefix_tokens))
  documents = [_document(found, document, grid) for document in found.documents]
  return html_page.box(how + _keys(found, grid)) + f'<div class="texts">{"".join(documents)}</div>'


def words(found: Excerpts) -> str:
  """How the paths were chosen."""
  if not found.by:
    return 'Each text has one path.'
  prefix, every = found.prefix_tokens, f'It is chosen anew every {found.every} tokens'
  by = f'the router, from the {prefix} tokens' if found.by == 'router' else 'the learned chooser, from all tokens'
  return f'A text begins under the path that its first {prefix} tokens are routed to. {every}, by {by} before.'


def figures(found: Excerpts, document: Excerpt) -> str:
  """A text's losses in a line."""
  if not document.counted:
    return f'No loss is counted: the text is no longer than the {found.prefix_tokens} tokens that the router reads.'
  under = f'{number(document.base)} nats a token under the base, {number(document.nats)} under path {document.path}'
  return f'{under}, {number(document.rerouted)} with paths chosen anew.' if found.by else f'{under}.'


def number(nats: float | None) -> str:
  return '-' if nats is None else f'{nats:.3f}'


def changes(document: Excerpt) -> list[bool]:
  """Whether each chunk has another path than the one before it; the first has."""
  paths = [chunk.path for chunk in document.chunks]
  return [i == 0 or path != paths[i - 1] for i, path in enumerate(paths)]


def _keys(found: Excerpts, grid: Grid) -> str:
  """All paths, or, of many, those that are met."""
  met = {chunk.path for document in found.documents for chunk in document.chunks}
  paths = range(grid.num_paths) if grid.num_paths <= MANY else sorted(met)
  keys = (f'<span style="{colour(grid, p).style}" title="{html.escape(_name(grid, p))}">{p}</span>' for p in paths)
  return f'<p class="keys">Paths {" ".join(keys)}</p>'


def _name(grid: Grid, path: int) -> str:
  """'path 3: a 1, b 1'."""
  axes = ', '.join(f'{name} {at}' for name, at in zip(grid.names, grid.coordinates(path), strict=True))
  return f'path {path}: {axes}' if len(grid.shape) > 1 else f'path {path}'


def _document(found: Excerpts, document: Excerpt, grid: Grid) -> str:
  text = ''.join(
    _chunk(chunk, grid, changed) for chunk, changed in zip(document.chunks, changes(document), strict=True)
  )
  name = html_page.element('b', document.name) if document.name else ''
  return html_page.box(
    f'{name}{html_page.element("p", figures(found, document), "quiet")}<div class="text">{text}</div>'
  )


def _chunk(chunk: Chunk, grid: Grid, changed: bool) -> str:
  losses, kinds = [f'{number(chunk.nats)} nats a token', f'base {number(chunk.base)}'], []
  if chunk.nats is not None and chunk.base is not None:
    losses.append(f'difference {chunk.nats - chunk.base:+.3f}')
    kinds += ['worse'] * (chunk.nats > chunk.base)
  if not chunk.counted:
    losses.append('not counted')
    kinds.append('prefix')
  title = '\n'.join([_name(grid, chunk.path), *losses])
  mark = f'<sup>{chunk.path}</sup>' if changed else ''
  return (
    f'<span class="{" ".join(kinds)}" style="{colour(grid, chunk.path).style}" title="{html.escape(title)}">'
    f'{mark}{html.escape(printable.text(chunk.text))}</span>'
  )
