"""A server as people run it: right answers to many at one time, clear errors, places that are free again, and its end.

What is right: what an engine of this process writes, alone with the request's texts.
"""

import concurrent.futures
import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time

import made_run
import numpy as np
import pytest
import serving

from dipaco_jax.inference import trained_run
from dipaco_jax.inference.engine import Engine
from dipaco_jax.inference.request import Request
from dipaco_jax.serving import connections
from dipaco_jax.storage import publishing

CLIENTS = 16
TEMPLATE = '{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}<s>assistant:'


def write_run(folder):
  made_run.write(folder, made_run.settings(model={'seq_len': 1024}))
  publishing.write_sealed(folder / 'chat_template.jinja', TEMPLATE.encode())
  return folder


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  return write_run(tmp_path_factory.mktemp('served') / 'run')


@pytest.fixture(scope='module')
def server(workdir):
  """One for all tests. A module that path 3 alone has is away until a test puts it back."""
  (workdir / 'modules' / '1').rename(workdir / 'away')
  made = serving.Serving(workdir, workdir.parent / 'log', '--max_paths=2', '--grace_s=1.5', '--max_waiting=64')
  try:
    made.said = made.wait()
    yield made
  finally:
    made.process.kill()
    made.process.communicate()


@pytest.fixture(scope='module')
def engine(workdir, server):
  return Engine(trained_run.TrainedRun(str(workdir)), max_batch=4)


@pytest.mark.slow
def test_the_command_that_it_prints_works(server):
  first, curl = server.said.splitlines()
  assert 'run/path-0 to path-3' in first and f'127.0.0.1:{server.port}/v1' in first
  curl += f" -s -H 'Authorization: Bearer {serving.KEY}'"
  done = subprocess.run(curl, shell=True, capture_output=True, text=True, timeout=serving.PATIENCE_S)
  assert json.loads(done.stdout)['usage']['completion_tokens'] > 0, done.stderr


def test_a_failure_is_an_error_of_its_own_request_and_told_only_in_the_log(server, workdir):
  whole, other = {'model': 'run/path-3', 'prompt': 'fox'}, {'model': 'run/path-1', 'prompt': 'fox'}
  status, said = server.ask(whole)
  assert (status, said['error']['type']) == (500, 'server_error') and 'Traceback' not in json.dumps(said)
  assert server.ask(other)[0] == 200
  assert server.ask(whole | {'stream': True})[0] == 500
  log = server.log.read_text()
  assert log.count('a request failed\nTraceback') == 2 and 'modules/1/index-0.json is missing' in log
  (workdir / 'away').rename(workdir / 'modules' / '1')
  assert server.ask(whole)[0] == 200


MALFORMED = [
  (b'{"model": "run", "prompt"', 400, None, 'is not JSON'),
  (b'[' * 100_000, 400, None, 'is not JSON'),
  (b'\xff\xfe{}', 400, None, 'is not JSON'),
  (b'[]', 400, None, 'should be a JSON object'),
  (b' ' * 2_100_000, 413, None, 'larger than 2097152 bytes'),
  ({'model': None}, 400, 'model', 'model is missing'),
  ({'prompt': None}, 400, 'prompt', 'prompt is missing'),
  ({'model': 'gpt-4'}, 404, 'model', "there is no model 'gpt-4': ask for run"),
  ({'model': 'run/path-4'}, 404, 'model', 'run/path-0 to path-3'),
  ({'model': 7}, 400, 'model', 'model should be a string'),
  ({'prompt': ''}, 400, 'prompt', 'give some text'),
  ({'prompt': []}, 400, 'prompt', 'prompt should be a string'),
  ({'prompt': {'text': 'fox'}}, 400, 'prompt', 'prompt should be a string'),
  ({'prompt': ['fox', 3]}, 400, 'prompt', 'prompt should be a string'),
  ({'prompt': [[3], []]}, 400, 'prompt', 'prompt should be a string'),
  ({'prompt': [3, 330]}, 400, 'prompt', 'from 0 to 329'),
  ({'prompt': [-1]}, 400, 'prompt', 'from 0 to 329'),
  ({'prompt': '\ud800'}, 400, 'prompt', 'half a character'),
  ({'prompt': 'fox ' * 1024}, 400, 'prompt', 'shorten the prompt'),
  ({'max_tokens': 1024}, 400, 'prompt', 'or set max_tokens to 10'),
  ({'max_tokens': 0}, 400, 'max_tokens', 'max_tokens=0'),
  ({'max_tokens': '9'}, 400, 'max_tokens', 'a whole number'),
  ({'max_tokens': True}, 400, 'max_tokens', 'a whole number'),
  ({'temperature': -1}, 400, 'temperature', 'temperature=-1'),
  ({'temperature': float('nan')}, 400, 'temperature', 'temperature=nan'),
  ({'temperature': 10**400}, 400, 'temperature', 'less than 2^31'),
  ({'temperature': 'hot'}, 400, 'temperature', 'temperature should be a number'),
  ({'top_p': 0}, 400, 'top_p', 'above 0'),
  ({'top_k': 10**20}, 400, 'top_k', 'less than 2^31'),
  ({'n': 0}, 400, 'n', '1 to 64'),
  ({'n': 65}, 400, 'n', '1 to 64'),
  ({'seed': -1}, 400, 'seed', 'from 0'),
  ({'stop': 3}, 400, 'stop', 'a string, or a list'),
  ({'stop': ['.', '']}, 400, 'stop', 'empty string'),
  ({'stop': ['.'] * 257}, 400, 'stop', '256 strings at most'),
  ({'stream': 'yes'}, 400, 'stream', 'true or false'),
  ({'stream_options': {'include_usage': True}}, 400, 'stream_options', 'set stream to true'),
  ({'stream': True, 'stream_options': {'usage': 1}}, 400, 'stream_options', 'include_usage'),
  ({'path': 4}, 400, 'path', 'the paths are 0 to 3'),
  ({'path': 1, 'model': 'run/path-2'}, 400, 'path', 'leave one of them out'),
  ({'path': 1, 'reroute_every': 8}, 400, 'reroute_every', 'and 0 where path=1'),
  ({'logprobs': 0}, 400, 'logprobs', 'logprobs is not supported: leave it out'),
  ({'best_of': 2}, 400, 'best_of', 'not supported'),
  ({'suffix': 'end'}, 400, 'suffix', 'not supported'),
  ({'logit_bias': {'50256': -100}}, 400, 'logit_bias', 'not supported'),
  ({'presence_penalty': 0.5}, 400, 'presence_penalty', 'not supported'),
  ({'frequency_penalty': -0.5}, 400, 'frequency_penalty', 'not supported'),
  ({'tempreature': 1}, 400, 'tempreature', 'did you mean temperature?'),
  ({'\ud800': 1}, 400, '\ud800', 'there is no field'),
]


def malformed(index: int):
  body, *expected = MALFORMED[index % len(MALFORMED)]
  return (body if isinstance(body, bytes) else {'model': 'run', 'prompt': 'fox'} | body), expected


def assert_refused(found, expected):
  (status, said), (expected_status, param, words) = found, expected
  assert status == expected_status and set(said) == {'error'}, said
  assert set(said['error']) == {'message', 'type', 'param', 'code'}
  assert said['error']['param'] == param and words in said['error']['message'], said
  assert said['error']['type'] == 'invalid_request_error' and '\n' not in said['error']['message']


@pytest.mark.parametrize('index', range(len(MALFORMED)), ids=lambda index: str(MALFORMED[index][0])[:40])
def test_a_body_that_cannot_be_answered_is_an_error_that_says_why(server, index):
  body, expected = malformed(index)
  assert_refused(server.ask(body), expected)


def test_keys_types_and_routes_are_checked_and_models_are_listed(server):
  status, said = server.ask({'model': 'run', 'prompt': 'fox'}, headers={'Content-Type': 'application/json'})
  assert status == 401 and said['error']['code'] == 'invalid_api_key' and 'DIPACO_API_KEY' in said['error']['message']
  assert server.ask({}, headers=serving.HEADERS | {'Content-Type': 'text/plain'})[0] == 415
  for path, expected in {'/v1/completions': 405, '/v1/chat/completions': 405, '/x': 404, '/v1/models/x': 404}.items():
    status, said = server.get(path)
    assert status == expected and json.loads(said)['error']['message'].startswith('there is no ')
  assert server.get('/health') == (200, '{"status":"ready"}')
  names = [model['id'] for model in json.loads(server.get('/v1/models')[1])['data']]
  assert names == ['run', 'run/path-0', 'run/path-1', 'run/path-2', 'run/path-3']
  assert json.loads(server.get('/v1/models/run/path-2')[1])['id'] == 'run/path-2'


def generate(engine, groups, known=()) -> list[list]:
  """The texts of groups of requests, those of `known` where these have the same."""
  found = {text.request: text for texts in known for text in texts}
  requests = [request for requests in groups for request in requests if request not in found]
  found |= {text.request: text for text in engine.generate(requests)}
  return [[found[request] for request in requests] for requests in groups]


def test_many_at_one_time_get_right_answers_and_clear_errors(server, engine, request):
  """A tenth of them malformed; greedy or drawn, streamed or not, alone or several, with stops, paths named or not."""
  number = 1000 if request.config.getoption('--slow') else 20
  rng = np.random.default_rng(0)
  drawn = [serving.draw(rng, engine.run.tokenizer) for _ in range(number * 9 // 10)]
  whole = generate(engine, [requests for _, requests in drawn])
  drawn = [serving.with_stop(rng, body, requests, texts) for (body, requests), texts in zip(drawn, whole, strict=True)]
  bodies = [body | {'stream': bool(rng.integers(2))} for body, _ in drawn]
  right = [
    [(text.transcript.text, text.finished, text.paths) for text in texts]
    for texts in generate(engine, [requests for _, requests in drawn], whole)
  ]
  jobs = [(body, answer, None) for body, answer in zip(bodies, right, strict=True)]
  jobs += [(body, None, expected) for body, expected in map(malformed, range(number // 10))]
  jobs = [jobs[i] for i in rng.permutation(len(jobs))]
  kept, opened = threading.local(), []

  def work(job):
    body, answer, expected = job
    if not hasattr(kept, 'connection'):
      kept.connection = server.connect()
      opened.append(kept.connection)
    found = server.ask(body, kept.connection)
    if expected:
      assert_refused(found, expected)
    else:
      assert found[0] == 200, found
      assert serving.gathered(found[1]) == answer

  began = time.monotonic()
  with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
    done = [pool.submit(work, job) for job in jobs]
  for connection in opened:
    connection.close()
  for future in done:
    future.result()
  print(f'{number} requests of {CLIENTS} clients in {time.monotonic() - began:.1f} s')
  assert len(done) == number and {'stop', 'length'} == {why for texts in right for _, why, _ in texts}


def test_openais_client_gets_what_the_engine_writes(server, engine):
  import openai  # a second, for few tests

  with openai.OpenAI(base_url=f'http://127.0.0.1:{server.port}/v1', api_key=serving.KEY, max_retries=0) as client:
    assert client.models.list().data[0].id == 'run' and client.models.retrieve('run/path-2').id == 'run/path-2'
    ask = {'model': 'run/path-2', 'prompt': 'The quick', 'max_tokens': 30, 'temperature': 0.7, 'seed': 5}
    answer = client.completions.create(**ask, n=2, echo=True)
    tokens = tuple(engine.run.tokenizer.encode('The quick', eos=False).tolist())
    right = engine.generate([Request(tokens, 30, 2, temperature=0.7, seed=seed) for seed in (5, 6)])
    assert [c.text for c in answer.choices] == ['The quick' + text.transcript.text for text in right]
    assert [c.finish_reason for c in answer.choices] == [text.finished for text in right]
    num_tokens = [len(text.tokens) - len(tokens) for text in right]
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(tokens), sum(num_tokens))
    with client.completions.create(**ask, stream=True, stream_options={'include_usage': True}) as stream:
      *chunks, last = list(stream)
    assert ''.join(chunk.choices[0].text for chunk in chunks) == right[0].transcript.text and len(chunks) > 3
    assert chunks[-1].choices[0].finish_reason == right[0].finished
    assert not last.choices and last.usage.completion_tokens == num_tokens[0]
    with pytest.raises(openai.BadRequestError, match='logprobs is not supported') as refused:
      client.completions.create(**ask, logprobs=1)
    assert refused.value.param == 'logprobs'
    with pytest.raises(openai.NotFoundError, match='there is no model'):
      client.completions.create(**ask | {'model': 'gpt-4'})
    with pytest.raises(openai.AuthenticationError):
      client.with_options(api_key='another').completions.create(**ask)


def test_openais_client_chats_with_a_path_that_stays_as_the_conversation_grows(server, engine):
  import openai

  tokenizer = engine.run.tokenizer
  begin, end = tokenizer.special['<s>'], tokenizer.special['</s>']

  def text(words):
    return tokenizer.encode(words, eos=False).tolist()

  messages = [{'role': 'user', 'content': 'The </s> dog'}]
  tokens = (begin, *text('user: The </s> dog'), end, begin, *text('assistant:'))
  path = engine.run.router.path('The </s> dog')
  with openai.OpenAI(base_url=f'http://127.0.0.1:{server.port}/v1', api_key=serving.KEY, max_retries=0) as client:
    ask = {'model': 'run', 'messages': messages, 'max_completion_tokens': 20, 'temperature': 0.7, 'seed': 5}
    answer = client.chat.completions.create(**ask, n=2)
    right = engine.generate([Request(tokens, 20, path, temperature=0.7, seed=seed) for seed in (5, 6)])
    assert [c.message.content for c in answer.choices] == [text.transcript.text for text in right]
    assert [c.finish_reason for c in answer.choices] == [text.finished for text in right]
    assert {c.message.role for c in answer.choices} == {'assistant'} and answer.choices[0].paths == [path]
    assert answer.usage.prompt_tokens == len(tokens) and answer.object == 'chat.completion'
    with client.chat.completions.create(**ask, stream=True, stream_options={'include_usage': True}) as stream:
      first, *chunks, before, last = list(stream)
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ('assistant', '')
    assert ''.join(chunk.choices[0].delta.content for chunk in chunks) == right[0].transcript.text
    assert before.choices[0].finish_reason == right[0].finished and before.choices[0].delta.content is None
    assert not last.choices and last.usage.completion_tokens == right[0].num_new and first.id.startswith('chatcmpl-')
    parts = [{'type': 'text', 'text': '12345'}]
    grown = [*messages, answer.choices[0].message.model_dump(), {'role': 'user', 'content': parts}]
    assert client.chat.completions.create(**ask | {'messages': grown}).choices[0].paths == [path]
    assert client.chat.completions.create(**ask | {'model': 'run/path-1'}).choices[0].paths == [1]
    with pytest.raises(openai.BadRequestError, match='tools is not supported') as refused:
      client.chat.completions.create(**ask, tools=[{'type': 'function', 'function': {'name': 'f'}}])
    assert refused.value.param == 'tools'


def test_a_stream_tells_the_routers_scores_and_which_path_writes(server, engine):
  tokens = [5, 6, 7] * 4
  body = {'model': 'run', 'prompt': tokens, 'max_tokens': 40, 'reroute_every': 16, 'seed': 3}
  (right,) = engine.generate([Request(tuple(tokens), 40, reroute_every=16, seed=3)])
  status, found = server.ask(body | {'stream': True, 'router_scores': 2})
  choices = [choice for event in found[:-1] for choice in event['choices']]
  best = [int(path) for path in np.argsort(-np.asarray(right.scores))[:2]]
  scores = [{'path': path, 'score': pytest.approx(right.scores[path], rel=1e-5)} for path in best]
  assert status == 200 and choices[0]['router_scores'] == scores and 'router_scores' not in choices[1]
  assert len(right.paths) > 1 and choices[0]['paths'] == right.paths[:1] and choices[-1]['paths'] == right.paths
  assert [len(choice['paths']) for choice in choices] == sorted(len(choice['paths']) for choice in choices)


def test_the_page_needs_no_key_and_its_head_has_no_body(server):
  for method in ('GET', 'HEAD'):
    with contextlib.closing(server.connect()) as connection:
      connection.request(method, '/')
      response = connection.getresponse()
      assert response.status == 200 and "frame-ancestors 'none'" in response.headers['content-security-policy']
      assert bool(response.read()) == (method == 'GET')


MANY = {'model': 'run/path-1', 'prompt': 'fox', 'max_tokens': 1000, 'n': 48}  # for seconds; until_eos ends few of them
CLIENT = """
import http.client, json, sys
connection = http.client.HTTPConnection('127.0.0.1', int(sys.argv[1]))
connection.request('POST', '/v1/completions', sys.argv[2], json.loads(sys.argv[3]))
print(connection.getresponse().readline(), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def on_the_way(server, how: str):
  """Many texts that grow, until who asked for them is gone."""
  body = MANY | {'stream': how != 'whole'}
  if how == 'killed':
    command = [sys.executable, '-c', CLIENT, str(server.port), json.dumps(body), json.dumps(serving.HEADERS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
      assert client.stdout.readline().startswith(b"b'data: ")
      yield
      client.kill()
  else:
    with server.open(body) as connection:
      if how == 'stream':
        assert connection.recv(100).startswith(b'HTTP/1.1 200 OK')
      yield


@pytest.mark.parametrize('how', ['stream', 'whole', 'killed'])
def test_a_client_that_hangs_up_frees_the_places_of_its_texts(server, how):
  before = server.measured('dipaco_completion_tokens_total')
  with on_the_way(server, how):
    serving.wait_for(lambda: server.measured('dipaco_active_texts') == 8)
    assert server.measured('dipaco_waiting_texts') > 16
  serving.wait_for(lambda: server.measured('dipaco_active_texts') == server.measured('dipaco_waiting_texts') == 0, 10)
  assert server.measured('dipaco_completion_tokens_total') - before < MANY['n'] * MANY['max_tokens'] / 3
  assert server.ask({'model': 'run/path-1', 'prompt': 'fox'})[0] == 200
  if how == 'whole':
    assert server.get('/metrics')[1].count('dipaco_requests_total{status="499"}') == 1


def test_a_full_queue_tells_clients_to_try_again(server):
  with on_the_way(server, 'whole'):
    serving.wait_for(lambda: server.measured('dipaco_active_texts') == 8)
    with contextlib.closing(server.connect()) as connection:
      connection.request('POST', '/v1/completions', json.dumps(MANY), serving.HEADERS)
      response = connection.getresponse()
      assert response.status == 429 and response.headers['retry-after'] == '1'
      assert json.loads(response.read())['error']['type'] == 'rate_limit_error'
  serving.wait_for(lambda: server.measured('dipaco_active_texts') == 0, 10)


def test_metrics_count_requests_tokens_and_batches(server):
  names = ['requests_total{status="200"}', 'prompt_tokens_total', 'completion_tokens_total']
  names += ['first_token_seconds_count', 'token_seconds_count', 'batch_texts_bucket{le="1.0"}']
  body = {'model': 'run/path-1', 'prompt': [5, 6, 7], 'max_tokens': 9}
  server.ask(body)
  before = [server.measured(f'dipaco_{name}') for name in names]
  usage = server.ask(body)[1]['usage']
  after = [server.measured(f'dipaco_{name}') for name in names]
  grown = [b - a for a, b in zip(before, after, strict=True)]
  assert grown == [1, 3, usage['completion_tokens'], 1, 1, -(-(usage['completion_tokens'] - 1) // 4)]
  assert server.measured('dipaco_paths_loaded') == 2


def test_clients_that_never_ask_leave_room_for_those_that_do(server):
  places = connections.IDLE + 64 + 2 * 8
  with contextlib.ExitStack() as stack:
    for i in range(places + 100):
      client = stack.enter_context(socket.create_connection(('127.0.0.1', server.port), serving.PATIENCE_S))
      client.sendall(b'POST /v1/completions HTTP/1.1\r\n' if i % 2 else b'')
    assert server.get('/health')[0] == 200
    assert server.ask({'model': 'run/path-1', 'prompt': 'fox'})[0] == 200
    assert server.measured('dipaco_connections') <= places
  log = server.log.read_text()
  assert f'all {places} connections are taken' in log and log.count('taken') <= connections.BURST


@pytest.mark.slow
def test_a_second_signal_ends_at_once(tmp_path):
  other = serving.Serving(write_run(tmp_path / 'run'), tmp_path / 'log', '--access_log', '--host=0.0.0.0')
  try:
    other.wait()
    with other.open(MANY | {'stream': True}) as connection:
      assert connection.recv(100).startswith(b'HTTP/1.1 200 OK')
      other.process.send_signal(signal.SIGTERM)
      serving.wait_for(lambda: 'stopping: 1 answers may finish, within 30 s' in other.log.read_text())
      assert other.process.poll() is None
      other.process.send_signal(signal.SIGTERM)
      assert other.process.wait(5) == 143
    assert other.log.read_text().count('POST /v1/completions HTTP/1.1" 200') == 1
  finally:
    other.process.kill()
    other.process.communicate()


def test_ctrl_c_lets_short_answers_end_and_cuts_long_ones(server):
  """The last test: the server ends with it."""
  short = {'model': 'run/path-0', 'prompt': 'fox', 'max_tokens': 20, 'stream': True, 'n': 8}
  with concurrent.futures.ThreadPoolExecutor() as pool:
    long = pool.submit(server.ask, MANY | {'stream': True, 'n': 64})
    serving.wait_for(lambda: server.measured('dipaco_active_texts') == 8)
    answers = [pool.submit(server.ask, short)]
    serving.wait_for(lambda: server.measured('dipaco_active_texts') > 8)
    server.process.send_signal(signal.SIGINT)
    serving.wait_for(lambda: server.get('/health')[0] == 503)
    status, said = server.ask({'model': 'run', 'prompt': 'fox'})
    assert status == 503 and 'stops' in said['error']['message']
    assert all(why for _, why, _ in serving.gathered(answers[0].result()[1]))
    status, found = long.result()
    assert status == 200 and found[-1]['error']['message'] == 'the server stops'
  assert server.process.wait(10) == 130
  log = server.log.read_text()
  assert 'stopping: 2 answers' in log and log.count('a request failed') == 2 and 'Exception in ASGI' not in log
