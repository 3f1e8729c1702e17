"""The worker's end of a gateway: one https address and one token, and nothing else (dipaco_jax/gateway).

The address may end in `#sha256=...`, the fingerprint of the gateway's certificate. It is compared before anything is
sent; without it, the certificate is verified as that of any web server. Needs only the standard library.
"""

import functools
import hashlib
import hmac
import http.client
import ipaddress
import json
import os
import pathlib
import re
import socket
import ssl
import tempfile
import threading
import time
import urllib.parse
import weakref
from collections.abc import Callable, Mapping
from typing import IO, Any, NamedTuple, Self, TypeVar

from dipaco_jax.core import json_text, printable
from dipaco_jax.core.errors import Away, InputError, Lost
from dipaco_jax.storage import backends, files, retry

T = TypeVar('T')
GATEWAY, TOKEN = 'DIPACO_GATEWAY', 'DIPACO_TOKEN'
FINGERPRINT = re.compile(r'sha256=([0-9a-f]{64})')
A_TOKEN = re.compile(r'[A-Za-z0-9_-]{20,200}')
FILE = 'file:'
PATIENCE_S = 600
SILENCE_S = 120  # without a byte from the gateway
REUSED_S = 25.0  # a connection that was idle for longer may be closed at the other end, or on the way
BLOCK = 1 << 20
MOST_ANSWER = 64 << 20  # bytes of an answer in JSON


class Rejected(InputError):
  """Error: the gateway does not accept a request of this worker; trying again does not help."""


class TokenRejected(Rejected):
  """Error: the gateway does not know the token, or no longer."""


class Busy(OSError):
  """Error: the gateway, or what is behind it, cannot answer now; trying again helps."""


class Address(NamedTuple):
  """A gateway's address."""

  scheme: str  # http or https
  host: str
  port: int
  fingerprint: str  # sha256 of the certificate, in hexadecimal digits; '' for the usual verification

  @property
  def url(self) -> str:
    """The address without the fingerprint, for messages."""
    host = f'[{self.host}]' if ':' in self.host else self.host
    return f'{self.scheme}://{host}:{self.port}'


def parse_address(text: str) -> Address:
  """Parses DIPACO_GATEWAY. Raises InputError that says what an address is like."""
  wanted = f'{GATEWAY} should be an address such as https://host:8443, or that with #sha256=FINGERPRINT'
  try:
    parts = urllib.parse.urlsplit(text.strip())
    port = parts.port or {'https': 443, 'http': 80}[parts.scheme]
  except (ValueError, KeyError) as e:
    raise InputError(wanted) from e
  if not parts.hostname or parts.username or parts.password or parts.query or parts.path.strip('/'):
    raise InputError(wanted)
  match = FINGERPRINT.fullmatch(parts.fragment.lower())
  if parts.fragment and not match:
    raise InputError(f'{wanted}, with the 64 hexadecimal digits that the gateway shows when it starts')
  if parts.scheme == 'http' and not is_loopback(parts.hostname):
    raise InputError(f'{GATEWAY}: http would send the token in the clear: use https://{parts.hostname}:{port}')
  return Address(parts.scheme, parts.hostname, port, match[1] if match else '')


def is_loopback(host: str) -> bool:
  """Returns whether a host is this machine, by its address or as localhost."""
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == 'localhost'


def read_token(given: str) -> str:
  """Returns the token in DIPACO_TOKEN, or in the file that it names as file:PATH. Messages never show it."""
  if given.startswith(FILE):
    file = given.removeprefix(FILE)
    try:
      given = pathlib.Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
      raise InputError(f'{TOKEN}=file:{file}: {getattr(e, "strerror", None) or "it is not UTF-8"}') from e
  if not A_TOKEN.fullmatch(given):
    raise InputError(f'{TOKEN} should be the token that `python -m dipaco_jax.gateway add` has shown, or file:PATH')
  return given


def from_environment(environment: Mapping[str, str] = os.environ) -> 'Link | None':
  """Returns the link that the environment describes, None if it names no gateway. Raises InputError."""
  if not (address := environment.get(GATEWAY, '').strip()):
    return None
  if not (token := environment.get(TOKEN, '').strip()):
    raise InputError(f'{GATEWAY} is set and {TOKEN} is not: set it to the token of this worker, or to file:PATH')
  return Link(parse_address(address), read_token(token))


def make_folder(address: Address, run_id: str) -> pathlib.Path:
  """Makes the private folder of this machine for a run behind a gateway."""
  place = hashlib.sha256(f'{address.url} {run_id}'.encode()).hexdigest()[:16]
  folder = pathlib.Path(tempfile.gettempdir()) / f'dipaco_jax-{place}'
  files.make_private_folder(folder, 'TMPDIR')
  return folder


class Link:
  """Requests to a gateway, by any number of threads, each with a connection of its own."""

  def __init__(self, address: Address, token: str, patience_s: float = PATIENCE_S):
    self.address, self.patience_s = address, patience_s
    self.name = ''  # of this process, beside that of its token
    self._token = token
    self._here = threading.local()

  def post(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Posts JSON once, and returns the answer. Raises Rejected or Lost, and transient errors as they come."""
    data = json.dumps({'name': self.name, **body}).encode()
    with self.open('POST', f'/v1/{route}', data, {'Content-Type': 'application/json'}) as answer:
      return _parse(answer.read_whole(MOST_ANSWER))

  def call(self, route: str, body: Mapping[str, Any], longest_wait_s: float = retry.LONGEST_WAIT_S) -> dict[str, Any]:
    """Posts JSON and returns the answer. Waits for a gateway that is away; raises Rejected, Lost or Away."""
    return self.retry(lambda: self.post(route, body), longest_wait_s)

  def retry(self, attempt: Callable[[], T], longest_wait_s: float = retry.LONGEST_WAIT_S) -> T:
    """Returns what `attempt` returns, called again while the gateway is away; raises Away after `patience_s`."""
    try:
      return retry.call(self.address.url, attempt, is_transient, self.patience_s, longest_wait_s)
    except Exception as e:
      if not is_transient(e):
        raise
      raise Away(f'the gateway {self.address.url} does not answer ({retry.first_line(e)})') from e

  def open(
    self, method: str, path: str, body: files.Data | IO[bytes] | None = None, headers: Mapping[str, str] | None = None
  ) -> 'Answer':
    """Sends a request; returns its answer, which has to be closed. Raises errors of the gateway by their status."""
    given = {'Authorization': f'Bearer {self._token}', **(headers or {})}
    for is_last in (False, True):
      connection, is_fresh = self._connection()
      try:
        connection.request(method, path, body, given)
        answer = Answer(connection.getresponse(), self._release)
        break
      except (OSError, http.client.HTTPException):
        self.close()
        if is_fresh or is_last or (body is not None and not isinstance(body, files.Data)):
          raise  # else the other end has closed an idle connection
    if answer.status >= 300:
      with answer:
        raise error_of(answer)
    return answer

  def close(self):
    """Closes this thread's connection."""
    if connection := getattr(self._here, 'connection', None):
      connection.close()
    self._here.connection = None

  def _release(self, is_whole: bool):
    self._here.used = time.monotonic()
    if not is_whole:
      self.close()

  def _connection(self) -> tuple[http.client.HTTPConnection, bool]:
    """Returns this thread's connection, and whether it is new."""
    kept = getattr(self._here, 'connection', None)
    if kept and kept.sock and time.monotonic() - self._here.used < REUSED_S:
      return kept, False
    self.close()
    self._here.connection, self._here.used = connect(self.address), time.monotonic()
    weakref.finalize(self._here.connection, self._here.connection.sock.close)  # where its thread ends
    return self._here.connection, True


class Answer:
  """A response whose connection is used again if it was read to its end."""

  def __init__(self, response: http.client.HTTPResponse, release: Callable[[bool], None]):
    self._response, self._release = response, release
    self.status, self.headers = response.status, response.headers

  def read(self, most: int) -> bytes:
    """Returns at most so many bytes; b'' at the end. Raises IncompleteRead where the connection broke before it."""
    data = self._response.read(most)
    if not data and self._response.length:
      raise http.client.IncompleteRead(data, self._response.length)
    return data

  def read_whole(self, most: int) -> bytes:
    """Returns all bytes, of which there may be `most`. Raises Busy if there are more."""
    parts = list[bytes]()
    while part := self.read(BLOCK):
      parts.append(part)
      if sum(map(len, parts)) > most:
        raise Busy(f'an answer is larger than {most} bytes')
    return b''.join(parts)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_):
    is_whole = self._response.length == 0 or self._response.isclosed()
    self._response.close()
    self._release(is_whole and not self._response.will_close)


def connect(address: Address) -> http.client.HTTPConnection:
  """Returns an open connection to a gateway whose certificate is the right one, to which nothing was sent yet."""
  if address.scheme == 'http':
    plain = http.client.HTTPConnection(address.host, address.port, timeout=SILENCE_S, blocksize=BLOCK)
    plain.connect()
    return plain
  context = tls_context(bool(address.fingerprint))
  secure = http.client.HTTPSConnection(address.host, address.port, timeout=SILENCE_S, context=context, blocksize=BLOCK)
  try:
    secure.connect()
    if address.fingerprint:
      check_fingerprint(address, secure.sock.getpeercert(binary_form=True) or b'')
  except ssl.SSLCertVerificationError as e:
    secure.close()
    fix = f'add #sha256=FINGERPRINT, which the gateway shows when it starts, to {GATEWAY}'
    raise InputError(f'the certificate of {address.url} cannot be verified ({e.verify_message}): {fix}') from e
  except BaseException:
    secure.close()
    raise
  return secure


@functools.cache  # to read the machine's certificates takes longer than a request
def tls_context(has_fingerprint: bool) -> ssl.SSLContext:
  """Returns the context of all connections. Where a fingerprint is known, it says more than a name does."""
  context = ssl.create_default_context()
  if has_fingerprint:
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
  return context


def check_fingerprint(address: Address, certificate: bytes):
  """Raises InputError if a certificate is not the one with the address's fingerprint."""
  if not hmac.compare_digest(hashlib.sha256(certificate).hexdigest(), address.fingerprint):
    raise InputError(
      f'{address.url} has another certificate than {GATEWAY} names: nothing was sent; ask the keeper of the run for '
      'the fingerprint, and use it only if it comes from them'
    )


def error_of(answer: Answer) -> Exception:
  """Returns the error that an answer's status means."""
  try:
    body = _parse(answer.read_whole(BLOCK))
  except (ValueError, OSError, http.client.HTTPException):
    body = {}
  message = printable.name(str(body.get('error') or f'status {answer.status}'), 500)
  if answer.status == 404:
    return FileNotFoundError(message)
  if answer.status == 409:
    return Lost(message)
  if backends.is_transient_status(answer.status):
    return Busy(message)
  if answer.status == 401:
    return TokenRejected(f'the gateway rejects the token (--token, or {TOKEN}): {message}')
  return Rejected(f'the gateway rejects a request: {message}')


def is_transient(error: Exception) -> bool:
  """Returns whether a request may succeed later: the gateway is away or busy, or the connection broke."""
  if isinstance(error, (Busy, ConnectionError, TimeoutError, http.client.HTTPException, socket.gaierror, ssl.SSLError)):
    return True
  return isinstance(error, OSError) and error.errno in backends.TRANSIENT


def _parse(data: bytes) -> dict[str, Any]:
  body = json_text.parse(data)
  if not isinstance(body, dict):
    raise Busy('the gateway has answered something else than a JSON object')
  return body
