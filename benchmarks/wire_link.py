"""One direction of the line of a simulated worker (wire_simulation.py). Pure."""

import collections


class Link:
  """One direction of a worker's line. Objects go in order; those behind go while there are no others."""

  def __init__(self, bytes_per_s: float, latency_s: float):
    self.bytes_per_s, self.latency_s = bytes_per_s, latency_s
    self.free_at = 0.0
    self.behind: collections.deque[list[float]] = collections.deque()  # the bytes that are left of each

  def send(self, now: float, num_bytes: int) -> float:
    """Puts an object in line, or a fact, of 0 bytes; returns when it is there."""
    self._pass(now)
    self.free_at += self.latency_s + num_bytes / self.bytes_per_s
    return self.free_at

  def send_behind(self, now: float, num_bytes: int):
    """Puts an object behind all else."""
    self._pass(now)
    self.behind.append([num_bytes])

  def first_behind(self, now: float) -> float | None:
    """Returns when the first object that is behind will be there if no other comes; None if it is, which removes it."""
    self._pass(now)
    there = self.free_at + self.behind[0][0] / self.bytes_per_s
    if there > now and self.behind[0][0] >= 1:  # a byte: rounding
      return there
    self.behind.popleft()
    return None

  def _pass(self, now: float):
    """Notes what went since the line was last free."""
    if self.behind and now > self.free_at:
      left = self.behind[0]
      left[0] = max(0.0, left[0] - (now - self.free_at) * self.bytes_per_s)
    self.free_at = max(self.free_at, now)
