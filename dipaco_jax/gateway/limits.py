"""Limits of what a token may ask for: requests a second and bytes a day. For the event loop, one thread."""

import collections
import time
from collections.abc import Callable
from typing import NamedTuple

from dipaco_jax.gateway.refusals import Refused

DAY_S = 86400.0
BURST = 4.0  # times the requests a second, that may come at once
TOLD = 10_000  # tokens and addresses that are remembered


class Limits(NamedTuple):
  """What requests may need."""

  requests_per_s: float  # of a token
  failures_per_s: float  # without a valid token, of all senders together
  bytes_per_day: float  # of a token, in both directions
  json_bytes: int  # of the body of a request
  body_s: float  # for the body of a request to come, or an object's next part
  most_open: int  # requests at one time


class Bucket:
  """Tokens that come back at a rate; who takes more than there are has to wait."""

  def __init__(self, rate: float, most: float, clock: Callable[[], float]):
    self.rate, self.most, self.clock = rate, most, clock
    self.left, self.since = most, clock()

  def take(self, count: float = 1.0) -> float:
    """Takes `count` if there are as many; returns 0, or after how many seconds there will be."""
    now = self.clock()
    self.left = min(self.most, self.left + (now - self.since) * self.rate)
    self.since = now
    if self.left < count:
      return (count - self.left) / self.rate
    self.left -= count
    return 0.0


class Meter:
  """Counts requests and bytes by the names of tokens."""

  def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic):
    self.limits, self.clock = limits, clock
    self.requests: collections.OrderedDict[str, Bucket] = collections.OrderedDict()
    self.bytes: collections.OrderedDict[str, Bucket] = collections.OrderedDict()
    self.failures = Bucket(limits.failures_per_s, BURST * limits.failures_per_s, clock)
    self.valid: collections.OrderedDict[str, None] = collections.OrderedDict()  # digests of tokens that were valid

  def request(self, name: str):
    """Counts a request of a token. Raises Refused if there were too many."""
    rate = self.limits.requests_per_s
    self._take(self.requests, name, Bucket(rate, BURST * rate, self.clock), 1.0, 'requests', 'a second')

  def transfer(self, name: str, size: float):
    """Counts bytes of a token. Raises Refused if there were too many."""
    most = self.limits.bytes_per_day
    self._take(self.bytes, name, Bucket(most / DAY_S, most, self.clock), size, 'bytes', 'a day')

  def may_ask(self, digest: str) -> bool:
    """Returns whether a token may be looked up now.

    One that was valid always may, so that nobody can lock workers out by requests without a valid token.
    """
    is_due = self.failures.left >= 1 or (self.clock() - self.failures.since) * self.failures.rate >= 1
    return is_due or digest in self.valid

  def fail(self, digest: str = ''):
    """Counts a request without a valid token."""
    self.valid.pop(digest, None)
    self.failures.take()

  def succeed(self, digest: str):
    """Remembers that a token was valid."""
    self.valid[digest] = None
    self.valid.move_to_end(digest)
    while len(self.valid) > TOLD:
      self.valid.popitem(last=False)

  def _take(self, buckets, name: str, new: Bucket, count: float, what: str, span: str):
    bucket = buckets.setdefault(name, new)
    buckets.move_to_end(name)
    while len(buckets) > TOLD:
      buckets.popitem(last=False)
    if bucket.take(count):
      raise Refused(429, what, f'too many {what} {span} with this token: try again later')
