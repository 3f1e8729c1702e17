"""What a role claims: its own keys before others', nothing that has to wait, and the next task only when it is due."""

import pytest
from role_loop_test import island, owned  # noqa: F401
from stopped_clock import Clock

from dipaco_jax.islands import claims
from dipaco_jax.islands.claims import Claims
from dipaco_jax.registry.registry import NewTask


@pytest.fixture
def clock(monkeypatch) -> Clock:
  made = Clock()
  monkeypatch.setattr(claims, 'time', made)
  return made


def test_nothing_is_claimed_long_before_it_can_be_begun(island):  # noqa: F811
  found = Claims(island, 'worker', ['train'], fetches={'train': lambda *_: None})
  lease = found.claim()
  found.fetch_s, found.work_s = 1.0, 100.0
  lease.ahead(0.5)
  assert found.ahead is None and owned(island) == ['0']
  lease.ahead(0.01)
  ahead = found.next()
  assert ahead.task.key == '1' and owned(island) == ['0', '1']
  found.drop(lease)
  found.drop(ahead)


def test_tasks_of_others_are_claimed_after_a_lease_without_own_ones(island, clock):  # noqa: F811
  found = Claims(island, 'worker', ['train'], keys=['2'])
  own = found.next()
  assert own.task.key == '2' and found.next() is None
  clock.now += island.registry.lease_s - 1
  assert found.next() is None
  clock.now += 1
  other = found.next()
  assert other.task.key == '0' and found.next() is None, 'it was busy just now'
  found.drop(own)
  found.drop(other)


def test_a_kind_that_has_to_wait_comes_after_the_others(island):  # noqa: F811
  island.registry.add_tasks([NewTask('reroute', '', 9)])
  found = Claims(island, 'worker', ['train', 'reroute'])
  found.postponed = 'train'
  first = found.next()
  assert first.task.kind == 'reroute' and found.next() is None and found.postponed == ''
  second = found.next()
  assert second.task.kind == 'train'
  found.drop(first)
  found.drop(second)


def test_all_that_is_held_is_given_back(island):  # noqa: F811
  found = Claims(island, 'worker', ['train'])
  leases = [found.next(), found.next()]
  assert owned(island) == ['0', '1']
  found.release_all()
  assert owned(island) == [] and island.registry.counts() == {'train': {'ready': 4}}
  for lease in leases:
    found.drop(lease)
  assert not found.leases
