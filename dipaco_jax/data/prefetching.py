"""Prefetching in threads."""

import collections
import concurrent.futures
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

S = TypeVar('S')
T = TypeVar('T')


def prefetch(load: Callable[[S], T], items: Iterable[S], depth: int = 2, threads: int = 1) -> Iterator[T]:
  """Yields `load(item)` for each item, in order; `depth` are loaded ahead, by threads that end with the iterator."""
  todo = iter(items)
  pool = concurrent.futures.ThreadPoolExecutor(threads, 'prefetch')
  try:
    waiting = collections.deque(pool.submit(load, item) for item in itertools.islice(todo, depth))
    while waiting:
      value = waiting.popleft().result()
      waiting.extend(pool.submit(load, item) for item in itertools.islice(todo, 1))
      yield value
  finally:
    pool.shutdown(cancel_futures=True)
