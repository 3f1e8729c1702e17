"""The engine's thread, with an engine that writes letters: what reaches the event loop, and what fails."""

import asyncio
import itertools

import pytest

from dipaco_jax.inference.batch import Text
from dipaco_jax.inference.request import Request
from dipaco_jax.serving.engine_thread import EngineThread, Metrics, PendingRequest
from dipaco_jax.serving.openai_api import CompletionRequest

FAILS = 13  # a seed
EOS = 0


class Letters:
  """Takes the place of a Transcript: a token is a letter."""

  def __init__(self):
    self.text, self.stopped, self._shown = '', False, 0

  def add(self, token: int):
    self.text += chr(token)

  def take(self, everything: bool = False) -> str:
    new, self._shown = self.text[self._shown :], len(self.text)
    return new

  def close(self):
    pass


class Alphabet:
  """An engine that admits texts one by one and adds a letter to all at every turn."""

  def __init__(self):
    self.texts: list[Text] = []
    self.batches, self.moving, self.paths = {}, {}, {}

  @property
  def busy(self) -> bool:
    return any(not text.finished for text in self.texts)

  def start(self, request: Request) -> Text:
    self.texts.append(Text(request, Letters()))
    return self.texts[-1]

  def cancel(self, text: Text):
    text.finish('cancelled')

  def admit(self) -> bool:
    text = next((text for text in self.texts if not text.finished and not text.paths), None)
    if text is None:
      return False
    text.paths = [1]
    if text.request.seed == FAILS:
      text.finish('error')
      raise RuntimeError('it fails')
    text.add(97, (EOS,))
    return True

  def advance(self) -> int:
    growing = [text for text in self.texts if not text.finished]
    for text in growing:
      text.add(97 + len(text.tokens) - len(text.request.tokens), (EOS,))
    return len(growing)


def pending(*lengths: int, stream: bool = True, seed: int = 0) -> PendingRequest:
  requests = tuple(Request((5, 6), length, seed=seed) for length in lengths)
  return PendingRequest(CompletionRequest('run', requests, ('',) * len(lengths), 2, stream, False))


def deltas_of(*asked: PendingRequest, engine=Alphabet) -> tuple[list[list], EngineThread]:
  """The deltas of each request, all submitted at once, until its texts are finished; and the thread."""
  thread = EngineThread(engine, Metrics())

  async def all_of(one: PendingRequest) -> list:
    found = []
    while sum(bool(delta.finished) for delta in found) < len(one.request.requests):
      found.append(await asyncio.wait_for(one.deltas.get(), 10))
    return found

  async def main() -> list[list]:
    ready = asyncio.Event()
    thread.start(asyncio.get_running_loop(), ready.set)
    await asyncio.wait_for(ready.wait(), 10)
    for one in asked:
      thread.submit(one)
    try:
      return await asyncio.gather(*map(all_of, asked))
    finally:
      thread.close()
      thread.thread.join(10)

  return asyncio.run(main()), thread


def test_a_stream_gets_every_piece_in_order():
  (found,), thread = deltas_of(pending(3, 5))
  for index, text in enumerate(['abc', 'abcde']):
    mine = [delta for delta in found if delta.choice == index]
    assert ''.join(delta.piece for delta in mine) == text and len(mine) == len(text)
    assert [delta.finished for delta in mine] == [''] * (len(text) - 1) + ['length']
    assert [delta.num_tokens for delta in mine] == [*range(1, len(text) + 1)] and mine[-1].paths == (1,)
  assert thread.num_waiting == 0 and not thread.thread.is_alive() and thread.failure is None


def test_a_path_is_told_once_it_has_written():
  class Rerouting(Alphabet):
    def advance(self):
      for text in self.texts:
        if not text.finished:
          super().advance()
          text.paths.append(text.paths[-1] + 1)  # chosen for what follows
      return 1

  (found,), _ = deltas_of(pending(4), engine=Rerouting)
  assert [delta.paths for delta in found] == [(1,), (1,), (1, 2), (1, 2, 3)]


def test_a_whole_answer_gets_one_delta_for_each_text():
  (found,), _ = deltas_of(pending(3, 5, stream=False))
  assert {delta.choice: (delta.piece, delta.finished) for delta in found} == {
    0: ('abc', 'length'),
    1: ('abcde', 'length'),
  }
  assert len(found) == 2


def test_an_error_ends_the_texts_that_it_happened_to_and_no_others(caplog):
  (good, failed), thread = deltas_of(pending(4), pending(4, seed=FAILS))
  assert ''.join(delta.piece for delta in good) == 'abcd' and good[-1].finished == 'length'
  assert [delta.finished for delta in failed] == ['error'] and 'it fails' in caplog.text
  assert thread.failure is None and thread.num_waiting == 0


def test_tokens_and_prompts_are_counted():
  _, thread = deltas_of(pending(3, 5), pending(2))
  value = thread.metrics.registry.get_sample_value
  assert value('dipaco_completion_tokens_total') == 10 and value('dipaco_prompt_tokens_total') == 4
  assert value('dipaco_first_token_seconds_count') == 3


@pytest.mark.parametrize('when', ['loading', 'at work'])
def test_a_failure_of_the_engine_itself_ends_the_thread_and_is_reported(when):
  class Broken(Alphabet):
    def advance(self):
      raise RuntimeError('it is broken')

  def load():
    if when == 'loading':
      raise RuntimeError('it is broken')
    return Broken()

  async def main() -> EngineThread:
    thread, calls = EngineThread(load, Metrics()), itertools.count(1)
    told = asyncio.Event()
    needed = 1 if when == 'loading' else 2  # that it is ready comes before
    thread.start(asyncio.get_running_loop(), lambda: told.set() if next(calls) == needed else None)
    if when == 'at work':
      thread.submit(pending(4))
    await asyncio.wait_for(told.wait(), 10)
    thread.thread.join(10)
    return thread

  assert str(asyncio.run(main()).failure) == 'it is broken'
