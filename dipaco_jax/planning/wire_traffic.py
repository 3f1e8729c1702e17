"""Times and bytes of the messages between islands of a run. Nothing is allocated.

For a path with the parameters n, and levels l that several paths share:

    message       of a path to the outer step of a module     parameters of l, or Q(Delta + e) [compression.py],
                                                              and with `outer.row_weights` a float32 for each row
    version       of a module, as paths read it               parameters of l, or Q'(M(v) - m(v-1))
    state         of a path, about every k-th phase           AdamW state; residuals e; levels that are the path's own,
                                                              and of the version that early stopping points at

with k = `checkpoint.state_every_phases`, or with streaming the next closed phase. The bytes are those of the arrays
that these functions make, without the names and shapes that objects also contain. algorithm/streaming.py has the times
of the messages.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from dipaco_jax.algorithm import compression, modules, streaming
from dipaco_jax.algorithm.grid import Level
from dipaco_jax.config import choices, settings as settings_lib, wires


class Traffic(NamedTuple):
  """What the paths of a run exchange; levels are those that several paths share."""

  table: streaming.Timetable
  num_paths: int
  groups: Mapping[str, tuple[tuple[int, ...], ...]]  # by level: the paths through each of its modules
  message: Mapping[str, int]  # by level: bytes that a path sends
  version: Mapping[str, int]  # by level: bytes that a path reads
  outer: Mapping[str, int]  # by level: bytes that the outer step of a module reads and writes
  state: int  # bytes of a path's state
  state_every: int  # `checkpoint.state_every_phases`; 0: states are not published

  @property
  def state_period(self) -> int:
    """Phases between two publications of a path's state, on average; with streaming only after closed phases."""
    every = self.state_every
    return max(every, self.table.closed_every) if every and self.table.stream else every

  @property
  def bytes_per_phase(self) -> tuple[float, float]:
    """Bytes that a path sends and reads in a phase, on average."""
    state = self.state / self.state_period if self.state_period else 0.0
    return sum(self.message.values()) + state, float(sum(self.version.values()))


def make_traffic(s: settings_lib.Settings, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> Traffic:
  """Returns the traffic of a run, from the shapes of one path's parameters (`transformer.shapes`)."""
  layout, kind = modules.make_layout(s.grid, s.levels, shapes), wires.make_wire(s.outer, s.train).compress
  of_level = {level: {name: shapes[name] for name in layout.names(level)} for level in layout.levels}
  shared = {level: named_shapes for level, named_shapes in of_level.items() if layout.grid.paths_through(level) > 1}
  own = [named_shapes for level, named_shapes in of_level.items() if level not in shared]
  message = {level.name: _message_bytes(s, named_shapes, kind) for level, named_shapes in shared.items()}
  version = {
    level.name: _sent_bytes(named_shapes, compression.of_modules(kind)) for level, named_shapes in shared.items()
  }
  outer_bytes = {
    l.name: _outer_bytes(s, named_shapes, kind, layout.grid.paths_through(l)) for l, named_shapes in shared.items()
  }
  return Traffic(
    table=choices.make_timetable(s, layout.shared_sizes(shapes)),
    num_paths=layout.grid.num_paths,
    groups={level.name: _groups(layout, level) for level in shared},
    message=message,
    version=version,
    outer=outer_bytes,
    state=_state_bytes(s, shapes, shared.values(), own, kind),
    state_every=s.checkpoint.state_every_phases,
  )


def _state_bytes(
  s: settings_lib.Settings, shapes: Mapping[str, Any], shared: Iterable[Any], own: Sequence[Any], kind: str
) -> int:
  """Returns the bytes of a path's state; `shared` and `own` are the shapes of levels."""
  adamw = choices.make_inner_of_run(s)
  kept = [jax.eval_shape(adamw.init, dict(shapes))] if s.inner.keep_state else []
  kept += [jax.eval_shape(compression.first_residual, level) for level in shared if kind != 'none']
  kept += [(level, jax.eval_shape(choices.make_outer_optimizer(s.outer).init, level)) for level in own]
  kept += list(own) if s.train.early_stopping else []  # of the version that it points at
  return num_bytes(kept)


def _outer_bytes(s: settings_lib.Settings, level: Mapping[str, Any], kind: str, num_paths: int) -> int:
  """Returns the bytes that an outer step reads and writes: messages, M and its optimizer's state, m and new version.

  Without compression m is M.
  """
  state = jax.eval_shape(choices.make_outer_optimizer(s.outer).init, dict(level))
  state_bytes = num_bytes((level, state)) + (num_bytes(level) if kind != 'none' else 0)
  version = _sent_bytes(level, compression.of_modules(kind)) if kind != 'none' else 0
  return num_paths * _message_bytes(s, level, kind) + 2 * state_bytes + version


def _message_bytes(s: settings_lib.Settings, level: Mapping[str, Any], kind: str) -> int:
  """Returns the bytes of a path's message of a level, with its row weights."""
  return _sent_bytes(level, kind) + _row_bytes(s, level)


def _sent_bytes(level: Mapping[str, Any], kind: str) -> int:
  """Returns the bytes that the parameters of a level are sent in."""
  return sum(compression.sent_bytes(x.shape, kind) for x in level.values())


def _row_bytes(s: settings_lib.Settings, level: Mapping[str, Any]) -> int:
  """Returns the bytes of a path's row weights of a level; 0 without `outer.row_weights`."""
  return 4 * sum(x.shape[0] if x.shape else 1 for x in level.values()) if s.outer.row_weights else 0


def num_bytes(tree: Any) -> int:
  """Returns the bytes of all arrays of a tree."""
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _groups(layout: modules.Layout, level: Level) -> tuple[tuple[int, ...], ...]:
  """Returns the paths through each module of a level."""
  paths_by_module: dict[tuple[int, ...], list[int]] = {}
  for path, point in enumerate(layout.grid.points()):
    paths_by_module.setdefault(layout.grid.module(level, point), []).append(path)
  return tuple(map(tuple, paths_by_module.values()))
