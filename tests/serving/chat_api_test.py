"""Bodies of OpenAI's chat completions become requests; errors name unsupported fields."""

import functools
import json

import made_run
import pytest

from dipaco_jax.data import chat_template, tokenizer_files
from dipaco_jax.inference.request import check_request
from dipaco_jax.serving import chat_api, openai_api
from dipaco_jax.serving.openai_api import ApiError, CompletionRequest

TEMPLATE = '{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}{{ kind }}<s>'
TOKENIZER = tokenizer_files.load(
  {'tokenizer.model': made_run.tokenizer_bytes(), 'chat_template.jinja': TEMPLATE.encode()}
)
MODEL = openai_api.ServedModel('run', 4, 96, TOKENIZER, functools.partial(check_request, max_length=96), 8, 6)
MESSAGES = [{'role': 'system', 'content': 'Terse.'}, {'role': 'user', 'content': 'fox'}]


def parse(template=TEMPLATE, **fields) -> CompletionRequest:
  body = json.dumps({'model': 'run', 'messages': MESSAGES} | fields).encode()
  return chat_api.parse(MODEL, chat_template.load(TOKENIZER) if template else None, body)


def text(words: str) -> list[int]:
  return TOKENIZER.encode(words, eos=False).tolist()


def test_a_conversation_is_routed_by_what_the_user_says_and_has_all_the_room_that_there_is():
  begin, end = TOKENIZER.special['<s>'], TOKENIZER.special['</s>']
  found = parse()
  [request] = found.requests
  assert request.tokens == (begin, *text('system: Terse.'), end, begin, *text('user: fox'), end, begin)
  assert list(request.routed_by) == text('fox') and request.path is None and request.reroute_every == 0
  assert found.prompt_tokens == len(request.tokens) and len(request.tokens) + request.max_tokens == 96
  [named] = parse(path=2).requests
  assert (named.path, named.routed_by) == (2, ())


def test_fields_are_those_of_completions():
  fields = {'n': 3, 'seed': 5, 'temperature': 0, 'top_p': 0.5, 'top_k': 4, 'stop': ['.', '!'], 'stream': True}
  found = parse(**fields, max_completion_tokens=7, max_tokens=7, stream_options={'include_usage': True})
  first = found.requests[0]
  assert [r.seed for r in found.requests] == [5, 6, 7] and found.stream and found.include_usage
  assert (first.temperature, first.top_p, first.top_k, first.stop, first.max_tokens) == (0, 0.5, 4, ('.', '!'), 7)
  assert parse(max_tokens=3).requests[0].max_tokens == 3 and first.until_eos
  assert parse(chat_template_kwargs={'kind': 'fox'}).prompt_tokens > parse().prompt_tokens


def test_fields_that_change_nothing_may_be_given():
  nothing = {name: values[0] for name, values in chat_api.UNSUPPORTED.items() if values}
  null = dict.fromkeys([*chat_api.FIELDS, *chat_api.UNSUPPORTED])
  assert (
    parse(**nothing).requests == parse(**null | {'model': 'run', 'messages': MESSAGES}).requests == parse().requests
  )
  assert parse(chat_template_kwargs={'tools': None, 'add_generation_prompt': True}).requests == parse().requests
  assert parse(metadata={'a': 'b'}, user='x', prompt_cache_key='y').requests == parse().requests


@pytest.mark.parametrize(
  'fields, param, words',
  [
    ({'messages': None}, 'messages', 'messages is missing'),
    ({'messages': 'hi'}, 'messages', 'messages should be a list of objects'),
    ({'messages': []}, 'messages', 'messages should be a list of objects'),
    ({'messages': [{'role': 'tool', 'content': 'x'}]}, 'messages', r'messages\[0\]\.role'),
    (
      {'messages': [{'role': 'user', 'content': 'fox ' * 99}]},
      'messages',
      'conversation has .* shorten the conversation',
    ),
    ({'max_tokens': 90}, 'messages', 'or set max_tokens to'),
    ({'max_tokens': 3, 'max_completion_tokens': 4}, 'max_tokens', 'contradicts max_completion_tokens=4'),
    ({'max_completion_tokens': 0}, 'max_completion_tokens', '^max_completion_tokens=0'),
    ({'max_completion_tokens': 90}, 'messages', 'or set max_completion_tokens to'),
    ({'n': 7}, 'n', '1 to 6 texts'),
    ({'tools': [{}]}, 'tools', 'tools is not supported'),
    ({'response_format': {'type': 'json_object'}}, 'response_format', 'not supported'),
    ({'logprobs': True}, 'logprobs', 'not supported'),
    ({'reroute_every': 8}, 'reroute_every', 'not supported'),
    ({'prompt': 'fox'}, 'prompt', 'there is no field'),
    ({'stop': ['']}, 'stop', 'empty string'),
    ({'chat_template_kwargs': [1]}, 'chat_template_kwargs', 'an object'),
    (
      {'chat_template_kwargs': {'add_generation_prompt': False}},
      'chat_template_kwargs',
      r'^chat_template_kwargs\.add_generation_prompt is not supported',
    ),
    ({'chat_template_kwargs': {'tools': [{}]}}, 'chat_template_kwargs', r'\.tools is not supported'),
  ],
)
def test_what_cannot_be_answered_is_named(fields, param, words):
  with pytest.raises(ApiError, match=words) as refused:
    parse(**fields)
  assert refused.value.status == 400 and refused.value.body['error']['param'] == param


def test_a_model_without_a_template_says_so():
  with pytest.raises(ApiError, match='this model has no chat template') as refused:
    parse(template=None)
  assert refused.value.status == 400


def test_a_stream_begins_with_the_role_and_ends_with_the_reason():
  chat = chat_api.ChatFormat()
  role, end = ({'delta': {'role': 'assistant', 'content': ''}}, ''), ({'delta': {}}, 'stop')
  assert chat.pieces('ab', True, '') == [role, ({'delta': {'content': 'ab'}}, '')]
  assert chat.pieces('', True, 'stop') == [role, end]
  assert chat.pieces('c', False, 'stop') == [({'delta': {'content': 'c'}}, ''), end]
