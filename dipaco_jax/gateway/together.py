"""Requests that are answered together: those that arrive while a call runs share the next one."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

MOST = 200  # requests in one call: others wait for the lock of its transaction


class Together:
  """Calls a function of many requests in a thread, one call at a time. For the event loop, one thread."""

  def __init__(self, pool: futures.Executor, answer: Callable[[Sequence[Any]], Sequence[Any]], pause_s: float):
    """Calls begin `pause_s` after the first request; `answer` returns the answer to each, or the error to raise."""
    self.pool, self.answer, self.pause_s = pool, answer, pause_s
    self.waiting = list[tuple[Any, asyncio.Future]]()
    self.task: asyncio.Task | None = None

  async def ask(self, request: Any) -> Any:
    """Returns the answer to a request, from a call that begins after it has arrived."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    self.waiting.append((request, future))
    if not self.task:
      self.task = loop.create_task(self._answer_all())
    return await future

  async def _answer_all(self):
    """Makes calls until nobody waits."""
    while self.waiting:
      await asyncio.sleep(self.pause_s)
      batch = self.waiting[:MOST]
      del self.waiting[: len(batch)]
      answers = await self._call([request for request, _ in batch])
      for (_, future), answer in zip(batch, answers, strict=True):
        if future.done():
          continue  # its request was cancelled
        if isinstance(answer, Exception):
          future.set_exception(answer)
        else:
          future.set_result(answer)
    self.task = None

  async def _call(self, requests: Sequence[Any]) -> Sequence[Any]:
    try:
      return await asyncio.get_running_loop().run_in_executor(self.pool, self.answer, requests)
    except Exception as e:
      return [e] * len(requests)
