"""Metrics for Prometheus, requested over HTTP; errors and missing libraries."""

import sys
import urllib.error
import urllib.request

import pytest

from dipaco_jax.core.errors import InputError
from dipaco_jax.telemetry import metrics_server
from dipaco_jax.telemetry.metrics_server import Reading


def ask(url: str) -> dict[str, float]:
  """Returns the samples by name and labels."""
  with urllib.request.urlopen(url, timeout=10) as answer:
    lines = answer.read().decode().splitlines()
  return {name: float(value) for name, value in (line.rsplit(' ', 1) for line in lines if line[0] != '#')}


@pytest.fixture
def served():
  server, url = metrics_server.serve(0)
  assert url.startswith('http://127.0.0.1:')
  return server, url


def test_it_tells_what_is_known_when_it_is_asked(served):
  server, url = served
  assert ask(url) == {}
  numbers = {'step': 7, 'loss': 2.5, 'tokens_per_s': None, 'tokens': 4096, 'compilations': 3}
  server.read = lambda: Reading('train', numbers, {'route': {'stages': 4.0}, 'train': {'inner': 3.0, 'wait': 1.0}})
  found = ask(url)
  assert min(memory for name, memory in found.items() if 'peak_memory' in name) > 1e6
  assert {name: value for name, value in found.items() if 'peak_memory' not in name} == {
    'dipaco_train_stage{stage="train"}': 1, 'dipaco_train_step': 7, 'dipaco_train_loss_nats': 2.5,
    'dipaco_train_tokens_total': 4096, 'dipaco_train_compilations_total': 3, 'dipaco_train_goodput_ratio': 0.75,
    'dipaco_train_seconds_total{cause="stages",stage="route"}': 4,
    'dipaco_train_seconds_total{cause="inner",stage="train"}': 3,
    'dipaco_train_seconds_total{cause="wait",stage="train"}': 1,
  }  # fmt: skip


def test_an_error_is_one_of_the_answer(served):
  server, url = served

  def fail() -> Reading:
    raise RuntimeError

  server.read = fail
  with pytest.raises(urllib.error.HTTPError, match='500'):
    ask(url)
  server.read = lambda: Reading('', {}, {})
  assert ask(url)['dipaco_train_stage{stage=""}'] == 1


def test_a_port_in_use_and_a_missing_library_are_the_user_s_to_mend(served, monkeypatch):
  port = int(served[1].split(':')[2].split('/')[0])
  with pytest.raises(InputError, match=f'--metrics_port={port}: Address already in use; choose another'):
    metrics_server.serve(port)
  monkeypatch.setitem(sys.modules, 'prometheus_client', None)
  with pytest.raises(InputError, match=r'needs: pip install "dipaco_jax\[serve\]"'):
    metrics_server.serve(0)
