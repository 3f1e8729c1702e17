"""A worker behind a gateway: it claims, trains and completes, and the gateway decides what follows."""

import threading
import time
import types
from concurrent import futures

import gateways
import numpy as np
import one_process
import pytest
import sqlalchemy as sa

from dipaco_jax.core.errors import InputError
from dipaco_jax.islands import path_steps, role_loop, state_facts, suspensions, withdrawals
from dipaco_jax.islands.claims import Claims
from dipaco_jax.islands.guard import Gone
from dipaco_jax.registry import writer_turns
from dipaco_jax.registry.registry import Lost, NewTask
from dipaco_jax.registry.registry_schema import TASKS
from dipaco_jax.storage import gateway_link, object_store

made = one_process.made


@pytest.fixture
def gateway(made, tmp_path):
  gateways.begin_training(made)
  with gateways.running(made, tmp_path) as running:
    yield running


def test_a_completion_is_a_fact_under_the_name_of_the_token_and_wakes_what_follows(gateway, made):
  worker = gateway.worker()
  task = worker.registry.claim('anybody', ['prepare', 'train'])
  assert (task.kind, task.owner) == ('train', 'alpha')
  worker.registry.complete(task, gateways.train(worker, task))
  [fact] = made.registry.facts('checkpoint', [task.key], 0)
  assert fact.meta['worker'] == 'alpha' and fact.meta['holdout_loss'] == 4.5
  for level in made.layout.levels:
    made.read_contribution(fact, level)
  waiting = {
    (row['kind'], row['key']) for row in made.registry.tasks('waiting') + made.registry.tasks('ready', 'outer')
  }
  assert {('outer', module) for module in made.modules_of(int(task.key)).values()} <= waiting
  assert not [fact for fact in made.registry.unscheduled() if fact.kind == 'checkpoint']


def test_facts_are_those_of_a_worker_with_direct_access(gateway, made):
  worker, direct = gateway.worker(), made
  ours, theirs = worker.registry.claim('', ['train'], ['0']), direct.registry.claim('direct', ['train'], ['1'])
  worker.registry.complete(ours, gateways.train(worker, ours))
  direct.registry.complete(theirs, gateways.train(direct, theirs))
  first, second = direct.registry.facts('checkpoint', ['0', '1'], 0)
  assert first.meta.keys() == second.meta.keys()
  ours, theirs = ({name for name, _ in fact.meta['objects'].values()} for fact in (first, second))
  assert {name.replace('/0/0-', '/0/1-') for name in ours} == theirs


def test_a_worker_reads_the_modules_of_its_paths(gateway, made):
  worker = gateway.worker(paths=[1])
  np.testing.assert_equal(worker.path_parameters(1, 0), made.path_parameters(1, 0))
  assert [fact.key for fact in worker.registry.facts('module')] == sorted(made.modules_of(1).values())
  assert worker.registry.facts('module', ['high/0'], 0) == []
  assert worker.registry.facts('excluded', ['1'], at_most=-1) == []  # as before the first phase


def test_a_token_with_paths_claims_tasks_of_these_alone(gateway):
  worker = gateway.worker(paths=[1, 2])
  tasks = [worker.registry.claim('', ['train']) for _ in range(3)]
  assert [task and task.key for task in tasks] == ['1', '2', None]
  assert worker.registry.claim('', ['train'], ['0', '3']) is None


@pytest.mark.parametrize('kind', ['prepare', 'reroute', 'outer', 'evaluate', 'finish'])
def test_tasks_of_other_roles_cannot_be_claimed(kind, gateway, made):
  made.registry.add_tasks([NewTask(kind, '', 7)])
  assert gateway.worker().registry.claim('', [kind]) is None


def test_a_worker_has_a_name_of_its_own_below_that_of_its_token(gateway, made):
  link = gateway.link()
  link.name = 'gpu-1'
  worker = gateways.island_of(made, link)
  assert worker.name == 'alpha/gpu-1' == worker.registry.claim('', ['train']).owner
  worker.registry.beat('else', 'outer', {'task': 'train 0 0', 'step': 1, 'of': 2, 'stuck': 'x', 'loss': 'x'})
  [role] = [role for role in made.registry.roles() if role['name'] == 'alpha/gpu-1']
  assert role['role'] == 'worker' and role['about'] == {'task': 'train 0 0', 'step': 1, 'of': 2}


def test_a_lost_object_is_made_again_but_not_one_that_is_there(gateway, made):
  worker = gateway.worker()
  task = worker.registry.claim('', ['train'], ['0'])
  worker.registry.complete(task, gateways.train(worker, task))
  other = worker.registry.claim('', ['train'], ['1'])
  worker.registry.reopen(other, 'train', '0', 0)
  assert made.registry.is_done('train', '0', 0)
  [fact] = made.registry.facts('checkpoint', ['0'], 0)
  (made.storage.local_path('') / fact.meta['objects']['low'][0]).unlink()
  worker.registry.reopen(other, 'train', '0', 0)
  assert not made.registry.is_done('train', '0', 0)
  again = worker.registry.claim('', ['train'], ['0'])
  worker.registry.complete(again, gateways.train(worker, again))
  made.read_contribution(fact, made.layout.levels[1])


def test_an_object_that_was_damaged_is_written_again(gateway, made):
  worker = gateway.worker()
  task = worker.registry.claim('', ['train'], ['0'])
  [fact] = gateways.train(worker, task)
  name, sha256 = fact.meta['objects']['low']
  (made.storage.local_path('') / name).write_bytes(b'damaged')
  gateways.train(worker, task)
  assert made.storage.read(name, sha256)


def test_a_repeated_result_with_other_bits_is_dropped_while_the_first_can_be_read(gateway, made):
  worker = gateway.worker()
  task = worker.registry.claim('', ['train'], ['0'])
  worker.registry.complete(task, gateways.train(worker, task, 1.0))
  [first] = made.registry.facts('checkpoint', ['0'], 0)
  other = worker.registry.claim('', ['train'], ['1'])
  made.registry.reopen(other, 'train', '0', 0)
  again = worker.registry.claim('', ['train'], ['0'])
  worker.registry.complete(again, gateways.train(worker, again, 2.0))
  assert made.registry.facts('checkpoint', ['0'], 0) == [first]


def test_a_state_is_published_and_withdrawn_when_it_cannot_be_read(gateway, made):
  worker = gateway.worker()
  task = worker.registry.claim('', ['train'], ['0'])
  worker.registry.complete(task, gateways.train(worker, task))
  [checkpoint] = made.registry.facts('checkpoint', ['0'], 0)
  state = gateways.state(made)
  state_facts.publish(worker, checkpoint, state)
  np.testing.assert_equal(state_facts.read(worker, checkpoint), state)
  [fact] = made.registry.facts('state')
  withdrawals.withdraw(worker, fact, Gone('x', 'a lie'))
  assert made.registry.facts('state') == [fact]
  (made.storage.local_path('') / fact.meta['objects'][0][0]).unlink()
  assert state_facts.read(worker, checkpoint) is None and not made.registry.facts('state')


def test_a_revoked_token_is_rejected_at_once_with_one_line(gateway, caplog):
  worker = gateway.worker()
  task = worker.registry.claim('', ['train'])
  gateway.tokens.revoke('alpha')
  with pytest.raises(InputError, match=r'--token, or DIPACO_TOKEN\): the token was revoked'):
    worker.registry.heartbeat(task)
  role = role_loop.Role(Claims(worker, 'worker', ['train']), lambda *_: None)
  lease = types.SimpleNamespace(task=task, about={'task': 'train'}, close=lambda: None)
  with pytest.raises(gateway_link.TokenRejected), role.failing(lease):
    worker.storage.write('objects/paths/0/0-low-0123456789abcdef.safetensors', b'x')
  assert not caplog.text, 'the error alone is told, by the command'


def wait_for(is_so):
  """Waits until a condition holds."""
  deadline = time.monotonic() + 10
  while not is_so():
    assert time.monotonic() < deadline
    time.sleep(0.01)


def test_a_token_that_is_revoked_while_others_are_looked_up_is_rejected(gateway):
  worker, callers = gateway.worker(), gateway.server.callers
  task = worker.registry.claim('', ['train'])
  look_up, has_looked, may_end = callers.answer, threading.Event(), threading.Event()

  def slow_look_up(tokens):
    found = look_up(tokens)
    has_looked.set()
    assert may_end.wait(10)
    return found

  callers.answer = slow_look_up
  with futures.ThreadPoolExecutor(2) as pool:
    before = pool.submit(worker.registry.heartbeat, task)
    assert has_looked.wait(10)
    gateway.tokens.revoke('alpha')
    after = pool.submit(worker.registry.heartbeat, task)
    wait_for(lambda: callers.waiting)
    may_end.set()
    assert before.result() == 0
    with pytest.raises(gateway_link.TokenRejected, match='the token was revoked'):
      after.result()


def test_heartbeats_are_written_together_and_a_lost_lease_is_that_of_its_worker_alone(gateway, made):
  workers = [gateway.worker(name) for name in ('alpha', 'beta', 'gamma')]
  tasks = [worker.registry.claim('', ['train'], [str(i)]) for i, worker in enumerate(workers)]
  made.registry.release(tasks[1])
  made.registry._db.change(sa.update(TASKS).where(TASKS.c.state == 'running').values(lease=1.0), {})
  together, sizes = gateway.server.heartbeats, []
  write = together.answer
  together.answer = lambda asked: sizes.append(len(asked)) or write(asked)
  with futures.ThreadPoolExecutor(4) as pool:
    with writer_turns.writer_turn(made.registry.name):
      first = pool.submit(workers[0].registry.heartbeat, tasks[0])
      wait_for(lambda: sizes == [1])
      others = [pool.submit(workers[i].registry.heartbeat, tasks[i]) for i in (0, 1, 2)]
      wait_for(lambda: len(together.waiting) == 3)
    assert first.result() == others[0].result() == others[2].result() == 0
    with pytest.raises(Lost):
      others[1].result()
  assert sizes == [1, 3]
  left = {row['key']: row['lease_left_s'] for row in made.registry.tasks('running')}
  assert left.keys() == {'0', '2'} and min(left.values()) > 0


def test_a_task_that_went_to_another_worker_is_lost(gateway, made):
  worker = gateway.worker()
  task = worker.registry.claim('', ['train'], ['0'])
  facts = gateways.train(worker, task)
  made.registry.release(task)
  made.registry.claim('other', ['train'], ['0'])
  for call in (lambda: worker.registry.heartbeat(task), lambda: worker.registry.complete(task, facts)):
    with pytest.raises(Lost):
      call()
  worker.registry.release(task)
  assert made.registry.tasks('running')[0]['owner'] == 'other'


def test_missing_objects_are_missing_to_workers_too(gateway, made):
  worker = gateway.worker()
  with pytest.raises(object_store.Missing):
    worker.storage.fetch('objects/paths/0/0-low-0123456789abcdef.safetensors')
  assert not worker.storage.exists('objects/paths/0/0-low-0123456789abcdef.safetensors')
  with pytest.raises(gateway_link.Rejected):
    worker.storage.fetch('registry.db')


def test_a_suspended_worker_reads_so_and_claims_nothing(gateway, made):
  worker = gateway.worker()
  suspensions.heed(worker)
  suspensions.suspend(made.registry, 'alpha', 'an audit differs', 'a test')
  with pytest.raises(InputError, match='suspended: an audit differs'):
    suspensions.heed(worker)
  with pytest.raises(InputError, match='this worker is suspended'):
    worker.registry.claim('', ['train'])


def test_steps_of_a_timed_phase_are_those_that_its_path_can_have_taken(made, tmp_path):
  timed = one_process.with_settings(made, train=dict(phase_s=9.0))
  gateways.begin_training(timed)
  before, tau = timed.run.settings.pretrain.steps, timed.run.settings.train.steps_per_phase
  with gateways.running(timed, tmp_path) as running:
    worker = running.worker()
    task = worker.registry.claim('', ['train'])
    for steps in ([before, 0], [before, tau + 1], [before + 1, 2], [before, 2.0], [before], None):
      with pytest.raises(gateway_link.Rejected, match='other steps than its path can have taken'):
        worker.registry.complete(task, gateways.train(worker, task, steps=steps))
    worker.registry.complete(task, gateways.train(worker, task, steps=[before, 2]))
    [fact] = timed.registry.facts('checkpoint', [task.key], 0)
    assert path_steps.of_fact(timed, fact) == (before, 2)
    assert path_steps.first(timed, int(task.key), 1) == before + 2
