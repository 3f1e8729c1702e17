"""Hold-outs of four paths, of different numbers of rows, one of none."""

import small

from dipaco_jax.training import evaluation

COUNTS = [3, 0, 5, 2]


def load(path, start, stop):
  tokens, segments = small.batch(path, 50, 8)
  return tokens[start:stop], segments[start:stop]


ROWS = evaluation.Rows(COUNTS, load, small.ROWS, small.LENGTH)
