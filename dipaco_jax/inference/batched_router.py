"""Paths of many texts at one time, for an event loop: texts that wait are routed together, in a thread."""

import asyncio
from collections.abc import Sequence

import numpy as np

from dipaco_jax.inference.text_router import TextRouter

SIZES = (1, 2, 4, 8)  # of batches, each compiled as the server starts
Text = str | Sequence[int]


class BatchedRouter:
  def __init__(self, router: TextRouter):
    self.router = router
    self._waiting: list[tuple[Text, asyncio.Future[np.ndarray]]] = []
    self._work: asyncio.Task | None = None

  def compile(self):
    for size in SIZES:
      self.router.batch_scores([np.zeros(1, np.int32)] * size)

  async def scores(self, text: Text) -> np.ndarray:
    """Returns `TextRouter.scores`; raises InputError if a text has none."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[np.ndarray] = loop.create_future()
    self._waiting.append((text, future))
    if self._work is None:
      self._work = loop.create_task(self._until_empty())
    return await future

  async def _until_empty(self):
    batch: list[tuple[Text, asyncio.Future[np.ndarray]]] = []
    try:
      while self._waiting:
        batch, self._waiting = self._waiting[: SIZES[-1]], self._waiting[SIZES[-1] :]
        results = await asyncio.to_thread(self._scores_or_errors, [text for text, _ in batch])
        for (_, future), one in zip(batch, results, strict=True):
          if future.cancelled():  # the client has gone
            continue
          if isinstance(one, Exception):
            future.set_exception(one)
          else:
            future.set_result(one)
    except BaseException as e:  # of threads that cannot start, or of a library: nobody waits for what does not come
      waiting, self._waiting = [*batch, *self._waiting], []
      for _, future in waiting:
        if not future.done():
          future.set_exception(RuntimeError(f'no text could be routed: {type(e).__name__}: {e}'))
      raise
    finally:
      self._work = None

  def _scores_or_errors(self, texts: list[Text]) -> list[np.ndarray | Exception]:
    """Returns what each text gets; a text's own error is no other's."""
    prefixes = [_or_error(self.router.prefix, text) for text in texts]
    good = [prefix for prefix in prefixes if isinstance(prefix, np.ndarray)]
    if not good:
      return prefixes
    size = next(size for size in SIZES if size >= len(good))
    scores = _or_error(self.router.batch_scores, good + good[:1] * (size - len(good)))
    rows = iter([self._alone(prefix) for prefix in good] if isinstance(scores, Exception) else scores)
    return [next(rows) if isinstance(prefix, np.ndarray) else prefix for prefix in prefixes]

  def _alone(self, prefix: np.ndarray) -> np.ndarray | Exception:
    result = _or_error(self.router.batch_scores, [prefix])
    return result if isinstance(result, Exception) else result[0]


def _or_error(function, argument) -> np.ndarray | Exception:
  try:
    return function(argument)
  except Exception as e:
    return e
