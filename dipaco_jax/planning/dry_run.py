"""What a run will cost, known without the machine: its programs compiled ahead of time for a TPU that is not there.

Where the figures come from:

    HBM         of the compiler, program by program, and what else is on a chip meanwhile
    collectives of the compiled programs, by what they cross: a path's slice (`data`), the grid, the data-center network
    time        see `roofline`
"""

import dataclasses
import math
import re
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dipaco_jax.core import grid as grid_lib
from dipaco_jax.core import modules
from dipaco_jax.core import settings as settings_lib
from dipaco_jax.models import transformer
from dipaco_jax.planning import hlo, roofline
from dipaco_jax.planning.topology import Topology
from dipaco_jax.training import mesh, programs
from dipaco_jax.training.performance import GIB

SPARE = 0.95  # of a chip's memory; the rest is the runtime's


class DoesNotFit(Exception):
  """A program that the compiler cannot place; `needed` bytes on a chip, as it says."""

  def __init__(self, needed: int):
    super().__init__(f'{needed / GIB:.1f} GiB')
    self.needed = needed


def run(settings: settings_lib.Settings, topology: Topology) -> dict[str, Any]:
  """The figures, by name; see `table`. Nothing is written. Raises InputError where devices do not take the grid."""
  s = dataclasses.replace(settings, model=transformer.for_device(settings.model, 'tpu'))
  mesh.place(grid_lib.Grid(), s.mesh, s.batch_sizes('pretrain'), topology.devices)  # the base model's
  made = on(s, topology)
  chips = made.placement.mesh.devices.size
  found: dict[str, Any] = {
    'topology': topology.name,
    'chips': chips,
    'chips_per_path': made.placement.data,
    'paths_in_turn': len(made.placement.turns()),
    'hbm_capacity_bytes': topology.chip.hbm_bytes,
  }
  try:
    compiled = compile_all(made)
  except DoesNotFit as e:
    return found | {'fits': False, 'hbm_bytes_per_chip': e.needed} | {'what_fits': what_fits(s, topology)}
  sent = traffic(made, compiled, topology)
  found |= memory(made, compiled) | sent | roofline.times(made, compiled['steps'], topology, sent)
  found['fits'] = found['hbm_bytes_per_chip'] <= SPARE * topology.chip.hbm_bytes
  return found if found['fits'] else found | {'what_fits': what_fits(s, topology)}


def on(s: settings_lib.Settings, topology: Topology) -> programs.Programs:
  """The run's programs, for devices that are not there."""
  made = transformer.make(s.model, s.tokenizer.vocab_size)
  layout = modules.make_layout(s.grid, s.levels, transformer.shapes(made))
  placement = mesh.place(layout.grid, s.mesh, s.batch_sizes('train'), topology.devices)
  return programs.make(s, placement, layout, made)


# -- compiling


class Arguments(NamedTuple):
  """Shapes of what is on the devices, with where they are."""

  modules: Any
  outer: Any
  gathered: Any
  params: Any
  state: Any


def arguments(made: programs.Programs) -> Arguments:
  stacked = jax.eval_shape(made.start, made.shapes)
  params = jax.eval_shape(made.gather_path, stacked[0], turn_of(made))
  state = jax.eval_shape(made.fresh_state, params)
  specs = made.specs.modules, made.specs.outer, made.specs.gathered, made.specs.params, made.specs.state
  place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
  trees = zip((*stacked, params, state), specs, strict=True)
  return Arguments(*(jax.tree.map(place, tree, made.specs.shardings(spec)) for tree, spec in trees))


def turn_of(made: programs.Programs):
  return replicated(made, (len(made.placement.positions),), np.int32)


def replicated(made: programs.Programs, shape, dtype):
  return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(made.placement.mesh, P()))


def rows(made: programs.Programs, steps: int | None):
  """Tokens, or segments, of a dispatch of so many steps; None: of one batch of evaluation."""
  s = made.settings
  size = s.train.batch_size if steps else s.evaluate.batch_size or s.train.batch_size
  length = s.model.seq_len if steps else s.evaluate.seq_len or s.model.seq_len
  shape = (*(steps,) * bool(steps), *made.placement.positions, size, length)
  sharding = NamedSharding(made.placement.mesh, made.specs.rows(int(bool(steps))))
  return jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)


PHASE = 'steps', 'accumulate', 'outer', 'evaluate'


def compile_all(made: programs.Programs, names: tuple[str, ...] = PHASE) -> dict[str, Any]:
  """The programs of a phase, or some. Raises DoesNotFit."""
  a, t = arguments(made), made.settings.train
  k = grid_lib.largest_divisor(t.steps_per_phase, t.steps_per_dispatch)
  weights = replicated(made, made.layout.grid.shape, np.float32)
  turn, first = turn_of(made), replicated(made, (), np.int32)
  calls = {
    'steps': (a.params, a.state, rows(made, k), rows(made, k), first, weights, turn),
    'accumulate': (
      *(a.gathered, a.modules, programs.usual(a.outer), a.params, a.state),
      *(weights, weights, first, first, turn),
    ),
    'outer': (a.modules, a.outer, a.gathered, weights),
    'evaluate': (a.params, rows(made, None), rows(made, None)),
  }
  return {name: compiled(getattr(made, name), *calls[name]) for name in names}


def compiled(program, *args) -> Any:
  try:
    return program.lower(*args).compile()
  except jax.errors.JaxRuntimeError as e:
    if not (needed := too_large(str(e))):
      raise
    raise DoesNotFit(needed) from e


def too_large(error: str) -> int:
  """Bytes that a program needs, where the compiler says in one of its ways that a chip has fewer; else 0."""
  used = re.search(r'RESOURCE_EXHAUSTED.*?\b([\d.]+)([KMG])\b', error, re.DOTALL)
  return int(float(used[1]) * 2 ** {'K': 10, 'M': 20, 'G': 30}[used[2]]) if used else 0


# -- memory


def bytes_on_chip(tree) -> int:
  """Of arrays that lie there as their shardings say."""
  leaves = jax.tree.leaves(tree)
  return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def memory(made: programs.Programs, compiled: dict[str, Any]) -> dict[str, Any]:
  """A chip's HBM at its fullest, and by kind while a path trains."""
  a, turns = arguments(made), len(made.placement.turns())
  taken = a.state.optimizer[0].nu if made.settings.outer.row_weights else ()  # of the state, by `accumulate` itself
  waiting = 0 if made.settings.train.offload else (turns - 1) * bytes_on_chip(a.state)
  held = {
    'steps': bytes_on_chip((a.modules, a.outer, a.gathered)) + waiting,
    'accumulate': bytes_on_chip((a.outer, a.state)) - bytes_on_chip(taken) + waiting,
    'outer': bytes_on_chip(a.state) + waiting,
    'evaluate': bytes_on_chip((a.modules, a.outer, a.gathered, a.state)) + waiting,
  }
  needed = {name: held[name] + live(compiled[name]) for name in held}
  found = compiled['steps'].memory_analysis()
  return {
    'hbm_bytes_per_chip': max(needed.values()),
    'hbm_bytes_by_program': needed,
    'hbm_bytes_by_kind': {
      'parameters': bytes_on_chip((a.params, a.modules)),
      'inner states': bytes_on_chip(a.state) + waiting,
      'outer states and sums': bytes_on_chip((a.outer, a.gathered)),
      'gradients': bytes_on_chip(a.params),
      'activations and temporaries': max(0, found.temp_size_in_bytes - bytes_on_chip(a.params)),
      'rows and programs': live(compiled['steps']) - found.temp_size_in_bytes - bytes_on_chip((a.params, a.state)),
    },
  }


def live(program: Any) -> int:
  """Bytes on a chip while a program runs; what it donates counts once."""
  m = program.memory_analysis()
  used = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
  return used + m.temp_size_in_bytes + m.generated_code_size_in_bytes


# -- traffic


def crossed(data: int, slices: list[int], group: list[int]) -> str:
  """What a group of devices has to cross: 'data', inside a path's slice; 'grid'; or 'dcn', from slice to slice.

  Args:
    data: devices inside a path, which are next to each other in the mesh.
    slices: of every device, in the mesh's order.
  """
  if len({slices[i] for i in group}) > 1:
    return 'dcn'
  return 'grid' if len({i // data for i in group}) > 1 else 'data'


def traffic(made: programs.Programs, compiled: dict[str, Any], topology: Topology) -> dict[str, Any]:
  """Collectives of an inner step, and of the outer step: how many, and the bytes that a chip sends."""
  number = {device: i // topology.chips_per_slice for i, device in enumerate(topology.devices)}
  slices = [number[device] for device in made.placement.mesh.devices.reshape(-1)]
  everybody = list(range(len(slices)))
  found: dict[str, Any] = {}
  for name in ('steps', 'outer'):
    count, size = dict.fromkeys(('data', 'grid', 'dcn'), 0), dict.fromkeys(('data', 'grid', 'dcn'), 0.0)
    for collective in hlo.collectives(compiled[name].as_text()):
      groups = collective.groups or [everybody]
      where = max((crossed(made.placement.data, slices, group) for group in groups), key=('data', 'grid', 'dcn').index)
      count[where] += 1
      size[where] += collective.sent(len(everybody))
    found |= {f'{name}_collectives': count, f'{name}_collective_bytes': size}
  return found | {
    'inner_grid_collectives': found['steps_collectives']['grid'] + found['steps_collectives']['dcn'],
    'outer_bytes_per_chip': sum(found['outer_collective_bytes'].values()),
  }


# -- what would fit


def what_fits(s: settings_lib.Settings, topology: Topology) -> str:
  """The options with which it does: smaller parts of a batch, blocks computed again, fewer rows; '' where none do.

  The first that fit are told, each tried by compiling.
  """
  rows, last = s.train.microbatch or s.train.batch_size, s.train.batch_size
  tries = [(remat, rows // 4**i, last) for remat in ('dots', 'full') for i in range(5) if rows // 4**i]
  tries += [('full', 1, last // 4**i) for i in range(1, 5) if last // 4**i]
  for remat, part, size in tries:
    if (remat, part, size) == (s.model.remat, rows, last):
      continue
    train, evaluate = (
      dataclasses.replace(s.train, microbatch=part, batch_size=size),
      dataclasses.replace(s.evaluate, batch_size=size),
    )
    changed = dataclasses.replace(s, model=dataclasses.replace(s.model, remat=remat), train=train)
    try:
      made = on(changed if size == last else dataclasses.replace(changed, evaluate=evaluate), topology)
      if memory(made, compile_all(made))['hbm_bytes_per_chip'] <= SPARE * topology.chip.hbm_bytes:
        fewer = f' --config.train.batch_size={size} --config.evaluate.batch_size={size}' if size < last else ''
        return f'--config.model.remat={remat} --config.train.microbatch={part}{fewer}'
    except (DoesNotFit, ValueError):  # ValueError: a path's devices do not divide it
      continue
  return ''


def table(found: dict[str, Any]) -> str:
  """For people."""
  gib = lambda n: f'{n / GIB:.2f} GiB'  # noqa: E731
  lines = [
    f'topology       {found["topology"]}: {found["chips"]} chips, {found["chips_per_path"]} to a path, '
    f'{found["paths_in_turn"]} paths in turn on each',
    f'HBM a chip     {gib(found["hbm_bytes_per_chip"])} of {gib(found["hbm_capacity_bytes"])}: '
    f'{"fits" if found["fits"] else "does not fit"}',
  ]
  lines += [f'  {name:28} {gib(size)}' for name, size in found.get('hbm_bytes_by_kind', {}).items()]
  if not found['fits']:
    lines.append(f'what would fit: {found["what_fits"] or "a topology with more chips, so that a path has more"}')
  if 'step_s_low' in found:
    for name, words in (('steps', 'an inner step'), ('outer', 'an outer step')):
      sent = ', '.join(
        f'{found[f"{name}_collectives"][where]} {words}, {size / 1e6:,.1f} MB'
        for where, words, size in (
          (w, {'data': 'inside paths', 'grid': 'across the grid', 'dcn': 'from slice to slice'}[w], z)
          for w, z in found[f'{name}_collective_bytes'].items()
        )
      )
      lines.append(f'collectives    of {words}: {sent}')
    lines += [
      f'a step         {found["flops_per_step"]:.3g} FLOPs of a path; {found["step_s_low"]:.3g} to '
      f'{found["step_s_high"]:.3g} s',
      f'MFU            {found["mfu_low"]:.0%} to {found["mfu_high"]:.0%}; at least '
      f'{found["tokens_per_s"]:,.0f} tokens/s',
      f'outer step     {found["outer_bytes_per_chip"] / 1e6:,.1f} MB a chip, {found["outer_s"]:.3f} s',
      f'whole run      {found["hours_low"]:,.1f} to {found["hours"]:,.1f} hours; {found["chip_hours"]:,.0f} chip hours',
    ]
  return '\n'.join(lines)
