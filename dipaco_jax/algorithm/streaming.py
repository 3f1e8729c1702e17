"""The steps of a phase at which levels are exchanged: all at its end, or one after another during it. Pure.

Without streaming, all levels are sent after step tau of a phase, and the next phase begins with the new modules. With
`outer.stream`, every level l has its own place o_l in the phase (arXiv 2501.18512, Algorithm 2). With theta the
path's parameters of the level, m(v) the module that paths read, and d = `outer.overlap_steps`:

    after step o_l       the outer gradient m(v) - theta is sent; the outer step makes m(v+1)
    after step o_l + d   theta <- theta + (1 - alpha) (m(v+1) - theta_o)     `outer.overlap='keep'`
                         theta <- alpha theta + (1 - alpha) m(v+1)           `outer.overlap='mix'`, as in the paper

with theta_o the value of theta after step o_l, and alpha = `outer.mix`; if d is 0, theta <- m(v+1). Training continues
in between; 'mix' undoes a share of 1 - alpha of these steps. If o_l + d > tau, it is step o_l + d - tau of the next
phase.

Places are steps and not times, so results do not depend on slow workers. The o_l spread the levels' bytes evenly over
the phase: the distance from a level's place to the next one is proportional to its bytes. A level of a single path
(path-specific) has no bytes, and its place is tau; its outer step is available immediately.

Some phases are *closed*: all levels are sent after step tau, and the next phase begins with the new modules, as without
streaming. These are the last phases of each round and of the run, and every n-th phase, n = `outer.closed_every`. After
a closed phase, a path consists only of modules and its state, so islands publish states then.

A *piece* of a phase lies between two steps at which a level is sent or taken over. It is trained without interruption.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Wire(NamedTuple):
  """What is exchanged, and how."""

  compress: str  # of compression.KINDS
  stream: bool
  overlap_steps: int  # d
  keeps: bool  # whether learning during overlap is kept
  alpha: float


class Piece(NamedTuple):
  """Steps of a phase that are trained in one go."""

  begin: int  # steps of the phase before it
  end: int
  mixed: tuple[str, ...]  # levels whose new modules are taken over before it
  sent: tuple[str, ...]  # levels that leave after it


@dataclasses.dataclass(frozen=True)
class Timetable:
  """The places of the levels, and the pieces of each phase."""

  tau: int
  unit: int  # steps of a dispatch; all places are multiples of it
  places: Mapping[str, int]  # o_l
  overlaps: Mapping[str, int]  # d of each level; 0 for levels of a single path
  alpha: float
  stream: bool
  phases: int
  closed: frozenset[int]  # the ends of rounds, phases that are closed in any case
  closed_every: int  # every n-th phase is closed, too; 0 means none
  keeps: bool = False  # what is learned during overlap

  def is_closed(self, phase: int) -> bool:
    """Returns whether all levels leave at the end of a phase, and the next begins with the new modules."""
    last = not self.stream or phase + 1 >= self.phases or phase in self.closed
    return last or (self.closed_every > 0 and (phase + 1) % self.closed_every == 0)

  def begins_whole(self, phase: int) -> bool:
    """Returns whether paths begin a phase with the modules, and nothing of their own parameters."""
    return phase == 0 or self.is_closed(phase - 1)

  def last_whole(self, phase: int) -> int:
    """Returns the last phase, this one included, that paths begin with the modules alone."""
    while not self.begins_whole(phase):
      phase -= 1
    return phase

  def pieces(self, phase: int) -> tuple[Piece, ...]:
    """Returns the pieces of a phase, in order."""
    sent = {level: self.tau if self.is_closed(phase) else o for level, o in self.places.items()}
    mixed: dict[str, int] = {}
    if not self.is_closed(phase):
      mixed |= {level: o + self.overlaps[level] for level, o in sent.items() if o + self.overlaps[level] < self.tau}
    if not self.begins_whole(phase):
      after = {level: o + self.overlaps[level] - self.tau for level, o in self.places.items()}
      mixed |= {level: step for level, step in after.items() if step >= 0}
    borders = sorted({0, self.tau, *sent.values(), *mixed.values()})
    return tuple(Piece(begin, end, _at(mixed, begin), _at(sent, end)) for begin, end in itertools.pairwise(borders))

  @functools.cached_property
  def most_pieces(self) -> int:
    """The largest number of pieces of a phase."""
    return max(len(self.pieces(phase)) for phase in range(self.phases))

  def kept(self, levels: Iterable[str]) -> tuple[str, ...]:
    """Returns those of the levels for which a path keeps theta_o in an open phase, until it takes them over."""
    return tuple(level for level in levels if self.keeps and self.overlaps[level])

  def left(self, levels: Iterable[str], phase: int) -> tuple[str, ...]:
    """Returns those of the levels for which a path keeps theta_o in this phase."""
    return () if self.is_closed(phase) else self.kept(levels)

  def mix(self, level: str) -> float:
    """Returns alpha of a level, or 0 if it is taken over at once."""
    return self.alpha if self.overlaps[level] else 0.0

  def version(self, level: str, phase: int, step: int) -> int:
    """Returns the version of a level's modules that paths have newest after `step` steps of a phase, 0 to tau - 1."""
    if self.begins_whole(phase):
      first = phase
    else:
      first = phase if self.places[level] + self.overlaps[level] - self.tau <= step else phase - 1
    back = self.places[level] + self.overlaps[level]
    return phase + 1 if not self.is_closed(phase) and back <= step else first

  def steps_since(self, level: str, phase: int) -> int:
    """Returns the number of inner steps between a level's place in this phase and its last one before."""
    end = self.tau if self.is_closed(phase) else self.places[level]
    return end if self.begins_whole(phase) else self.tau - self.places[level] + end


def taken(alpha: float, own: Any, left: Any, new: Any) -> Any:
  """Returns a path's parameters after it has taken `new` ones over; `left` is theta_o if kept, else None.

  Example:
    >>> taken(0.0, own=5.0, left=4.0, new=3.0)  # learning during the overlap is kept
    4.0
    >>> taken(0.5, own=5.0, left=None, new=3.0)
    4.0
  """
  if left is not None:
    return own + (1 - alpha) * (new - left) if alpha else own + (new - left)
  return alpha * own + (1 - alpha) * new if alpha else new


def at_the_end(levels: Iterable[str], tau: int, unit: int) -> Timetable:
  """Returns the timetable without streaming: phases of one piece."""
  places = dict.fromkeys(levels, tau)
  return Timetable(tau, unit, places, dict.fromkeys(places, 0), 0.0, False, 1, frozenset(), 0)


def spread(sizes: Mapping[str, int], tau: int, unit: int) -> dict[str, int]:
  """Spreads the levels' places over a phase by their sizes, multiples of `unit`; the last one's is tau, as is a 0's.

  The gap between a level's place and the next, around the phase, is the share of tau that its size has in all.

  Example:
    >>> spread({'low': 100, 'high': 100, 'own': 0}, tau=20, unit=2)
    {'low': 10, 'high': 20, 'own': 20}
  """
  shared = {level: size for level, size in sizes.items() if size}
  total = sum(shared.values())
  places = dict.fromkeys(sizes, tau)
  size_before = 0
  last = [*shared.values()][-1] if shared else 0
  for level, size in shared.items():
    exact = tau * (size_before + last) / total
    places[level] = min(tau, max(unit, round(exact / unit) * unit))
    size_before += size
  return places


def _at(places: Mapping[str, int], step: int) -> tuple[str, ...]:
  return tuple(level for level, place in places.items() if place == step)
