"""Ratios of perplexities by kind of text and by path."""

import json

import numpy as np
import pytest

from dipaco_jax.core import bootstrap
from dipaco_jax.pipeline import group_ratios
from dipaco_jax.telemetry import metrics_log

NAMES = ['law', 'news', 'none']


@pytest.fixture
def groups():
  rng = np.random.default_rng(0)
  return group_ratios.Groups(np.arange(60) % 2, NAMES, rng.integers(0, 3, 60), np.arange(60, dtype=np.uint64))


def test_a_group_has_the_ratio_of_its_own_documents(groups):
  rng = np.random.default_rng(1)
  tokens = rng.integers(1, 100, 60).astype(float)
  nats = tokens * np.where(groups.domain == 0, 0.1, -0.2)
  found = group_ratios.compare('ratio_to_control', groups, nats, tokens, 4)
  assert found['ratio_to_control_by_domain'] == {
    'law': pytest.approx(np.exp(0.1)), 'news': pytest.approx(np.exp(-0.2)), 'none': None,
  }  # fmt: skip
  mine = groups.path == 1
  expected = bootstrap.interval(nats[mine], tokens[mine], contents_N=groups.content[mine])
  assert found['ratio_to_control_interval_by_path'][1] == expected and expected[0] < expected[1]
  assert found['ratio_to_control_interval_by_path'][3] is None is found['ratio_to_control_by_path'][3]
  json.dumps(metrics_log.plain(found))


def test_documents_without_a_counted_token_do_not_count(groups):
  tokens = np.where(np.arange(60) < 10, 0, 5)
  found = group_ratios.count_documents(groups, tokens, 3)
  assert found['validation_documents_by_domain'] == {'law': 25, 'news': 25, 'none': 0}
  assert found['validation_tokens_by_domain'] == {'law': 125, 'news': 125, 'none': 0}
  assert sum(found['validation_documents_by_path']) == 50


def test_a_loss_that_is_not_finite_has_no_ratio(groups):
  nats = np.where(groups.domain == 0, np.inf, 1.0)
  found = group_ratios.compare('x', groups, nats, np.ones(60), 3)
  assert found['x_by_domain']['law'] is None and found['x_interval_by_domain']['law'] is None
