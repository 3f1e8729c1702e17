"""The page at `/`: its policy fits its contents, it fetches nothing from elsewhere, and keys and hosts are checked.

page_browser_test has a browser use it.
"""

import asyncio
import base64
import hashlib
import html.parser
import json
import pathlib
import re

import made_run
import pytest

from dipaco_jax.data import chat_template
from dipaco_jax.inference import trained_run
from dipaco_jax.inference.batch import Text
from dipaco_jax.inference.engine import Engine
from dipaco_jax.inference.request import Request
from dipaco_jax.serving import http_server, page

KEY = 'a key'
AUTHORIZED = {'authorization': f'Bearer {KEY}'}


class Elements(html.parser.HTMLParser):
  """The elements of a page with their attributes, and of each the elements around it."""

  def __init__(self, text: str):
    super().__init__()
    self.all: list[tuple[str, dict[str, str | None], tuple[str, ...]]] = []
    self.contents: dict[str, list[str]] = {'script': [], 'style': []}
    self._open: list[str] = []
    self.feed(text)
    assert not self._open

  def handle_starttag(self, tag, attrs):
    self.all.append((tag, dict(attrs), tuple(self._open)))
    if tag not in ('meta', 'link', 'input'):
      self._open.append(tag)

  def handle_endtag(self, tag):
    assert self._open.pop() == tag

  def handle_data(self, data):
    if self._open and self._open[-1] in self.contents:
      self.contents[self._open[-1]].append(data)


PAGE = Elements(page.HTML)


def make_server(**changes) -> http_server.Server:
  options = {'name': 'run', 'load_engine': None, 'started': None, 'reroute_every': 16, 'max_waiting': 4}
  return http_server.Server(**options | {'grace_s': 1.0, 'api_key': KEY} | changes)


def respond(server: http_server.Server, path: str = '/', method: str = 'GET', **headers: str):
  """(status, headers, body) of a request without a body."""
  sent = []

  async def receive():
    return {'type': 'http.request'}

  async def send(message):
    sent.append(message)

  lines = [(name.encode(), value.encode()) for name, value in {'host': 'localhost', **headers}.items()]
  scope = {'type': 'http', 'path': path, 'raw_path': path.encode(), 'method': method, 'headers': lines}
  asyncio.run(server.make_app()(scope | {'query_string': b'', 'root_path': ''}, receive, send))
  found = {name.decode(): value.decode() for name, value in sent[0]['headers']}
  return sent[0]['status'], found, b''.join(message.get('body', b'') for message in sent[1:]).decode()


@pytest.fixture(scope='module')
def engine(tmp_path_factory):
  return Engine(trained_run.TrainedRun(made_run.write(tmp_path_factory.mktemp('page') / 'run', made_run.settings())))


@pytest.mark.parametrize('method', ['GET', 'HEAD'])
def test_the_page_is_served_without_a_key_while_the_run_is_loaded(method):
  status, headers, body = respond(make_server(), method=method)
  assert status == 200 and headers['content-type'] == 'text/html; charset=utf-8'
  assert headers['content-length'] == str(len(page.HTML.encode())) and body in (page.HTML, '')
  assert (headers['x-content-type-options'], headers['referrer-policy']) == ('nosniff', 'no-referrer')
  assert headers['cache-control'] == 'no-cache' and 'access-control-allow-origin' not in headers


def test_the_policy_allows_the_pages_own_script_and_style_and_nothing_else():
  _, headers, _ = respond(make_server())
  policy = dict(part.split(' ', 1) for part in headers['content-security-policy'].split('; '))
  hashes = {
    tag: f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
    for tag, (content,) in PAGE.contents.items()
  }
  nothing = dict.fromkeys(('default-src', 'base-uri', 'form-action', 'frame-ancestors'), "'none'")
  own = {'script-src': hashes['script'], 'style-src': hashes['style']}
  assert policy == nothing | own | {'connect-src': "'self'", 'img-src': 'data:'}


def test_the_page_fetches_nothing_from_elsewhere():
  assert not re.search(r'https?:|//\w+\.|@import|url\(', page.HTML)
  links = [value for _, attributes, _ in PAGE.all for name, value in attributes.items() if name in ('src', 'href')]
  assert links == ['data:,']
  (script,) = PAGE.contents['script']
  assert set(re.findall(r"'(v1/[\w/]+)'", script)) == {'v1/grid', 'v1/completions', 'v1/chat/completions'}


def test_texts_are_never_read_as_html_and_the_key_is_stored_nowhere():
  (script,) = PAGE.contents['script']
  assert 'textContent' in script
  assert not re.search(r'innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|\beval\b|Function\(', script)
  assert not re.search(r'Storage|cookie|indexedDB|\bname = key', script)
  names = {name for _, attributes, _ in PAGE.all for name in attributes}
  assert not {name for name in names if name == 'style' or name.startswith('on')}  # the policy would ignore these


def test_every_control_has_a_label():
  controls = [(tag, around) for tag, _, around in PAGE.all if tag in ('input', 'select', 'textarea')]
  assert len(controls) > 10 and all('label' in around for _, around in controls)


@pytest.mark.parametrize('path', ['/', '/v1/grid'])
def test_a_page_whose_name_leads_here_does_not_get_it(path):
  server = make_server(hosts=['box'])
  status, headers, body = respond(server, path, host='evil.example:8000', **AUTHORIZED)
  assert status == 403 and '--allowed_hosts' in json.loads(body)['error']['message']
  assert 'content-security-policy' not in headers
  assert respond(server, host='box')[0] == 200


def test_the_grid_needs_the_key_and_the_run():
  server = make_server()
  for headers in ({}, {'authorization': 'Bearer another'}):
    status, _, body = respond(server, '/v1/grid', **headers)
    assert status == 401 and json.loads(body)['error']['code'] == 'invalid_api_key'
  status, headers, body = respond(server, '/v1/grid', **AUTHORIZED)
  assert status == 503 and 'loading' in json.loads(body)['error']['message'] and headers['retry-after'] == '1'
  assert 'GET /v1/grid' in json.loads(respond(server, '/nothing')[2])['error']['message']


def described(engine: Engine, template=None) -> dict:
  """The answer of a server that is ready."""
  server = make_server(started=lambda: None, chat_template=template)
  server.engine_thread.engine = engine
  server._changed()
  status, _, body = respond(server, '/v1/grid', **AUTHORIZED)
  assert status == 200
  return json.loads(body)


def test_the_grid_is_described(engine):
  source = chat_template.ChatTemplate('{{ messages[0].content }}', engine.run.tokenizer, {})
  assert described(engine, source) == {
    'model': 'run',
    'axes': [{'name': 'a', 'size': 2, 'names': None}, {'name': 'b', 'size': 2, 'names': None}],
    'levels': [
      {'name': 'shared', 'axes': []},
      {'name': 'low', 'axes': ['a']},
      {'name': 'high', 'axes': ['b']},
    ],
    'paths': [0, 1, 2, 3],
    'max_length': 96,
    'reroute_every': 16,
    'unavailable': {},
  }


def test_what_cannot_be_asked_for_has_its_reason(engine, tmp_path):
  assert 'no chat template' in described(engine)['unavailable']['chat']
  workdir = made_run.write(tmp_path / 'run', made_run.settings(routing={'method': 'random'}))
  (pathlib.Path(workdir) / 'routing' / '0' / 'router.safetensors').unlink()
  unrouted = described(Engine(trained_run.TrainedRun(workdir)))
  assert unrouted['unavailable']['router'] == "config.routing.method='random' has no router: name a path"


@pytest.mark.parametrize('every', [0, 16])
def test_a_text_keeps_the_routers_scores_of_its_first_choice(engine, every):
  tokens = (5, 6, 7, 8) * 5
  text = Text(Request(tokens, 40, reroute_every=every), None)
  first = engine._choose_path(text)
  right = engine.run.router.scores(tokens[:16] if every else tokens)
  assert text.scores == tuple(right.tolist()) and first == right.argmax()
  text.paths, text.tokens = [first], [*tokens, *range(9, 40)]
  engine._choose_path(text)
  assert text.scores == tuple(right.tolist())


def test_a_named_path_has_no_scores(engine):
  text = Text(Request((5, 6), 40, path=1), None)
  assert engine._choose_path(text) == 1 and text.scores == ()
