"""Bodies of OpenAI's completions become requests. http_server_test tests unsupported fields over HTTP."""

import dataclasses
import functools
import json

import made_run
import pytest

from dipaco_jax.data.sentencepiece_tokenizer import SentencePieceTokenizer
from dipaco_jax.inference import trained_run
from dipaco_jax.inference.engine import Engine
from dipaco_jax.inference.request import Request, check_request
from dipaco_jax.serving import openai_api
from dipaco_jax.serving.openai_api import ApiError
from dipaco_jax.storage import seals


def served(check=functools.partial(check_request, max_length=96)) -> openai_api.ServedModel:
  return openai_api.ServedModel('run', 4, 96, SentencePieceTokenizer(made_run.tokenizer_bytes()), check, 8, 6)


def parse(by: openai_api.ServedModel | None = None, **fields) -> openai_api.CompletionRequest:
  return (by or served()).parse(json.dumps({'model': 'run', 'prompt': [5, 6, 7]} | fields).encode())


def test_defaults_are_openais_and_the_servers():
  found = parse()
  assert found.requests == (Request((5, 6, 7), 16, reroute_every=8),)
  assert (found.prefixes, found.prompt_tokens, found.stream, found.include_usage) == (('',), 3, False, False)


def test_null_is_no_value():
  names = [*openai_api.FIELDS, *openai_api.UNSUPPORTED]
  assert parse(**{name: None for name in names if name not in ('model', 'prompt')}) == parse()


def test_unsupported_fields_may_have_values_that_change_nothing():
  assert parse(best_of=1, logit_bias={}, suffix='', presence_penalty=0, frequency_penalty=0.0) == parse()


def test_seeds_follow_each_other_for_each_prompt():
  found = parse(prompt=['fox', 'The dog'], n=3, seed=5, echo=True)
  assert [request.seed for request in found.requests] == [5, 6, 7] * 2
  assert found.prefixes == ('fox',) * 3 + ('The dog',) * 3
  prompts = [request.tokens for request in found.requests]
  assert prompts[:3] == [prompts[0]] * 3 and found.prompt_tokens == len(prompts[0]) + len(prompts[3])


@pytest.mark.parametrize('fields', [{'path': 2}, {'model': 'run/path-2'}, {'path': 2, 'model': 'run/path-2'}])
def test_a_path_that_is_named_is_kept(fields):
  (request,) = parse(**fields).requests
  assert (request.path, request.reroute_every) == (2, 0)


def test_an_answer_is_as_long_as_there_is_room_for():
  (request,) = parse(prompt=[5] * 90).requests
  assert request.max_tokens == 6


def test_one_stop_string_is_a_list_of_one():
  assert parse(stop='.').requests[0].stop == parse(stop=['.']).requests[0].stop == ('.',)


def test_scores_are_asked_for():
  assert (parse().num_scores, parse(router_scores=5).num_scores) == (0, 5)
  for number in (-1, 257):
    with pytest.raises(ApiError, match=f'router_scores={number} should be from 0 to 256') as refused:
      parse(router_scores=number)
    assert refused.value.body['error']['param'] == 'router_scores'


def test_more_texts_than_may_wait_are_rejected():
  assert len(parse(prompt=['a', 'b'], n=3).requests) == 6
  with pytest.raises(ApiError, match='ask for 1 to 6 texts') as refused:
    parse(prompt=['a', 'b'], n=4)
  assert refused.value.body['error']['param'] == 'n'


@pytest.mark.parametrize('fields', [{'prompt': ['a'] * 65}, {'prompt': 'a', 'n': 65}, {'prompt': ['a'] * 40, 'n': 2}])
def test_texts_are_counted_before_any_is_tokenized(fields):
  model = served()
  untouched = dataclasses.replace(model, tokenizer=None, max_texts=64)
  with pytest.raises(ApiError, match='texts at one time'):
    parse(untouched, **fields)


def test_an_error_does_not_tell_where_the_run_is(tmp_path):
  engine = Engine(trained_run.TrainedRun(made_run.write(tmp_path / 'secret run', made_run.settings())))
  (tmp_path / 'secret run' / 'routing' / '0' / 'router.safetensors').unlink()
  with pytest.raises(ApiError) as refused:
    parse(served(engine.check_request))
  assert refused.value.body['error'] == {
    'message': f'there is no router yet: {trained_run.NOT_YET}',
    'type': 'invalid_request_error',
    'param': None,
    'code': None,
  }


@pytest.mark.parametrize('error', [ValueError('a bug'), seals.Damaged('/secret/run/router', 'is damaged')])
def test_faults_of_the_server_are_not_told_as_faults_of_a_request(error):
  def check(request):
    raise error

  with pytest.raises(type(error)):
    parse(served(check))


@pytest.mark.parametrize(
  'status, kind',
  [(400, 'invalid_request_error'), (401, 'authentication_error'), (429, 'rate_limit_error'), (503, 'server_error')],
)
def test_errors_have_openais_types(status, kind):
  assert ApiError(status, 'words').body['error']['type'] == kind


def test_as_many_stop_strings_are_taken_as_an_evaluation_asks_for():
  stop = [f'Question {i}:' for i in range(256)]
  assert parse(stop=stop).requests[0].stop == tuple(stop)
  for too_many in ([*stop, 'x'], 'x' * 1025):
    with pytest.raises(openai_api.ApiError, match='stop should have 256 strings at most, of 1024 characters at most'):
      parse(stop=too_many)


@pytest.mark.parametrize('opened, closed', ['[]', ('{"a": ', '}')])
def test_a_body_whose_brackets_nest_too_deeply_is_rejected(opened, closed):
  most = openai_api.MAX_DEPTH - 1  # beside those of the body
  body = '{"messages": ' + opened * most + '1' + closed * most + '}'
  assert list(openai_api.parse_object(body.encode())) == ['messages']
  with pytest.raises(ApiError, match='the body is not JSON: its brackets nest too deeply'):
    openai_api.parse_object(body.replace('1', opened + '1' + closed).encode())
