"""Requests that are answered together: each has its own answer, of a call that began after the request came."""

import asyncio
import threading
from concurrent import futures

import pytest

from dipaco_jax.gateway.together import MOST, Together


class Calls:
  """Answers numbers by their squares, where `may_end` is set; -1 by an error of its own, 0 by one of the whole call."""

  def __init__(self):
    self.batches = list[list[int]]()
    self.has_begun, self.may_end = threading.Event(), threading.Event()

  def answer(self, numbers):
    self.batches.append(list(numbers))
    self.has_begun.set()
    assert self.may_end.wait(10)
    if 0 in numbers:
      raise OSError('the database is away')
    return [ValueError('no') if x == -1 else x * x for x in numbers]


@pytest.fixture
def calls():
  return Calls()


def run(calls: Calls, scenario):
  """Runs a scenario, given requests that are answered together."""
  with futures.ThreadPoolExecutor(1) as pool:
    return asyncio.run(asyncio.wait_for(scenario(Together(pool, calls.answer, pause_s=0.001)), 20))


async def begin(calls: Calls, together: Together, number: int) -> asyncio.Task:
  """Asks, and returns when the call with this request runs."""
  task = asyncio.create_task(together.ask(number))
  await asyncio.to_thread(calls.has_begun.wait, 10)
  return task


def test_requests_that_come_during_a_call_share_the_next_one_and_each_has_its_own_answer(calls):
  async def scenario(together):
    first = await begin(calls, together, 1)
    others = [asyncio.create_task(together.ask(number)) for number in (2, -1, 3)]
    await asyncio.sleep(0.02)
    assert calls.batches == [[1]]
    calls.may_end.set()
    return await asyncio.gather(first, *others, return_exceptions=True)

  one, four, error, nine = run(calls, scenario)
  assert (one, four, nine) == (1, 4, 9) and isinstance(error, ValueError)
  assert calls.batches == [[1], [2, -1, 3]]


def test_an_error_of_a_call_is_that_of_its_requests_alone(calls):
  async def scenario(together):
    calls.may_end.set()
    failed = await asyncio.gather(together.ask(0), together.ask(5), return_exceptions=True)
    return failed, await together.ask(6)

  failed, answer = run(calls, scenario)
  assert [str(error) for error in failed] == ['the database is away'] * 2 and answer == 36


def test_a_request_that_is_cancelled_leaves_the_others_their_answers(calls):
  async def scenario(together):
    cancelled = await begin(calls, together, 1)
    other = asyncio.create_task(together.ask(2))
    cancelled.cancel()
    await asyncio.sleep(0)
    calls.may_end.set()
    return await other

  assert run(calls, scenario) == 4


def test_a_call_has_a_limit(calls):
  async def scenario(together):
    calls.may_end.set()
    return await asyncio.gather(*map(together.ask, range(1, MOST + 3)))

  assert run(calls, scenario) == [x * x for x in range(1, MOST + 3)]
  assert list(map(len, calls.batches)) == [MOST, 2]
