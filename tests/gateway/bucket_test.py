"""A gateway in front of a bucket: objects go there directly, and get their names after they were checked."""

import gateways
import numpy as np
import object_server
import one_process
import pytest

from dipaco_jax.gateway import object_desk
from dipaco_jax.storage import gateway_link, gateway_objects


@pytest.fixture
def gateway(tmp_path, monkeypatch):
  with object_server.s3_server() as endpoint, one_process.one_device():
    for variable, value in object_server.environment(endpoint).items():
      monkeypatch.setenv(variable, value)
    machine = one_process.Machine(one_process.two_phases(tmp_path), {})
    island = machine.island(tmp_path, storage=f's3://{object_server.BUCKET}{tmp_path}')
    gateways.begin_training(island)
    with gateways.running(island, tmp_path) as running:
      yield running
    one_process.close(island)


@pytest.mark.slow  # quickly: desks_test.py, with a folder
def test_objects_of_a_bucket(gateway, monkeypatch):
  island, worker = gateway.island, gateway.worker()
  np.testing.assert_equal(worker.path_parameters(1, 0), island.path_parameters(1, 0))
  task = worker.registry.claim('', ['train'], ['0'])
  facts = gateways.train(worker, task)
  for level, (name, sha256) in facts[0].meta['objects'].items():
    assert island.storage.read(name, sha256), level
  worker.registry.complete(task, facts)
  assert island.registry.facts('checkpoint', ['0'], 0)
  assert not island.storage.names(object_desk.INCOMING)
  before = island.storage.names('')
  task = worker.registry.claim('', ['train'], ['1'])
  put = gateway_objects.send_to
  monkeypatch.setattr(gateway_objects, 'send_to', lambda url, size, body: put(url, size, bytes(size)))
  with pytest.raises(gateway_link.Rejected, match='another sha256'):
    gateways.train(worker, task)
  assert island.storage.names('') == before and not [*gateway.aside.iterdir()]
  with pytest.raises(gateway_link.Rejected):
    worker.storage.fetch('registry.id')
