"""All roles in one process: where outer steps are computed, and what becomes of errors in the monitor's thread."""

import threading
import time
from concurrent import futures

import jax
import one_process
import pytest

from dipaco_jax.core.errors import InputError
from dipaco_jax.islands import all_roles, monitor
from dipaco_jax.registry.registry import Task

made = one_process.made
OUTER, TRAIN = (Task(1, kind, '0', 0, 1, 'w', 0) for kind in ('outer', 'train'))


def test_outer_steps_are_computed_on_the_cpu_in_all_threads():
  """Also those parts that another thread publishes; everything else is computed on the devices of the process."""
  found = list[jax.Device | None]()

  def publish():
    found.append(jax.config.jax_default_device)
    return []

  def perform(*_):
    publish()
    return publish

  performs = all_roles.perform(perform, perform)
  with futures.ThreadPoolExecutor(1) as publisher:
    for task in (OUTER, TRAIN):
      assert publisher.submit(performs(None, task, None)).result() == []
  cpu = jax.local_devices(backend='cpu')[0]
  assert found == [cpu, cpu, None, None]


def test_a_monitor_that_fails_ends_the_process(made, monkeypatch):
  failed = threading.Event()

  def watch(island, is_alone):
    assert is_alone and island.name != made.name
    failed.set()
    raise InputError('no sink')

  monkeypatch.setattr(monitor, 'watch', watch)
  with pytest.raises(InputError, match='no sink'), all_roles.watched(made) as check:
    failed.wait()
    performs = all_roles.checked(lambda *_: None, check)
    for _ in range(200):
      performs(made, TRAIN, None)
      time.sleep(0.01)
    pytest.fail('tasks are performed as if nothing had happened')
  with pytest.raises(InputError, match='no sink'), all_roles.watched(made):
    pass
