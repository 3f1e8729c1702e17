"""The tokens that models have read by a step."""

import dataclasses

import numpy as np

from dipaco_jax.config import settings
from dipaco_jax.reports import token_axis
from dipaco_jax.reports.plot_style import Curve

S = settings.Settings(
  grid=(('a', 4),), pretrain=settings.Pretrain(steps=10, batch_size=32),
  train=settings.Train(phases=2, steps_per_phase=5, batch_size=8), model=settings.Model(seq_len=100),
)  # fmt: skip
CURVE = Curve(np.array([5, 10, 15, 20]), np.zeros(4))


def test_all_paths_read_at_one_step():
  assert token_axis.of_paths(S, CURVE).steps.tolist() == [16_000, 32_000, 48_000, 64_000]
  assert token_axis.of_one_model(S, CURVE).steps.tolist() == [16_000, 32_000, 36_000, 40_000]


def test_paths_that_sit_a_phase_out_read_nothing_in_it():
  train = dataclasses.replace(S.train, schedule=((0, (0, 1, 2, 3)), (1, (0,))))
  found = token_axis.of_paths(dataclasses.replace(S, train=train), CURVE)
  assert found.steps.tolist() == [16_000, 32_000, 48_000, 52_000]
