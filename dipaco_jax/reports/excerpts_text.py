"""Text by the paths that read it, in a terminal or as plain text."""

from dipaco_jax.core import printable
from dipaco_jax.core.grid import Grid
from dipaco_jax.reports import excerpts_html as panel
from dipaco_jax.routing.chunk_losses import Excerpt, Excerpts

SUPERSCRIPT = str.maketrans('0123456789', '⁰¹²³⁴⁵⁶⁷⁸⁹')


def make(found: Excerpts, grid: Grid, colours: bool) -> str:
  """Each text, its losses chunk by chunk, and in all."""
  parts = [panel.words(found)]
  for document in found.documents:
    text = _coloured(document, grid) if colours else _marked(document)
    parts += [printable.name(document.name)] * bool(document.name)
    parts += [text, _table(document), panel.figures(found, document)]
  return '\n\n'.join(parts + [_total(found)] * (len(found.documents) > 1))


def _total(found: Excerpts) -> str:
  """Over all tokens that are counted."""
  counted = [document for document in found.documents if document.counted]
  tokens = sum(document.counted for document in counted)

  def mean(name: str) -> str:
    nats = [(getattr(document, name), document.counted) for document in counted]
    return panel.number(None if None in dict(nats) or not tokens else sum(x * n for x, n in nats) / tokens)

  again = f', {mean("rerouted")} with paths chosen anew' if found.by else ''
  return f'All {tokens} tokens: {mean("base")} nats a token under the base, {mean("nats")} routed once{again}.'


def _coloured(document: Excerpt, grid: Grid) -> str:
  """With the path's number, raised, where it changes."""
  text = ''
  for chunk, changed in zip(document.chunks, panel.changes(document), strict=True):
    red, green, blue = bytes.fromhex(panel.colour(grid, chunk.path).light[1:])
    start, end = f'\x1b[38;2;16;42;67;48;2;{red};{green};{blue}m', '\x1b[0m'
    words = str(chunk.path).translate(SUPERSCRIPT) * changed + printable.text(chunk.text)
    text += start + words.replace('\n', f'{end}\n{start}') + end  # else the colour goes on to the margin
  return text


def _marked(document: Excerpt) -> str:
  chunks_and_changes = zip(document.chunks, panel.changes(document), strict=True)
  return ''.join(f'[path {c.path}]' * changed + printable.text(c.text) for c, changed in chunks_and_changes)


def _table(document: Excerpt) -> str:
  lines = [f'{"place":>10}{"path":>6}{"nats":>9}{"base":>9}{"difference":>12}']
  for c in document.chunks:
    difference = '-' if c.nats is None or c.base is None else f'{c.nats - c.base:+.3f}'
    note = '' if c.counted else '  not counted'
    lines.append(f'{c.start:>10}{c.path:>6}{panel.number(c.nats):>9}{panel.number(c.base):>9}{difference:>12}{note}')
  return '\n'.join(lines)
