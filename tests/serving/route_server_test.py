"""A router in front of our own servers, as people run them: the paths of the run's router, and engines that die.

What is right: what a server of the run writes that chooses the path itself.
"""

import concurrent.futures
import contextlib
import json
import signal
import time

import made_run
import ports
import pytest
import serving

import dipaco_jax
from dipaco_jax.storage import publishing

PROMPTS = ['The quick', 'def f(x)', 'Zwölf Box', '12345', 'lazy dog. The', 'return {x']
TEMPLATE = '{% for m in messages %}<s>{{ m.role }}: {{ m.content }}{% endfor %}<s>'


class Running:
  """Engines, each of which has all paths, and a router to them."""

  def __init__(self, folder, num_engines):
    self.workdir = folder / 'run'
    made_run.write(self.workdir, made_run.settings(model={'seq_len': 1024}))
    publishing.write_sealed(self.workdir / 'chat_template.jinja', TEMPLATE.encode())
    self.ports = [ports.free_port() for _ in range(num_engines)]
    self.options = f'--engines={folder / "engines.json"}', '--grace_s=2', '--max_open=16'
    self.engines = [self.engine(i) for i in range(num_engines)]
    listed = {
      str(path): [
        {'url': f'http://127.0.0.1:{port}/v1', 'model': f'run/path-{path}', 'api_key_env': 'DIPACO_API_KEY'}
        for port in self.ports
      ]
      for path in range(4)
    }
    (folder / 'engines.json').write_text(json.dumps({'paths': listed}))
    self.router = serving.Serving(self.workdir, folder / 'log', *self.options, command='route')

  def wait(self):
    for server in (*self.engines, self.router):
      server.wait()
    serving.wait_for(lambda: self.num_in() == 4 * len(self.engines))

  def engine(self, i: int) -> serving.Serving:
    return serving.Serving(self.workdir, self.workdir.parent / f'log-{i}', f'--port={self.ports[i]}')

  def num_in(self) -> int:
    return self.router.get('/metrics')[1].count('/v1"} 1.0\n')

  def close(self):
    for process in [server.process for server in (self.router, *self.engines)]:
      process.kill()
      process.communicate()


@pytest.fixture(scope='module')
def running(tmp_path_factory, pytestconfig):
  """With two engines where one of them is killed, which is slow."""
  made = Running(tmp_path_factory.mktemp('routed'), 2 if pytestconfig.getoption('--slow') else 1)
  try:
    made.wait()
    yield made
  finally:
    made.close()


def ask(server: serving.Serving, **fields):
  """(status, the path header, answer) of a request."""
  body = json.dumps({'model': 'run', 'max_tokens': 8} | fields)
  with contextlib.closing(server.connect()) as connection:
    connection.request('POST', '/v1/completions', body, serving.HEADERS)
    response = connection.getresponse()
    is_stream = response.headers['content-type'].startswith('text/event-stream')
    found = serving.events(response) if is_stream else json.loads(response.read())
    return response.status, response.headers.get('dipaco-path'), found


def texts(answer) -> list[str]:
  return [text for text, _, _ in serving.gathered(answer)]


def test_each_text_is_written_by_its_path(running):
  router = dipaco_jax.load_router(str(running.workdir))
  paths = [router.path(prompt) for prompt in PROMPTS]
  assert len({*paths}) > 1
  for prompt, path in zip(PROMPTS, paths, strict=True):
    right = ask(running.engines[0], prompt=prompt)
    for stream in (False, True):
      status, header, answer = ask(running.router, prompt=prompt, stream=stream)
      assert (status, header) == (200, str(path)) and texts(answer) == texts(right[2])
  status, header, answer = ask(running.router, prompt=PROMPTS, n=2)
  assert (status, header) == (200, ','.join(map(str, paths)))
  right = ask(running.engines[0], prompt=PROMPTS, n=2)[2]
  assert answer['choices'] == right['choices'] and answer['usage'] == right['usage']
  assert ask(running.router, prompt=PROMPTS, stream=True)[0] == 400
  tokens = router.tokenizer.encode(PROMPTS[0], eos=False).tolist()
  assert texts(ask(running.router, prompt=tokens)[2]) == texts(ask(running.router, prompt=PROMPTS[0])[2])


def test_openais_client_asks_for_paths_and_sees_errors(running):
  import openai  # a second, for few tests

  with openai.OpenAI(
    base_url=f'http://127.0.0.1:{running.router.port}/v1', api_key=serving.KEY, max_retries=0
  ) as client:
    assert [model.id for model in client.models.list()][:2] == ['run', 'run/path-0']
    raw = client.completions.with_raw_response.create(model='run/path-2', prompt='fox', max_tokens=3)
    assert raw.headers['dipaco-path'] == '2' and raw.parse().model == 'run/path-2'
    with pytest.raises(openai.BadRequestError, match='logprobs is not supported'):  # the engine's own words
      client.completions.create(model='run', prompt='fox', logprobs=1)
    with pytest.raises(openai.BadRequestError, match='give some text'):
      client.completions.create(model='run', prompt='')
    with pytest.raises(openai.BadRequestError, match='messages have no text'):
      client.chat.completions.create(model='run', messages=[{'role': 'user', 'content': ''}])
    with pytest.raises(openai.AuthenticationError):
      client.with_options(api_key='another').completions.create(model='run', prompt='fox')


def test_conversations_go_to_the_paths_of_what_their_users_say_and_stay_there(running):
  import openai

  router, system = dipaco_jax.load_router(str(running.workdir)), {'role': 'system', 'content': 'Be terse. '}
  prompts = {router.path(prompt): prompt for prompt in PROMPTS}
  assert len(prompts) > 1
  url = f'http://127.0.0.1:{running.router.port}/v1'
  with openai.OpenAI(base_url=url, api_key=serving.KEY, max_retries=0) as client:
    for path, prompt in [*prompts.items()][:2]:
      begun = [system, {'role': 'user', 'content': prompt}]
      answer = [{'role': 'assistant', 'content': 'Yes.'}, {'role': 'user', 'content': 'x'}]
      for messages in (begun, begun + answer):
        raw = client.chat.completions.with_raw_response.create(model='run', messages=messages, max_tokens=3)
        assert raw.headers['dipaco-path'] == str(path) and raw.parse().object == 'chat.completion'


def test_a_client_that_hangs_up_ends_the_engines_work(running):
  many = {'model': 'run/path-1', 'prompt': 'fox', 'max_tokens': 1000, 'n': 8, 'stream': True}

  def active() -> float:
    return sum(engine.measured('dipaco_active_texts') for engine in running.engines)

  with running.router.open(many) as connection:
    assert connection.recv(100).startswith(b'HTTP/1.1 200 OK')
    serving.wait_for(lambda: active() > 0, 10)  # the answer begins before its texts do
  serving.wait_for(lambda: active() == 0, 10)


@pytest.mark.slow
def test_an_engine_that_is_killed_is_left_out_and_taken_back(running):
  assert json.loads(running.router.get('/health')[1]) == {'status': 'ready', 'paths_without_engine': []}
  first = running.engines[0]
  first.process.kill()
  first.process.communicate()
  answers = [ask(running.router, prompt=prompt) for prompt in PROMPTS * 3]
  assert {status for status, _, _ in answers} == {200}
  assert 4 <= running.num_in() < 8 and f'{running.ports[0]}/v1 of path ' in running.router.log.read_text()
  running.engines[0] = running.engine(0)
  running.engines[0].wait()
  serving.wait_for(lambda: running.num_in() == 8, 60)
  for path in range(4):
    assert ask(running.router, prompt='fox', path=path)[0] == 200
  assert running.router.measured('dipaco_retries_total') > 0


@pytest.mark.slow
def test_no_more_requests_are_open_than_may_be(running):
  """Of those that come at one time too, as clients that try again do."""
  with concurrent.futures.ThreadPoolExecutor(40) as pool:
    several = [pool.submit(ask, running.router, prompt='fox', max_tokens=200) for _ in range(40)]
  statuses = sorted(one.result()[0] for one in several)
  assert {*statuses} == {200, 429} and statuses.count(429) >= 8


def test_the_end_of_its_terminal_lets_an_answer_end_and_cuts_off_a_long_one(running):
  """The last of the tests with this router."""
  router = running.router
  long = {'model': 'run/path-1', 'prompt': 'fox', 'max_tokens': 1000, 'n': 8, 'stream': True, 'temperature': 1}
  with contextlib.closing(router.connect()) as connection:
    connection.request('POST', '/v1/completions', json.dumps(long), serving.HEADERS)
    response = connection.getresponse()
    response.readline()
    began = time.monotonic()
    router.process.send_signal(signal.SIGHUP)
    last = response.read().split(b'\n\n')[-2]
  assert b'the server stops' in last or b'[DONE]' in last
  assert router.process.wait(20) == 128 + signal.SIGHUP and time.monotonic() - began < 15
  assert 'stopping: 1 answers may finish, within 2 s' in router.log.read_text()
