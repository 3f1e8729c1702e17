"""Texts coloured by the paths that read them, as a page or a part of one (templates/excerpts.html)."""

from typing import Any

from dipaco_jax.core.grid import Grid
from dipaco_jax.reports import excerpts_text, pages, palette
from dipaco_jax.routing.chunk_losses import Chunk, Excerpt, Excerpts

MAX_LEGEND = 32  # paths; with more, the legend shows those that read something


def render(found: Excerpts, grid: Grid, workdir: str) -> str:
  """Returns the page of texts that were read by the paths of the run in `workdir`."""
  return pages.render('inspect.html', excerpts=content(found, grid), workdir=workdir)


def content(found: Excerpts, grid: Grid) -> dict[str, Any]:
  """Returns what templates/excerpts.html shows."""
  read = {chunk.path for document in found.documents for chunk in document.chunks}
  paths = range(grid.num_paths) if grid.num_paths <= MAX_LEGEND else sorted(read)
  return {
    'how': excerpts_text.how_chosen(found),
    'prefix_tokens': found.prefix_tokens,
    'legend': [{'path': path, 'style': _style(grid, path), 'title': _place(grid, path)} for path in paths],
    'texts': [
      {'name': text.name, 'losses': excerpts_text.losses(found, text), 'chunks': _chunks(text, grid)}
      for text in found.documents
    ],
  }


def _chunks(document: Excerpt, grid: Grid) -> list[dict[str, Any]]:
  return [
    {
      'text': chunk.text,
      'number': chunk.path if is_new else None,
      'kinds': ['worse'] * _is_worse(chunk) + ['prefix'] * (not chunk.counted),
      'style': _style(grid, chunk.path),
      'title': '\n'.join([_place(grid, chunk.path), *_losses(chunk)]),
    }
    for chunk, is_new in zip(document.chunks, excerpts_text.new_path(document), strict=True)
  ]


def _is_worse(chunk: Chunk) -> bool:
  """Returns whether the base model does better."""
  return chunk.nats is not None and chunk.base is not None and chunk.nats > chunk.base


def _losses(chunk: Chunk) -> list[str]:
  lines = [f'{excerpts_text.nats(chunk.nats)} nats a token', f'base {excerpts_text.nats(chunk.base)}']
  if chunk.nats is not None and chunk.base is not None:
    lines.append(f'difference {chunk.nats - chunk.base:+.3f}')
  return lines if chunk.counted else [*lines, 'not counted']


def _style(grid: Grid, path: int) -> str:
  light, dark = palette.path_colours(grid, path)
  return f'--light:{light};--dark:{dark}'


def _place(grid: Grid, path: int) -> str:
  """Returns 'path 3: a 1, b 1'."""
  axes = ', '.join(f'{name} {at}' for name, at in zip(grid.names, grid.coordinates(path), strict=True))
  return f'path {path}: {axes}' if len(grid.shape) > 1 else f'path {path}'
