"""A real object store for tests: moto's S3 server as a process."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

BUCKET = 'bucket'


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
