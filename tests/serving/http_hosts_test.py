"""Names that a server answers to, and what a request by another name gets."""

import asyncio
import json

import pytest

from dipaco_jax.serving import http_hosts, http_messages

NAMES = ['box', 'api.example.com', '.example.org']


@pytest.mark.parametrize('host, is_allowed', [
  ('', True), ('localhost', True), ('LOCALHOST:8000', True), ('a.localhost:1', True), ('127.0.0.1:8000', True),
  ('[::1]:8000', True), ('::1', False), ('[::1', True), ('10.0.0.7', True), ('box:80', True), ('box.', True),
  ('api.example.com', True), ('a.api.example.com', False), ('x.y.example.org', True), ('example.org', False),
  ('evil.example', False), ('localhost.evil.example', False), ('evil-localhost', False),
  ('127.0.0.1.evil.example', False),
  ('127.1', False), ('0x7f000001', False), ('evil.example:8000', False), ('box@evil.example', False),
])  # fmt: skip
def test_which_hosts_are_allowed(host, is_allowed):
  assert http_hosts.is_allowed(host, NAMES) == is_allowed


def test_a_star_is_every_name():
  assert http_hosts.is_allowed('anything.example', ['*'])


def answer(hosts, *given: bytes, path: str = '/v1/models') -> tuple[int, bytes]:
  """The status and the body of a request with these Host headers."""
  messages = []

  async def app(scope, receive, send):
    await send({'type': 'http.response.start', 'status': 200, 'headers': []})
    await send({'type': 'http.response.body', 'body': b'fine'})

  async def send(message):
    messages.append(message)

  scope = {'type': 'http', 'path': path, 'method': 'GET', 'headers': [(b'host', host) for host in given]}
  asyncio.run(http_messages.guarded(app, '', hosts, lambda path, status: None)(scope, None, send))
  return messages[0]['status'], messages[1]['body']


@pytest.mark.parametrize('path', ['/v1/models', '/v1/completions', '/metrics', '/health'])
def test_a_page_whose_name_leads_here_gets_nothing(path):
  status, body = answer(NAMES, b'evil.example:8000', path=path)
  assert status == 403 and 'evil.example' in json.loads(body)['error']['message'] and b'--allowed_hosts' in body
  assert answer(NAMES, b'127.0.0.1', b'evil.example', path=path)[0] == 403
  assert answer(NAMES, b'127.0.0.1:8000', path=path) == (200, b'fine') == answer(None, b'evil.example', path=path)
