"""The dry run: its figures for programs on existing devices, compared with counts by hand."""

import json
import math
import subprocess
import sys

import jax
import pytest
import small

from dipaco_jax.planning import cost_text, dry_run, topology
from dipaco_jax.telemetry import metrics_log, performance

CHIP = performance.Chip(flops=1e12, hbm_bytes=2**30, hbm_bytes_per_s=1e11, ici_bytes_per_s=1e10)


def here(devices: int = 4, slices: int = 1, chip: performance.Chip = CHIP) -> topology.Topology:
  return topology.Topology('here', chip, jax.devices()[:devices], slices)


def test_memory_and_traffic_are_those_of_arithmetic():
  s = small.on_2x2()
  found, made = dry_run.estimate(s, here()), small.make_programs(s, 4)
  parameters = sum(4 * math.prod(x.shape) for x in made.shapes.values())
  kinds = found['hbm_bytes_by_kind']
  assert kinds['gradients'] == parameters and kinds['parameters'] == 2 * parameters
  assert 2 * parameters <= kinds['inner states'] <= 2 * parameters + 16
  assert found['fits'] and found['hbm_bytes_per_chip'] >= sum(kinds.values()) - kinds['gradients']
  assert found['inner_grid_collectives'] == 0 and found['steps_collectives'] == {'data': 0, 'grid': 0, 'dcn': 0}
  sent = {(): 1.5, ('a',): 1, ('b',): 1, ('a', 'b'): 0}  # of each byte: 2 (n - 1) / n among n paths
  shared = sum(4 * math.prod(made.shapes[name].shape) * sent[level.axes] for name, level in made.layout.owner.items())
  assert shared <= found['outer_bytes_per_chip'] <= shared + 8 * 4 * 20
  assert found['outer_collectives']['grid'] > 0 and found['chips'] == 4 and found['paths_in_turn'] == 1
  json.dumps(metrics_log.plain(found))
  assert (
    dry_run.count_parameters(*dry_run.layout_and_shapes(s)).items() <= found.items()
    and found['parameters_path'] == parameters // 4
  )
  text = cost_text.to_text(found)
  assert 'fits' in text and 'as islands' in text and 'line needed' in text and 'between slices' not in text
  own = sum(
    4 * math.prod(made.shapes[name].shape) for name, level in made.layout.owner.items() if sent[level.axes] == 0
  )
  assert found['island_sent_bytes_per_phase'] == parameters - own and len(found['island_line_mbits']) == 2


def test_parameters_of_a_path_and_of_all_modules_are_printed():
  s = small.on_2x2()
  made = small.make_programs(s, 1)
  of_path = sum(math.prod(x.shape) for x in made.shapes.values())
  modules = {(): 1, ('a',): 2, ('b',): 2, ('a', 'b'): 4}
  of_all = sum(math.prod(made.shapes[name].shape) * modules[of.axes] for name, of in made.layout.owner.items())
  counts = dry_run.count_parameters(*dry_run.layout_and_shapes(s))
  assert counts == {'parameters_path': of_path, 'parameters_total': of_all} and of_all > of_path
  assert cost_text.parameters_to_text(counts) == f'parameters     {of_path:,} of a path, {of_all:,} of all modules'


@pytest.mark.slow
def test_memory_counts_what_compression_and_streaming_keep():
  found = {}
  for name, outer in {'lan': {}, 'int4': dict(compress='int4'), 'thin': dict(wire='thin', overlap='keep')}.items():
    made = small.make_programs(small.on_2x2(outer=outer), 1)
    compiled = dry_run.compile_all(made, ('steps',))
    found[name] = dry_run.memory_use(made, compiled)['hbm_bytes_by_program']['steps']
  shapes = made.shapes
  shared = sum(made.layout.shared_sizes(shapes).values()) * 4
  modules = sum(
    4 * math.prod(shapes[n].shape) * made.layout.grid.num_modules(of) for n, of in made.layout.owner.items()
    if made.layout.grid.paths_through(of) > 1
  )  # fmt: skip
  # Masters, and residuals, bfloat16, of the paths, which take turns.
  assert found['int4'] - found['lan'] == modules + 4 * shared // 2
  every = sum(4 * math.prod(x.shape) for x in shapes.values())
  assert found['thin'] - found['int4'] == pytest.approx(3 * every + 4 * shared, rel=0.02)  # own, and what is on its way


def test_between_slices_go_inner_and_outer_steps_of_all_chips():
  s = small.on_2x2()
  inner, outer = {'dcn': 2.0}, {'dcn': 100.0}
  found = {'chips': 8, 'paths_in_turn': 3, 'steps_collective_bytes': inner, 'outer_collective_bytes': outer}
  expected = 8 * (3 * 2 * s.train.steps_per_phase + 100)
  assert dry_run.slices_traffic(s, found, here(4, slices=2)) == {'slices_bytes_per_phase': expected}
  assert dry_run.slices_traffic(s, found, here(4)) == {}


@pytest.mark.slow  # .ci/run has it compiled for a TPU
def test_pretraining_is_compiled_too():
  s = small.on_2x2(pretrain=dict(steps=10, batch_size=8))
  found = dry_run.estimate(s, here())
  base, without = found['pretrain'], dry_run.estimate(small.on_2x2(), here())
  parameters = sum(4 * math.prod(x.shape) for x in small.make_programs(s, 4).shapes.values())
  assert base['chips'] == 4 and base['inner_grid_collectives'] == 0
  # gradients of all parameters, summed over the 4 devices of the one path: 2 (n - 1) / n of each byte, in each step
  assert base['steps_collective_bytes']['data'] >= 1.5 * parameters > found['steps_collective_bytes']['data'] == 0
  assert base['step_s_high'] > base['step_s_low'] > 0
  more_s = 3600 * (found['hours'] - without['hours'])
  assert more_s == pytest.approx(10 * base['step_s_high'], rel=1e-3) and 'pretrain' not in without
  assert 'pretraining    on 4 chips' in cost_text.to_text(found)
  small_chip = base['hbm_bytes_per_chip'] - 1
  assert not dry_run.fits(
    without | {'hbm_bytes_per_chip': 1, 'pretrain': base}, here(chip=CHIP._replace(hbm_bytes=small_chip))
  )
  header, *rows = cost_text.to_table([found, without | {'fits': False}]).splitlines()
  assert (
    header.startswith('topology') and len(rows) == 2 and 'does not fit' not in rows[0] and 'does not fit' in rows[1]
  )


@pytest.mark.slow
def test_collectives_cross_what_lies_between_their_devices():
  s = small.on_2x2(mesh=dict(data=2))
  found = dry_run.estimate(s, here(8))
  assert found['steps_collectives']['data'] > 0 and found['inner_grid_collectives'] == 0
  found = dry_run.estimate(s, here(8, slices=2))
  assert found['steps_collectives']['dcn'] == 0 and found['outer_collectives']['dcn'] > 0
  assert found['slices_bytes_per_phase'] == 8 * found['outer_collective_bytes']['dcn'] > 0
  assert f'{found["slices_bytes_per_phase"] / 1e6:,.1f} MB a phase' in cost_text.to_text(found)


@pytest.mark.slow
def test_what_does_not_fit_is_answered_with_what_would():
  needed = dry_run.estimate(small.on_2x2(), here())['hbm_bytes_per_chip']
  found = dry_run.estimate(small.on_2x2(), here(chip=CHIP._replace(hbm_bytes=int(needed / 0.97))))
  assert not found['fits'] and '--config.train.microbatch=' in found['what_fits']
  assert 'does not fit' in cost_text.to_text(found)


@pytest.mark.parametrize('error, needed', [
  ('RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 19.5G of 15.75G hbm. Exceeded by 3.75G.', 19.5),
  ('RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (19.5G) exceeds '
   'available HBM (15.75G).', 19.5),
  ('INTERNAL: Mosaic failed to compile a kernel with 2.5G', 0),
])  # fmt: skip
def test_bytes_are_read_from_the_compiler_s_errors(error, needed):
  assert dry_run.bytes_needed(error) == needed * 2**30


def test_text_of_the_config_need_not_be_there():
  command = [sys.executable, '-m', 'dipaco_jax.main', '--config=configs/text.py', '--compile_only', '--topology=none']
  done = subprocess.run(command, capture_output=True, text=True, timeout=120)
  assert done.returncode == 2 and '--topology=none is not known' in done.stderr


@pytest.mark.slow
def test_the_machine_at_hand_is_a_topology():
  command = [sys.executable, '-m', 'dipaco_jax.main', '--config=configs/text.py', '--compile_only', '--topology=here']
  done = subprocess.run(command, capture_output=True, text=True, timeout=120)
  parameters, memory, time = done.stdout.splitlines()
  assert done.returncode == 0 and memory.startswith('the run needs about') and time.startswith('the whole run takes')
  assert parameters.startswith('parameters ')


@pytest.mark.parametrize(
  'options, words',
  [
    ([], '--topology is missing'),
    # Quick: test_text_of_the_config_need_not_be_there has a topology that is not known.
    pytest.param(['--topology=v5e:3x5'], 'v5e:3x5 is not known', marks=pytest.mark.slow),
  ],
)
def test_the_command_refuses_in_one_line(options, words):
  command = [sys.executable, '-m', 'dipaco_jax.main', '--config=configs/tiny.py', '--compile_only', *options]
  done = subprocess.run(command, capture_output=True, text=True, timeout=120)
  *waiting, said = done.stderr.strip().splitlines()
  assert done.returncode == 2 and words in said and all(line.startswith('loading JAX') for line in waiting)
