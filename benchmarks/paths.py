"""Time and memory of one device against the number of paths that take turns on it.

    python benchmarks/paths.py [--paths=1,4,16,64 --width=128 ...]

Time should be linear in the number of paths P, memory what arithmetic says:

    3 x all modules (they, their outer momentum, the sums of outer gradients) + P AdamW states (2 x parameters)
    + one path's parameters and what a program of its steps needs (gradients, activations), as XLA states it

Where all modules are larger than the latter, the outer step is the peak: XLA copies the momentum before it writes it.

Every count of paths runs in a process of its own. Memory is the largest use during whole phases, less that before
them, with everything imported, compiled and run once: of the device where it tells, else of the process (Linux).
Prints a table and, as the last line, one JSON object.
"""

import ctypes
import gc
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import time

import common
import jax
import numpy as np
from absl import app, flags

from dipaco_jax.core.errors import InputError
from dipaco_jax.models import transformer
from dipaco_jax.training import programs

common.define_sizes(width=128, num_layers=4, num_heads=4, mlp_dim=352, vocab_size=2048, seq_len=128, batch_size=8)
PATHS = flags.DEFINE_list('paths', ['1', '4', '16', '64'], 'numbers of paths, each on a grid as square as it can be')
STEPS = flags.DEFINE_integer('steps', 4, 'inner steps of a phase, in one dispatch')
PHASES = flags.DEFINE_integer('phases', 2, 'the shortest is reported')
ONE = flags.DEFINE_integer('one', 0, 'measure this number of paths in this process')


def used_bytes() -> int:
  """By the device, else by the process, now."""
  stats = jax.devices()[0].memory_stats()
  return stats['bytes_in_use'] if stats else _resident('VmRSS')


def peak_bytes() -> int:
  """The most that has been used since `reset_peak`; a device's since its start."""
  stats = jax.devices()[0].memory_stats()
  return stats['peak_bytes_in_use'] if stats else _resident('VmHWM')


def reset_peak():
  """Only a process can; it hands back first what nobody uses."""
  gc.collect()
  if not jax.devices()[0].memory_stats():
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path('/proc/self/clear_refs').write_text('5')


def _resident(name: str) -> int:
  found = re.search(rf'{name}:\s+(\d+) kB', pathlib.Path('/proc/self/status').read_text())
  if found is None:
    raise InputError(f'/proc/self/status does not tell {name}')
  return int(found[1]) * 1024


def last_steps(made: programs.Programs) -> tuple:
  """The last step of a phase, and how many steps it had, by level."""
  return np.int32(STEPS.value), dict.fromkeys(made.levels, np.int32(STEPS.value))


def compile_all(made: programs.Programs) -> dict:
  """The programs of a phase, ahead of time, so that compiling is in no peak."""
  turn, weights = np.zeros(2, np.int32), np.ones(made.layout.grid.shape, np.float32)
  with_sharding = lambda tree, specs: jax.tree.map(  # noqa: E731
    lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, made.specs.shardings(specs)
  )
  stacked_specs = (made.specs.modules, made.specs.outer, made.specs.gathered)
  modules, _, *rest = jax.eval_shape(made.start, made.shapes)
  modules, outer, gathered = with_sharding((modules, *rest), stacked_specs)
  params = with_sharding(jax.eval_shape(made.gather_path, modules, turn), made.specs.params)
  state = with_sharding(jax.eval_shape(made.fresh_state, params), made.specs.state)
  rows = common.in_flight(made, common.random_rows(made.settings, STEPS.value))
  arguments = {
    'start': (made.shapes,),
    'gather_path': (modules, turn),
    'fresh_state': (params,),
    'steps': (params, state, *rows, np.int32(0), weights, turn),
    'accumulate': (
      gathered,
      {},
      modules,
      programs.usual(outer),
      params,
      state,
      weights,
      weights,
      *last_steps(made),
      turn,
    ),
    'outer': (modules, {}, outer, gathered, weights),
    'zero_sums': (gathered,),
  }
  return {name: made.program(name).lower(*args).compile() for name, args in arguments.items()}


def phase(made: programs.Programs, compiled: dict, stacked, states: dict, rows, turns):
  """These turns, one path each, then the outer step; returns what `start` does, of the next phase."""
  weights = np.ones(made.layout.grid.shape, np.float32)
  modules, masters, outer, gathered = stacked
  for turn in turns:
    at = np.array(turn, np.int32)
    params = compiled['gather_path'](modules, at)
    state = states.pop(turn, None) or compiled['fresh_state'](params)
    params, states[turn], _ = compiled['steps'](params, state, *rows, np.int32(0), weights, at)
    steps = last_steps(made)
    gathered, _ = compiled['accumulate'](
      gathered, {}, modules, programs.usual(outer), params, states[turn], weights, 10 * weights, *steps, at
    )
  modules, masters, outer, _ = compiled['outer'](modules, masters, outer, gathered, weights)
  return modules, masters, outer, compiled['zero_sums'](gathered)


def arithmetic(made: programs.Programs, temporary: int) -> dict[str, int]:
  """Bytes by what they are for."""
  modules = 4 * made.layout.num_parameters(made.shapes)
  one = common.num_bytes(made.shapes)
  return {
    'modules': modules,
    'outer_momenta': modules,
    'sums': modules,
    'inner_states': 2 * one * made.layout.grid.num_paths,
    'params': one,
    'gradients_and_activations': temporary,
  }


def measure_one(num_paths: int) -> dict:
  a = max(d for d in range(1, math.isqrt(num_paths) + 1) if num_paths % d == 0)
  s = common.make_settings({'a': a, 'b': num_paths // a}, common.LEVELS)
  made = common.make_programs(s, jax.devices()[:1])
  base = {name: np.asarray(x) for name, x in transformer.init(made.model, jax.random.key(0)).items()}
  compiled = compile_all(made)
  rows = common.in_flight(made, common.random_rows(s, STEPS.value))
  turns = made.placement.turns()
  jax.block_until_ready(phase(made, compiled, compiled['start'](base), {}, rows, turns[:1]))
  reset_peak()
  before = used_bytes()
  stacked, times = compiled['start'](base), []
  states: dict = {}
  for _ in range(PHASES.value):
    started = time.perf_counter()
    stacked = jax.block_until_ready(phase(made, compiled, stacked, states, rows, turns))
    times.append(time.perf_counter() - started)
  measured = peak_bytes() - before
  parts = arithmetic(made, compiled['steps'].memory_analysis().temp_size_in_bytes)
  expected = sum(parts.values())
  return {
    'paths': num_paths,
    'phase_s': min(times),
    'path_phase_s': min(times) / num_paths,
    'measured_bytes': measured,
    'expected_bytes': expected,
    'memory_ratio': measured / expected,
    'parts': parts,
    'device': jax.devices()[0].device_kind,
  }


def in_own_process(num_paths: int) -> dict:
  flags_given = [argument for argument in sys.argv[1:] if not argument.startswith('--paths')]
  command = [sys.executable, os.path.abspath(__file__), *flags_given, f'--one={num_paths}']
  done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
  return json.loads(done.stdout.splitlines()[-1])


def table(results: list[dict]):
  columns = ('paths', 'phase_s', 'path_phase_s', 'measured_bytes', 'expected_bytes', 'memory_ratio')
  print(''.join(f'{name:>16}' for name in columns))
  for row in results:
    print(''.join(f'{row[name]:>16,.4g}' if name != 'paths' else f'{row[name]:>16}' for name in columns))


def main(_):
  if ONE.value:
    print(json.dumps(measure_one(ONE.value)))
    return
  results = [in_own_process(int(count)) for count in PATHS.value]
  table(results)
  first, last = results[0], results[-1]
  print(
    json.dumps(
      {
        'time_ratio': last['path_phase_s'] / first['path_phase_s'],  # 1: linear
        'memory_ratio': last['memory_ratio'],
        'memory_ratios': [row['memory_ratio'] for row in results],
        'results': results,
      }
    )
  )


if __name__ == '__main__':
  app.run(main)
