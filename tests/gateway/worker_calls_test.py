"""The calls that a worker makes to a registry do the same with the database and behind a gateway."""

import gateways
import one_process
import pytest
import sqlalchemy as sa

from dipaco_jax.islands import state_facts
from dipaco_jax.registry.registry import Lost, Withdrawal
from dipaco_jax.registry.registry_schema import TASKS

made = one_process.made
EXPIRE = sa.update(TASKS).where(TASKS.c.state == 'running').values(lease=1.0)


@pytest.fixture(params=['database', 'gateway'])
def worker(request, made, tmp_path):
  """A worker's island, of the run of `made`."""
  gateways.begin_training(made)
  if request.param == 'database':
    yield made
    return
  with gateways.running(made, tmp_path) as running:
    yield running.worker()


def claim(worker, key: str):
  return worker.registry.claim(worker.name, ['train'], [key])


def test_claims_go_by_age_and_are_of_the_keys_that_are_asked_for(worker):
  assert [worker.registry.claim(worker.name, ['train']).key for _ in range(2)] == ['0', '1']
  assert claim(worker, '3').key == '3' and claim(worker, '3') is None


def test_a_lease_that_runs_out_goes_to_another_and_the_old_owner_is_refused(worker, made):
  task = claim(worker, '0')
  facts = gateways.train(worker, task)
  made.registry._db.change(EXPIRE, {})
  other = made.registry.claim('other', ['train'], ['0'])
  assert other.fence == task.fence + 1
  for call in (lambda: worker.registry.heartbeat(task), lambda: worker.registry.complete(task, facts)):
    with pytest.raises(Lost):
      call()
  worker.registry.release(task)
  assert made.registry.tasks('running')[0]['owner'] == 'other'


@pytest.mark.slow
def test_a_late_owner_whom_nobody_replaced_continues(worker, made):
  task = claim(worker, '0')
  made.registry._db.change(EXPIRE, {})
  worker.registry.heartbeat(task)
  worker.registry.complete(task, gateways.train(worker, task))
  assert made.registry.is_done('train', '0', 0)


@pytest.mark.slow
def test_released_tasks_are_ready_with_what_went_wrong(worker, made):
  worker.registry.release(claim(worker, '0'), error='the disk is full\0')
  [row] = made.registry.tasks('ready', 'train', failed=True)
  assert row['error'].startswith('the disk is full')


def test_completing_again_is_the_same(worker, made):
  task = claim(worker, '0')
  facts = gateways.train(worker, task)
  for _ in range(2):  # the first acknowledgement was lost
    worker.registry.complete(task, facts)
  assert len(made.registry.facts('checkpoint')) == 1
  with pytest.raises(Lost):
    worker.registry.complete(task, gateways.train(worker, task, 2.0))


def test_facts_are_found_by_kind_keys_and_number(worker):
  task = claim(worker, '1')
  worker.registry.complete(task, gateways.train(worker, task))
  find = worker.registry.facts
  assert [fact.key for fact in find('checkpoint')] == [fact.key for fact in find('checkpoint', ['1', '2'], 0)] == ['1']
  assert find('checkpoint', ['2'], 0) == find('checkpoint', at_least=1) == find('checkpoint', at_most=-1) == []
  assert worker.registry.newest('checkpoint') == {'1': 0} and worker.registry.newest('checkpoint', below=0) == {}
  assert worker.registry.is_done('train', '1', 0) and not worker.registry.is_done('train', '2', 0)
  assert len(worker.registry.durations('train', 5)) == 1


def test_a_withdrawal_is_noticed_at_the_next_heartbeat(worker, made):
  task, other = claim(worker, '0'), claim(worker, '1')
  worker.registry.complete(task, gateways.train(worker, task))
  [fact] = worker.registry.facts('checkpoint', ['0'], 0)
  made.registry.revoke(Withdrawal([fact], 'lost', 'a test'))
  worker.registry.heartbeat(other)
  assert worker.registry.facts('checkpoint', ['0'], 0) == []


@pytest.mark.slow
def test_a_state_is_put_once(worker, made):
  task = claim(worker, '0')
  worker.registry.complete(task, gateways.train(worker, task))
  [checkpoint] = worker.registry.facts('checkpoint', ['0'], 0)
  state = gateways.state(made)
  for _ in range(2):
    state_facts.publish(worker, checkpoint, state)
  assert len(made.registry.facts('state')) == 1
