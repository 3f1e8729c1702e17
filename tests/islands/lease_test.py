"""How a lease is renewed: at random times, and with a look at whether the run is over."""

import dataclasses
import math
import time

import pytest
from registries import train
from role_loop_test import island, wait_for  # noqa: F401

from dipaco_jax.core.errors import Diverged
from dipaco_jax.islands import lease as lease_lib, screening_facts
from dipaco_jax.registry.registry import Lost, NewTask


def test_renewals_of_leases_that_began_together_spread(island, monkeypatch):  # noqa: F811
  """Of 20 leases taken at one moment, over the last third of the time between two renewals."""
  monkeypatch.setattr(lease_lib, 'SIGN_OF_LIFE_S', 1.0)
  island.registry.add_tasks(train(*((str(i), 1) for i in range(20))))
  times, heartbeat = {}, island.registry.heartbeat

  def noted(task):
    times.setdefault(task.id, time.monotonic())
    heartbeat(task)

  monkeypatch.setattr(island.registry, 'heartbeat', noted)
  tasks = [island.registry.claim('worker-0', ['train']) for _ in range(20)]
  leases, began = [lease_lib.Lease(island, 'worker', task) for task in tasks], time.monotonic()
  time.sleep(1.5)
  for each in leases:
    each.close()
  waits = [at - began for at in times.values()]
  assert len(waits) == 20 and 0.6 < min(waits) < 0.85 < max(waits) < 1.3


@pytest.mark.parametrize('is_copy', [False, True])
def test_a_renewal_tells_that_the_run_is_over(is_copy, island, monkeypatch):  # noqa: F811
  monkeypatch.setattr(lease_lib, 'SIGN_OF_LIFE_S', 0.1)
  task = island.registry.claim('another' if is_copy else island.name, ['train'])
  lease = lease_lib.Lease(island, 'worker', task)
  time.sleep(0.3)
  lease.check()
  screening_facts.tell(island, 'the loss is not finite')
  wait_for(lambda: lease._lost)
  with pytest.raises(Diverged, match='the loss is not finite'):
    lease.check()
  lease.close()


@pytest.mark.parametrize('quorum, grace_s, expected', [(1.0, 0.0, math.inf), (0.75, 60.0, 18.0), (0.75, 0.0, 1.0)])
def test_with_a_quorum_a_worker_soon_learns_that_its_path_is_late(quorum, grace_s, expected, island):  # noqa: F811
  outer = dataclasses.replace(island.run.settings.outer, quorum=quorum, grace_s=grace_s)
  island.run.settings = dataclasses.replace(island.run.settings, outer=outer)
  assert lease_lib.longest_unaware_s(island) == expected


def test_leases_are_renewed_in_time_for_that(island, monkeypatch):  # noqa: F811
  monkeypatch.setattr(lease_lib, 'longest_unaware_s', lambda island: 0.05)
  lease, began = lease_lib.Lease(island, 'worker', island.registry.claim('worker-0', ['train'])), time.monotonic()
  with pytest.raises(Lost):
    assert island.registry.settle(NewTask('train', '0', 0), [])
    wait_for(lambda: lease.check())
  assert time.monotonic() - began < lease_lib.RENEWED * island.registry.lease_s / 2
  lease.close()
