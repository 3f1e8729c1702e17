"""The dry run: what it says of programs that are compiled for devices that are there, against hand counts."""

import dataclasses
import json
import math
import subprocess
import sys
import types

import jax
import pytest
import small
from jax.experimental import topologies

from dipaco_jax.core import settings as settings_lib
from dipaco_jax.planning import dry_run, roofline, topology
from dipaco_jax.training import metrics_log, performance

CHIP = performance.Chip(flops=1e12, hbm_bytes=2**30, hbm_bytes_per_s=1e11, ici_bytes_per_s=1e10)


def here(devices: int = 4, slices: int = 1, chip: performance.Chip = CHIP) -> topology.Topology:
  return topology.Topology('here', chip, jax.devices()[:devices], slices)


def config(**changes) -> settings_lib.Settings:
  changes = {'model': {'dtype': 'float32'}} | changes
  s = small.settings({'a': 2, 'b': 2}, small.MIXED_LEVELS, **changes)
  return dataclasses.replace(s, tokenizer=dataclasses.replace(s.tokenizer, vocab_size=small.VOCAB))


def test_memory_and_traffic_are_those_of_arithmetic():
  s = config()
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
  assert 'fits' in dry_run.to_text(found)


def test_turns_without_a_path_that_trains_take_no_time():
  of = dict(phases=3, steps_per_phase=5)
  for changes, turns in (({}, 4), ({'paths_per_phase': 1}, 1), ({'schedule': ((0, (0, 2)), (2, (0, 1, 2, 3)))}, 8 / 3)):
    made = small.make_programs(config(train=of | changes, pretrain=dict(steps=0)), 1)
    assert roofline.whole_run_s(made, 1.0, 0.0) == pytest.approx(3 * 5 * turns)


WIDE = dict(width=256, num_layers=3, num_heads=4, head_dim=64, mlp_dim=688, dtype='float32')


def flops_of_row(**changes) -> float:
  s = config(model=WIDE | changes, train=dict(batch_size=4, steps_per_phase=2, phases=1))
  return roofline.flops_of_step(dataclasses.replace(s, tokenizer=settings_lib.Tokenizer(vocab_size=2048))) / 4


def test_flops_are_those_of_a_hand_count():
  by_hand = performance.flops_per_token(settings_lib.Model(**WIDE), 2048, 128) * 128
  # Beside products of matrices there are norms, the softmax and AdamW; the embedding is looked up, and multiplies once.
  assert by_hand < flops_of_row(seq_len=128) < 1.2 * by_hand


def test_flops_that_are_done_again_count():
  kept, length = flops_of_row(seq_len=1024), 1024
  scores = 3 * length * 2 * length * 256  # queries and keys
  products = 3 * length * 2 * 256 * (4 * 256 + 2 * 688)  # of a block, but for its last one
  for remat, again in (('dots', 2 * scores), ('full', 2 * scores + products)):
    assert again < flops_of_row(seq_len=1024, remat=remat) - kept < 1.1 * again


@pytest.mark.parametrize('remat, more, less', [('none', 7, 6), ('dots', 7, 8), ('full', 9, 8)])
def test_flops_of_splash_are_those_of_its_blocks(remat, more, less):
  scores = 3 * 1024 * 2 * 1024 * 256
  found = flops_of_row(seq_len=1024, remat=remat, attention='splash') - flops_of_row(seq_len=1024, remat=remat)
  assert found == pytest.approx((more * 3 / 4 - less) * scores)  # of 2 x 2 blocks of 512, 3 are computed


@pytest.mark.slow
def test_devices_inside_a_path_and_slices():
  s = config(mesh=dict(data=2))
  found = dry_run.estimate(s, here(8))
  assert found['steps_collectives']['data'] > 0 and found['inner_grid_collectives'] == 0
  found = dry_run.estimate(s, here(8, slices=2))
  assert found['steps_collectives']['dcn'] == 0 and found['outer_collectives']['dcn'] > 0


def test_what_does_not_fit_is_answered_with_what_would():
  needed = dry_run.estimate(config(), here())['hbm_bytes_per_chip']
  found = dry_run.estimate(config(), here(chip=CHIP._replace(hbm_bytes=int(needed / 0.97))))
  assert not found['fits'] and '--config.train.microbatch=' in found['what_fits']
  assert 'does not fit' in dry_run.to_text(found)


@pytest.mark.parametrize('error, needed', [
  ('RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 19.5G of 15.75G hbm. Exceeded by 3.75G.', 19.5),
  ('RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (19.5G) exceeds '
   'available HBM (15.75G).', 19.5),
  ('INTERNAL: Mosaic failed to compile a kernel with 2.5G', 0),
])  # fmt: skip
def test_the_compiler_s_words_for_too_large(error, needed):
  assert dry_run.bytes_needed(error) == needed * 2**30


KINDS = 'kinds are v4, v5e, v5p, v6e'
UNKNOWN = [('v5e', KINDS), ('v5e:3x5', 'a shape of 1x1, 2x2, 2x4'), ('v7:2x2', KINDS), ('v5e:2x2*', KINDS), ('', KINDS)]


@pytest.mark.parametrize('name, known', UNKNOWN)
def test_an_unknown_topology_is_answered_with_the_known_ones(name, known):
  with pytest.raises(ValueError, match=known):
    topology.find_topology(name)


@pytest.mark.parametrize(
  'name, asked',
  [
    ('v5e:2x4', {'topology_name': 'v5e:2x4', 'num_slices': 1}),
    ('v5e:2x2*3', {'topology_name': 'v5e:2x2', 'num_slices': 3}),
    ('v4:2x2x1', {'topology_name': 'v4:2x2x1', 'num_slices': 1, 'chip_config_name': 'megacore'}),
  ],
)
def test_the_compiler_is_asked_for_the_topology_that_is_named(name, asked, monkeypatch):
  calls = []

  def describe(**options):
    calls.append(options)
    return types.SimpleNamespace(devices=jax.devices()[:4])

  monkeypatch.setattr(topologies, 'get_topology_desc', describe)
  found = topology.find_topology(name)
  assert calls == [asked | {'platform': 'tpu'}] and found.name == name and found.slices == asked['num_slices']


def test_no_text_is_asked_for():
  command = [sys.executable, '-m', 'dipaco_jax.main', '--config=configs/text.py', '--compile_only', '--topology=none']
  done = subprocess.run(command, capture_output=True, text=True, timeout=120)
  assert done.returncode == 2 and '--topology=none is not known' in done.stderr


@pytest.mark.parametrize(
  'options, words',
  [
    ([], '--topology is missing'),
    (['--topology=v5e:3x5'], 'v5e:3x5 is not known'),
  ],
)
def test_the_command_refuses_in_one_line(options, words):
  command = [sys.executable, '-m', 'dipaco_jax.main', '--config=configs/tiny.py', '--compile_only', *options]
  done = subprocess.run(command, capture_output=True, text=True, timeout=120)
  *waiting, said = done.stderr.strip().splitlines()
  assert done.returncode == 2 and words in said and all(line.startswith('loading JAX') for line in waiting)
