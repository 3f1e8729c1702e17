"""The cost of a run, estimated without its machine: its programs are compiled for a TPU that is not available.

Where the figures come from:

    HBM         the compiler's, program by program, and other arrays on the chip
    collectives in the compiled programs, by what they cross: a path's slice (`data`), the grid, the data-center network
    time        see `roofline`
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from dipaco_jax.algorithm import grid as grid_lib, modules
from dipaco_jax.config import settings as settings_lib
from dipaco_jax.core.errors import InputError
from dipaco_jax.models import transformer
from dipaco_jax.planning import hlo, roofline, wire_needs
from dipaco_jax.planning.topology import Topology
from dipaco_jax.telemetry.performance import GIB
from dipaco_jax.training import mesh, programs

USABLE = 0.95  # the share of a chip's memory that programs may use; the runtime has the rest
LINKS = 'data', 'grid', 'dcn'  # the fastest first


class DoesNotFit(Exception):
  """The compiler cannot place a program, which needs `needed` bytes on a chip."""

  def __init__(self, needed: int):
    super().__init__(f'{needed / GIB:.1f} GiB')
    self.needed = needed


def estimate(settings: settings_lib.Settings, topology: Topology) -> dict[str, Any]:
  """Returns the figures by name, which `cost_text` prints. Raises InputError if the devices do not take the grid."""
  s = dataclasses.replace(settings, model=transformer.for_device(settings.model, 'tpu'))
  # Raises InputError if pretraining's batches do not divide.
  mesh.place(grid_lib.Grid(), s.mesh, s.batch_sizes('pretrain'), topology.devices)
  run_programs, base = make_programs(s, topology), base_programs(s, topology)
  chips = run_programs.placement.mesh.devices.size
  figures: dict[str, Any] = {'topology': topology.name, 'chips': chips, 'chips_per_path': run_programs.placement.data}
  figures |= {'paths_in_turn': len(run_programs.placement.turns()), 'hbm_capacity_bytes': topology.chip.hbm_bytes}
  figures |= count_parameters(*layout_and_shapes(s))
  try:
    compiled = compile_all(run_programs)
    alone = compile_all(base, PROGRAMS[:1]) if base else {}
  except DoesNotFit as e:
    figures |= {'fits': False, 'hbm_bytes_per_chip': e.needed} | wire_needs.estimate(s, ())
    return figures | {'what_fits': find_fitting_options(s, topology)}
  sent = traffic(run_programs, compiled, topology)
  figures |= (
    memory_use(run_programs, compiled) | sent | roofline.estimate_times(run_programs, compiled['steps'], topology, sent)
  )
  if base:
    figures['pretrain'] = pretraining(base, alone, topology)
  figures |= roofline.whole_run(run_programs, figures)
  figures |= slices_traffic(s, figures, topology) | wire_needs.estimate(
    s, (figures['step_s_low'], figures['step_s_high'])
  )
  figures['fits'] = fits(figures, topology)
  return figures if figures['fits'] else figures | {'what_fits': find_fitting_options(s, topology)}


def count_parameters(layout: modules.Layout, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, int]:
  """Returns the number of parameters of one path and of all modules, under the names that report.json has.

  `shapes` are those of one path's parameters.
  """
  of_path = sum(shape.size for shape in shapes.values())
  return {'parameters_path': of_path, 'parameters_total': layout.num_parameters(shapes)}


def layout_and_shapes(s: settings_lib.Settings) -> tuple[modules.Layout, dict[str, jax.ShapeDtypeStruct]]:
  """Returns the layout of the grid's modules, and the shapes of one path's parameters."""
  shapes = transformer.shapes(transformer.make_model(s.model, s.tokenizer.vocab_size))
  return modules.make_layout(s.grid, s.levels, shapes), shapes


def pretraining(base: programs.Programs, compiled: dict[str, Any], topology: Topology) -> dict[str, Any]:
  """Returns the figures of the base model's inner steps, called as those of the paths."""
  sent = traffic(base, compiled, topology)
  figures = memory_use(base, compiled) | sent | roofline.estimate_times(base, compiled['steps'], topology, sent)
  return {'chips': base.placement.data} | {name: x for name, x in figures.items() if not name.startswith('outer')}


def fits(figures: dict[str, Any], topology: Topology) -> bool:
  """Returns whether a run's memory use leaves the runtime its share of a chip's memory."""
  return all(
    x['hbm_bytes_per_chip'] <= USABLE * topology.chip.hbm_bytes for x in (figures, figures.get('pretrain', figures))
  )


def make_programs(s: settings_lib.Settings, topology: Topology) -> programs.Programs:
  model = transformer.make_model(s.model, s.tokenizer.vocab_size)
  layout = modules.make_layout(s.grid, s.levels, transformer.shapes(model))
  placement = mesh.place(layout.grid, s.mesh, s.batch_sizes('train'), topology.devices)
  return programs.Programs(placement, layout, model, s)


def base_programs(s: settings_lib.Settings, topology: Topology) -> programs.Programs | None:
  """Returns the programs of the base model, None if there is no pretraining."""
  if not s.pretrain.steps:
    return None
  s = s.dense()
  evaluate = dataclasses.replace(s.evaluate, batch_size=s.batch_sizes('train')['evaluate.batch_size'])
  train = dataclasses.replace(s.train, batch_size=s.pretrain.batch_size)
  return make_programs(dataclasses.replace(s, train=train, evaluate=evaluate), topology)


# -- compiling


class Arguments(NamedTuple):
  """Shapes and shardings of the arrays on the devices."""

  turn: Any
  modules: Any
  masters: Any
  outer: Any
  gathered: Any
  params: Any
  state: Any
  residuals: Any


def argument_shapes(run_programs: programs.Programs) -> Arguments:
  """Returns shapes and shardings of all that the programs take, as they lie on the topology's devices."""
  stacked = jax.eval_shape(run_programs.start, run_programs.shapes)
  turn = replicated(
    run_programs, (len(run_programs.placement.positions),), np.int32
  )  # the paths in flight, on each mesh axis
  params = jax.eval_shape(run_programs.gather_path, stacked[0], turn)
  state = jax.eval_shape(run_programs.fresh_state, params)
  residuals = jax.eval_shape(run_programs.fresh_residuals)
  at = run_programs.specs
  specs = at.modules, at.masters, at.outer, at.gathered, at.params, at.state, at.residuals

  def place(x, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  trees = zip((*stacked, params, state, residuals), specs, strict=True)
  return Arguments(turn, *(jax.tree.map(place, tree, run_programs.specs.shardings(spec)) for tree, spec in trees))


def replicated(run_programs: programs.Programs, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
  """Returns the shape of an array that every device of the mesh has whole."""
  return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(run_programs.placement.mesh, P()))


def row_shapes(run_programs: programs.Programs, steps: int | None) -> jax.ShapeDtypeStruct:
  """Returns the shape of tokens, or segment ids, of a dispatch of `steps` steps; None: of a batch of evaluation."""
  s = run_programs.settings
  size = s.train.batch_size if steps else s.evaluate.batch_size or s.train.batch_size
  length = s.model.seq_len if steps else s.evaluate.seq_len or s.model.seq_len
  leading = (steps,) if steps else ()
  sharding = NamedSharding(run_programs.placement.mesh, run_programs.specs.rows(len(leading)))
  return jax.ShapeDtypeStruct((*leading, *run_programs.placement.positions, size, length), np.int32, sharding=sharding)


PROGRAMS = 'steps', 'accumulate', 'outer', 'evaluate'  # of a phase
KEYS = {'accumulate': 'finish'}  # of programs in the JSON object, where they have been renamed


def compile_all(run_programs: programs.Programs, names: tuple[str, ...] = PROGRAMS) -> dict[str, Any]:
  """Compiles the programs of a phase, or some of them. Raises DoesNotFit if a chip has too little memory."""
  a = argument_shapes(run_programs)
  k = run_programs.timetable.unit
  weights = replicated(run_programs, run_programs.layout.grid.shape, np.float32)
  turn, first = a.turn, replicated(run_programs, (), np.int32)
  gathering = a.gathered, a.residuals, a.modules, programs.usual(a.outer), a.params, a.state
  calls = {
    'steps': (a.params, a.state, row_shapes(run_programs, k), row_shapes(run_programs, k), first, weights, turn),
    'accumulate': (*gathering, weights, weights, first, dict.fromkeys(run_programs.levels, first), turn),
    'outer': (a.modules, a.masters, a.outer, a.gathered, weights),
    'evaluate': (a.params, row_shapes(run_programs, None), row_shapes(run_programs, None)),
  }
  try:
    return {name: run_programs.program(name).lower(*calls[name]).compile() for name in names}
  except jax.errors.JaxRuntimeError as e:
    if not (needed := bytes_needed(str(e))):
      raise
    raise DoesNotFit(needed) from e


def bytes_needed(error: str) -> int:
  """Returns the bytes that a program needs, if an error of the compiler says that a chip has fewer, else 0."""
  used = re.search(r'RESOURCE_EXHAUSTED.*?\b([\d.]+)([KMG])\b', error, re.DOTALL)
  return int(float(used[1]) * 2 ** {'K': 10, 'M': 20, 'G': 30}[used[2]]) if used else 0


# -- memory


def bytes_on_chip(tree) -> int:
  leaves = jax.tree.leaves(tree)
  return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def memory_use(run_programs: programs.Programs, compiled: dict[str, Any]) -> dict[str, Any]:
  """Returns the bytes of a chip's HBM at its fullest, and by kind while a path trains."""
  a, held = argument_shapes(run_programs), held_bytes(run_programs)
  needed = {name: held[name] + program_bytes(program) for name, program in compiled.items()}
  analysis = compiled['steps'].memory_analysis()
  counted = analysis.temp_size_in_bytes + bytes_on_chip((a.params, a.state))  # under other names
  return {
    'hbm_bytes_per_chip': max(needed.values()),
    'hbm_bytes_by_program': {KEYS.get(name, name): size for name, size in needed.items()},
    'hbm_bytes_by_kind': state_bytes(run_programs)
    | {
      'activations and temporaries': max(0, analysis.temp_size_in_bytes - bytes_on_chip(a.params)),
      'rows and programs': program_bytes(compiled['steps']) - counted,
    },
  }


def held_bytes(run_programs: programs.Programs) -> dict[str, int]:
  """Returns the bytes that a chip holds while each program of a phase runs, without that program's own arrays."""
  a, turns = argument_shapes(run_programs), len(run_programs.placement.turns())
  # 'accumulate' is given AdamW's second moments as an argument: they are counted with the program.
  taken = a.state.optimizer[0].nu if run_programs.settings.outer.row_weights else ()
  waiting, exchange, own = _waiting_bytes(run_programs, a)
  return {
    'steps': bytes_on_chip((a.modules, a.outer, a.gathered)) + waiting + exchange + (turns - 1) * own,
    'accumulate': bytes_on_chip((a.outer, a.state))
    - bytes_on_chip(taken)
    + waiting
    + exchange
    - bytes_on_chip(a.residuals)
    + (turns - 1) * own,
    'outer': bytes_on_chip(a.state) + waiting + exchange - bytes_on_chip(a.masters) + turns * own,
    'evaluate': bytes_on_chip((a.modules, a.outer, a.gathered, a.state)) + waiting + exchange + turns * own,
  }


def state_bytes(run_programs: programs.Programs) -> dict[str, int]:
  """Returns the bytes of a chip, by kind, of the arrays that a run has while a path trains; of no temporary ones."""
  a, turns = argument_shapes(run_programs), len(run_programs.placement.turns())
  waiting, exchange, own = _waiting_bytes(run_programs, a)
  return {
    'parameters': bytes_on_chip((a.params, a.modules)),
    'inner states': bytes_on_chip(a.state) + waiting,
    'outer states and sums': bytes_on_chip((a.outer, a.gathered)) + exchange + (turns - 1) * own,
    'gradients': bytes_on_chip(a.params),
  }


def _waiting_bytes(run_programs: programs.Programs, a: Arguments) -> tuple[int, int, int]:
  """Returns the bytes of inner states that wait, of what compression and streaming keep, and of a turn's own copy."""
  turns = len(run_programs.placement.turns())
  keeps = run_programs.settings.inner.keep_state or run_programs.timetable.stream  # else states end with their turn
  waiting = (turns - 1) * bytes_on_chip(a.state) if keeps and not run_programs.settings.train.offload else 0
  own = (
    bytes_on_chip(a.params) if run_programs.timetable.stream or run_programs.settings.outer.lost else 0
  )  # between pieces
  left = turns * bytes_on_chip({name: a.params[name] for name in run_programs.left_names(run_programs.levels)})
  exchange = bytes_on_chip(a.masters) + turns * bytes_on_chip(a.residuals) + left  # see `train_state.State`
  return waiting, exchange, own


def program_bytes(program: Any) -> int:
  """Returns the bytes on a chip while a program runs; donated arrays count once."""
  m = program.memory_analysis()
  used = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
  return used + m.temp_size_in_bytes + m.generated_code_size_in_bytes


# -- traffic


def slowest_link(data: int, slices: list[int], group: list[int]) -> str:
  """Returns the slowest link that a group crosses: 'data', in a path's devices; 'grid'; 'dcn', between TPU slices.

  `data` devices of a path are next to each other in the mesh; `slices` has every device's slice, in the mesh's order.
  """
  if len({slices[i] for i in group}) > 1:
    return 'dcn'
  return 'grid' if len({i // data for i in group}) > 1 else 'data'


def traffic(run_programs: programs.Programs, compiled: dict[str, Any], topology: Topology) -> dict[str, Any]:
  """Counts collectives of an inner and of the outer step, and the bytes that a chip sends, by the link they cross."""
  number = {device: i * topology.slices // len(topology.devices) for i, device in enumerate(topology.devices)}
  slices = [number[device] for device in run_programs.placement.mesh.devices.reshape(-1)]
  everybody = list(range(len(slices)))
  figures: dict[str, Any] = {}
  for name in (name for name in ('steps', 'outer') if name in compiled):  # in this order, in the JSON too
    count, size = dict.fromkeys(LINKS, 0), dict.fromkeys(LINKS, 0.0)
    for collective in hlo.collectives(compiled[name].as_text()):
      crossed = [slowest_link(run_programs.placement.data, slices, group) for group in collective.groups or [everybody]]
      link = max(crossed, key=LINKS.index)
      count[link] += 1
      size[link] += collective.sent(len(everybody))
    figures |= {f'{name}_collectives': count, f'{name}_collective_bytes': size}
  crossing = figures['steps_collectives']['grid'] + figures['steps_collectives']['dcn']
  sent = sum(figures.get('outer_collective_bytes', {}).values())
  return figures | {'inner_grid_collectives': crossing, 'outer_bytes_per_chip': sent}


def slices_traffic(s: settings_lib.Settings, figures: dict[str, Any], topology: Topology) -> dict[str, float]:
  """Returns the bytes that all chips send to other slices in a phase, or {} if there is one slice."""
  inner, outer = (figures[f'{name}_collective_bytes']['dcn'] for name in ('steps', 'outer'))
  per_chip = s.train.steps_per_phase * figures['paths_in_turn'] * inner + outer
  return {'slices_bytes_per_phase': figures['chips'] * per_chip} if topology.slices > 1 else {}


# -- what would fit


def find_fitting_options(s: settings_lib.Settings, topology: Topology) -> str:
  """Returns the first options with which a run fits, '' if none do; each is tried by compiling.

  They are smaller microbatches, blocks that are computed again, and then fewer rows of a batch.
  """
  rows, last = s.train.microbatch or s.train.batch_size, s.train.batch_size
  tries = [(remat, rows // 4**i, last) for remat in ('dots', 'full') for i in range(5) if rows // 4**i]
  tries += [('full', 1, last // 4**i) for i in range(1, 5) if last // 4**i]
  for remat, microbatch, size in tries:
    if (remat, microbatch, size) == (s.model.remat, rows, last):
      continue
    train = dataclasses.replace(s.train, microbatch=microbatch, batch_size=size)
    changed = dataclasses.replace(s, model=dataclasses.replace(s.model, remat=remat), train=train)
    if size < last:
      changed = dataclasses.replace(changed, evaluate=dataclasses.replace(s.evaluate, batch_size=size))
    try:
      if _fit(changed, topology):
        fewer = f' --config.train.batch_size={size} --config.evaluate.batch_size={size}' if size < last else ''
        return f'--config.model.remat={remat} --config.train.microbatch={microbatch}{fewer}'
    except (DoesNotFit, InputError):  # InputError: the batch is not a multiple of a path's devices
      continue
  return ''


def _fit(s: settings_lib.Settings, topology: Topology) -> bool:
  """Returns whether pretraining and training fit. Raises DoesNotFit if the compiler cannot place a program."""
  run_programs, base = make_programs(s, topology), base_programs(s, topology)
  memory = memory_use(run_programs, compile_all(run_programs))
  return fits(memory | ({'pretrain': memory_use(base, compile_all(base, PROGRAMS[:1]))} if base else {}), topology)
