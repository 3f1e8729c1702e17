"""Real object stores for tests: moto's S3 server as a process, and a line to it that breaks when told to."""

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator

BUCKET = 'bucket'
UNAVAILABLE = b'HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n'


def environment(endpoint: str) -> dict[str, str]:
  """What points S3 and Google clients at an endpoint. moto answers to both: their XML interfaces are alike."""
  return {
    'AWS_ENDPOINT_URL': endpoint,
    'AWS_REGION': 'us-east-1',
    'AWS_ACCESS_KEY_ID': 'test',
    'AWS_SECRET_ACCESS_KEY': 'test',
    'GOOGLE_BASE_URL': endpoint,
    'GOOGLE_BEARER_TOKEN': 'test',
  }


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
  """Starts moto's server with an empty bucket of the name BUCKET; yields its endpoint."""
  with socket.create_server(('127.0.0.1', 0)) as free:
    port = free.getsockname()[1]
  command = [sys.executable, '-m', 'moto.server', '-H', '127.0.0.1', '-p', str(port)]
  server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ})
  try:
    endpoint, deadline = f'http://127.0.0.1:{port}', time.monotonic() + 60
    while True:
      try:
        urllib.request.urlopen(urllib.request.Request(f'{endpoint}/{BUCKET}', method='PUT')).close()
        break
      except OSError:
        assert server.poll() is None and time.monotonic() < deadline, "moto's server did not start"
        time.sleep(0.1)
    yield endpoint
  finally:
    server.kill()
    server.wait()


class Line:
  """A TCP line to an endpoint. The next connections, one by one, get what `faults` says, the others pass."""

  def __init__(self, endpoint: str):
    self.target = ('127.0.0.1', int(endpoint.rpartition(':')[2]))
    self.faults: list[str] = []  # 'reset' or 'unavailable', used from the front
    self.listener = socket.create_server(('127.0.0.1', 0))
    self.endpoint = f'http://127.0.0.1:{self.listener.getsockname()[1]}'
    threading.Thread(target=self.accept, daemon=True).start()

  def accept(self):
    while True:
      try:
        client, _ = self.listener.accept()
      except OSError:  # closed
        return
      fault = self.faults.pop(0) if self.faults else ''
      if fault == 'unavailable':
        client.recv(1 << 16)
        client.sendall(UNAVAILABLE)
      if fault:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', fault == 'reset', 0))
        client.close()
        continue
      threading.Thread(target=connect, args=(client, self.target), daemon=True).start()

  def __enter__(self):
    return self

  def __exit__(self, *_):
    with contextlib.suppress(OSError):
      self.listener.shutdown(socket.SHUT_RDWR)
    self.listener.close()


def connect(client: socket.socket, target: tuple[str, int]):
  """Passes bytes on both ways until one side ends."""
  with client, socket.create_connection(target) as server:
    back = threading.Thread(target=pump, args=(server, client), daemon=True)
    back.start()
    pump(client, server)
    back.join()


def pump(source: socket.socket, sink: socket.socket):
  """Passes bytes on until one side ends."""
  with contextlib.suppress(OSError):
    while data := source.recv(1 << 16):
      sink.sendall(data)
  for side in (source, sink):
    with contextlib.suppress(OSError):
      side.shutdown(socket.SHUT_RDWR)
