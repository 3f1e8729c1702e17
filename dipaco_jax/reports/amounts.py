"""Numbers, bytes and times in words."""

import datetime


def count(n: float | None) -> str:
  """Returns '1.05 M', '5.3 B' or '812'; 'not known' for None."""
  if n is None:
    return 'not known'
  for scale, unit in ((1e15, 'P'), (1e12, 'T'), (1e9, 'B'), (1e6, 'M'), (1e3, 'K')):
    if abs(n) >= scale:
      return f'{n / scale:.3g} {unit}'
  return f'{n:,.0f}'


def size(num_bytes: float) -> str:
  """Returns bytes in decimal units, as '1.05 MB'."""
  if num_bytes < 1e3:
    return f'{num_bytes:,.0f} bytes'
  return f'{count(num_bytes).replace(" B", " G").replace(" K", " k")}B'


def clock_time(unix_s: float) -> str:
  """Returns a time in ISO 8601, to the second, with the offset of this machine's clock."""
  return datetime.datetime.fromtimestamp(unix_s).astimezone().isoformat(' ', 'seconds')
