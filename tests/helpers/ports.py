"""A port of this machine that nobody listens on."""

import socket


def free_port() -> int:
  with socket.socket() as s:
    s.bind(('localhost', 0))
    return s.getsockname()[1]
