"""The line that each island needs, for models past the machines at hand: a simulation (wire_simulation.py).

    python benchmarks/wire.py                                                       the table, in a minute
    python benchmarks/wire.py --parameters=150e6 --step_s=1 --mbits=20,100,1000     how busy workers are behind lines

The table has Gbit/s, each way, of the line from which an island spends 50, 80, 90, 95 and 99% of its time in inner
steps. Eight workers, a path each, beside a storage that is never slow, train

    diloco    one level that all share, as configs/c4_diloco_64.py
    dipaco    2x4 paths, as configs/c4_8paths.py: half of the blocks along each axis, all else shared

of a transformer of so many parameters, with `outer.wire` as named. Further rows are what changes give, or would give:

    cut in 8          every level of blocks is eight levels, with places of their own
    state with        a path's state goes up before the fact of its piece, and not whenever the line is free
    facts by level    a message counts from a fact of its own, not from that of its piece
    every 64 phases   states are published so often

Bytes are those of the arrays that a run exchanges, and pieces those of algorithm/streaming.py. For comparison,
data-parallel training and plain DiLoCo exchange bfloat16 by way of the same storage, which keeps no states, without any
overlap; the paper's send one way what goes up and then down here, and overlap with backward passes. The last line is
JSON.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import wire_simulation
from absl import flags

from dipaco_jax.command_line import command
from dipaco_jax.config import settings
from dipaco_jax.core.errors import InputError
from dipaco_jax.models import transformer
from dipaco_jax.planning import wire_traffic

TARGETS = 0.5, 0.8, 0.9, 0.95, 0.99
GRIDS = 'diloco', 'dipaco'
WIRES = 'lan', 'wan', 'thin'
WORKERS = 8
WIDTH_PER_LAYER = 110  # as in Llama's larger models
# Gbit/s for TARGETS, simulated: arXiv 2501.18512, Table 4, for 1 B, 10 B and 100 B parameters, H = 100.
PAPER = {
  'data-parallel': ('86.8/152.6/184.2/222.3/569', '104.8/222.3/222.3/268.3/471.5', '184.2/323.8/390.7/390.7/471.5'),
  'DiLoCo': ('1.4/6.2/13.3/23.3/86.8', '1.7/7.5/16/33.9/104.8', '3/11/23.3/49.4/184.2'),
  'Streaming DiLoCo: fragments, overlap, FP4': (
    '0.4/0.9/1.7/2.0/3.0', '0.4/0.9/1.4/1.4/1.7', '0.5/0.9/1.1/1.1/1.4',
  ),
}  # fmt: skip
PAPERS = (1e9, 0.1), (10e9, 0.8), (100e9, 4.9)  # parameters, and seconds of a step

FLAGS = flags.FLAGS
flags.DEFINE_list('parameters', [f'{n:g}' for n, _ in PAPERS], 'of a path')
flags.DEFINE_list('step_s', [f'{s:g}' for _, s in PAPERS], 'of an inner step, for each of the parameters')
flags.DEFINE_list('mbits', [], 'Mbit/s of lines, each way: tells utilization behind them, of one case')
flags.DEFINE_integer('tau', 100, 'inner steps in a phase')
flags.DEFINE_integer('steps_per_dispatch', settings.Train.steps_per_dispatch, 'places are multiples of it')
flags.DEFINE_integer('state_every', 16, 'phases between two publications of states, and closed phases of streaming')
flags.DEFINE_float('latency_ms', 0.0, 'of a call to database or storage')
flags.DEFINE_float('memory_gbytes', 0.0, 'GB/s at which an outer step reads and writes; 0: it takes no time')
flags.DEFINE_integer('paths_per_worker', 1, 'a worker trains another path while one waits')
flags.DEFINE_float('publications', 1.0, 'of a worker that may be on their way when it begins a piece')
flags.DEFINE_enum('grid', '', ('', *GRIDS), "with --mbits; '': diloco")
flags.DEFINE_enum('wire', 'thin', WIRES, 'with --mbits: outer.wire')
flags.DEFINE_integer('cut', 1, 'with --mbits: levels instead of each level of blocks')
flags.DEFINE_enum('state', 'behind', wire_simulation.STATES, "with --mbits: when states travel, against a piece's fact")
flags.DEFINE_bool('by_level', False, 'with --mbits: a fact follows each message')


class Case(NamedTuple):
  """What is simulated, but for the size."""

  grid: str  # of GRIDS, or 'data-parallel', or 'plain DiLoCo'
  wire: str
  cut: int = 1
  state: str = wire_simulation.BEHIND
  by_level: bool = False
  state_every: int = 0  # phases; 0: what the flag says

  def __str__(self) -> str:
    words = [self.grid, self.wire] if self.wire else [self.grid]
    words += [f'cut in {self.cut}'] if self.cut > 1 else []
    words += [f'state {self.state}'] if self.state != wire_simulation.BEHIND else []
    words += ['facts by level'] if self.by_level else []
    return ', '.join(words + ([f'every {self.state_every} phases'] if self.state_every else []))


def table_cases() -> list[Case]:
  """Returns the rows of the table."""
  cases = [Case('data-parallel', ''), Case('plain DiLoCo', '')]
  for grid, cut in zip(GRIDS, (8, 4), strict=True):
    fine = Case(grid, 'thin', cut)
    cases += [Case(grid, wire) for wire in WIRES] + [Case(grid, 'thin', state=wire_simulation.WITH)]
    cases += [fine, fine._replace(by_level=True), fine._replace(by_level=True, state_every=64)]
  return cases


# -- sizes


def model_of(parameters: float, vocab_size: int) -> dict[str, int]:
  """Returns the sizes of a transformer with about so many parameters: a width of about 110 times the layers."""
  found = []
  for num_layers in range(2, 200, 2):
    width = round(math.sqrt(parameters / (12 * num_layers)) / 128) * 128  # a block has about 12 width^2
    rest = (parameters - vocab_size * width) / num_layers - 4 * width**2
    mlp_dim = round(rest / (3 * width) / 8) * 8 if width else 0
    if mlp_dim > width:
      sizes = {'num_layers': num_layers, 'num_heads': width // 128, 'head_dim': 128, 'mlp_dim': mlp_dim}
      found.append((abs(math.log(width / num_layers / WIDTH_PER_LAYER)), {'width': width} | sizes))
  if not found:
    raise InputError(f'--parameters={parameters:g} are too few beside a vocabulary of {vocab_size:,}')
  return min(found, key=lambda pair: pair[0])[1]


def levels_of(case: Case, num_layers: int) -> list[tuple[str, str, tuple[str, ...]]]:
  """Returns the levels of a case."""
  if case.grid != 'dipaco' and case.cut == 1:
    return [('all', '.*', ())]
  if case.grid != 'dipaco':
    return [('ends', 'embed|final_norm', ()), *cut('blocks', range(num_layers), (), case.cut)]
  half = num_layers // 2
  halves = cut('low', range(half), ('a',), case.cut) + cut('high', range(half, num_layers), ('b',), case.cut)
  return [('shared', 'embed|final_norm', ()), *halves]


def cut(name: str, blocks: range, axes: tuple[str, ...], parts: int) -> list[tuple[str, str, tuple[str, ...]]]:
  """Returns `parts` levels, of as many blocks each as can be, or as many levels as there are blocks."""
  parts = min(parts, len(blocks))
  borders = [len(blocks) * i // parts for i in range(parts + 1)]
  pieces = [blocks[begin:end] for begin, end in itertools.pairwise(borders)]
  return [(f'{name}_{i}', f'block_({"|".join(map(str, piece))})/', axes) for i, piece in enumerate(pieces)]


# -- simulation


def traffic_of(case: Case, model: Mapping[str, int], shapes: Mapping[str, Any]) -> wire_traffic.Traffic:
  """Returns what a case exchanges."""
  axes = {'a': 2, 'b': WORKERS // 2} if case.grid == 'dipaco' else {'worker': WORKERS}
  tau, every = 1 if case.grid == 'data-parallel' else FLAGS.tau, case.state_every or FLAGS.state_every
  sections: dict[str, Any] = {'grid': axes, 'levels': tuple(levels_of(case, model['num_layers'])), 'model': model}
  sections['train'] = {'steps_per_phase': tau, 'steps_per_dispatch': FLAGS.steps_per_dispatch}
  sections['outer'] = {'wire': case.wire or 'lan', 'closed_every': every}
  sections['checkpoint'] = {'state_every_phases': every}
  found = wire_traffic.make_traffic(settings.from_dict(sections), shapes)
  if case.grid in GRIDS:
    return found
  halves = {level: size // 2 for level, size in found.message.items()}  # bfloat16
  return found._replace(message=halves, version=halves, state=0, state_every=0)


def conditions_of(case: Case, step_s: float) -> wire_simulation.Conditions:
  """Returns the workers of a case; their lines are still missing."""
  return wire_simulation.Conditions(
    (step_s,),
    latency_s=FLAGS.latency_ms / 1000,
    outer_bytes_per_s=FLAGS.memory_gbytes * 1e9 or math.inf,
    paths_per_worker=FLAGS.paths_per_worker,
    state=case.state,
    by_level=case.by_level,
    publications=FLAGS.publications,
  )


def sizes() -> Iterator[tuple[float, dict[str, int], dict[str, Any]]]:
  """Yields seconds of a step, the model's sizes and its parameters' shapes, by the flags."""
  if len(FLAGS.parameters) != len(FLAGS.step_s):
    raise InputError(f'--step_s has {len(FLAGS.step_s)} values, --parameters {len(FLAGS.parameters)}')
  vocab_size = settings.Tokenizer.vocab_size
  for parameters, step_s in zip(map(float, FLAGS.parameters), map(float, FLAGS.step_s), strict=True):
    model = model_of(parameters, vocab_size)
    config = settings.from_dict({'model': model}).model
    yield step_s, model, dict(transformer.shapes(transformer.make_model(config, vocab_size)))


def measure(cases: list[Case]) -> list[dict[str, Any]]:
  """Returns a row for each size and case: the lines for TARGETS, or utilization behind --mbits."""
  rows = []
  for step_s, model, shapes in sizes():
    parameters = sum(x.size for x in shapes.values())
    for case in cases:
      traffic, conditions = traffic_of(case, model, shapes), conditions_of(case, step_s)
      up, down = (size / parameters for size in traffic.bytes_per_phase)
      row = {'case': str(case), 'parameters': parameters, 'step_s': step_s, 'up': up, 'down': down}
      if FLAGS.mbits:
        lines = {mbit: conditions._replace(bytes_per_s=float(mbit) * 1e6 / 8) for mbit in FLAGS.mbits}
        row['utilization'] = {mbit: wire_simulation.utilization(traffic, line) for mbit, line in lines.items()}
      else:
        found = wire_simulation.find_lines(traffic, conditions, TARGETS)
        row['gbits'] = [line * 8 / 1e9 if math.isfinite(line) else None for line in found.values()]
      rows.append(row)
  return rows


# -- the tables


def lines_table(rows: list[dict[str, Any]]) -> str:
  """Formats the lines that are needed: a row for each case, a column for each size; the paper's first, if they fit."""
  columns = list(dict.fromkeys((row['parameters'], row['step_s']) for row in rows))
  heads = [f'{n / 1e9:.3g} B, {s:g} s a step' for n, s in columns]
  lines = [f'| Gbit/s for 50/80/90/95/99% | bytes up, down | {" | ".join(heads)} |', '|---' * (2 + len(heads)) + '|']
  given = zip(map(float, FLAGS.parameters), map(float, FLAGS.step_s), strict=True)
  if (*given,) == PAPERS and FLAGS.tau == 100:
    lines += [f'| the paper: {name} | | {" | ".join(cells)} |' for name, cells in PAPER.items()]
  for case in dict.fromkeys(row['case'] for row in rows):
    mine = [row for row in rows if row['case'] == case]
    cells = ['/'.join('never' if x is None else brief(x) for x in row['gbits']) for row in mine]
    lines.append(f'| {case} | {mine[0]["up"]:.2f}, {mine[0]["down"]:.2f} | {" | ".join(cells)} |')
  return '\n'.join(lines)


def brief(x: float) -> str:
  """Formats a number with two digits, or all before the point."""
  return f'{x:.2g}' if x < 10 else f'{x:.0f}'


def utilization_table(rows: list[dict[str, Any]]) -> str:
  """Formats utilization: a row for each size, a column for each line."""
  heads = [f'{mbit} Mbit/s' for mbit in FLAGS.mbits]
  lines = [f'| case | parameters | a step | bytes up, down | {" | ".join(heads)} |', '|---' * (4 + len(heads)) + '|']
  for row in rows:
    cells = [f'{share:.1%}' for share in row['utilization'].values()]
    size = f'{row["parameters"] / 1e6:,.0f} M | {row["step_s"]:g} s | {row["up"]:.2f}, {row["down"]:.2f}'
    lines.append(f'| {row["case"]} | {size} | {" | ".join(cells)} |')
  return '\n'.join(lines)


def main():
  own = Case(FLAGS.grid or 'diloco', FLAGS.wire, FLAGS.cut, FLAGS.state, FLAGS.by_level)
  rows = measure([own] if FLAGS.mbits else table_cases())
  print(utilization_table(rows) if FLAGS.mbits else lines_table(rows))
  about = {
    name: FLAGS[name].value for name in ('tau', 'state_every', 'latency_ms', 'memory_gbytes', 'paths_per_worker')
  }
  print(json.dumps({'rows': rows, 'targets': TARGETS} | about))


if __name__ == '__main__':
  command.run(main)
