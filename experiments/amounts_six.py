"""(18) How much to share, by how much text there is, on the six kinds of text that are alike.

As table (14), of fewer amounts, without German law and code: is what path-specific modules gain more than what two
kinds of text that are unlike the rest give? The text is made by split.py with --without=law_de,code.
"""

import math

import amounts
import common
import config
import paths
from runs import Row

SHARING = ('batch', 'own', 'ends', 'flat')  # kinds of table (14)


def rows(size: str) -> list[Row]:
  """The rows of table (14) with as many paths as the size's grid has, at the least, a middle and the largest amount."""
  documents = amounts.DOCUMENTS[size]
  chosen, num_paths = {documents[0], documents[len(documents) // 2], documents[-1]}, math.prod(config.SIZES[size].grid)
  return [
    row
    for amount in documents if amount in chosen
    for kind in SHARING
    for row in amounts.lengths(size, kind, num_paths, amount)
  ]  # fmt: skip


TABLE = amounts.TABLE._replace(
  name='amounts_six', title='How much to share, on six kinds of text that are alike', rows=rows
)

if __name__ == '__main__':
  common.main(TABLE, paths.prepare)
