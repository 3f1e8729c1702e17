"""Texts by the paths that read them: on a page (templates/excerpts.html), in a terminal, and as plain text."""

from typing import Any

from dipaco_jax.algorithm.grid import Grid
from dipaco_jax.core import printable
from dipaco_jax.reports import pages, palette
from dipaco_jax.routing.chunk_losses import Chunk, Excerpt, Excerpts

SUPERSCRIPT = str.maketrans('0123456789', '⁰¹²³⁴⁵⁶⁷⁸⁹')
MAX_LEGEND = 32  # paths; with more, the legend shows those that read something


def how_chosen(excerpts: Excerpts) -> str:
  if not excerpts.by:
    return 'Each text has one path.'
  prefix, every = excerpts.prefix_tokens, f'The path is chosen again every {excerpts.every} tokens'
  by = f'the router, from the {prefix} tokens' if excerpts.by == 'router' else 'the learned chooser, from all tokens'
  return f'The router chooses the first path from the first {prefix} tokens of a text. {every}, by {by} before.'


def losses(excerpts: Excerpts, document: Excerpt) -> str:
  if not document.counted:
    return f'Not scored: the text has no more than the {excerpts.prefix_tokens} tokens that the router reads.'
  loss = f'Loss in nats per token: base {nats(document.base)}, path {document.path} {nats(document.nats)}'
  return f'{loss}, with the path chosen again along the text {nats(document.rerouted)}.' if excerpts.by else f'{loss}.'


def nats(loss: float | None) -> str:
  """Returns '2.250', or '-' if there is no loss."""
  return '-' if loss is None else f'{loss:.3f}'


def changes_path(document: Excerpt) -> list[bool]:
  """Returns whether each chunk has another path than the one before it; the first has."""
  paths = [chunk.path for chunk in document.chunks]
  return [i == 0 or path != paths[i - 1] for i, path in enumerate(paths)]


def to_text(excerpts: Excerpts, grid: Grid, coloured: bool) -> str:
  """Returns each text with its losses, chunk by chunk and as a whole; `coloured` by escape sequences."""
  parts = [how_chosen(excerpts)]
  for document in excerpts.documents:
    parts += [printable.name(document.name)] * bool(document.name)
    parts += [_chunks_in_terminal(document, grid, coloured), _table(document), losses(excerpts, document)]
  return '\n\n'.join(parts + [_total(excerpts)] * (len(excerpts.documents) > 1))


def _total(excerpts: Excerpts) -> str:
  """Returns a line with the means over all tokens that are counted."""
  counted = [document for document in excerpts.documents if document.counted]
  tokens = sum(document.counted for document in counted)

  def mean(name: str) -> str:
    losses = [(getattr(document, name), document.counted) for document in counted]
    if not tokens or any(loss is None for loss, _ in losses):
      return nats(None)
    return nats(sum(loss * n for loss, n in losses) / tokens)

  again = f', with the path chosen again along the text {mean("rerouted")}' if excerpts.by else ''
  return f'Loss in nats per token, all {tokens} tokens: base {mean("base")}, routed once {mean("nats")}{again}.'


def _chunks_in_terminal(document: Excerpt, grid: Grid, coloured: bool) -> str:
  """Returns the text, with a path's number where the path changes: on its paths' colours raised, else in brackets."""
  text = ''
  for chunk, is_new in zip(document.chunks, changes_path(document), strict=True):
    if not coloured:
      text += f'[path {chunk.path}]' * is_new + printable.text(chunk.text)
      continue
    red, green, blue = bytes.fromhex(palette.path_colours(grid, chunk.path)[0][1:])
    start, end = f'\x1b[38;2;16;42;67;48;2;{red};{green};{blue}m', '\x1b[0m'
    shown_text = str(chunk.path).translate(SUPERSCRIPT) * is_new + printable.text(chunk.text)
    text += start + shown_text.replace('\n', f'{end}\n{start}') + end  # else the colour continues to the margin
  return text


def _table(document: Excerpt) -> str:
  lines = [f'{"place":>10}{"path":>6}{"nats":>9}{"base":>9}{"difference":>12}']
  for c in document.chunks:
    difference = '-' if c.nats is None or c.base is None else f'{c.nats - c.base:+.3f}'
    note = '' if c.counted else '  not scored'
    lines.append(f'{c.start:>10}{c.path:>6}{nats(c.nats):>9}{nats(c.base):>9}{difference:>12}{note}')
  return '\n'.join(lines)


def to_page(excerpts: Excerpts, grid: Grid, workdir: str) -> str:
  """Returns the page of texts that were read by the paths of the run in `workdir`."""
  return pages.render('inspect.html', excerpts=page_content(excerpts, grid), workdir=workdir)


def page_content(excerpts: Excerpts, grid: Grid) -> dict[str, Any]:
  """Returns what templates/excerpts.html shows."""
  read = {chunk.path for document in excerpts.documents for chunk in document.chunks}
  paths = range(grid.num_paths) if grid.num_paths <= MAX_LEGEND else sorted(read)
  return {
    'how': how_chosen(excerpts),
    'prefix_tokens': excerpts.prefix_tokens,
    'legend': [{'path': path, 'style': _style(grid, path), 'title': _place(grid, path)} for path in paths],
    'texts': [
      {'name': x.name, 'losses': losses(excerpts, x), 'chunks': _chunks(x, grid), 'rows': _rows(x)}
      for x in excerpts.documents
    ],
  }


def _rows(document: Excerpt) -> list[tuple[str, ...]]:
  """Returns (first token, path, loss, the base's loss, difference) of each chunk."""
  rows: list[tuple[str, ...]] = []
  for chunk in document.chunks:
    known = chunk.counted and chunk.nats is not None and chunk.base is not None
    losses_of_chunk = (nats(chunk.nats), nats(chunk.base)) if chunk.counted else ('not scored', '-')
    difference = f'{(chunk.nats or 0) - (chunk.base or 0):+.3f}' if known else '-'
    rows.append((str(chunk.start), str(chunk.path), *losses_of_chunk, difference))
  return rows


def _chunks(document: Excerpt, grid: Grid) -> list[dict[str, Any]]:
  return [
    {
      'text': chunk.text,
      'number': chunk.path if is_new else None,
      'kinds': ['worse'] * _is_worse(chunk) + ['prefix'] * (not chunk.counted),
      'style': _style(grid, chunk.path),
      'title': '\n'.join([_place(grid, chunk.path), *_chunk_losses(chunk)]),
    }
    for chunk, is_new in zip(document.chunks, changes_path(document), strict=True)
  ]


def _is_worse(chunk: Chunk) -> bool:
  """Returns whether the base model does better."""
  return chunk.nats is not None and chunk.base is not None and chunk.nats > chunk.base


def _chunk_losses(chunk: Chunk) -> list[str]:
  lines = [f'{nats(chunk.nats)} nats a token', f'base {nats(chunk.base)}']
  if chunk.nats is not None and chunk.base is not None:
    lines.append(f'difference {chunk.nats - chunk.base:+.3f}')
  return lines if chunk.counted else [*lines, 'not scored']


def _style(grid: Grid, path: int) -> str:
  light, dark = palette.path_colours(grid, path)
  return f'--light:{light};--dark:{dark}'


def _place(grid: Grid, path: int) -> str:
  """Returns 'path 3: a 1, b 1'."""
  axes = ', '.join(f'{name} {at}' for name, at in zip(grid.names, grid.coordinates(path), strict=True))
  return f'path {grid.path_name(path)}: {axes}' if len(grid.shape) > 1 else f'path {grid.path_name(path)}'
