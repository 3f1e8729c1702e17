"""Sockets of the HTTP servers."""

import socket
import types

import pytest

from dipaco_jax.command_line import listener as listener_lib


def test_no_piece_of_an_answer_waits_for_an_acknowledgement():
  listener = listener_lib.listen('127.0.0.1', 0)
  with listener, socket.create_connection(listener.getsockname()), listener.accept()[0] as connection:
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_port_that_is_taken_is_an_error_that_names_the_fix():
  with socket.create_server(('127.0.0.1', 0)) as taken:
    port = taken.getsockname()[1]
    with pytest.raises(ValueError, match=f'--port={port}: Address already in use; choose another, or --port=0'):
      listener_lib.listen('127.0.0.1', port)


def test_a_model_is_called_as_its_folder():
  assert listener_lib.model_name('runs/tiny/') == 'tiny' == listener_lib.model_name('s3://bucket/tiny/')


@pytest.fixture
def options(monkeypatch):
  """The options of a server, as absl has them after parsing."""
  given = types.SimpleNamespace(allowed_hosts=None)
  monkeypatch.setattr(listener_lib.flags, 'FLAGS', given)
  monkeypatch.delenv('DIPACO_API_KEY', raising=False)
  return given


@pytest.mark.parametrize('given, key', [('', ''), ('secret', 'secret'), ('two words\n', 'two words'), ('a\r\n', 'a')])
def test_the_newline_of_a_file_is_no_part_of_a_key(monkeypatch, given, key):
  monkeypatch.setenv('DIPACO_API_KEY', given)
  assert listener_lib.api_key() == key


@pytest.mark.parametrize('given', ['\n', ' ', ' a', 'a ', 'a\nb', 'a\tb', 'clé', 'a\udcff'])
def test_a_key_that_no_header_can_have_is_an_error(monkeypatch, given):
  """An empty one too: it would open the server to everybody."""
  monkeypatch.setenv('DIPACO_API_KEY', given)
  with pytest.raises(
    ValueError, match='DIPACO_API_KEY: its value is empty, begins or ends with a space, or has a char'
  ):
    listener_lib.api_key()


def test_which_names_a_server_answers_to(options, monkeypatch):
  with listener_lib.listen('127.0.0.1', 0) as local, listener_lib.listen('0.0.0.0', 0) as everywhere:
    assert listener_lib.allowed_hosts(local) == [socket.gethostname().lower()]
    assert listener_lib.allowed_hosts(everywhere) is None
    monkeypatch.setenv('DIPACO_API_KEY', 'secret')
    assert listener_lib.allowed_hosts(local) is None  # a page has no key
    options.allowed_hosts = ['API.example.com.', '.example.org']
    for listener in (local, everywhere):
      assert listener_lib.allowed_hosts(listener) == ['api.example.com', '.example.org']
