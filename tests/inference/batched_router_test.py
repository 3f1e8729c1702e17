"""Texts that are routed in a batch get the same paths and errors as alone."""

import asyncio

import made_run
import numpy as np
import pytest

import dipaco_jax
from dipaco_jax.core.errors import InputError
from dipaco_jax.inference.batched_router import SIZES, BatchedRouter


@pytest.fixture(scope='module')
def router(tmp_path_factory):
  return dipaco_jax.load_router(made_run.write(tmp_path_factory.mktemp('made'), made_run.settings()))


def test_texts_get_the_same_scores_in_a_batch_as_alone(router):
  rng = np.random.default_rng(0)
  texts = [rng.integers(3, 300, rng.integers(1, 20)).tolist() for _ in range(19)] + made_run.TEXT
  batched = BatchedRouter(router)
  sizes = []
  scores = batched.router.batch_scores
  object.__setattr__(
    router, 'batch_scores', lambda tokens, *others: sizes.append(len(tokens)) or scores(tokens, *others)
  )
  bad = {4: '', 7: [-1], 9: '\ud800'}
  inputs = [bad.get(i, text) for i, text in enumerate(texts)]

  async def route():
    return await asyncio.gather(*map(batched.scores, inputs), return_exceptions=True)

  all_scores = asyncio.run(route())
  assert set(sizes) <= {*SIZES} and len(sizes) < len(texts) / 2
  for i, (text, got) in enumerate(zip(texts, all_scores, strict=True)):
    if i in bad:
      assert isinstance(got, InputError)
    else:
      np.testing.assert_allclose(got, router.scores(text), rtol=1e-4, atol=1e-5)
      assert got.argmax() == router.path(text)


def test_compile_compiles_for_batches_of_any_size(router):
  batched = BatchedRouter(router)
  batched.compile()
  from dipaco_jax.inference import text_router

  before = text_router._scores._cache_size()

  async def route(count: int):
    return await asyncio.gather(*(batched.scores('fox') for _ in range(count)))

  for count in (1, 3, 8, 11):
    asyncio.run(route(count))
  assert text_router._scores._cache_size() == before


def test_a_cancelled_text_does_not_affect_others(router):
  batched = BatchedRouter(router)

  async def route():
    tasks = [asyncio.create_task(batched.scores('fox')) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)

  first, gone, last = asyncio.run(route())
  assert isinstance(gone, asyncio.CancelledError) and np.array_equal(first, last)


def test_an_error_of_one_text_does_not_affect_others(router, monkeypatch):
  batched, scores = BatchedRouter(router), router.batch_scores
  bad = router.prefix('fox')

  def picky(tokens, *others):
    if any(np.array_equal(prefix, bad) for prefix in tokens):
      raise InputError('not this one')
    return scores(tokens, *others)

  object.__setattr__(router, 'batch_scores', picky)
  try:
    found = asyncio.run(gather_scores(batched, 'lazy dog', 'fox', '12345'))
  finally:
    object.__setattr__(router, 'batch_scores', scores)
  assert isinstance(found[1], InputError)
  for text, got in (('lazy dog', found[0]), ('12345', found[2])):
    np.testing.assert_allclose(got, router.scores(text), rtol=1e-4, atol=1e-5)


def test_any_other_error_is_raised_for_every_waiting_text(router, monkeypatch):
  batched = BatchedRouter(router)

  async def no_thread(*args):
    raise RuntimeError("can't start new thread")

  monkeypatch.setattr(asyncio, 'to_thread', no_thread)
  for error in asyncio.run(gather_scores(batched, 'fox', 'lazy dog')):
    assert isinstance(error, RuntimeError) and 'new thread' in str(error)
  monkeypatch.undo()
  [found] = asyncio.run(gather_scores(batched, 'fox'))
  np.testing.assert_allclose(found, router.scores('fox'), rtol=1e-4, atol=1e-5)


async def gather_scores(batched, *texts):
  async with asyncio.timeout(30):
    return await asyncio.gather(*map(batched.scores, texts), return_exceptions=True)
