"""Answers of the server, whole and as streams, with scripted deltas in place of an engine."""

import asyncio
import dataclasses
import json

import pytest
from starlette.requests import ClientDisconnect

from dipaco_jax.inference.request import Request
from dipaco_jax.serving.completions import Completions
from dipaco_jax.serving.engine_thread import Delta
from dipaco_jax.serving.openai_api import ApiError, CompletionRequest

TWO = (Request((5, 6), 4), Request((7,), 4))
DELTAS = [
  Delta(1, 'x', '', (3,), 1),
  Delta(0, 'ab', 'stop', (0, 2), 2),
  Delta(1, 'yz', 'length', (3,), 4),
]


class Script:
  """Takes the place of EngineThread: every request gets the same deltas at once."""

  def __init__(self, deltas=(), num_waiting: int = 0):
    self.deltas, self.num_waiting, self.submitted, self.cancelled = deltas, num_waiting, [], []

  def submit(self, pending):
    self.submitted.append(pending)
    for delta in self.deltas:
      pending.deltas.put_nowait(delta)

  def cancel(self, pending):
    self.cancelled.append(pending)


def asked(stream: bool = False, include_usage: bool = False, prefixes=('', '')) -> CompletionRequest:
  return CompletionRequest('run', TWO, prefixes, 3, stream, include_usage)


def respond(completions: Completions, request: CompletionRequest, hangs_up: bool = False, end: ApiError | None = None):
  """The messages that an answer sends; a client that waits sends nothing."""
  sent: list[dict] = []

  async def receive():
    if not hangs_up:
      await asyncio.Event().wait()
    return {'type': 'http.disconnect'}

  async def send(message):
    sent.append(message)
    if end:
      completions.end(end)

  answer = completions.stream if request.stream else completions.answer
  try:
    asyncio.run(asyncio.wait_for(answer(request, {'type': 'http'}, receive, send), 5))
  finally:
    assert not completions.open
  return sent


def events(sent) -> list:
  data = b''.join(message.get('body', b'') for message in sent).decode()
  parts = [event.removeprefix('data: ') for event in data.split('\n\n')[:-1]]
  return [part if part == '[DONE]' else json.loads(part) for part in parts]


def test_a_whole_answer_has_the_last_delta_of_each_text_in_order():
  script = Script([Delta(1, 'xyz', 'length', (3,), 4), Delta(0, 'ab', 'stop', (0, 2), 2)])
  start, body = respond(Completions(script, 8), asked(prefixes=('The ', '')))
  answer = json.loads(body['body'])
  assert start['status'] == 200 and answer['object'] == 'text_completion' and answer['model'] == 'run'
  assert answer['choices'] == [
    {'index': 0, 'text': 'The ab', 'logprobs': None, 'finish_reason': 'stop', 'paths': [0, 2]},
    {'index': 1, 'text': 'xyz', 'logprobs': None, 'finish_reason': 'length', 'paths': [3]},
  ]
  assert answer['usage'] == {'prompt_tokens': 3, 'completion_tokens': 6, 'total_tokens': 9}
  assert script.cancelled == script.submitted and len(script.submitted) == 1


@pytest.mark.parametrize('include_usage', [False, True])
def test_a_stream_has_an_event_for_each_delta(include_usage):
  sent = respond(Completions(Script(DELTAS), 8), asked(True, include_usage, ('The ', 'A ')))
  *chunks, done = events(sent)
  assert sent[0]['status'] == 200 and dict(sent[0]['headers'])[b'content-type'].startswith(b'text/event-stream')
  assert done == '[DONE]' and len({chunk['id'] for chunk in chunks}) == 1
  choices = [choice for chunk in chunks for choice in chunk['choices']]
  assert [(c['index'], c['text'], c['finish_reason']) for c in choices] == [
    (1, 'A x', None),
    (0, 'The ab', 'stop'),
    (1, 'yz', 'length'),
  ]
  if include_usage:
    assert [chunk['usage'] for chunk in chunks[:-1]] == [None] * 3 and not chunks[-1]['choices']
    assert chunks[-1]['usage'] == {'prompt_tokens': 3, 'completion_tokens': 6, 'total_tokens': 9}
  else:
    assert not any('usage' in chunk for chunk in chunks)


@pytest.mark.parametrize('stream', [False, True])
def test_the_best_scores_come_once_with_each_text(stream):
  deltas = [Delta(0, 'a', '', (2,), 1, (0.5, -1.0, 3.0, 0.5)), Delta(0, 'b', 'stop', (2,), 2, (0.5, -1.0, 3.0, 0.5))]
  deltas += [Delta(1, 'x', 'length', (1,), 1)]  # of a named path
  request = dataclasses.replace(asked(stream), num_scores=3)
  sent = respond(Completions(Script(deltas), 8), request)
  bodies = events(sent)[:-1] if stream else [json.loads(sent[1]['body'])]
  choices = [choice for body in bodies for choice in body['choices']]
  assert [choice['router_scores'] for choice in choices if 'router_scores' in choice] == [
    [{'path': 2, 'score': 3.0}, {'path': 0, 'score': 0.5}, {'path': 3, 'score': 0.5}],
    [],
  ]
  assert [choice['index'] for choice in choices if 'router_scores' in choice] == [0, 1]


def test_a_full_queue_refuses_without_a_word_to_the_engine():
  script = Script(DELTAS, num_waiting=7)
  with pytest.raises(ApiError, match='7 of at most 8 texts are waiting already') as refused:
    respond(Completions(script, 8), asked())
  assert refused.value.status == 429 and not script.submitted
  script.num_waiting = 6
  assert respond(Completions(script, 8), asked())


@pytest.mark.parametrize('stream', [False, True])
def test_what_fails_before_the_first_event_is_raised(stream):
  script = Script([Delta(0, '', 'error', (), 0)])
  with pytest.raises(ApiError, match='its log has the error') as failed:
    respond(Completions(script, 8), asked(stream))
  assert failed.value.status == 500 and script.cancelled == script.submitted


def test_what_fails_later_is_the_last_event_of_a_stream():
  sent = respond(Completions(Script([*DELTAS[:2], Delta(1, '', 'error', (3,), 1)]), 8), asked(True))
  *chunks, last = events(sent)
  assert len(chunks) == 2 and last['error']['type'] == 'server_error'


def test_open_requests_end_with_the_server():
  sent = respond(Completions(Script(DELTAS[:1]), 8), asked(True), end=ApiError(503, 'the server stops'))
  assert events(sent)[-1]['error']['message'] == 'the server stops'


@pytest.mark.parametrize('stream', [False, True])
def test_a_client_that_hangs_up_cancels_its_request(stream):
  script = Script()
  with pytest.raises(ClientDisconnect):
    respond(Completions(script, 8), asked(stream), hangs_up=True)
  assert script.cancelled == script.submitted and len(script.submitted) == 1
