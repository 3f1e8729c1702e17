"""Mixtures of sources: one stream of documents in which every source has its share of the bytes."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

T = TypeVar('T')
Read = Callable[[int], Iterator[T]]  # (how often it was read before) -> the documents of a source


class Stream(NamedTuple):
  """A source that may be read again from its beginning, and its weight."""

  read: Read[Any]
  weight: float


def mix(streams: Sequence[Stream], size: Callable[[T], int]) -> Iterator[T]:
  """Yields the documents of all streams, each next one from the stream that is furthest behind its weight.

  After any document, a stream's size and its share w_i / sum(w) of the whole differ by less than the largest
  documents, so that shares are exact in the long run. A stream that ends begins again; all end as soon as each was
  read whole once. A stream without documents is passed over. Nothing is drawn: the order is always the same.
  """
  sizes, times = [0] * len(streams), [0] * len(streams)
  left = [stream.read(0) for stream in streams]
  open_streams = [i for i, stream in enumerate(streams)]
  unread = {*open_streams}  # not read whole yet
  while unread:
    i = min(open_streams, key=lambda i: sizes[i] / streams[i].weight)
    document = next(left[i], None)
    if document is None:
      unread.discard(i)
      if not sizes[i]:
        open_streams.remove(i)
      times[i] += 1
      left[i] = streams[i].read(times[i])
      continue
    sizes[i] += size(document)
    yield document
