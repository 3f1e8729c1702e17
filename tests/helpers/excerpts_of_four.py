"""Texts that the paths of a 2 x 2 grid have read, with what a page or a terminal could mistake for its own."""

from dipaco_jax.algorithm.grid import Grid
from dipaco_jax.routing import chunk_losses

FOUR = Grid({'a': 2, 'b': 2})
FOUND = chunk_losses.Excerpts(4, 4, 'router', [
  chunk_losses.Excerpt('code <b>', 1, 3, 2.5, 2.25, 3.0, [
    chunk_losses.Chunk(0, 'if a < b:\n', 1, 2.0, 2.5, 0),
    chunk_losses.Chunk(4, '<script>alert("x")</script>\x1b[31m', 3, 2.25, 3.0, 4),
    chunk_losses.Chunk(8, ' & so on', 3, 3.5, 3.0, 3),
  ])
])  # fmt: skip
