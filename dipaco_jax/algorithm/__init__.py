"""The papers' mathematics: DiPaCo [arXiv 2403.10616], DiLoCo [2311.08105], Streaming DiLoCo [2501.18512].

Read `reference` first, Algorithm 1 as a plain loop; then `grid` (axes, levels, paths), `modules` (what paths share),
and `inner` and `outer`, the two optimizations. `levels`, `phase` and `outer_step` apply them to a training step of your
own: they are the library, and their names are exported here. `muon` is another inner optimizer. `streaming` and
`compression` reduce communication; `screening` excludes faulty paths, and `weight_cap` limits the share of one owner;
`exact_sum` and `row_sum` add contributions in any order to the same bits. `averaging_gap` measures what the outer step
costs each path; `checks` finds arguments that do not fit, and `errors` are those of this room. docs/concepts.md lists
the symbols of the docstrings with their names in code.

Everything here but `ExactSum` and `RowSum`, which are accumulators, is pure: arrays in, arrays out. It imports JAX,
NumPy, Optax and the standard library, and nothing from other rooms.
"""

import importlib
from typing import Any

HOMES = {  # the file of each public name
  'Grid': 'grid',
  'Levels': 'levels',
  'OuterStep': 'outer_step',
  'Report': 'outer_step',
  'State': 'outer_step',
  'row_weights': 'outer_step',
  'spread': 'phase',
  'train_path': 'phase',
  'train_phase': 'phase',
}

__all__ = list(HOMES)


def __getattr__(name: str) -> Any:
  """Loads public names at their first use, because they import JAX, which `--help` does not need."""
  if name not in __all__:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return getattr(importlib.import_module(f'{__name__}.{HOMES[name]}'), name)


def __dir__() -> list[str]:
  return __all__
