"""Curves of all stages in one space of names, and MLflow's names of them."""

import pytest

from dipaco_jax.telemetry import curves, sink_mlflow


def step(stage, at, paths, loss):
  return dict(kind='step', stage=stage, updates=at, time=0.0, step=at, paths=paths, paths_in_phase=2, loss=loss)


def test_stages_have_names_of_their_own_and_means_of_their_own():
  found = curves.CurvesOfStages()
  assert list(found.points(step('train', 5, [0], [1.0]))) == [(5, {'train/loss/path_0': 1.0})]
  assert (5, {'control/train/loss': 8.0}) in found.points(step('control', 5, [0, 1], [7.0, 9.0]))
  assert list(found.points(step('train', 5, [1], [2.0]))) == [
    (5, {'train/loss': 1.5}),
    (5, {'train/loss/path_1': 2.0}),
  ]


@pytest.mark.parametrize('curve, name', [
  ('train/loss', 'train/loss'),
  ('train/loss/path_3', 'train/loss.path_3'),
  ('control/train/loss', 'control/train.loss'),
  ('evaluation/perplexity/domain/a(b)/ä', 'evaluation/perplexity.domain.a_b_._'),
])  # fmt: skip
def test_names_in_mlflow_have_one_slash_and_no_odd_characters(curve, name):
  assert sink_mlflow.name_of(curve) == name
