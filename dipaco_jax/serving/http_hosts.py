"""Which names a server answers to. A web page cannot read a local server by a name of its own that leads here.

A browser keeps pages of other sites away from a server on its machine, but not a page whose own name resolves to that
machine's address by the time of its second request (DNS rebinding). Such a request carries that name as its Host.
"""

import ipaddress
from collections.abc import Collection

LOCAL = ('localhost', '.localhost')  # names and endings that resolve to this machine, independent of DNS servers


def is_allowed(host: str, names: Collection[str]) -> bool:
  """Returns whether a Host header may be answered.

  Args:
    host: its value, as 'name:port'; '', as of HTTP/1.0, is allowed. No browser sends that.
    names: that are allowed beside addresses, which no DNS server can claim, and localhost; '.example.com' is all names
      that end so, and '*' all names.
  """
  name = _without_port(host.strip().lower()).removesuffix('.')
  if not host or '*' in names or _is_address(name):
    return True
  return any(name == one or (one[:1] == '.' and name.endswith(one)) for one in (*LOCAL, *names))


def _without_port(host: str) -> str:
  if host.startswith('['):  # an address of IPv6
    return host[1:].partition(']')[0]
  return host.partition(':')[0]


def _is_address(name: str) -> bool:
  try:
    ipaddress.ip_address(name)
  except ValueError:
    return False
  return True
