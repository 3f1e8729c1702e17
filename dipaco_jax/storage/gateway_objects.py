"""Objects behind a gateway: the third backend of `object_store`, beside a folder and a bucket, for workers.

A worker reads what its token may read, and offers new objects under the names that follow from their content. It
cannot list, delete or replace any. Objects of a bucket go there directly, by URLs that the gateway signs.
"""

import contextlib
import functools
import hashlib
import http.client
import pathlib
import ssl
import urllib.parse
from collections.abc import Iterator
from typing import IO, Any

from dipaco_jax.core.errors import InputError
from dipaco_jax.storage import backends, files, gateway_link

OBJECTS = '/v1/objects/'


class Gateway:
  """Objects by name, through a link. Methods are those of `backends.Folder` that a worker needs."""

  def __init__(self, link: gateway_link.Link):
    self.link = link

  def put(self, name: str, data: files.Data):
    """Offers an object, and sends it unless the gateway has it."""
    sha256 = hashlib.sha256(data).hexdigest()
    self._put(name, len(data), sha256, lambda: contextlib.nullcontext(data))

  def put_file(self, name: str, file: pathlib.Path):
    """Offers an object with the bytes of a file."""
    sha256 = files.digests(file.parent, [file.name])[file.name]
    self._put(name, file.stat().st_size, sha256, functools.partial(open, file, 'rb'))

  def _put(self, name: str, size: int, sha256: str, open_body: Any):
    about = {'object': name, 'size': size, 'sha256': sha256}
    answer = self.link.post('offer', about)
    if answer.get('has'):
      return
    if url := answer.get('url'):
      with open_body() as body:
        send_to(url, size, body)
      self.link.post('commit', about | {'ticket': answer['ticket']})
      return
    headers = {'Content-Length': str(size), 'Content-Type': 'application/octet-stream'}
    with open_body() as body, self.link.open('PUT', f'{path_of(name)}?sha256={sha256}', body, headers) as response:
      response.read_whole(gateway_link.BLOCK)

  def get(self, name: str) -> memoryview:
    """Returns an object's bytes. Raises FileNotFoundError."""
    import numpy as np  # which `main --help` does without

    with self._open(name) as answer:
      data = np.empty(int(answer.headers['Content-Length']), np.uint8).data
      position = 0
      while chunk := answer.read(backends.PART_BYTES):
        data[position : position + len(chunk)] = chunk
        position += len(chunk)
    if position != len(data):
      raise gateway_link.Busy(f'{position} of {len(data)} bytes have arrived')
    return data.toreadonly()

  def chunks(self, name: str) -> Iterator[files.Data]:
    """Yields an object's bytes, PART_BYTES at a time. Raises FileNotFoundError."""
    with self._open(name) as answer:
      while chunk := answer.read(backends.PART_BYTES):
        yield chunk

  def _open(self, name: str) -> Any:
    """Opens an object: its bytes, or those at the URL that the gateway answers."""
    answer = self.link.open('GET', path_of(name))
    if not (url := answer.headers.get('X-Object-URL')):
      return answer
    with answer:
      answer.read_whole(gateway_link.BLOCK)
    return read_from(url)

  def exists(self, name: str) -> bool:
    """Returns whether there is an object of this name."""
    return bool(self.link.post('exists', {'object': name})['exists'])

  def delete(self, name: str):
    """Does nothing: a worker deletes no object. The gateway removes states that come after the end of a run."""

  def create(self, name: str, data: files.Data):
    raise gateway_link.Rejected(f'a worker behind a gateway writes no {name}')

  def changed(self, name: str) -> float:
    raise gateway_link.Rejected(f'a worker behind a gateway is not told when {name} was written')

  def names(self, prefix: str) -> Iterator[str]:
    raise gateway_link.Rejected('a worker behind a gateway lists no objects')

  def tidy(self, prefix: str):
    """Does nothing: unfinished objects are on the gateway's machine."""

  def is_transient(self, error: Exception) -> bool:
    """Returns whether a request may succeed later."""
    return gateway_link.is_transient(error)


def path_of(name: str) -> str:
  """Returns the path of an object's URL."""
  return OBJECTS + urllib.parse.quote(name)


def send_to(url: str, size: int, body: files.Data | IO[bytes]):
  """Puts an object at a signed URL."""
  connection, path = _connect(url)
  try:
    connection.request('PUT', path, body, {'Content-Length': str(size)})
    response = connection.getresponse()
    response.read()
    _check(response)
  finally:
    connection.close()


def read_from(url: str) -> gateway_link.Answer:
  """Opens the object at a signed URL."""
  connection, path = _connect(url)
  connection.request('GET', path)
  response = connection.getresponse()
  try:
    _check(response)
  except BaseException:
    connection.close()
    raise
  return gateway_link.Answer(response, lambda _: connection.close())


def _connect(url: str) -> tuple[http.client.HTTPConnection, str]:
  """Returns a connection to the host of a signed URL, and the rest of the URL."""
  parts = urllib.parse.urlsplit(url)
  host = parts.hostname or ''
  if parts.scheme == 'https':
    context = ssl.create_default_context()
    made = http.client.HTTPSConnection(host, parts.port, timeout=gateway_link.SILENCE_S, context=context)
  elif parts.scheme == 'http' and gateway_link.is_loopback(host):
    return http.client.HTTPConnection(host, parts.port, timeout=gateway_link.SILENCE_S), f'{parts.path}?{parts.query}'
  else:
    raise InputError(f'the gateway names an object at {parts.scheme}://{host}, which is not https')
  return made, f'{parts.path}?{parts.query}'


def _check(response: http.client.HTTPResponse):
  """Raises FileNotFoundError, Busy where the bucket may answer later or the URL has expired, or Rejected."""
  if response.status == 404:
    raise FileNotFoundError('the bucket has no such object')
  if response.status >= 300:
    may_pass = backends.is_transient_status(response.status) or response.status == 403
    raise (gateway_link.Busy if may_pass else gateway_link.Rejected)(f'the bucket answers status {response.status}')
