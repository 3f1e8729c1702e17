"""Sockets of the HTTP servers."""

import socket

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
