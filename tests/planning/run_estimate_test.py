"""What a run takes of memory and time, against compiled programs and hand counts; a run that cannot fit is rejected."""

import dataclasses

import jax
import pytest
import small

from dipaco_jax.core.errors import InputError
from dipaco_jax.models import transformer
from dipaco_jax.planning import cost_check, dry_run, machine, run_estimate
from dipaco_jax.planning.machine import Machine
from dipaco_jax.telemetry import performance

WIDE = dict(width=64, num_layers=2, num_heads=4, head_dim=16, mlp_dim=172, seq_len=128, loss_chunk=512, dtype='float32')
GB = 10**9


def host(total: float, free: float | None = None) -> Machine:
  return Machine(jax.devices()[:1], 1, 0, int(total), int(total if free is None else free), 1e9)


@pytest.mark.slow
@pytest.mark.parametrize('changes', [{}, {'remat': 'full'}])
def test_the_memory_of_a_step_is_that_of_the_compiled_program(changes):
  s = small.on_2x2(model=WIDE | changes, train=dict(batch_size=8))
  memory = run_estimate.estimate_memory(s, jax.devices()[:1])
  made = small.make_programs(dataclasses.replace(s, model=transformer.for_device(s.model, 'cpu')), 1)
  compiled = dry_run.compile_all(made, ('steps',))
  needed = dry_run.memory_use(made, compiled)['hbm_bytes_per_chip']
  assert sum(memory.device.values()) == pytest.approx(needed, rel=0.15)


def test_blocks_that_are_computed_again_are_there_one_at_a_time():
  """XLA for CPUs undoes rematerialization, unless blocks are scanned."""
  found = {}
  for remat, layers in (('none', 'unrolled'), ('full', 'unrolled'), ('full', 'scanned')):
    s = small.on_2x2(model=WIDE | {'remat': remat, 'layers': layers})
    found[remat, layers] = run_estimate.temporary_bytes(s, 8)['activations']
  assert found['full', 'unrolled'] == found['none', 'unrolled'] > 1.5 * found['full', 'scanned']


def test_states_that_end_with_their_turn_do_not_wait():
  kept, dropped = (small.on_2x2(inner=dict(keep_state=keeps)) for keeps in (True, False))
  of_kept, of_dropped = (
    run_estimate.estimate_memory(s, jax.devices()[:1]).device['inner states'] for s in (kept, dropped)
  )
  assert of_kept == 4 * of_dropped


def test_flops_are_those_of_all_paths_and_steps():
  s = small.on_2x2(train=dict(phases=3, steps_per_phase=4), pretrain=dict(steps=5), evaluate=dict(control=True))
  per_token = performance.flops_per_token(s.model, small.VOCAB, small.LENGTH)
  of_step = small.ROWS * small.LENGTH * per_token
  flops = run_estimate.count_flops(s)
  assert flops['train'] == 4 * 3 * 4 * of_step
  assert (flops['pretrain'], flops['control']) == (5 * of_step, 12 * of_step)
  sampled = small.on_2x2(train=dict(phases=3, steps_per_phase=4, paths_per_phase=1))
  assert run_estimate.count_flops(sampled)['train'] == 3 * 4 * of_step
  assert run_estimate.seconds(s, 1e9, 2) == pytest.approx(run_estimate.seconds(s, 1e9) / 2)


def test_the_bound_of_a_small_run_is_above_its_estimate():
  for s in (small.on_2x2(), small.on_2x2(model=WIDE, train=dict(batch_size=8))):
    memory = run_estimate.estimate_memory(s, jax.devices()[:1])
    assert run_estimate.bound_bytes(s) > sum(memory.device.values()) + memory.host['checkpoint']


@pytest.mark.slow
def test_what_fits_is_said_and_what_cannot_fit_is_rejected_with_what_helps(caplog):
  s, lines = small.on_2x2(model=WIDE, train=dict(batch_size=8)), []
  cost_check.check(s, lines.append, host(100 * GB))
  assert lines[0].startswith('the run needs about') and 'of 100.0 GB, 100.0 GB of them free (' in lines[0]
  assert 'the whole run takes roughly' in lines[1] and not caplog.records
  cost_check.check(s, lines.append, host(100 * GB, free=0.01 * GB))
  assert 'may need more memory than is free' in caplog.text
  step = sum(run_estimate.estimate_memory(s, jax.devices()[:1]).device.values())
  with pytest.raises(InputError, match=r'which is more than is available: .*--config\.train\.microbatch=1') as e:
    cost_check.check(s, lines.append, host(step / 2))
  assert '--config.model.remat=full --config.model.layers=scanned' in str(e.value)


def test_the_grid_of_a_large_run_is_made_smaller():
  s = dataclasses.replace(small.on_2x2(), grid=(('a', 8), ('b', 4)))
  grids = [changed.grid for words, changed in cost_check._smaller(s, host(GB)) if 'grid' in words]
  assert grids == [(('a', 4), ('b', 2)), (('a', 2), ('b', 2))]


def test_a_small_run_is_not_looked_at_closely(monkeypatch):
  monkeypatch.setattr(machine, 'look', lambda dtype: pytest.fail('it is small'))
  lines = []
  cost_check.check(small.on_2x2(), lines.append)
  assert lines == ['the run takes less than 1 GB of memory, and less than a minute besides compilation']


def test_the_machine_is_looked_at():
  found = machine.look()
  assert found.flops_per_s > 1e7 and found.host_bytes >= found.host_free_bytes > 0 and found.is_cpu
