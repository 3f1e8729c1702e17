"""FLOPs of a step and the time of a run, against hand counts."""

import dataclasses

import pytest
import small

from dipaco_jax.config import settings as settings_lib
from dipaco_jax.planning import roofline
from dipaco_jax.telemetry import performance


def test_turns_without_a_path_that_trains_take_no_time():
  of = dict(phases=3, steps_per_phase=5)
  for changes, turns in (({}, 4), ({'paths_per_phase': 1}, 1), ({'schedule': ((0, (0, 2)), (2, (0, 1, 2, 3)))}, 8 / 3)):
    made = small.make_programs(small.on_2x2(train=of | changes, pretrain=dict(steps=0)), 1)
    assert roofline.phases_s(made, 1.0, 0.0) == pytest.approx(3 * 5 * turns)


def test_the_whole_run_is_pretraining_and_phases():
  made = small.make_programs(small.on_2x2(train=dict(phases=3, steps_per_phase=5), pretrain=dict(steps=7)), 4)
  paths = dict(step_s_low=1.0, step_s_high=2.0, outer_s=0.5)
  found = roofline.whole_run(made, paths | {'pretrain': dict(step_s_low=10.0, step_s_high=30.0)})
  low, high = 7 * 10 + 3 * (5 + 0.5), 7 * 30 + 3 * (10 + 0.5)
  assert {n: 3600 * x for n, x in found.items()} == pytest.approx(dict(hours_low=low, hours=high, chip_hours=4 * high))
  assert roofline.whole_run(made, paths)['hours_low'] * 3600 == pytest.approx(3 * 5.5)


WIDE = dict(width=256, num_layers=3, num_heads=4, head_dim=64, mlp_dim=688, dtype='float32')


def flops_of_row(**changes) -> float:
  s = small.on_2x2(model=WIDE | changes, train=dict(batch_size=4, steps_per_phase=4, phases=1))
  return roofline.flops_of_step(dataclasses.replace(s, tokenizer=settings_lib.Tokenizer(vocab_size=2048))) / 4


def test_flops_are_those_of_a_hand_count():
  by_hand = performance.flops_per_token(settings_lib.Model(**WIDE), 2048, 128) * 128
  # Beside products of matrices there are norms, the softmax and AdamW; the embedding is looked up, and multiplies once.
  assert by_hand < flops_of_row(seq_len=128) < 1.2 * by_hand


def test_flops_of_experts_are_those_of_a_token_s():
  mixture = dict(seq_len=128, mlp_dim=344, num_experts=8, experts_per_token=2)
  router = 6 * 3 * 128 * 256 * 8
  assert flops_of_row(**mixture) == pytest.approx(flops_of_row(seq_len=128) + router, rel=1e-6)


@pytest.mark.slow
def test_flops_that_are_done_again_count():
  kept, length = flops_of_row(seq_len=1024), 1024
  scores = 3 * length * 2 * length * 256  # queries and keys
  products = 3 * length * 2 * 256 * (4 * 256 + 2 * 688)  # of a block, but for its last one
  for remat, again in (('dots', 2 * scores), ('full', 2 * scores + products)):
    assert again < flops_of_row(seq_len=1024, remat=remat) - kept < 1.1 * again


@pytest.mark.slow
@pytest.mark.parametrize('remat, more, less', [('none', 7, 6), ('dots', 7, 8), ('full', 9, 8)])
def test_flops_of_splash_are_those_of_its_blocks(remat, more, less):
  scores = 3 * 1024 * 2 * 1024 * 256
  found = flops_of_row(seq_len=1024, remat=remat, attention='splash') - flops_of_row(seq_len=1024, remat=remat)
  assert found == pytest.approx((more * 3 / 4 - less) * scores)  # of 2 x 2 blocks of 512, 3 are computed
