"""Shapes and PartitionSpecs of a run's parameters, states and sums, on one placement.

In-flight arrays have the mesh's axes in front, [m_a, ..., shape]; stacked modules the axes of their level. Inside a
path's slice, parameters and AdamW state are replicated over `data`, or sharded over it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from dipaco_jax.algorithm import inner as inner_lib, modules as modules_lib, outer as outer_lib
from dipaco_jax.algorithm.grid import Level
from dipaco_jax.config import choices, settings as settings_lib, wires
from dipaco_jax.models import transformer as model_lib
from dipaco_jax.training.mesh import Placement


class Gathered(NamedTuple):
  """Sums of a phase for its outer step; zeros at its beginning."""

  sums: Any  # w (old - new), [positions along axes that a level lacks, K_a, ..., shape] by level and parameter
  squares: Any  # |w (old - new)|^2, [positions, K_a, ...] by level
  moved: Any  # r of screening.py, shaped like the grid, by level
  excluded: Any  # whose outer gradient takes no part, bool, shaped like the grid
  masses: Any  # with `outer.row_weights` w s, [positions, K_a, ..., rows], and sums and squares are times s; else {}


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity
class Specs:
  """Shapes and PartitionSpecs of the programs' arguments and results."""

  placement: Placement
  layout: modules_lib.Layout
  model: model_lib.Transformer
  settings: settings_lib.Settings

  @functools.cached_property
  def inner(self) -> inner_lib.Inner:
    """The optimizer of a path."""
    return choices.make_inner_of_run(self.settings)

  @functools.cached_property
  def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
    """One path's parameters."""
    return model_lib.shapes(self.model)

  @functools.cached_property
  def dims(self) -> dict[str, int | None]:
    """The dimension of each parameter that is sharded over `data`."""
    return {name: self.placement.data_dim(s.shape) for name, s in self.shapes.items()}

  @property
  def num_axes(self) -> int:
    """Axes of the grid, which in-flight arrays have in front."""
    return len(self.layout.grid.names)

  def shardings(self, specs: Any) -> Any:
    """Turns PartitionSpecs into NamedShardings."""
    return jax.tree.map(lambda s: NamedSharding(self.placement.mesh, s), specs, is_leaf=lambda s: isinstance(s, P))

  # -- in flight

  @functools.cached_property
  def params(self) -> dict[str, P]:
    """Parameters of the paths in flight."""
    return {name: self.placement.in_flight_spec(s.shape) for name, s in self.shapes.items()}

  @functools.cached_property
  def state(self) -> Any:
    """Inner states of the paths in flight: moments as the parameters, counts one per position."""
    state = jax.eval_shape(self.inner.init, self.shapes)
    return jax.tree.map(lambda s: self.placement.in_flight_spec(s.shape), state)

  @functools.cached_property
  def waiting(self) -> Any:
    """Shardings of the inner states of paths that wait: in the hosts' pinned memory, if the config asks for that."""
    shardings = self.shardings(self.state)
    if not self.settings.train.offload:
      return shardings
    return jax.tree.map(lambda s: s.with_memory_kind('pinned_host'), shardings)

  def rows(self, leading: int = 0) -> P:
    """`[..., m_a, ..., B, L]`: rows split over `data`."""
    return P(*(None,) * leading, *self.layout.grid.names, 'data')

  @property
  def weights(self) -> P:
    """PartitionSpec of an array with one entry per path, shaped like the grid."""
    return P(*self.layout.grid.names)

  # -- compression

  @property
  def compress(self) -> str:
    """The compression of outer gradients, one of compression.KINDS."""
    return wires.make_wire(self.settings.outer, self.settings.train).compress

  @functools.cached_property
  def compressed(self) -> tuple[str, ...]:
    """Names of the levels that are compressed: those that several paths share."""
    shared = (level.name for level in self.layout.levels if self.layout.grid.paths_through(level) > 1)
    return tuple(shared) if self.compress != 'none' else ()

  @functools.cached_property
  def residuals(self) -> dict[str, P]:
    """Residuals of the paths in flight, of compressed parameters, bfloat16."""
    return {name: spec for name, spec in self.params.items() if self.layout.owner[name].name in self.compressed}

  def zero_residuals(self) -> dict[str, jax.Array]:
    """Returns one path's residuals before it has sent anything, on this device."""
    shapes = {n: list(self.shapes[n].shape) for n in self.residuals}
    for name, shape in shapes.items():
      if (dim := self.dims[name]) is not None:
        shape[dim] //= self.placement.data
    return {name: jnp.zeros(shape, jnp.bfloat16) for name, shape in shapes.items()}

  @functools.cached_property
  def masters(self) -> dict[str, dict[str, P]]:
    """M of compression.py, the compressed levels' modules as the outer optimizer has them; placed as the modules."""
    return {level: self.modules[level] for level in self.compressed}

  # -- modules

  @functools.cached_property
  def modules(self) -> dict[str, dict[str, P]]:
    """Stacked modules: sharded over their level's axes, replicated over the others."""
    return self.per_parameter(lambda level, name: P(*level.axes, *self._of_parameter(name)))

  @functools.cached_property
  def whole(self) -> dict[str, dict[str, P]]:
    """Stacked modules, each in one piece on every device of its slice."""
    return self.per_parameter(lambda level, name: P(*level.axes))

  @functools.cached_property
  def outer(self) -> Any:
    """Outer states: moments as the modules, scalars one per module."""
    modules = jax.eval_shape(functools.partial(modules_lib.stack, self.layout), self.shapes)
    state = jax.eval_shape(self.first_outer_state, modules)

    def spec(level, leaf):
      return P(*level.axes, *self.placement.parameter_spec(leaf.shape[len(level.axes) :]))

    return {level.name: jax.tree.map(functools.partial(spec, level), state[level.name]) for level in self.layout.levels}

  def first_outer_state(self, modules: modules_lib.Modules) -> Any:
    """Returns the outer state before the first step."""
    optimizer = choices.make_outer_optimizer(self.settings.outer)
    return outer_lib.init(self.layout, optimizer, modules, self.settings.inner.optimizer)

  @functools.cached_property
  def gathered(self) -> Gathered:
    """Partial sums, which need one all-reduce, and data about each path, at the path's position."""
    sums = self.per_parameter(lambda level, name: P(self._lacking(level), *level.axes, *self._of_parameter(name)))
    squares = {level.name: P(self._lacking(level), *level.axes) for level in self.layout.levels}
    masses = {level: {n: P(*s[: len(squares[level]) + 1]) for n, s in of.items()} for level, of in sums.items()}
    masses = masses if self.settings.outer.row_weights else {}
    return Gathered(sums, squares, dict.fromkeys(squares, self.weights), self.weights, masses)

  def zeros(self, modules: modules_lib.Modules) -> Gathered:
    """Returns the zeros that a phase begins with."""
    grid, sizes = self.layout.grid, self.placement.positions
    positions = {level.name: math.prod(sizes[i] for i in grid.lacking(level)) for level in self.layout.levels}
    sums = {l: {n: jnp.zeros((positions[l], *x.shape), x.dtype) for n, x in m.items()} for l, m in modules.items()}
    squares = {l.name: jnp.zeros((positions[l.name], *grid.level_shape(l)), jnp.float32) for l in self.layout.levels}
    moved = {level: jnp.zeros(grid.shape, jnp.float32) for level in squares}
    rows = squares if self.settings.outer.row_weights else {}
    masses = {l: {n: jnp.zeros(x.shape[: s.ndim + 1]) for n, x in sums[l].items()} for l, s in rows.items()}
    return Gathered(sums, squares, moved, jnp.zeros(grid.shape, bool), masses)

  @functools.cached_property
  def usual(self) -> dict[str, P]:
    """h of screening.py, one per module."""
    return {level.name: P(*level.axes) for level in self.layout.levels}

  def per_parameter(self, spec: Callable[[Level, str], Any]) -> dict[str, dict[str, Any]]:
    """Returns {level: {parameter: `spec(level, parameter)`}}."""
    return {level.name: {name: spec(level, name) for name in self.layout.names(level)} for level in self.layout.levels}

  def _of_parameter(self, name: str) -> tuple[str | None, ...]:
    return self.placement.parameter_spec(self.shapes[name].shape)

  def _lacking(self, level: Level) -> tuple[str, ...]:
    return tuple(self.layout.grid.names[i] for i in self.layout.grid.lacking(level))
