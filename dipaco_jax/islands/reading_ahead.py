"""Reads modules beside a path's inner steps, which it takes over before its next piece [algorithm/streaming.py].

The task of that piece comes when the piece before is trained. Without this the download would begin then; with it, what
was there at one of the looks is in memory by then, or on its way. A look is one statement to the database.
"""

import logging
from concurrent import futures

from dipaco_jax.islands import pieces
from dipaco_jax.islands.island import Island
from dipaco_jax.islands.pieces import Part

SHARES = 0.75, 0.5, 0.25  # of a piece, that are left when there is a look, unless all was found


class ReadingAhead:
  """What the piece after one needs of modules; `look` is called while that one is trained."""

  def __init__(self, island: Island, path: int, part: Part):
    self.island = island
    following = pieces.after(island, part)
    takes_over = following is not None and not pieces.begins_whole(island, following)
    self.needed = pieces.needed(island, path, following, is_excluded=False) if following and takes_over else {}
    self.shares = [*SHARES]
    self.reading: futures.Future | None = None

  def look(self, left: float):
    """Looks for modules that are not read yet, in another thread, if it is time; `left`: a share of the piece."""
    is_due = bool(self.shares) and left <= self.shares[0]
    self.shares = [share for share in self.shares if share < left]
    if is_due and self.needed and (self.reading is None or self.reading.done()):
      self.reading = self.island.weights.reader.submit(self._read)

  def _read(self):
    try:
      for version in {*self.needed.values()}:
        modules = sorted(module for module, number in self.needed.items() if number == version)
        for fact in self.island.registry.facts('module', modules, version):
          self.island.read_weights(fact)
          del self.needed[fact.key]
    except Exception as e:  # the task that needs them reports missing ones
      logging.warning('modules of the next piece were not read ahead: %s', e)
