"""Requests to the router: parsing, distribution of prompts to paths, and joining of answers."""

import json

import pytest

from dipaco_jax.serving import route_api
from dipaco_jax.serving.openai_api import ApiError
from dipaco_jax.serving.route_api import ApiParser, Part

PARSER = ApiParser('run', 4, 8)


def body(**fields) -> bytes:
  return json.dumps({'model': 'run', 'prompt': 'fox'} | fields).encode()


def test_fields_of_the_engine_stay_and_ours_go():
  asked = PARSER.completion(body(top_k=5, path=2, reroute_every=0, guided={'a': 1}, suffix=None))
  assert asked.values == {'model': 'run', 'prompt': 'fox', 'top_k': 5, 'guided': {'a': 1}}
  assert asked.texts == ['fox'] and asked.path == 2
  assert PARSER.completion(body(model='run/path-3')).path == 3
  assert PARSER.completion(body(prompt=['fox', 'dog'])).texts == ['fox', 'dog']
  assert PARSER.completion(body(prompt=[1, 2])).texts == [[1, 2]]
  assert PARSER.completion(body(prompt=[[1, 2], [3]])).texts == [[1, 2], [3]]


@pytest.mark.parametrize(
  'given, status, words',
  [
    (b'{', 400, 'is not JSON'),
    (body(prompt=None), 400, 'prompt is missing'),
    (body(prompt=[]), 400, 'prompt should be a string'),
    (body(model='gpt'), 404, 'there is no model'),
    (body(path=4), 400, 'path=4: the paths are 0 to 3'),
    (body(path=1, model='run/path-2'), 400, 'leave one of them out'),
    (body(reroute_every=8), 400, 'reroute_every is not supported here'),
    (body(n=9), 400, 'ask for 1 to 8 texts'),
    (body(prompt=['a'] * 9), 400, 'ask for 1 to 8 texts'),
    (body(stream='yes'), 400, 'true or false'),
  ],
)
def test_what_a_path_cannot_be_chosen_by_is_rejected(given, status, words):
  with pytest.raises(ApiError, match=words) as found:
    PARSER.completion(given)
  assert found.value.status == status


def test_what_the_user_says_first_routes_a_chat_and_the_engine_gets_all_of_it():
  messages = [{'role': 'system', 'content': 'Be terse. ' * 50}, {'role': 'user', 'content': 'hi', 'x': 1}]
  fields = {'model': 'run', 'messages': messages, 'tools': [{'name': 'é'}]}
  chat = PARSER.chat(json.dumps(fields).encode())
  assert chat == (fields, ['hi'], None)
  with pytest.raises(ApiError, match='messages should be a list') as found:
    PARSER.chat(body(messages='hi'))
  assert found.value.body['error']['param'] == 'messages'


def test_prompts_are_dealt_to_paths_and_come_back_in_their_order():
  asked = PARSER.completion(body(prompt=['a', 'b', 'c'], n=2))
  assert route_api.deal(asked, [(1, 0), (1, 2), (1,)]) == [Part((1, 0), (0, 1, 2), asked.values)]
  parts = route_api.deal(asked, [(2,), (0,), (2,)])
  assert [(part.paths, part.prompts, part.values['prompt']) for part in parts] == [
    ((2,), (0, 2), ['a', 'c']), ((0,), (1,), ['b'])
  ]  # fmt: skip

  def answer(texts: str) -> bytes:
    choices = [{'index': i, 'text': text} for i, text in reversed([*enumerate(texts)])]
    usage = {'prompt_tokens': 1, 'completion_tokens': len(texts), 'total_tokens': 1 + len(texts)}
    return json.dumps({'id': texts, 'choices': choices, 'usage': usage}).encode()

  whole = json.loads(route_api.merge(parts, [answer('AaCc'), answer('Bb')]))
  assert [choice['text'] for choice in whole['choices']] == [*'AaBbCc']
  assert [choice['index'] for choice in whole['choices']] == [*range(6)]
  assert whole['usage'] == {'prompt_tokens': 2, 'completion_tokens': 6, 'total_tokens': 8} and whole['id'] == 'AaCc'
  for odd in (b'{}', b'no', b'{"choices": [{"index": 9}], "usage": {}}', answer('Bb').replace(b'1', b'1e999')):
    with pytest.raises(ValueError):
      route_api.merge(parts, [answer('AaCc'), odd])
  for indices in ([0], [0, 0], [0, -1], [0, 1, 2], []):  # as of engines that ignore n
    choices = [{'index': i, 'text': 'b'} for i in indices]
    with pytest.raises(ValueError, match='2 choices were asked for'):
      route_api.merge(parts, [answer('AaCc'), json.dumps(json.loads(answer('Bb')) | {'choices': choices}).encode()])


def test_a_stream_has_one_path():
  asked = PARSER.completion(body(prompt=['a', 'b'], stream=True))
  with pytest.raises(ApiError, match='prompts of 2 paths cannot be one stream: send each by itself'):
    route_api.deal(asked, [(0,), (1,)])
  assert len(route_api.deal(asked, [(0,), (0,)])) == 1
